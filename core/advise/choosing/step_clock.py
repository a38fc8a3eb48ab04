"""A training by a clock that is simulated: what it costs that a `Chooser` finds the method while it
runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean

from gradwire.core.advise.choosing.chooser import Chooser

#: The time of a step, from its number, its method and the time since the beginning, all in seconds:
#: of the slowest replica.
StepSeconds = Callable[[int, int, float], float]


def clocked(
    chooser: Chooser | int, seconds: StepSeconds, steps: int, late: int = 1
) -> tuple[float, list[int]]:
    """Take so many steps.

    Args:
        chooser: what chooses; or one method, for all steps.
        late: the time of a step is known when so many more have ended.

    Returns:
        The seconds of all of them, and their methods.
    """
    now, methods = 0.0, []
    recent: list[float] = []
    on_their_way: deque[tuple[int, float]] = deque()
    for step in range(steps):
        method = chooser if isinstance(chooser, int) else chooser.advance()
        took = seconds(step, method, now)
        now += took
        methods.append(method)
        if isinstance(chooser, int):
            continue
        if chooser.timed:
            recent.append(took)
        if chooser.shared:
            on_their_way.append((step, fmean(recent)))
            recent.clear()
        while on_their_way and on_their_way[0][0] + late <= step:
            chooser.observe(on_their_way.popleft()[1])
    return now, methods
