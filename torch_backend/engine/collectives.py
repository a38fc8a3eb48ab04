"""What torch does for each request: one table, from its class to the method that performs it.

collectives = Collectives(ProcessGroups(group), TorchOps(device))
pending = collectives.perform(Gather((x,)))
...
(everything,) = pending.wait()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.kernels.arrays import group_by, message_key
from gradwire.core.protocol.control_requests import Branch, OptimizerStep, StepIsFinite, Watch
from gradwire.core.protocol.exchanges import AllToAll, Gather
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.halves import AllGather, ReduceScatter
from gradwire.core.protocol.local_requests import LocalNorm, ReplicaIndex, WorldSize
from gradwire.core.protocol.programs import Fusable, Program, Request, cannot_answer
from gradwire.core.protocol.reductions import Reduce, SumScalar
from gradwire.torch_backend.engine.groups.gloo_exit import last_messages
from gradwire.torch_backend.engine.groups.halves import (
    Launched,
    launch_all_gather,
    launch_all_to_all,
    launch_gather,
    launch_reduce_scatter,
)
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.groups.whereabouts import Whereabouts
from gradwire.torch_backend.engine.host_scalars import Foreseen
from gradwire.torch_backend.engine.questions import Arrived, Asked, Question
from gradwire.torch_backend.monitor.stats import Sent
from gradwire.torch_backend.monitor.timers import Moment
from gradwire.torch_backend.monitor.watcher import StepTimes
from gradwire.torch_backend.ops.addresses import side_by_side
from gradwire.torch_backend.ops.fused import TorchFused
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import Scratch

ALL_REDUCES = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Pending:
    """A request on its way: wait for its `works`, which send such a tensor, and `unpacked` gives
    the answers. What is `watched` is to be finite."""

    def __init__(
        self,
        works: Sequence[Any],
        tensor: Tensor,
        unpacked: Callable[[], tuple[Tensor, ...]],
        watched: Sequence[Tensor] = (),
    ) -> None:
        if tensor.is_cpu:
            last_messages.extend(works)
        self.works = works
        self.watched = watched
        self._unpacked = unpacked

    #: Payload, when it was launched, and among whom.
    nbytes: int = 0
    launched: Moment = None
    groups: Groups | None = None
    #: What to ask where the others are; and what they are told of it, in words.
    whereabouts: Whereabouts | None = None
    said: str = ""
    #: Of `Sent`, what it counts each time that it is sent, where that is noted.
    counts: tuple[int, ...] = ()
    #: There is work for the time of waiting.
    busy = False

    def wait(self, times: StepTimes | None = None) -> tuple[Tensor, ...]:
        """The answers. On the CPU this blocks until they are there; on CUDA only the current stream
        waits. Notes how long."""
        self.compute_overlap()
        self.arrive(times)
        return self.unpacked()

    def arrive(self, times: StepTimes | None) -> None:
        """Wait for all messages."""
        start = None if times is None else times.now()
        self.settle()
        if times is not None:
            times.waited(self.nbytes, self.launched, start)

    def compute_overlap(self) -> None:
        """The work that was meant for the time of waiting."""

    def settle(self) -> None:
        """Wait for messages whose answers nobody wants. Raises RuntimeError, saying where each rank
        is, if one does not come."""
        where = self.whereabouts
        if where is not None:
            where.waits = True
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            if where is None:
                raise
            raise where.named(error) from error
        if where is not None:
            where.waits = False

    def unpacked(self) -> tuple[Tensor, ...]:
        """The answers, once all messages are known to have arrived."""
        return self._unpacked()


def at_once(launch: Callable[..., list[Any]], *args: Any) -> list[Any]:
    """Launch messages: what to wait for."""
    return launch(*args)


def all_reduce(flat: Tensor, op: Any, group: dist.ProcessGroup) -> list[Any]:
    """Begin to reduce a vector over the ranks of a group."""
    return [dist.all_reduce(flat, op, group=group, async_op=True)]


@dataclass(slots=True)
class Message:
    """Some arrays of one dtype on their way."""

    indices: Sequence[int]
    sizes: list[int]
    flat: Tensor
    in_place: bool
    work: Any


class Reducing(Pending):
    """A `Reduce` request whose all-reduces have been launched: one flat buffer per dtype, packed in
    these buffers. Arrays that lie side by side in memory and are donated travel from where they
    are. `divided`: they have been multiplied by `share` already. `fused`: kernels that multiply as
    they pack."""

    def __init__(
        self,
        request: Reduce[Tensor],
        group: dist.ProcessGroup,
        buffers: Scratch,
        send: Callable[..., list[Any]] | None = None,
        *,
        divided: bool = False,
        fused: TorchFused | None = None,
    ) -> None:
        self.request = request
        self._fused = fused
        self.busy = bool(request.overlap)
        self._send = send or at_once
        self._divides = request.op == "mean" and not divided
        self._shapes = [x.shape for x in request.arrays]
        sizes = list(map(torch.Size.numel, self._shapes))
        dtypes = set(map(message_key, request.arrays))
        self.messages = []
        if len(dtypes) == 1 and all(sizes):  # as a rule, and then there is nothing to sort
            donated = all(request.donated)
            everything = range(len(sizes))
            self.messages.append(
                self._launch(
                    everything, request.arrays, donated, self._shapes, sizes, group, buffers
                )
            )
        else:
            for members in group_by(range(len(sizes)), map(message_key, request.arrays)):
                if indices := [i for i in members if sizes[i]]:
                    arrays, shapes = (
                        [request.arrays[i] for i in indices],
                        [self._shapes[i] for i in indices],
                    )
                    donated = all(request.donated[i] for i in indices)
                    own = [sizes[i] for i in indices]
                    self.messages.append(
                        self._launch(indices, arrays, donated, shapes, own, group, buffers)
                    )
        self.works = [message.work for message in self.messages]
        self.watched = (
            [m.flat for m in self.messages if m.flat.dtype.is_floating_point]
            if request.watched
            else ()
        )

    def _launch(
        self,
        indices: Sequence[int],
        arrays: Sequence[Tensor],
        donated: bool,
        shapes: Sequence[torch.Size],
        sizes: list[int],
        group: dist.ProcessGroup,
        buffers: Scratch,
    ) -> Message:
        flat = side_by_side(arrays) if donated else None
        in_place, divides = flat is not None, self._divides
        if flat is None:
            flat = buffers.take((sum(sizes),), arrays[0])
            if self._divides and self._fused is not None and flat.dtype != torch.float64:
                self._fused.multiplied_copies(
                    flat.split_with_sizes(sizes), arrays, 1.0 / dist.get_world_size(group)
                )
                divides = False
            else:
                torch.cat(
                    [
                        x if len(s) == 1 else x.reshape(-1)
                        for x, s in zip(arrays, shapes, strict=True)
                    ],
                    out=flat,
                )
        if divides:
            flat.mul_(share(group, flat.dtype))
        (work,) = self._send(all_reduce, flat, ALL_REDUCES[self.request.op], group)
        if flat.is_cpu:
            last_messages.append(work)
        return Message(indices, sizes, flat, in_place, work)

    def compute_overlap(self) -> None:
        for residual in self.request.overlap:
            residual.compute()

    def unpacked(self) -> tuple[Tensor, ...]:
        answers = list(self.request.arrays)
        for message in self.messages:
            if not message.in_place:
                everything = len(message.sizes) == len(answers)
                pieces = message.flat.split_with_sizes(message.sizes)
                shapes = self._shapes if everything else [self._shapes[i] for i in message.indices]
                shaped = [
                    x if len(s) == 1 else x.view(s) for x, s in zip(pieces, shapes, strict=True)
                ]
                if everything:
                    return tuple(shaped)
                for i, piece in zip(message.indices, shaped, strict=True):
                    answers[i] = piece
        return tuple(answers)


class Collectives:
    """What this rank is asked for. To be called on all ranks alike.

    Attributes:
        groups: whose ranks are the replicas, and the groups of them that requests may name.
        scratch: where messages are packed and arrive.
        foreseen: what the host knows of scalars on the device; None where they are its own.
        sent: messages and payload bytes so far.
        times: notes how long messages take and are waited for.
        asked, last: a checksum of all messages that were asked for, and the last of them in words.
        beside: who knows both of the messages of these, too; None: these do.
        whereabouts: of the ranks; None where nobody keeps them.
        levels: of the algorithm, for what leaves a node; None: it has one.
        send: launches messages: a function of these arguments that gives what to wait for.
    """

    def __init__(self, groups: ProcessGroups, ops: TorchOps, *, divided: bool = False) -> None:
        self.groups = groups
        self.ops = ops
        self.scratch = Scratch()
        self.foreseen = None if ops.device.type == "cpu" else Foreseen(ops.device)
        self.sent = Sent()
        self.times = StepTimes(ops.device)
        self.asked, self.last = 0, ""
        self.beside: Collectives | None = None
        self.whereabouts: Whereabouts | None = None
        self.levels: TwoLevel | None = None
        self.send: Callable[..., list[Any]] = at_once
        self._divided = divided
        self._exchanges: dict[Groups | None, Exchange] = {}

    def perform(
        self, request: Any
    ) -> tuple[Any, ...] | Pending | Question | Arrived | Program[Any]:
        """The answers; or what to wait for before there are any; or a program, and what it returns
        is the answer. Raises UnknownRequest for what is not in the table, and does not answer
        itself."""
        method = TABLE.get(type(request))
        if method is not None:
            launched, before = self.times.now() if method in MESSAGES else None, self.sent.nbytes
            answer = method(self, request)
            if self.levels is not None:
                self._note_level(getattr(request, "groups", None), self.sent.nbytes - before)
            if isinstance(answer, Pending):
                answer.launched, answer.nbytes = launched, self.sent.nbytes - before
                answer.groups, answer.whereabouts = request.groups, self.whereabouts
                answer.said = f"{type(request).__name__} of {answer.nbytes} bytes"
                self.note(answer.said)
            return answer
        if isinstance(request, Request) and request.local:
            return request.answer()
        raise cannot_answer("the torch driver", request)

    def note(self, said: str) -> None:
        """That this has been asked for."""
        known = self.beside or self
        known.last = said
        known.asked = crc32(said.encode(), known.asked)

    def sum_of(self, scalars: Sequence[Tensor]) -> Tensor:
        """The sum of these, over all replicas: one message."""
        pending = self.perform(
            Reduce((torch.stack(list(scalars)).sum(),), (True,), watched=False, op="sum")
        )
        assert isinstance(pending, Pending)
        (total,) = pending.wait(self.times)
        return total

    def _reduce(self, request: Reduce[Tensor]) -> Pending:
        group = self.groups.whole if request.groups is None else self.groups[request.groups]
        fused = self.ops.fused
        pending = Reducing(
            request, group, self.scratch, self.send, divided=self._divided, fused=fused
        )
        for message in pending.messages:
            elements = message.flat.numel()
            self._count(elements, elements * message.flat.element_size())
        return pending

    def _gather(self, request: Gather[Tensor]) -> Pending:
        exchange = self.exchange(request.groups)
        launched = launch_gather(self.send, exchange, self.scratch, request.arrays)
        self._count_halves(launched.sent)
        return _half(request, launched, launched.watched if request.watched else ())

    def _all_to_all(self, request: AllToAll[Tensor]) -> Pending:
        exchange = self.exchange(request.groups)
        size, parts = exchange.size, request.parts(exchange.size)
        shapes = [
            (size * own[exchange.rank],) if request.counts else tuple(x.shape)
            for x, own in zip(request.arrays, parts, strict=True)
        ]
        launched = launch_all_to_all(
            self.send, exchange, self.scratch, request.arrays, parts, shapes
        )
        self._count_halves(launched.sent)
        return _half(request, launched)

    def _reduce_scatter(self, request: ReduceScatter[Tensor]) -> Pending:
        # In nodes all are on their way at once, and memory is used again. A sharded optimizer has a
        # few at a time, and gives them back.
        scratch = None if request.groups is None else self.scratch
        exchange = self.exchange(request.groups)
        launched = launch_reduce_scatter(
            self.send, exchange, scratch, request.arrays, request.counts, share
        )
        self._count_each_half(launched.sent)
        return _half(request, launched)

    def _all_gather(self, request: AllGather[Tensor]) -> Pending:
        exchange = self.exchange(request.groups)
        launched = launch_all_gather(
            self.send, exchange, request.arrays, request.counts, request.out
        )
        self._count_each_half(launched.sent)
        return _half(request, launched)

    def _branch(self, request: Branch[Any]) -> Program[Any]:
        if request.phase is None:
            return request.side(bool(request.predicate))
        counter, value = request.phase
        known = counter if self.foreseen is None else self.foreseen.value(counter)
        return request.side(bool(known == value))

    def _size(self, request: WorldSize) -> tuple[int]:
        return (dist.get_world_size(self.groups[request.groups]),)

    def _index(self, request: ReplicaIndex) -> tuple[int]:
        return (self.exchange(request.groups).rank,)

    def _norm(self, request: LocalNorm[Tensor]) -> Question:
        return Question(Asked.NORM, self.ops.norm_of_all(request.arrays))

    def _sum(self, request: SumScalar[Tensor]) -> Question:
        return Question(Asked.SUM, request.array)

    def _update(self, request: OptimizerStep[Tensor]) -> Question:
        return Question(Asked.UPDATE, (request.pieces, request.ok))

    def _finite(self, request: StepIsFinite) -> Question:
        return Question(Asked.FINITE)

    def _watch(self, request: Watch[Tensor]) -> Arrived:
        return Arrived(request.arrays)

    def exchange(self, groups: Groups | None) -> Exchange:
        """How the ranks of these groups send each other parts."""
        if groups not in self._exchanges:
            self._exchanges[groups] = self.groups.exchange(groups, self.ops.device)
        return self._exchanges[groups]

    def _note_level(self, groups: Groups | None, nbytes: int) -> None:
        assert self.levels is not None
        near = self.levels.near(self.groups.whole.size())
        if groups == near:
            self.sent.within += nbytes
        else:
            self.sent.beside += (len(near[0]) - 1) * nbytes

    def _count(self, elements: int, nbytes: int) -> None:
        self.sent.collectives += 1
        self.sent.nbytes += nbytes
        self.sent.elements += elements

    def _count_each_half(self, xs: Sequence[Tensor]) -> None:
        """Count messages, each of which sends as much as half an all-reduce of such an array."""
        for x in xs:
            self._count_halves([x])

    def _count_halves(self, xs: Sequence[Tensor]) -> None:
        """Count what sends as much as half an all-reduce of these, of which those of one dtype are
        one message."""
        for dtype in dict.fromkeys([x.dtype for x in xs]):
            if elements := sum(x.numel() for x in xs if x.dtype == dtype):
                self._count(-(-elements // 2), -(-elements * dtype.itemsize // 2))


def _half(request: Fusable[Tensor], launched: Launched, watched: Sequence[Tensor] = ()) -> Pending:
    return Pending(launched.works, request.arrays[0], launched.unpacked, watched)


#: What a program may ask for.
TABLE: dict[
    type[Request],
    Callable[[Collectives, Any], tuple[Any, ...] | Pending | Question | Arrived | Program[Any]],
] = {
    Reduce: Collectives._reduce,
    Gather: Collectives._gather,
    AllToAll: Collectives._all_to_all,
    ReduceScatter: Collectives._reduce_scatter,
    AllGather: Collectives._all_gather,
    WorldSize: Collectives._size,
    ReplicaIndex: Collectives._index,
    Branch: Collectives._branch,
    LocalNorm: Collectives._norm,
    SumScalar: Collectives._sum,
    OptimizerStep: Collectives._update,
    StepIsFinite: Collectives._finite,
    Watch: Collectives._watch,
}

#: Those that send something.
MESSAGES = {
    Collectives._reduce,
    Collectives._gather,
    Collectives._all_to_all,
    Collectives._reduce_scatter,
    Collectives._all_gather,
}


def answerable(request: Request, *, optimizer: bool) -> bool:
    """Whether somebody with an optimizer can answer this, or somebody without."""
    return request.local or (type(request) in TABLE and (optimizer or not request.updates))


def asked_in(requests: Iterable[Request]) -> frozenset[Asked]:
    """What these ask of all programs of a step together."""
    kinds = {
        LocalNorm: Asked.NORM,
        SumScalar: Asked.SUM,
        OptimizerStep: Asked.UPDATE,
        StepIsFinite: Asked.FINITE,
    }
    return frozenset(kinds[type(request)] for request in requests if type(request) in kinds)


def share(group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The scalar that arrays of this dtype are multiplied by before they are summed over the ranks,
    so that the sum is the average.

    As the C++ reducer of DDP does it, bit for bit: before the sum, which large float16 gradients
    would make overflow; by the reciprocal of the number of ranks, which is not rounded to less than
    float32. A tensor: torch takes three times as long over a Python number. It is on the CPU
    wherever the arrays are, since a product with a scalar of the device rounds that to the arrays'
    dtype first.
    """
    wide = torch.promote_types(dtype, torch.float32)
    return torch.tensor(1.0 / dist.get_world_size(group), dtype=wide, device="cpu")
