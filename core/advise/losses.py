"""What a method does to the loss: by kind, as the user's own comparison has found, or as this
project has measured on one small model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.core.advise.evidence import MEASURED, SOURCE
from gradwire.core.algorithm import is_ours, nested
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.quantize import Quantize
from gradwire.core.algorithms.two_level import levels_of, without_levels
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.text.options import short

#: Codes of so many bits are as good as a rule; those of fewer lose what matters.
ROUNDED = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
#: What is shown to somebody who has named no limit, in parts of the loss of uncompressed averages.
LIMITS = (0.005, 0.02, 0.05)


@dataclass(frozen=True)
class LossDifference:
    """How much higher the held-out loss of a method is than that of uncompressed averages.

    Attributes:
        difference: in parts of that of uncompressed averages.
        bound: below which the mean over seeds is with 90 % confidence, one-sided.
        rate: the factor on the learning rate that the method had.
        by_kind: nothing was measured: the method only rounds, to 8 bits or more.
    """

    difference: float
    bound: float
    rate: float = 1.0
    by_kind: bool = False

    def __str__(self) -> str:
        if self.by_kind:
            return "0 by kind"
        return f"{_percent(self.difference, '+')}≤{_percent(self.bound)} %"


def _percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.{1 if abs(share) < 0.0995 else 0}f}"


@dataclass(frozen=True)
class Losses:
    """The sources of losses, and what is known of methods.

    Attributes:
        source: what was trained, for how long, in words.
        methods: by name, see `gradwire.core.advise.advice.name_of`.
        own: whether the user's own training was measured.
    """

    source: str
    methods: Mapping[str, LossDifference]
    own: bool = False


ONLY_ROUNDS = LossDifference(0.0, 0.0, by_kind=True)


def known_losses(algorithms: Mapping[str, Any]) -> Losses:
    """What is known of these algorithms, by name, without a comparison of one's own. Within nodes
    of `TwoLevel` averages are plain, so it counts as what it has between them. Of somebody's own
    classes nothing is known, whatever their names."""
    found = {}
    for name, algorithm in algorithms.items():
        inner = without_levels(algorithm) if levels_of(algorithm) is not None else algorithm
        if not all(is_ours(type(each)) for each in nested(inner)):
            continue
        if only_rounds(inner):
            found[name] = ONLY_ROUNDS
        elif (measured := MEASURED.get(repr(inner))) is not None:
            found[name] = LossDifference(*measured)
    return Losses(SOURCE, found)


def only_rounds(algorithm: Any) -> bool:
    """Whether a method's averages are the plain ones, but for a rounding to 8 bits or more."""
    if isinstance(algorithm, AllReduce):
        return True
    if isinstance(algorithm, LocalSGD):
        return False
    if isinstance(algorithm, Quantize):
        return algorithm.dtype in ROUNDED
    if isinstance(algorithm, WireDtype):
        return algorithm.dtype in ROUNDED and only_rounds(algorithm.algorithm)
    inner = getattr(algorithm, "algorithm", None)
    return inner is not None and only_rounds(inner)


def limits_of(loss: float | str | None) -> Sequence[float]:
    """The parts by which the loss may be higher: what was asked for, or several limits.

    Args:
        loss: "1%", or 0.01. None: `LIMITS`.

    Raises:
        ValueError: it is neither, or less than 0. 1 and more without "%" is refused too: it would
            be as much as the loss itself.
    """
    if loss is None:
        return LIMITS
    text = str(loss).strip()
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if isinstance(loss, bool) or not 0 <= value < (math.inf if text.endswith("%") else 1):
        raise ValueError(
            f"{short(loss)} must be a share of the loss of uncompressed averages, such as '1%' or"
            " 0.01"
        )
    return (value,)
