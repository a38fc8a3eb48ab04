"""How long a training step of one replica takes in JAX."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import jax

from gradwire.core.advise.timeline import LEAST, LONG, MOST, WARM_UP, Compute, require_step

T = TypeVar("T")


def step_compute(train_step: Callable[[], Any]) -> Compute:
    """Run a step some times, with nothing sent. It returns what it computes, so that its end can be waited for. Raises NoStep if it builds a model, and whatever it
    raises."""
    for _ in range(WARM_UP):
        returned = train_step()
        require_step(returned)
        ready(returned)
    seconds: list[float] = []
    while len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < LONG):
        began = time.perf_counter()
        ready(train_step())
        seconds.append(time.perf_counter() - began)
    return Compute(median(seconds))


def ready(x: T) -> T:
    """The arrays of a tree, once they are computed."""
    waited: T = jax.block_until_ready(x)  # type: ignore[no-untyped-call]
    return waited
