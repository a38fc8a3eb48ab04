"""How long a training step of one replica takes in JAX."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import jax

from gradwire.core.advise.timeline import Compute
from gradwire.core.advise.timing import STEPS, WARM_UP, NoStep, repeated, require_step

T = TypeVar("T")


def step_compute(train_step: Callable[[], Any]) -> Compute:
    """Run a step some times, with nothing sent. It returns what it computes, so that its end can be
    waited for. Raises NoStep if it builds a model or returns nothing, and whatever it raises."""
    for _ in range(WARM_UP):
        returned = train_step()
        require_step(returned)
        if not jax.tree.leaves(returned):
            raise NoStep(
                "it returns nothing, so nobody can wait for its end; return what it computes, as"
                " the new parameters"
            )
        ready(returned)
    return Compute(median(repeated(lambda: seconds_of(train_step), *STEPS)))


def seconds_of(run: Callable[[], Any]) -> float:
    """How long something takes, until the arrays of the tree that it returns are computed."""
    began = time.perf_counter()
    ready(run())
    return time.perf_counter() - began


def ready(x: T) -> T:
    """The arrays of a tree, once they are computed."""
    waited: T = jax.block_until_ready(x)  # type: ignore[no-untyped-call]
    return waited
