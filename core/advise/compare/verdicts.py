"""Whether a method trains worse than uncompressed averages: an interval for the difference of
held-out losses, from pairs with the same seed and the same window.

Losses of held-out windows differ much more from each other than methods do on one window, so
windows are paired, and so are seeds. Both are a sample: other seeds and other windows would have
given another mean difference. The variance of that is estimated from the spread over seeds and the
spread over windows, which is what drawing both anew would give; Student's t with Welch's and
Satterthwaite's degrees of freedom makes an interval of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

#: Of the intervals; and of the bound above which a difference is not.
CONFIDENCE, ONE_SIDED = 0.95, 0.9


@dataclass(frozen=True)
class Verdict:
    """How the held-out loss of a method differs from that of uncompressed averages.

    Attributes:
        step: after so many steps; None if nothing can be said.
        loss: of the method, the mean over seeds and windows.
        difference: of the mean losses, in parts of that of uncompressed averages: 0.01 is 1 %
            worse. NaN where either is NaN or inf.
        plain: of uncompressed averages, as `loss`.
        margin: half the interval that holds the difference with 95 % confidence; None from one
            seed, which says nothing of others.
        seeds: how many there were of both.
        bound: below which the difference is with 90 % confidence, one-sided; None as `margin`.
    """

    step: int | None
    loss: float = math.nan
    difference: float = math.nan
    margin: float | None = None
    seeds: int = 0
    bound: float | None = None
    plain: float = 0.0

    def __str__(self) -> str:
        return self.in_short() + (
            "" if self.step is None else f", {self.seeds} seed{'s' * (self.seeds != 1)}"
        )

    def in_short(self) -> str:
        """The same without the number of seeds."""
        if self.step is None:
            return "no verdict"
        where = f"at step {self.step}"
        if not math.isfinite(self.plain):
            return f"no verdict: uncompressed averages diverge, loss {self.plain} {where}"
        if not math.isfinite(self.loss):
            return f"diverges: loss {self.loss} {where}"
        percent = 100 * self.difference
        if self.margin is None:
            return f"{percent:+.1f} %, no interval, {where}"
        margin = 100 * self.margin
        digits = 1 if margin >= 0.05 else 2
        if abs(percent) <= margin:
            return f"not told apart ({percent:+.{digits}f} % ± {margin:.{digits}f}) {where}"
        return (
            f"{'worse' if percent > 0 else 'better'} by {abs(percent):.{digits}f} % ±"
            f" {margin:.{digits}f} {where}"
        )


def verdict(
    step: int, plain: Sequence[Sequence[float]], method: Sequence[Sequence[float]]
) -> Verdict:
    """The verdict about the losses of the same windows after so many steps, (seeds, windows) of
    uncompressed averages and of a method.

    Raises:
        ValueError: they have not the same seeds and windows.
    """
    reference, losses = np.asarray(plain, np.float64), np.asarray(method, np.float64)
    if reference.shape != losses.shape or reference.ndim != 2 or not reference.size:
        raise ValueError(
            f"losses of shapes {reference.shape} and {losses.shape} are no pairs of (seeds,"
            " windows)"
        )
    seeds, windows = losses.shape
    found = Verdict(step, float(losses.mean()), seeds=seeds, plain=float(reference.mean()))
    if not math.isfinite(found.loss) or not math.isfinite(found.plain):
        return found
    # Beside a loss of zero a difference is what it is.
    differences = (losses - reference) / (abs(found.plain) or 1.0)
    found = replace(found, difference=float(differences.mean()))
    if seeds < 2 or windows < 2:
        return found
    upper = found.difference + margin(differences, 2 * ONE_SIDED - 1)
    return replace(found, margin=margin(differences), bound=upper)


def margin(differences: npt.NDArray[np.float64], confidence: float = CONFIDENCE) -> float:
    """Half the interval for the mean of (seeds, windows), two of each or more."""
    over_seeds, over_windows = (
        float(differences.mean(axis=1 - axis).var(ddof=1)) / differences.shape[axis]
        for axis in (0, 1)
    )
    variance = over_seeds + over_windows
    if not variance:
        return 0.0
    seeds, windows = differences.shape
    freedom = variance**2 / (over_seeds**2 / (seeds - 1) + over_windows**2 / (windows - 1))
    return quantile(freedom, confidence) * math.sqrt(variance)


def quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    """What the size of a variable of Student's t distribution exceeds with probability 1 -
    `confidence`, for 1 degree of freedom or more.

    With t = √ν·tan φ the density is proportional to cos(φ)^(ν-1), on a bounded interval.
    """
    angles = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(confidence * below[-1], below, angles))
    return math.sqrt(freedom) * math.tan(angle)
