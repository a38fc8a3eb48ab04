"""How long messages take, measured, and the α-β model fitted to it: seconds = fixed + per_byte · bytes.

curve = Curve.fitted([(1024, 1.1e-4), (1 << 20, 1.3e-3), (1 << 24, 1.9e-2)])
curve.seconds(10_000_000)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

#: (bytes, seconds) of messages of one size.
Sample = tuple[int, float]


@dataclass(frozen=True)
class Curve:
    """Messages of one kind among some replicas.

    Attributes:
        samples: bytes and seconds, by rising bytes, each size once.
        fixed: seconds of an empty message, by the fit.
        per_byte: seconds that each byte adds, by the fit.
    """

    samples: tuple[Sample, ...]
    fixed: float
    per_byte: float

    @classmethod
    def fitted(cls, samples: Sequence[Sample]) -> Curve:
        """The line with the least squares of *relative* errors, so that small messages count as much as large ones; neither number is negative.

        Raises:
            ValueError: no samples, or sizes and times that are not positive.
        """
        if not samples or any(n <= 0 or not t > 0 for n, t in samples):
            raise ValueError(f"samples={list(samples)}: give (bytes, seconds), one at least, all of them more than 0")
        by_size: dict[int, list[float]] = {}
        for nbytes, seconds in samples:
            by_size.setdefault(int(nbytes), []).append(float(seconds))
        known = tuple((n, statistics.median(by_size[n])) for n in sorted(by_size))
        return cls(known, *_line(known))

    def fit(self, nbytes: float) -> float:
        """Seconds, by the line."""
        return self.fixed + self.per_byte * nbytes

    @property
    def errors(self) -> tuple[float, ...]:
        """By how much of the measured time the line is off, at each sample."""
        return tuple(abs(self.fit(n) - t) / t for n, t in self.samples)

    @property
    def error(self) -> float:
        """The median of `errors`: how good the fit is."""
        return statistics.median(self.errors)

    def seconds(self, nbytes: float) -> float:
        """Seconds of a message of so many bytes: between what was measured on both sides of it. A larger message never takes less. Beyond the
        largest sample time grows in proportion; nothing takes no time."""
        if nbytes <= 0:
            return 0.0
        sizes = [n for n, _ in self.samples]
        times = list(accumulate((t for _, t in self.samples), max))
        if nbytes > sizes[-1]:
            return times[-1] * nbytes / sizes[-1]
        return float(np.interp(nbytes, sizes, times))


def _line(samples: Sequence[Sample]) -> tuple[float, float]:
    sizes, times = (np.array(column, np.float64) for column in zip(*samples, strict=True))
    largest = sizes.max()
    # Each row is divided by its time, so that the right side is 1 and errors are relative.
    rows = np.stack([1 / times, sizes / largest / times], axis=1)
    ones = np.ones(len(times))
    if len(times) > 1:
        fixed, per_size = np.linalg.lstsq(rows, ones, rcond=None)[0]
        if fixed >= 0 and per_size >= 0:
            return float(fixed), float(per_size / largest)
        only = 1 if fixed < 0 else 0
    else:
        only = 1  # of one size: all of it bandwidth, which is what large messages want to know
    column = rows[:, only]
    alone = float(column @ ones / (column @ column))
    return (0.0, alone / float(largest)) if only else (alone, 0.0)
