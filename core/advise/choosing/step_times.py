"""What steps take here, unless somebody paused before one: for an evaluation, a checkpoint. Others
wait for that replica in their steps, and cannot tell it from a slow network."""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

#: A step before which so many times as long passed as usual, and more than this part of a usual
#: step, is left out; what is usual is known of so many.
PAUSE, SHORT, REMEMBERED = 3.0, 0.05, 20


class StepTimes:
    """The steps of one replica, or process, since the last time that all were told.

    Examples:
        >>> from gradwire.core.advise.choosing.step_times import StepTimes
        >>> times = StepTimes()
        >>> for seconds in (1.0, 1.5, 1.25):
        ...     times.add(0.1, seconds)
        >>> times.take()
        1.25
        >>> times.add(0.1, 1.25), times.add(60.0, 61.0)      # an evaluation
        (None, None)
        >>> times.take()
    """

    def __init__(self) -> None:
        self._outside: deque[float] = deque(maxlen=REMEMBERED)
        self._whole: deque[float] = deque(maxlen=REMEMBERED)
        self._recent: list[float] = []
        self._paused = False

    def add(self, outside: float, whole: float, counts: bool = True) -> None:
        """Take a step: the seconds in which nothing of it ran, since the one before, and all of
        them. Not `counts`: it only says what is usual."""
        if len(self._outside) >= 3 and outside > PAUSE * median(self._outside) + SHORT * median(
            self._whole
        ):
            self._paused = True
            return
        self._outside.append(outside)
        self._whole.append(whole)
        if counts:
            self._recent.append(whole)

    def take(self) -> float | None:
        """The mean since the last time; None: no step counted, or there was a pause."""
        recent, self._recent = self._recent, []
        paused, self._paused = self._paused, False
        return fmean(recent) if recent and not paused else None
