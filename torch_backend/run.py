"""A driver for programs that have all their arrays from the start: runs one to its end, message after message."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.core.programs import Program, Request, cannot_answer, run
from gradwire.core.requests import Branch, LocalNorm, Orthonormalize, Reduce, StepIsFinite
from gradwire.torch_backend.kernels import TorchOps
from gradwire.torch_backend.messages import Sent
from gradwire.torch_backend.process_groups import ProcessGroups
from gradwire.torch_backend.scratch import Scratch

__all__ = ["Runner"]

T = TypeVar("T")


class Runner:
    """Runs programs on this rank. To be called on all ranks alike: what is sent, and in which order, is up to the program alone.

    Args:
        ops: kernels.
        groups: whose ranks are the replicas.

    Attributes:
        collectives, bytes_sent: all-reduces and payload bytes so far.
    """

    def __init__(self, ops: TorchOps, groups: ProcessGroups) -> None:
        self.ops = ops
        self.groups = groups
        self.collectives = 0
        self.bytes_sent = 0

    def run(self, program: Program[T]) -> T:
        """What the program returns. Its arrays may lie in messages: copy what is to last."""
        # Not kept: programs that run now and then would hold on to the size of the model in between.
        return run(program, _Run(self, Scratch()).answer)


class _Run:
    def __init__(self, runner: Runner, buffers: Scratch) -> None:
        self.runner = runner
        self.buffers = buffers
        self.ok: list[Tensor] = []

    def answer(self, request: Request) -> tuple[Any, ...]:
        ops = self.runner.ops
        if isinstance(request, Reduce):
            return self._mean(request)
        if isinstance(request, Orthonormalize):
            return request.answer()
        if isinstance(request, LocalNorm):
            return (ops.norm_of_all(request.arrays),)
        if isinstance(request, StepIsFinite):
            return (torch.stack(self.ok).all() if self.ok else torch.ones((), dtype=torch.bool, device=ops.device),)
        if isinstance(request, Branch):
            side = request.then if request.predicate else request.otherwise
            return (run(side(*request.operands), self.answer),)
        raise cannot_answer("the torch driver", request)

    def _mean(self, request: Reduce[Tensor]) -> tuple[Tensor, ...]:
        sent = Sent(request, self.runner.groups[request.groups], self.buffers)
        self.runner.collectives += len(sent.messages)
        self.runner.bytes_sent += sum(m.nbytes for m in sent.messages)
        answers = sent.wait()
        if request.watched:
            self.ok.extend(self.runner.ops.all_finite(m.flat) for m in sent.messages)
        return answers
