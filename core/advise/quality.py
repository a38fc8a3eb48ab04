"""What a method does to training: in five classes, or as it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.local_sgd.algorithm import LocalSGD

#: The best first: the plain average; 8 bits or more, as good as a rule; with error feedback, which sends the rest later; without, where the rest is lost; replicas part between averages.
QUALITIES = ("exact", "rounded", "feedback", "lossy", "local")
#: Codes of fewer bits lose what matters.
ROUNDED = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


@dataclass(frozen=True)
class LossDifference:
    """How much higher the held-out loss of a method was than that of plain averages.

    Attributes:
        difference: in parts of that of plain averages.
        margin: half the interval that holds it.
        rate: the factor on the learning rate that the method had.
    """

    difference: float
    margin: float
    rate: float = 1.0

    def __str__(self) -> str:
        return f"{100 * self.difference:+.1f}±{100 * self.margin:.1f} %"


@dataclass(frozen=True)
class MeasuredLosses:
    """What a comparison of methods has found.

    Attributes:
        source: what was trained, for how long, in words.
        methods: those of which it says something, by name.
        worse: a method may be worse by as much, in parts of the loss of plain averages, at the far end of its interval.
    """

    source: str
    methods: Mapping[str, LossDifference]
    worse: float

    def allows(self, name: str) -> bool:
        """Whether a method was measured, and is near enough."""
        found = self.methods.get(name)
        return found is not None and found.difference + found.margin <= self.worse


def quality_of(algorithm: Any) -> str:
    """The class of a method. Of one that nobody knows, by whether its error feedback keeps everything (`biased`)."""
    if isinstance(algorithm, LocalSGD):
        return "local"
    if isinstance(algorithm, AllReduce):
        return "exact"
    if isinstance(algorithm, WireDtype):
        rounding = "rounded" if algorithm.dtype in ROUNDED else "lossy"
        return max(rounding, quality_of(algorithm.algorithm), key=QUALITIES.index)
    if (inner := getattr(algorithm, "algorithm", None)) is not None:
        return quality_of(inner)
    return "feedback" if getattr(algorithm, "biased", True) is False else "lossy"


def require_quality(label: str) -> str:
    """The label of a class. Raises ValueError for any other."""
    if label not in QUALITIES:
        raise ValueError(f"{label!r} is no class of quality: give {', '.join(QUALITIES)}")
    return label
