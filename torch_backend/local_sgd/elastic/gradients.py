"""Gradients averaged in each step, by replicas that come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.weighted import Weighted, weighted
from gradwire.core.protocol.settings import with_settings
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.engine.scheduler import run_alone
from gradwire.torch_backend.engine.step import keep
from gradwire.torch_backend.local_sgd.elastic.handle import ElasticHandle
from gradwire.torch_backend.local_sgd.elastic.quorum import Present, Quorum
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.setup.assumptions import Assumptions


class ElasticGradients(ElasticHandle):
    """What `elastic` returns for an algorithm: each `optimizer.step()` is a round, and does nothing
    where the vote is against it. Layers that all replicas have frozen meanwhile take no part."""

    def __init__(
        self,
        algorithm: Algorithm,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        quorum: Quorum,
        rest: Callable[[], Mapping[str, Tensor]],
        assumed: Assumptions,
    ) -> None:
        self._algorithm = algorithm
        state = algorithm.init(TorchOps(quorum.device), specs_of(parameters))
        super().__init__(algorithm, state, parameters, buffers, optimizer, quorum, rest, assumed)
        optimizer.register_step_pre_hook(self._before_step)
        while self._joining:
            optimizer.zero_grad()
            optimizer.step()
        optimizer.zero_grad()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(given is not None for given in (*args[1:], *kwargs.values())):
            raise ValueError(
                "optimizer.step() was given a closure, which makes gradients of its own after they"
                " have been averaged here; call it before, and step() without it"
            )
        present = self.quorum.meet(self.steps, joining=self._joining)
        averages = None
        if present is not None:
            self._memory.steps = present.steps
            if present.trained:
                averages = self.quorum.attempt(lambda: self._average(present))
        taken = self.quorum.vote()
        self._joining = self._joining and not taken
        if taken and averages is not None:
            average, state = averages
            keep(state, self._memory.state)
            self._memory.steps += 1
            for name, p in self._parameters.items():
                if name not in average:  # zeros would be decayed, and moved by momentum
                    p.grad = None
                    continue
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
                p.grad.copy_(average[name])
        else:  # a step without any gradient does nothing
            for p in self._parameters.values():
                p.grad = None

    @torch.no_grad()
    def _average(self, present: Present) -> Any:
        algorithm = self._algorithm
        weight: tuple[float, ...] = ()
        if not present.all_count:
            algorithm = weighted(algorithm)
        if isinstance(algorithm, Weighted):
            weight = (self._weight * present.counts,)
        gradients = {n: _gradient_of(p) for n, p in self._parameters.items() if p.requires_grad}
        memory = self._copied()
        state = State(memory.shared, {n: m for n, m in memory.tensors.items() if n in gradients})
        with plain_arithmetic(self._ops.device):
            program = algorithm.step(self._ops, gradients, state, self.steps, *weight)
            return run_alone(self.quorum.collectives, with_settings(program, self._settings))

    def _give(self) -> dict[str, Any]:
        frozen = [name for name, p in self._parameters.items() if not p.requires_grad]
        return {**super()._give(), "frozen": frozen}

    def _receive(self, given: Mapping[str, Any]) -> None:
        super()._receive(given)
        # All replicas must send the same gradients, and a newcomer has frozen nothing yet.
        for name, p in self._parameters.items():
            p.requires_grad_(name not in given.get("frozen", ()))


def _gradient_of(parameter: Tensor) -> Tensor:
    """The contiguous gradient of a parameter, zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad.contiguous()
