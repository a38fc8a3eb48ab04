"""One run of a comparison in torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from gradwire.core.advise.advice import name_of
from gradwire.core.advise.compare.runs import Run
from gradwire.torch_backend.advise.compare.generators import seed_all
from gradwire.torch_backend.advise.compare.opaque import OpaqueReplicas
from gradwire.torch_backend.advise.compare.replicas import Replicas, replicas_of
from gradwire.torch_backend.advise.compare.training import Training


def run(
    make: Callable[..., Any],
    algorithm: Any,
    replicas: int,
    steps: int,
    seed: int,
    looks: Collection[int],
    on_step: Callable[[], object],
) -> Run:
    """Train anew under a method.

    Args:
        make: called without arguments, after torch's, NumPy's and Python's generators are seeded; returns a `Training`. Or (replica, replicas) → what
            `gradwire.torch_backend.advise.compare.opaque` says.
        algorithm: how gradients, or parameters, are averaged.
        replicas, steps, seed: of the run.
        looks: after how many steps it is evaluated.
        on_step: called after each step.

    Raises:
        TypeError: `make` returns something else; or as `Training`.
        ValueError: what the algorithm refuses, or the training, by name.
    """
    seed_all(seed)
    trained: Replicas | OpaqueReplicas
    if "replica" in inspect.signature(make).parameters:
        trained = OpaqueReplicas(make, algorithm, replicas, seed)
        evaluates = trained.evaluates
    else:
        training = make()
        if not isinstance(training, Training):
            raise TypeError(f"make() returns a {type(training).__name__}; return a gradwire.torch_backend.Training")
        trained = replicas_of(training, algorithm, replicas, seed)
        evaluates = training.evaluate is not None
    losses, rates, held_out = [], [], {}
    for step in range(1, steps + 1):
        losses.append(trained.step())
        rates.append(trained.rate)
        if step in looks and evaluates:
            held_out[step] = trained.held_out()
        on_step()
    return Run(name_of(algorithm), seed, losses, held_out, rates, trained.sent / steps)
