"""What replicas send each other: averages, sums and maxima, gathers, exchanges, and the halves of an all-reduce.

    p = await mean(p)                                     # the average over all replicas
    values, indices = await gather(values, indices)       # those of all replicas: (...) → (W, ...)

Each request is a class and the function that asks for it. `gradwire.core.protocol` says what a request knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.kernels.payloads import Residual
from gradwire.core.ops import ITEMSIZE, WIRE_ITEMSIZE, A, Ops
from gradwire.core.protocol.groups import Groups, group_size, members_of
from gradwire.core.protocol.local_requests import world_size
from gradwire.core.protocol.programs import (
    AbstractReplica,
    Collective,
    Fusable,
    LockStep,
    ReplicaMismatch,
    Request,
    ask,
    ask_one,
)

K = TypeVar("K")
R = TypeVar("R", bound=Fusable[Any])

#: For each array, how many elements each replica receives, or contributes.
Parts = Sequence[tuple[int, ...]]


@dataclass(slots=True)  # not frozen: one is made for every matrix, and that would take three times as long
class Reduce(Fusable[A], Collective):
    """Each array averaged, summed or maximized over all replicas: one all-reduce per dtype, whatever the number of arrays.

    Attributes:
        arrays: floats; for "sum" and "max" integers too, which are summed in their own dtype.
        donated: whether the answer may overwrite the array, for each.
        watched: the driver notes whether the answers were finite (see `StepIsFinite`); an algorithm with no memory of its own can spare itself
            that pass over the data.
        groups: a partition of the replicas: each group by itself, all with one request. None: all replicas together. What a group averages
            cannot be watched, since the groups would come to different answers.
        overlap: what the senders keep of what they send: a driver may compute it while the message is on its way, each once, or not at all.
        op: "mean", "sum" or "max". A maximum may swallow a NaN, but no inf.
    """

    per_array = ("arrays", "donated", "overlap")

    arrays: tuple[A, ...]
    donated: tuple[bool, ...]
    watched: bool = True
    groups: Groups | None = None
    overlap: tuple[Residual[A], ...] = ()
    op: str = "mean"

    def __post_init__(self) -> None:
        if self.groups is not None and self.watched:
            raise ValueError(
                f"an average in groups {self.groups} differs between them and cannot be watched; pass watched=False"
            )

    def key(self) -> object:
        return type(self), self.groups, self.op

    def carrying(self, arrays: tuple[A, ...], new: Sequence[bool]) -> Reduce[A]:
        return replace(self, arrays=arrays, donated=tuple(d or n for d, n in zip(self.donated, new, strict=True)))

    def among(self, groups: Groups) -> Request:
        return Request.among(self, groups)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return self.bytes_by_dtype(ops)

    def about_parts(self, parts: tuple[A, ...], ours: tuple[bool, ...]) -> Reduce[A]:
        return replace(self, arrays=parts, donated=ours)

    async def between(self, nodes: Any) -> Any:
        return await nodes.in_parts(self, donated=all(self.donated))

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        answers: tuple[Any, ...] = await weighing.mean(self)
        return answers

    async def coded(self, coder: Any) -> tuple[A, ...]:
        mine = [i for i, x in enumerate(self.arrays) if self.op != "max" and coder.shrinks(x)]
        rest = [i for i in range(len(self)) if i not in mine]
        asked = replace(self, arrays=tuple(self.arrays[i] for i in rest), donated=tuple(self.donated[i] for i in rest))
        answers = dict(zip(rest, await ask(asked), strict=True))
        if mine:
            donated = all(self.donated[i] for i in mine)
            # Also where what travels as it is would not be watched: scales show it for next to nothing, and what is cast is being read.
            means = await coder.mean([self.arrays[i] for i in mine], donated=donated, groups=self.groups)
            factor = 1 if self.op == "mean" else await world_size(self.groups, assumed=1)
            answers |= {i: x if factor == 1 else x * float(factor) for i, x in zip(mine, means, strict=True)}
        return tuple(answers[i] for i in range(len(self)))

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        for x in self.arrays:
            if x.dtype not in ITEMSIZE and (self.op == "mean" or x.dtype.startswith("float")):
                advice = "gather it" if x.dtype.startswith("float") else "ask for reduce_sum, or cast it"
                raise ValueError(f"the {self.op} of {x.dtype} cannot be formed on the wire; {advice}")
        return self.arrays

    def signature(self) -> object:
        return (self.op, self.groups, *[(x.dtype, x.shape) for x in self.arrays])

    def describe(self) -> str:
        return f"the {self.op} {Fusable.describe(self).removeprefix('Reduce ')}"

    @staticmethod
    def simulate(asked: Sequence[Reduce[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        first, answers = asked[0], [()] * len(asked)
        # Everything of one dtype as one vector, as on a network.
        n = len(first.arrays)
        parts = [range(n)] if len({x.dtype for x in first.arrays}) == 1 else [range(i, i + 1) for i in range(n)]
        for members in members_of(first.groups, len(asked)):
            for part in parts:
                like = [first.arrays[i] for i in part]
                result = _combined([_joined([asked[m].arrays[i] for i in part]) for m in members], first.op)
                world.finite = world.finite and not (first.watched and not np.isfinite(result).all())
                for m in members:
                    answers[m] += tuple(_cut(result.copy(), like))
        world.give([x for r in asked for x, donated in zip(r.arrays, r.donated, strict=True) if donated])
        for r in asked:
            for residual in r.overlap:
                residual.compute()
        return answers


async def mean(
    x: A,
    *,
    out: A | None = None,
    watched: bool = True,
    groups: Groups | None = None,
    overlap: Residual[A] | None = None,
) -> A:
    """Average `x` over all replicas; `out=x` lets the answer overwrite it. Every replica receives the same bits.

    With `groups`, a partition of the replicas, over those of this replica's group; that is never watched, see `Reduce`. `overlap` may be
    computed while `x` is on its way, see `gradwire.core.algorithms.compressor.StepContext`.
    """
    residuals = () if overlap is None else (overlap,)
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, residuals))


async def mean_each(
    arrays: Mapping[K, A], *, donated: bool = True, watched: bool = True, groups: Groups | None = None
) -> dict[K, A]:
    """Average each of these arrays, all `donated` or none, with one request: a coroutine for each would cost more than a small array itself.
    `groups` as for `mean`."""
    if not arrays:
        return {}
    request = Reduce(tuple(arrays.values()), (donated,) * len(arrays), watched and groups is None, groups)
    answers = await ask(request)
    return dict(zip(arrays, answers, strict=True))


async def reduce_sum(x: A, *, out: A | None = None, watched: bool = True, groups: Groups | None = None) -> A:
    """`x` summed over all replicas, in its own dtype: int8 wraps round beyond 127. Arguments as for `mean`."""
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, op="sum"))


async def reduce_max(x: A, *, out: A | None = None, watched: bool = True, groups: Groups | None = None) -> A:
    """The largest of each element over all replicas. It may swallow a NaN: send inf in its place. Arguments as for `mean`."""
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, op="max"))


@dataclass(slots=True)
class SumScalar(Collective, Generic[A]):
    """The sum of a scalar over all replicas, and over all programs of the step where a driver runs several: one message for all of them."""

    array: A

    async def between(self, nodes: Any) -> tuple[A, ...]:
        (total,) = await ask(self)  # to which each replica of a node adds the same
        return (total / nodes.size,)

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        return await ask(self)

    async def coded(self, coder: Any) -> tuple[A, ...]:
        return await ask(self)

    def among(self, groups: Groups) -> Request:
        raise TypeError(f"a sum_scalar is of all replicas, and cannot be asked in groups {groups}; take reduce_sum")

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return [WIRE_ITEMSIZE[ops.dtype_of(self.array)]]

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (self.array,)

    @staticmethod
    def simulate(asked: Sequence[SumScalar[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        total = np.asarray(sum(r.array for r in asked))
        return [(total.copy(),) for _ in asked]


async def sum_scalar(x: A) -> A:
    """The sum of the scalar `x` over all replicas and all programs of the step."""
    return await ask_one(SumScalar(x))


@dataclass(slots=True)
class Gather(Fusable[A], Collective):
    """Each array of every replica, on every replica: (…) → (W, …). The same shapes everywhere; one all-gather per dtype.

    Attributes:
        arrays: of any dtype that can be sent.
        watched: the driver notes whether what it received was finite, as for `Reduce`.
        groups: a partition of the replicas into groups of equal size G: (…) → (G, …), from this replica's group. Not watched.
        assumed: the number of replicas for a plan that has not been told it, see `WorldSize`.
    """

    pattern = "all_gather"

    arrays: tuple[A, ...]
    watched: bool = True
    groups: Groups | None = None
    assumed: int | None = None

    async def between(self, nodes: Any) -> Any:
        return await nodes.in_parts(self, received=group_size(self.groups, nodes.count))

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        answers: tuple[Any, ...] = await weighing.gathered(self)
        return answers

    async def coded(self, coder: Any) -> tuple[A, ...]:
        return await _cast(self, coder)

    def among(self, groups: Groups) -> Request:
        return Request.among(self, groups)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        size = group_size(self.groups, world_size or self.assumed)
        return [-(-size * nbytes // 2) for nbytes in self.bytes_by_dtype(ops)]

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        size = replica.replicas(self.groups, self.assumed)
        return tuple(AbstractArray((size, *x.shape), x.dtype) for x in self.arrays)

    @staticmethod
    def simulate(asked: Sequence[Gather[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        def stacked(group: Sequence[Gather[Any]], i: int) -> list[Any]:
            everything = np.stack([r.arrays[i] for r in group])
            world.finite = world.finite and not (asked[0].watched and not np.isfinite(everything).all())
            return [everything.copy() for _ in group]

        return _by_group(asked, stacked)


async def gather(
    *arrays: A, watched: bool = True, groups: Groups | None = None, assumed: int | None = None
) -> tuple[A, ...]:
    """Each of these arrays of every replica, stacked: (…) → (W, …). See `Gather`."""
    return await ask(Gather(arrays, watched and groups is None, groups, assumed))


@dataclass(slots=True)
class AllToAll(Fusable[A], Collective):
    """To each replica its part of each array, and from each replica a part: one all-to-all per dtype.

    Attributes:
        arrays: with a row for each replica, (W, …) → (W, …); with `counts` vectors.
        groups: a partition of the replicas into groups of equal size, which exchange by themselves.
        counts: for each vector, how many elements each replica receives, in order, of every replica: of so many in all, replica i receives
            W · counts[i]. Only parts of equal size work in JAX. Empty: the arrays have rows.
    """

    pattern = "all_to_all"

    arrays: tuple[A, ...]
    groups: Groups | None = None
    counts: tuple[tuple[int, ...], ...] = ()

    per_array = ("arrays", "counts")

    def key(self) -> object:
        return type(self), self.groups, bool(self.counts)

    async def between(self, nodes: Any) -> Any:
        size = group_size(self.groups, nodes.count)
        return await (nodes.whole(self) if self.counts else nodes.in_parts(self, size, size))

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        answers: tuple[Any, ...] = await weighing.gathered(self, exchanged=True)
        return answers

    async def coded(self, coder: Any) -> tuple[A, ...]:
        return await _cast(self, coder)

    def among(self, groups: Groups) -> Request:
        return Request.among(self, groups)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return [-(-nbytes // 2) for nbytes in self.bytes_by_dtype(ops)]

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        if self.counts:
            parts = zip(self.arrays, self.counts, strict=True)
            return tuple(AbstractArray((len(counts) * counts[0],), x.dtype) for x, counts in parts)
        self.require_rows(replica.replicas(self.groups, self.arrays[0].shape[0] if self.arrays[0].shape else None))
        return self.arrays

    def signature(self) -> object:
        return (*Fusable.signature(self), self.counts)  # type: ignore[misc]

    def parts(self, size: int) -> list[tuple[int, ...]]:
        """Of each array, how many elements each of so many replicas receives. Raises ValueError for an array that has not a row for each."""
        if self.counts:
            return list(self.counts)
        self.require_rows(size)
        return [(math.prod(x.shape[1:]),) * size for x in self.arrays]

    def require_rows(self, size: int) -> None:
        """Raise ValueError for an array that has no row for each of so many replicas."""
        for x in self.arrays:
            if not x.shape or x.shape[0] != size:
                raise ValueError(
                    f"an all-to-all of {list(x.shape)} among {size} replicas: the first axis must be {size}"
                )

    @staticmethod
    def simulate(asked: Sequence[AllToAll[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        def exchanged(group: Sequence[AllToAll[Any]], i: int) -> list[Any]:
            counts = group[0].parts(len(group))[i]
            parts = [_split(r.arrays[i].reshape(-1), counts, len(group)) for r in group]
            received = [np.concatenate(own) for own in zip(*parts, strict=True)]
            return received if asked[0].counts else [x.reshape(asked[0].arrays[i].shape) for x in received]

        return _by_group(asked, exchanged)


async def all_to_all(*arrays: A, groups: Groups | None = None) -> tuple[A, ...]:
    """Row i of each of these arrays to replica i, and a row from each: (W, …) → (W, …). See `AllToAll`."""
    return await ask(AllToAll(arrays, groups))


async def all_to_all_parts(arrays: Sequence[A], counts: Parts, *, groups: Groups | None = None) -> tuple[A, ...]:
    """Vectors in parts of their own: to replica i the part of `counts[i]` elements, and from each replica one. See `AllToAll`."""
    return await ask(AllToAll(tuple(arrays), groups, tuple(counts)))


@dataclass(slots=True)
class ReduceScatter(Fusable[A], Collective):
    """This replica's part of the average of each array: half of an all-reduce.

    Attributes:
        arrays: vectors, donated.
        counts: for each array, how many elements each replica receives, in order; they add up to the array's length. Only parts of
            equal size work in JAX.
        groups: a partition of the replicas into groups of equal size, which average and divide by themselves.
    """

    per_array = ("arrays", "counts")

    pattern = "reduce_scatter"

    arrays: tuple[A, ...]
    counts: tuple[tuple[int, ...], ...]
    groups: Groups | None = None

    async def between(self, nodes: Any) -> Any:
        return await nodes.whole(self)

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        raise weighing.refuse(self, "of which each replica receives a part")

    def among(self, groups: Groups) -> Request:
        return Request.among(self, groups)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return _parts_payloads(self, ops)

    async def coded(self, coder: Any) -> tuple[A, ...]:
        if not all(coder.shrinks(x) for x in self.arrays):
            return await ask(self)
        return tuple(await coder.parts_of_mean(self.arrays, self.counts, self.groups))

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return tuple(AbstractArray((n[replica.place],), x.dtype) for x, n in zip(self.arrays, self.counts, strict=True))

    def signature(self) -> object:
        return (type(self), self.groups, self.counts, *[x.dtype for x in self.arrays])

    def describe(self) -> str:
        return f"{Fusable.describe(self)} in parts of {list(self.counts)}"

    @staticmethod
    def simulate(asked: Sequence[ReduceScatter[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        def parts(group: Sequence[ReduceScatter[Any]], i: int) -> list[Any]:
            average = _combined([r.arrays[i] for r in group], "mean")
            return [part.copy() for part in _split(average, group[0].counts[i], len(group))]

        answers = _by_group(asked, parts)
        world.give([x for r in asked for x in r.arrays])
        return answers


async def reduce_scatter(arrays: Sequence[A], counts: Parts, *, groups: Groups | None = None) -> tuple[A, ...]:
    """This replica's part of the average of each array, see `ReduceScatter`."""
    return await ask(ReduceScatter(tuple(arrays), tuple(counts), groups))


@dataclass(slots=True)
class AllGather(Fusable[A], Collective):
    """The vectors of all replicas one after the other, on every replica: the other half of an all-reduce.

    Attributes:
        arrays: this replica's vectors, donated.
        counts: for each array, how many elements each replica contributes. Only parts of equal size work in JAX.
        out: for each array, a vector for the answer, donated, in whose place this replica's part may lie already; or None.
        groups: a partition of the replicas into groups of equal size, which gather by themselves.
    """

    per_array = ("arrays", "counts", "out")

    pattern = "all_gather"

    arrays: tuple[A, ...]
    counts: tuple[tuple[int, ...], ...]
    out: tuple[A | None, ...]
    groups: Groups | None = None

    async def between(self, nodes: Any) -> Any:
        return await nodes.whole(self)

    def carrying(self, arrays: tuple[A, ...], new: Sequence[bool]) -> AllGather[A]:
        out = tuple(None if other else place for place, other in zip(self.out, new, strict=True))
        return replace(self, arrays=arrays, out=out)

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        return await ask(self)

    async def coded(self, coder: Any) -> tuple[A, ...]:
        return await _cast(self, coder)

    def among(self, groups: Groups) -> Request:
        return Request.among(self, groups)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return _parts_payloads(self, ops)

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return tuple(AbstractArray((sum(n),), x.dtype) for x, n in zip(self.arrays, self.counts, strict=True))

    def signature(self) -> object:
        return (type(self), self.groups, self.counts, *[x.dtype for x in self.arrays])

    def describe(self) -> str:  # without the shapes, which differ
        return f"AllGather of {', '.join(x.dtype.name for x in self.arrays)} in parts of {list(self.counts)}"

    @staticmethod
    def simulate(asked: Sequence[AllGather[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        def joined(group: Sequence[AllGather[Any]], i: int) -> list[Any]:
            everything = np.concatenate([r.arrays[i] for r in group])
            return [everything.copy() for _ in group]

        answers = _by_group(asked, joined)
        world.give([x for r in asked for x in r.arrays])
        return answers


async def all_gather(
    arrays: Sequence[A],
    counts: Parts,
    *,
    out: Sequence[A | None] = (),
    groups: Groups | None = None,
) -> tuple[A, ...]:
    """The parts of all replicas, joined, see `AllGather`."""
    out = tuple(out) or (None,) * len(arrays)
    return await ask(AllGather(tuple(arrays), tuple(counts), out, groups))


async def _cast(request: Gather[A] | AllToAll[A] | AllGather[A], coder: Any) -> tuple[A, ...]:
    """The answers, of arrays that are cast to a shorter float: what is handed over, and not averaged, is not quantized."""
    if not coder.casts:
        return await ask(request)
    ops, shrinks = coder.ops, [coder.shrinks(x) for x in request.arrays]
    pairs = zip(request.arrays, shrinks, strict=True)
    sent = tuple(ops.cast(x, coder.codec.dtype) if shorter else x for x, shorter in pairs)
    answers = await ask(request.carrying(sent, shrinks))
    dtypes = [ops.dtype_of(x) for x in request.arrays]
    return tuple(ops.cast(y, dtype) for y, dtype in zip(answers, dtypes, strict=True))


def _parts_payloads(request: ReduceScatter[A] | AllGather[A], ops: Ops[A]) -> list[int]:
    sizes = [sum(n) * WIRE_ITEMSIZE[ops.dtype_of(x)] for x, n in zip(request.arrays, request.counts, strict=True)]
    return [-(-size // 2) for size in sizes if size]


def _by_group(asked: Sequence[R], answers_of: Callable[[Sequence[R], int], Sequence[Any]]) -> list[tuple[Any, ...]]:
    """For each replica an answer for each array: `answers_of(requests of the replicas of a group, array)`, in the order of the group."""
    answers: list[tuple[Any, ...]] = [()] * len(asked)
    for members in members_of(asked[0].groups, len(asked), equal=True):
        for i in range(len(asked[0])):
            for m, answer in zip(members, answers_of([asked[m] for m in members], i), strict=True):
                answers[m] += (answer,)
    return answers


def _split(vector: Any, counts: Sequence[int], replicas: int) -> list[Any]:
    """The parts of a vector, for each of so many replicas."""
    if sum(counts) != vector.size or len(counts) != replicas:
        raise ReplicaMismatch(f"{vector.size} elements in parts of {list(counts)} for {replicas} replicas")
    return np.split(vector, np.cumsum(counts)[:-1])


def _combined(vectors: Sequence[Any], op: str) -> Any:
    dtype = vectors[0].dtype
    if op == "max":
        return np.maximum.reduce(list(vectors))
    if op == "sum":
        return np.asarray(sum(vectors), dtype)
    if dtype == np.float16:  # whose sum may overflow where the mean does not
        return np.asarray(sum(v / len(vectors) for v in vectors), dtype)
    return np.asarray(sum(vectors) / len(vectors), dtype)


def _joined(arrays: Sequence[Any]) -> Any:
    return arrays[0].reshape(-1) if len(arrays) == 1 else np.concatenate([x.reshape(-1) for x in arrays])


def _cut(vector: Any, like: Sequence[Any]) -> list[Any]:
    """Arrays of the shapes of those, in the vector's memory."""
    if len(like) == 1:
        return [vector.reshape(like[0].shape)]
    arrays, start = [], 0
    for x in like:
        end = start + x.size
        arrays.append(vector[start:end].reshape(x.shape))
        start = end
    return arrays
