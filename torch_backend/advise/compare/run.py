"""One run of a comparison in torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gradwire.core.advise.advice import name_of
from gradwire.core.advise.compare.runs import Run
from gradwire.torch_backend.advise.compare.generators import seed_all
from gradwire.torch_backend.advise.compare.opaque import OpaqueReplicas
from gradwire.torch_backend.advise.compare.replicas import Replicas, replicas_of
from gradwire.torch_backend.advise.compare.training import Training
from gradwire.torch_backend.engine.driver import specs_of


def run(
    make: Callable[..., Any],
    algorithm: Any,
    replicas: int,
    steps: int,
    seed: int,
    looks: Collection[int],
    on_step: Callable[[], object],
    factor: float = 1.0,
) -> Run:
    """Train anew under a method.

    Args:
        make: called without arguments, after torch's, NumPy's and Python's generators are seeded;
            returns a `Training`. Or (replica, replicas) → what
            `gradwire.torch_backend.advise.compare.opaque` says.
        algorithm: how gradients, or parameters, are averaged.
        replicas, steps, seed: of the run.
        looks: after how many steps it is evaluated.
        on_step: called after each step.
        factor: on the optimizer's learning rates, in each of its steps.

    Raises:
        TypeError: `make` returns something else; or as `Training`.
        ValueError: what the algorithm refuses, or the training, by name.
    """
    seed_all(seed)
    trained: Replicas | OpaqueReplicas
    if "replica" in inspect.signature(make).parameters:
        trained = OpaqueReplicas(partial(_scaled_step, make, factor), algorithm, replicas, seed)
        evaluates = trained.evaluates
    else:
        training = make()
        if not isinstance(training, Training):
            raise TypeError(
                f"make() returns a {type(training).__name__}; return a"
                " gradwire.torch_backend.Training"
            )
        training = replace(
            training, optimizer=partial(_scaled_optimizer, training.optimizer, factor)
        )
        trained = replicas_of(training, algorithm, replicas, seed)
        evaluates = training.evaluate is not None
    losses, rates, held_out = [], [], {}
    for step in range(1, steps + 1):
        losses.append(trained.step())
        rates.append(factor * trained.rate)
        if step in looks and evaluates:
            held_out[step] = trained.held_out()
        on_step()
    return Run(
        name_of(algorithm),
        seed,
        losses,
        held_out,
        rates,
        trained.sent / steps,
        factor,
        specs_of(trained.parameters),
    )


def _scaled_optimizer(make: Callable[[Any], Any], factor: float, parameters: Any) -> Any:
    made = make(parameters)
    scale_rates(made[0] if isinstance(made, tuple) and made else made, factor)
    return made


def _scaled_step(
    make: Callable[[int, int], Any], factor: float, replica: int, replicas: int
) -> Any:
    made = make(replica, replicas)
    scale_rates(made[1] if isinstance(made, tuple) and len(made) > 1 else None, factor)
    return made


def scale_rates(optimizer: Any, factor: float) -> None:
    """Multiply the learning rates of an optimizer while it steps: schedulers, and whoever sets
    them, see their own. What is no optimizer is left to who checks.

    Raises:
        ValueError: it has none.
    """
    if factor == 1 or not isinstance(optimizer, torch.optim.Optimizer):
        return
    if not any("lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} has no learning rate 'lr' to search with rates"
        )
    own: list[Any] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own[:] = [group.get("lr") for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = factor * group["lr"]

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            if "lr" in group:
                group["lr"] = rate

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
