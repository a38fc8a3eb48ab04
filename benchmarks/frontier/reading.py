"""What the results say: how much worse a method ends than uncompressed averages, how long it takes
on a link, and which to take there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from frontier.subjects import MUON

#: A loss that is so much higher than that of uncompressed averages, as a part of it, passes for as
#: good; and what somebody in a hurry may give for time.
AS_GOOD, NEARLY = 0.005, 0.02
#: A step that is not so many times faster than that of uncompressed averages is no reason to change
#: them.
WORTH = 1.05
#: The 90 % quantiles of Student's t with one degree of freedom, two, and so on.
T_90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415)
Row = Mapping[str, Any]


def uncompressed(methods: Sequence[Row]) -> Row:
    return next(m for m in methods if m["name"] == "uncompressed")


def timed(methods: Sequence[Row]) -> list[Row]:
    """Those whose steps have been measured."""
    return [m for m in methods if m["step_seconds"]["torch"] is not None]


def lengths(methods: Sequence[Row]) -> list[int]:
    """Steps of the trainings, the shortest first."""
    return sorted(map(int, uncompressed(methods)["lengths"]))


def longest(methods: Sequence[Row]) -> tuple[int, list[Row]]:
    """The greatest length at which more than uncompressed averages were trained, and the methods
    that were."""
    found = {
        steps: [m for m in methods if str(steps) in m["lengths"]] for steps in lengths(methods)
    }
    steps = max((steps for steps, of in found.items() if len(of) > 1), default=lengths(methods)[0])
    return steps, found[steps]


def excess(method: Row, methods: Sequence[Row], steps: int) -> float:
    """How much higher the final loss is than that of uncompressed averages, as a part of it. Both
    are means over the same seeds."""
    return statistics.mean(excesses(method, methods, steps))


def excesses(method: Row, methods: Sequence[Row], steps: int) -> list[float]:
    """The same for each seed that was trained with both."""
    mine, plain = (
        m["lengths"][str(steps)]["losses"]["torch"] for m in (method, uncompressed(methods))
    )
    return [a / b - 1 for a, b in zip(mine, plain, strict=False)]


def upper_bound(parts: Sequence[float]) -> float:
    """Below which the mean is with 90 % confidence (one-sided, Student's t), of the differences of
    two to eight seeds."""
    error = statistics.stdev(parts) / math.sqrt(len(parts))
    return statistics.mean(parts) + T_90[len(parts) - 2] * error


def dominating(method: Row, methods: Sequence[Row], steps: int) -> Row | None:
    """A method that sends less and ends lower, by the same optimizer and both beyond doubt: with 90
    % confidence of differences that are paired by seed. Of several that which ends lowest; None:
    there is none."""

    def ends_lower(other: Row) -> bool:
        theirs, mine = (m["lengths"][str(steps)]["losses"]["torch"] for m in (other, method))
        parts = [a / b - 1 for a, b in zip(theirs, mine, strict=False)]
        return len(parts) > 1 and upper_bound(parts) < 0

    def like(other: Row) -> bool:
        return bool(other["name"].endswith(MUON) == method["name"].endswith(MUON))

    trained = [m for m in methods if str(steps) in m["lengths"] and like(m)]
    better = [
        m for m in trained if m["bytes_per_step"] < method["bytes_per_step"] and ends_lower(m)
    ]
    return min(better, key=lambda m: float(m["lengths"][str(steps)]["loss"]), default=None)


def apart(method: Row, steps: int) -> float | None:
    """How far JAX's final loss is from torch's with the same seed, as a part of it; None if JAX did
    not train."""
    losses = method["lengths"][str(steps)]["losses"]
    return losses["jax"][0] / losses["torch"][0] - 1 if losses["jax"] else None


def computing(method: Row, backend: str = "torch") -> float:
    """Seconds of a step between processes of one machine."""
    return float(method["step_seconds"][backend])


def seconds(method: Row, link: str, backend: str = "torch") -> float:
    """Of a step between two machines: what was measured, and the time on the wire by the α-β model;
    nothing overlaps."""
    return computing(method, backend) + float(method["wire_seconds"][link])


def best(methods: Sequence[Row], link: str, steps: int, within: float = AS_GOOD) -> Row:
    """The fastest of those whose loss after so many steps is so near to that of uncompressed
    averages; these, if none is clearly faster."""
    good = [
        m for m in methods if str(steps) in m["lengths"] and excess(m, methods, steps) <= within
    ]
    fastest = min(good, key=lambda m: seconds(m, link))
    return fastest if times_faster(fastest, methods, link) > WORTH else uncompressed(methods)


def times_faster(method: Row, methods: Sequence[Row], link: str) -> float:
    """Than uncompressed averages."""
    return seconds(uncompressed(methods), link) / seconds(method, link)
