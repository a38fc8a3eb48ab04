"""How often something is run to know how long it takes, and what is no training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

T = TypeVar("T")

#: Of a training step: runs before the clock starts; so many at least and at most under it, until
#: all have taken so many seconds.
WARM_UP, STEPS = 2, (3, 20, 3.0)
#: The same of a method at work.
METHOD = (3, 15, 0.5)


def repeated(run: Callable[[], T], least: int, most: int, long: float) -> list[T]:
    """What `run` returns, at least and at most so many times, until all of it has taken so many
    seconds."""
    found: list[T] = []
    began = time.perf_counter()
    while len(found) < least or (len(found) < most and time.perf_counter() - began < long):
        found.append(run())
    return found


def seconds_in_cycle(step: Callable[[], float], cycle: int) -> list[float]:
    """The median of what each step of a cycle of a method took, after a first one that is compiled,
    or whose memory is fresh."""

    def once() -> list[float]:
        return [step() for _ in range(cycle)]

    once()
    return [median(times) for times in zip(*repeated(once, *METHOD), strict=True)]


class NoStep(ValueError):
    """A function that was to do a training step does something else."""


def require_step(returned: object) -> None:
    """Raise NoStep for what a function returns that builds a model."""
    if any(kind.__name__ == "Module" for kind in type(returned).__mro__):
        raise NoStep(
            f"it returned a {type(returned).__name__}, so it builds a model; give a function that"
            " does a training step: forward, backward and optimizer"
        )
