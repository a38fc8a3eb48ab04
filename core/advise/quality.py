"""What a method does to training, in five classes, the best first."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.local_sgd.algorithm import LocalSGD

#: Codes of fewer bits lose what matters.
ROUNDED = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


class Quality(IntEnum):
    """The lower, the closer to plain averages."""

    EXACT = 0
    ROUNDED = 1
    FEEDBACK = 2
    LOSSY = 3
    LOCAL = 4

    @property
    def label(self) -> str:
        """As the command line has it."""
        return self.name.lower()

    def __str__(self) -> str:
        return WORDS[self]


WORDS = {
    Quality.EXACT: "exact: the plain average",
    Quality.ROUNDED: "rounded to 8 bits or more: as good as a rule",
    Quality.FEEDBACK: "error feedback: what is not sent comes later",
    Quality.LOSSY: "lossy: what is left out is gone",
    Quality.LOCAL: "local: replicas part between averages",
}


def quality_of(algorithm: Any) -> Quality:
    """The class of a method. Of one that nobody knows, by whether its error feedback keeps everything (`biased`)."""
    if isinstance(algorithm, LocalSGD):
        return Quality.LOCAL
    if isinstance(algorithm, AllReduce):
        return Quality.EXACT
    if isinstance(algorithm, WireDtype):
        rounding = Quality.ROUNDED if algorithm.dtype in ROUNDED else Quality.LOSSY
        return max(rounding, quality_of(algorithm.algorithm))
    inner = getattr(algorithm, "algorithm", None)
    if inner is not None:
        return quality_of(inner)
    return Quality.FEEDBACK if getattr(algorithm, "biased", True) is False else Quality.LOSSY


def quality_named(label: str) -> Quality:
    """By its label. Raises ValueError."""
    for quality in Quality:
        if quality.label == label:
            return quality
    raise ValueError(f"{label!r} is no class of quality: give {', '.join(q.label for q in Quality)}")
