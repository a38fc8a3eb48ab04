"""The driver of `Zero`: one program per bucket, few of them with messages in flight, all in one order on all ranks.

A bucket's reduce-scatter is launched when its gradients arrive, and awaited when those of the next bucket do. Then either everything
waits for the last bucket, and the optimizer steps once; or (`interleaved`) a bucket's owners update it at once, and its new parameters
travel while the backward pass goes on. What is launched when is a function of the order of the buckets alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.algorithms.zero import Zero
from gradwire.core.programs import Request, cannot_answer
from gradwire.core.requests import AllGather, OptimizerStep, ReduceScatter, ReplicaIndex, SumScalar
from gradwire.torch_backend.capture import refuse_capture
from gradwire.torch_backend.kernels import TorchOps
from gradwire.torch_backend.sharded_messages import Exchange, Gathered, Scattered

__all__ = ["ShardedStep"]

#: Messages in flight together: one on the wire, and one that is being packed or unpacked. More would only cost memory.
IN_FLIGHT = 2
#: A parameter of so many bytes is a message of its own, which travels from where it lies; smaller ones are packed together.
LARGE = 4 << 20


class _Bucket:
    """A bucket's program, and what it waits for: a message, an answer that concerns all buckets, or nothing any more."""

    def __init__(self, program: Any, ops: TorchOps, exchange: Exchange) -> None:
        self._program = program
        self._ops = ops
        self._exchange = exchange
        self.message: Scattered | Gathered | None = None
        self.barrier: SumScalar[Tensor] | OptimizerStep[Tensor] | None = None
        self.sent: list[int] = []
        self.advance(None)

    def advance(self, answers: tuple[Any, ...] | None) -> None:
        self.message, self.barrier = None, None
        while True:
            try:
                request: Request = self._program.send(answers)
            except StopIteration:
                return
            if not isinstance(request, SumScalar):  # which is one message for all buckets
                self.sent += request.payloads(self._ops, self._exchange.world_size)
            if isinstance(request, ReplicaIndex):
                answers = (self._exchange.rank,)
            elif isinstance(request, ReduceScatter):
                self.message = Scattered(request, self._exchange)
                return
            elif isinstance(request, AllGather):
                self.message = Gathered(request, self._exchange)
                return
            elif isinstance(request, (SumScalar, OptimizerStep)):
                self.barrier = request
                return
            else:
                raise cannot_answer("a sharded step", request)

    def receive(self) -> None:
        assert self.message is not None
        self.advance(self.message.wait())

    def close(self) -> None:
        self._program.close()


class ShardedStep:
    """One step of a sharded optimizer on one rank.

    Args:
        zero: the step's program.
        parameters: name → parameter, overwritten with the new values.
        optimize: (gradients of the owned pieces, whether to step at all) → new values of the pieces.
        process_group: whose ranks own the shards.
        interleaved: update each bucket as soon as its gradients are averaged.

    Attributes:
        collectives, bytes_sent: so far, as `gradwire.core.plan.traffic.Traffic` counts them.
    """

    def __init__(
        self,
        zero: Zero,
        parameters: Mapping[str, Tensor],
        optimize: Callable[[dict[str, Tensor], bool], dict[str, Tensor]],
        process_group: dist.ProcessGroup,
        *,
        interleaved: bool = False,
    ) -> None:
        self._zero = zero
        self._parameters = parameters
        self._optimize = optimize
        self._interleaved = interleaved
        device = next(iter(parameters.values())).device
        self._ops = TorchOps(device)
        self._exchange = Exchange(process_group, device)
        self._buckets: list[_Bucket] = []
        self.collectives = 0
        self.bytes_sent = 0

    def begin(self) -> None:
        """Drop whatever a step that never came to its end has left behind."""
        refuse_capture("A sharded optimizer, whose learning rate and count of steps are the host's,")
        for bucket in self._buckets:
            bucket.close()
        self._buckets = []

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients of a bucket, which are overwritten. The same buckets in the same order on all ranks."""
        with torch.no_grad():
            for names in _by_message(gradients):
                self._launch({name: gradients[name] for name in names})

    def _launch(self, gradients: Mapping[str, Tensor]) -> None:
        out = {name: self._parameters[name] for name in gradients}
        program = self._zero.step(self._ops, gradients, State(), 0, out)
        self._buckets.append(_Bucket(program, self._ops, self._exchange))
        self._continue(self._buckets[-1])
        for bucket in self._buckets[: -(IN_FLIGHT - 1)]:
            if bucket.message is not None:
                bucket.receive()
                self._continue(bucket)

    def finish(self) -> bool:
        """End the step. Returns whether the optimizer stepped: False if a rank's gradients held inf or NaN and that is looked for."""
        with torch.no_grad():
            if self._interleaved:
                for bucket in self._buckets:
                    while bucket.message is not None:
                        bucket.receive()
                        self._continue(bucket)
                stepped = True
            else:
                stepped = self._update_all()
            self.collectives += sum(len(b.sent) for b in self._buckets)
            self.bytes_sent += sum(sum(b.sent) for b in self._buckets)
            self.begin()
            return stepped

    def _continue(self, bucket: _Bucket) -> None:
        if self._interleaved and isinstance(bucket.barrier, OptimizerStep):
            for name in bucket.barrier.pieces:
                # Messages write into parameters behind autograd's back. A node that still needs the old value must notice.
                torch.autograd.graph.increment_version(self._parameters[name])
            bucket.advance((self._optimize(bucket.barrier.pieces, True),))

    def _update_all(self) -> bool:
        for bucket in self._buckets:
            if bucket.message is not None:
                bucket.receive()
        sums = [b.barrier.array for b in self._buckets if isinstance(b.barrier, SumScalar)]
        if sums:
            total = torch.stack(sums).sum()
            dist.all_reduce(total, group=self._exchange.group)
            self.collectives += 1
            self.bytes_sent += total.nbytes
            for bucket in self._buckets:
                if isinstance(bucket.barrier, SumScalar):
                    bucket.advance((total,))
        updates = [b.barrier for b in self._buckets if isinstance(b.barrier, OptimizerStep)]
        stepped = all(u.ok is None or bool(u.ok) for u in updates[:1])  # the same answer for all of them
        new = self._optimize({name: g for u in updates for name, g in u.pieces.items()}, stepped)
        in_flight: deque[_Bucket] = deque()
        for bucket, update in zip(self._buckets, updates, strict=True):
            bucket.advance(({name: new[name] for name in update.pieces},))
            in_flight.append(bucket)
            if len(in_flight) == IN_FLIGHT:
                in_flight.popleft().receive()
        for bucket in in_flight:
            bucket.receive()
        return stepped


def _by_message(gradients: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of what travels together."""
    small = [name for name, g in gradients.items() if g.nbytes < LARGE]
    return [[name] for name in gradients if name not in small] + ([small] if small else [])
