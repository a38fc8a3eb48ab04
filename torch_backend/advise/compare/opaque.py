"""R replicas of a training whose step is the user's own: R models, and gradients that are averaged
where a backward pass ends.

    def make(replica, replicas):
        ...
        return model, optimizer, step      # step() → loss: forward, backward, clipping, optimizer

For a training that does not come apart in the pieces of a `Training`. It takes the memory of R
trainings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import set_multithreading_enabled

from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.torch_backend.advise.compare.generators import drawn, drawn_by, put_back, seed_all
from gradwire.torch_backend.advise.compare.one_process import World
from gradwire.torch_backend.advise.compare.replicas import (
    OF_A_REPLICA,
    driver_of,
    handle_of,
    in_common,
    largest_rate,
    require_memory,
    size_in_bytes,
)
from gradwire.torch_backend.advise.compare.training import held_out_losses
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.local_sgd.optimizer_hooks import step_on_every_rank
from gradwire.torch_backend.ops.full_precision import arithmetic
from gradwire.torch_backend.torch_internals import queue_callback


class OpaqueReplicas:
    """Replicas that step by themselves.

    Args:
        make: (replica, replicas) → (model, optimizer, step) or (model, optimizer, step, evaluate).
        algorithm: how gradients, or parameters, are averaged.
        replicas, seed: how many, and what they draw by.

    Attributes:
        evaluates: whether `make` gave something that does.
        rate: the largest learning rate of the last step.

    Raises:
        TypeError: `make` returns something else.
        ValueError: what the algorithm refuses, by name; there is no memory for so many.
    """

    def __init__(
        self, make: Callable[[int, int], Any], algorithm: Any, replicas: int, seed: int
    ) -> None:
        self.made: list[tuple[Any, ...]] = []
        for rank in range(replicas):
            seed_all(seed)  # the same weights
            self.made.append(_checked(make(rank, replicas)))
            if rank == 0:
                self.parameters = _trained(self.made[0][0])
                self.device = next(iter(self.parameters.values())).device
                needed = OF_A_REPLICA * (replicas - 1) * size_in_bytes(self.parameters)
                require_memory(needed, replicas, self.device)
        for model, *_ in self.made[1:]:
            model.load_state_dict(self.made[0][0].state_dict())
        self.evaluates, self.rate = len(self.made[0]) > 3, 0.0
        self._generators = [drawn_by(rank, seed, self.device) for rank in range(replicas)]
        self._arithmetic = [arithmetic(self.device)] * replicas
        self.world = World(replicas, self._enter, self._leave)
        self._hooked = self._on_each(
            lambda rank: _Hooked(self.world.groups(rank), algorithm, *self.made[rank][:2])
        )

    def step(self) -> float:
        """A step of all replicas. Returns the mean of their losses."""
        losses = self._on_each(self._loss_of_a_step)
        self.rate = self._hooked[0].rate
        return float(np.mean(losses))

    def _loss_of_a_step(self, rank: int) -> float:
        # A backward pass on a device ends in a thread that the passes of all replicas share: who
        # waited there for another would wait for ever.
        with set_multithreading_enabled(False):
            loss = self.made[rank][2]()
        return float(loss.detach() if isinstance(loss, Tensor) else loss)

    @property
    def sent(self) -> int:
        """Bytes that each replica has sent so far."""
        return int(self._hooked[0].sent)

    def held_out(self) -> list[float]:
        """The losses of the held-out windows, in the model of the first replica, under what
        replicas have in common."""
        before = drawn(self.device)
        model, _, _, evaluate = self.made[0]
        with self._in_common():
            found = held_out_losses(model, evaluate)
        put_back(before, self.device)
        return found

    @contextmanager
    def _in_common(self) -> Iterator[None]:
        """The first replica has the parameters that stand for all, within."""
        handle, first = self._hooked[0].handle, self.parameters
        if handle is None:
            yield
            return
        sets = [hooked.parameters for hooked in self._hooked]
        own, common = (
            {name: p.detach().clone() for name, p in first.items()},
            in_common(handle, sets),
        )
        try:
            for name, p in first.items():
                p.detach().copy_(common[name])
            yield
        finally:
            for name, p in first.items():
                p.detach().copy_(own[name])

    def _on_each(self, function: Callable[[int], Any]) -> list[Any]:
        before, put_arithmetic_back = drawn(self.device), arithmetic(self.device)
        try:
            return self.world.on_each(function)
        finally:
            put_back(before, self.device)
            put_arithmetic_back()

    def _enter(self, rank: int) -> None:
        put_back(self._generators[rank], self.device)
        self._arithmetic[rank]()

    def _leave(self, rank: int) -> None:
        """Others may go on in their own steps, with the arithmetic that users have set, while this
        one waits in a step of the method's."""
        self._generators[rank] = drawn(self.device)
        self._arithmetic[rank] = arithmetic(self.device)


class _Hooked:
    """A method at work on one replica: on its gradients where a backward pass ends, on its
    parameters after the optimizer's step."""

    def __init__(
        self, groups: Any, algorithm: Any, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self.parameters = _trained(model)
        self._armed = self._averaged = False
        self.rate = 0.0
        self.handle: Any = None
        self._driver: Driver | None = None
        if isinstance(algorithm, LocalSGD):
            buffers = dict(model.named_buffers())
            self.handle, target = handle_of(
                algorithm, groups, self.parameters, self.parameters, buffers
            )
            self._driver = target.driver
            step_on_every_rank(optimizer, self.handle._begin, self.handle._end)
        else:
            self._driver = driver_of(algorithm, groups, self.parameters)
        optimizer.register_step_post_hook(self._stepped)
        for p in self.parameters.values():
            p.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @property
    def sent(self) -> int:
        if self.handle is not None:
            return int(self.handle.stats().bytes_sent)
        assert self._driver is not None
        return int(self._driver.collectives.sent.nbytes)

    def _arrived(self, parameter: Tensor) -> None:
        if not self._armed:
            self._armed = True
            queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._armed = False
        if self._driver is None:
            return
        if self._averaged:
            raise ValueError(
                "step() has two backward passes; give the pieces, Training(..., accumulate=2)"
            )
        gradients: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if p.grad is None:
                raise ValueError(
                    f"parameter {name!r} has no gradient; give the pieces, a Training, which may"
                    " leave some out"
                )
            gradients[name] = p.grad
        self._averaged = True
        self._driver.add(gradients, first=True, last=True)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._averaged = False
        self.rate = largest_rate(optimizer)


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _checked(made: Any) -> tuple[Any, ...]:
    known = isinstance(made, tuple) and len(made) in (3, 4) and all(map(callable, made[2:]))
    if not (
        known and isinstance(made[0], nn.Module) and isinstance(made[1], torch.optim.Optimizer)
    ):
        raise TypeError(
            f"make(replica, replicas) returns {type(made).__name__}; return (model, optimizer,"
            " step) or (model, optimizer, step, evaluate)"
        )
    if not _trained(made[0]):
        raise ValueError(
            "model has no parameter with requires_grad=True, so there is nothing to train"
        )
    return tuple(made)
