"""Which of two methods takes less time, by pairs of their steps, looked at after each pair."""

from __future__ import annotations

import math

#: The probability, in each of the two directions, with which a test ever decides between methods
#: that take equally long.
ERROR = 0.05
#: Relative differences, and shares of the wealth, that are bet on.
SCALES, SHARES = (0.02, 0.1), (0.5, 0.95)


class PairedTest:
    """A sequential test by betting.

    Of each pair it takes d, the logarithm of the ratio of both times. Where both methods take
    equally long, either step of a pair might have been the other's, so d and -d are equally likely,
    whatever the noise. A bet on it, which multiplies a wealth of 1 by 1 + λ·tanh(d/s), is then
    fair: the wealth is a martingale, as is the mean over several λ and s, and reaches 1/α with a
    probability of at most α, however often one looks (Ville's inequality). So the error rate is α =
    5 % in each direction, for one test of any length. A burst counts no more than a clear
    difference does, since tanh is bounded. Six pairs of clear difference decide.

    Source: Shafer 2021, "Testing by betting"; Ramdas, Ruf, Larsson, Koolen 2020, "Admissible
    anytime-valid sequential inference must rely on nonnegative martingales", on bets on symmetry.

    Examples:
        >>> from gradwire.core.advise.choosing.paired_test import PairedTest
        >>> test = PairedTest()
        >>> for _ in range(6):
        ...     test.add(0.2, 0.3)
        >>> test.faster
        1
    """

    def __init__(self) -> None:
        self._wealth = {
            (way, share, scale): 1.0 for way in (1, -1) for share in SHARES for scale in SCALES
        }
        self._decided = 0

    def add(self, first: float, second: float) -> None:
        """Take the seconds of a step of either method. What has been decided stays."""
        difference = math.log(second / first)
        for way, share, scale in self._wealth:
            self._wealth[way, share, scale] *= 1 + share * math.tanh(way * difference / scale)
        if self._decided == 0:
            self._decided = next((way for way in (1, -1) if self._mean(way) >= 1 / ERROR), 0)

    def _mean(self, way: int) -> float:
        return sum(x for (w, *_), x in self._wealth.items() if w == way) / (
            len(SHARES) * len(SCALES)
        )

    @property
    def faster(self) -> int:
        """1: the first method; -1: the second; 0: nobody can tell yet."""
        return self._decided
