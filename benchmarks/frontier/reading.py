"""What the results say: how much worse a method ends than dense averages, how long it takes on a link, and which to take there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: A loss that is so much higher than that of dense averages, as a part of it, passes for as good; and what somebody in a hurry may give for time.
AS_GOOD, NEARLY = 0.005, 0.02
Row = Mapping[str, Any]


def dense(methods: Sequence[Row]) -> Row:
    return next(m for m in methods if m["name"] == "dense")


def excess(method: Row, methods: Sequence[Row]) -> float:
    """How much higher the final loss is than that of dense averages, as a part of it."""
    return float(method["loss"] / dense(methods)["loss"] - 1)


def computing(method: Row, backend: str = "torch") -> float:
    """Seconds of a step between processes of one machine."""
    return float(method["step_seconds"][backend])


def seconds(method: Row, link: str, backend: str = "torch") -> float:
    """Of a step between two machines: what was measured, and the time on the wire by the α-β model; nothing overlaps."""
    return computing(method, backend) + float(method["wire_seconds"][link])


def best(methods: Sequence[Row], link: str, within: float = AS_GOOD) -> Row:
    """The fastest of those whose loss is so near to that of dense averages."""
    return min((m for m in methods if excess(m, methods) <= within), key=lambda m: seconds(m, link))


def times_faster(method: Row, methods: Sequence[Row], link: str) -> float:
    """Than dense averages."""
    return seconds(dense(methods), link) / seconds(method, link)
