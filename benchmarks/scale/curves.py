"""How something grows: values at some sizes, the exponent of the power of the size that fits them,
and that of a peer beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

#: A curve holds if its exponent is no more than this above its peer's.
ABOVE = 0.1


@dataclass(frozen=True)
class Curve:
    """What a subject needs, against a size.

    Attributes:
        part: what grows: ranks, tensors, leaves.
        subject: a method, or "DDP", "pmean".
        what: what was counted or measured, with its unit.
        values: by size.
        peer: the exponent that this one is held to.
        gathered: whether these are bytes of what is gathered, which grow by design; `outgrown_at`
            is held to them instead.
        holds: whether it is as it should be.
    """

    part: str
    subject: str
    what: str
    values: Mapping[int, float]
    peer: float = 0.0
    gathered: bool = False
    outgrown_right: bool = True

    @property
    def exponent(self) -> float:
        """The slope of the straight line through the logarithms, by least squares. Of nothing at
        all, 0."""
        points = [
            (math.log(size), math.log(value)) for size, value in self.values.items() if value > 0
        ]
        if len(points) < 2:
            return 0.0
        x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
        slope: float = sum((a - x) * (b - y) for a, b in points) / sum(
            (a - x) ** 2 for a, _ in points
        )
        return slope

    @property
    def holds(self) -> bool:
        return self.outgrown_right if self.gathered else self.exponent <= self.peer + ABOVE

    def row(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self) | {"exponent": round(self.exponent, 3), "holds": self.holds}


def beside(curves: Sequence[Curve], peer: str) -> list[Curve]:
    """The curves, each held to that of the subject `peer` of the same part for the same thing, and
    to no growth at all where `peer` does not grow either."""
    theirs = {curve.what: max(0.0, curve.exponent) for curve in curves if curve.subject == peer}
    return [replace(curve, peer=theirs.get(curve.what, curve.peer)) for curve in curves]
