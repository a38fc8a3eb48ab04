"""What a program may ask for: every request, and the function that asks for it.

    p = await mean(p)                                     # the average over all replicas
    values, indices = await gather(values, indices)       # those of all replicas: (...) → (W, ...)
    ok = await step_is_finite()                           # was everything finite that this step averaged, on every replica?

A request knows, with no framework, what the simulator, a plan and a wire dtype want to know: the bytes of its messages, its answer on arrays
without data, when two replicas ask for the same, and the answers for N replicas in one process. A backend has one table, from the class of a
request to the method that performs it. A new request is a class in this file, and a line in each table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np

from gradwire.core.factors import Residual
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import FLOATS, ITEMSIZE, WIRE_ITEMSIZE, A, Ops
from gradwire.core.programs import (
    DryRun,
    Fusable,
    Groups,
    LockStep,
    NoPartition,
    Program,
    ReplicaMismatch,
    Request,
    UnknownWorldSize,
    ask,
    ask_one,
    cannot_answer,
)

T = TypeVar("T")
K = TypeVar("K")

#: For each array, how many elements each replica receives, or contributes.
Parts = Sequence[tuple[int, ...]]
#: One side of a branch.
Side = Callable[..., Program[T]]


# What all replicas combine.


@dataclass(slots=True)  # not frozen: one is made for every matrix, and that would take three times as long
class Reduce(Fusable[A]):
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

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return self.bytes_by_dtype(ops)

    def about_parts(self, parts: tuple[A, ...], ours: tuple[bool, ...]) -> Reduce[A]:
        return replace(self, arrays=parts, donated=ours)

    async def between(self, nodes: Any) -> tuple[A, ...]:
        answers: tuple[A, ...] = await nodes.in_parts(self, donated=all(self.donated))
        return answers

    async def coded(self, coder: Any) -> tuple[A, ...]:
        mine = [i for i, x in enumerate(self.arrays) if self.op != "max" and coder.shrinks(x)]
        rest = [i for i in range(len(self)) if i not in mine]
        asked = replace(self, arrays=tuple(self.arrays[i] for i in rest), donated=tuple(self.donated[i] for i in rest))
        answers = dict(zip(rest, await ask(asked), strict=True))
        if mine:
            donated = all(self.donated[i] for i in mine)
            means = await coder.mean(
                [self.arrays[i] for i in mine], donated=donated, watched=self.watched, groups=self.groups
            )
            factor = 1 if self.op == "mean" else await world_size(self.groups, assumed=1)
            answers |= {i: x if factor == 1 else x * float(factor) for i, x in zip(mine, means, strict=True)}
        return tuple(answers[i] for i in range(len(self)))

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
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
        for members in _members(first.groups, len(asked)):
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


async def mean_each(arrays: Mapping[K, A], *, watched: bool = True, groups: Groups | None = None) -> dict[K, A]:
    """Average each of these arrays, all donated, with one request: a coroutine for each would cost more than a small array itself.
    `groups` as for `mean`."""
    if not arrays:
        return {}
    request = Reduce(tuple(arrays.values()), (True,) * len(arrays), watched and groups is None, groups)
    answers = await ask(request)
    return dict(zip(arrays, answers, strict=True))


async def reduce_sum(x: A, *, out: A | None = None, watched: bool = True, groups: Groups | None = None) -> A:
    """`x` summed over all replicas, in its own dtype: int8 wraps round beyond 127. Arguments as for `mean`."""
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, op="sum"))


async def reduce_max(x: A, *, out: A | None = None, watched: bool = True, groups: Groups | None = None) -> A:
    """The largest of each element over all replicas. It may swallow a NaN: send inf in its place. Arguments as for `mean`."""
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, op="max"))


@dataclass(slots=True)
class SumScalar(Request, Generic[A]):
    """The sum of a scalar over all replicas, and over all programs of the step where a driver runs several: one message for all of them."""

    array: A

    async def between(self, nodes: Any) -> tuple[A, ...]:
        (total,) = await ask(self)  # to which each replica of a node adds the same
        return (total / nodes.size,)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return [WIRE_ITEMSIZE[ops.dtype_of(self.array)]]

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return (self.array,)

    @staticmethod
    def simulate(asked: Sequence[SumScalar[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        total = np.asarray(sum(r.array for r in asked))
        return [(total.copy(),) for _ in asked]


async def sum_scalar(x: A) -> A:
    """The sum of the scalar `x` over all replicas and all programs of the step."""
    return await ask_one(SumScalar(x))


# What replicas hand each other.


@dataclass(slots=True)
class Gather(Fusable[A]):
    """Each array of every replica, on every replica: (…) → (W, …). The same shapes everywhere; one all-gather per dtype.

    Attributes:
        arrays: of any dtype that can be sent.
        watched: the driver notes whether what it received was finite, as for `Reduce`.
        groups: a partition of the replicas into groups of equal size G: (…) → (G, …), from this replica's group. Not watched.
        assumed: the number of replicas for a plan that has not been told it, see `WorldSize`.
    """

    exchanges = True

    arrays: tuple[A, ...]
    watched: bool = True
    groups: Groups | None = None
    assumed: int | None = None

    async def between(self, nodes: Any) -> tuple[A, ...]:
        answers: tuple[A, ...] = await nodes.in_parts(self, received=group_size(self.groups, nodes.count))
        return answers

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        size = group_size(self.groups, world_size or self.assumed)
        return [-(-size * nbytes // 2) for nbytes in self.bytes_by_dtype(ops)]

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        size = _told(dry, self.groups, self.assumed)
        return tuple(AbstractArray((size, *x.shape), x.dtype) for x in self.arrays)

    @staticmethod
    def simulate(asked: Sequence[Gather[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        answers: list[tuple[Any, ...]] = [()] * len(asked)
        for members in _members(asked[0].groups, len(asked), equal=True):
            for i in range(len(asked[0].arrays)):
                everything = np.stack([asked[m].arrays[i] for m in members])
                world.finite = world.finite and not (asked[0].watched and not np.isfinite(everything).all())
                for m in members:
                    answers[m] += (everything.copy(),)
        return answers


async def gather(
    *arrays: A, watched: bool = True, groups: Groups | None = None, assumed: int | None = None
) -> tuple[A, ...]:
    """Each of these arrays of every replica, stacked: (…) → (W, …). See `Gather`."""
    return await ask(Gather(arrays, watched and groups is None, groups, assumed))


@dataclass(slots=True)
class AllToAll(Fusable[A]):
    """To each replica its part of each array, and from each replica a part: one all-to-all per dtype.

    Attributes:
        arrays: with a row for each replica, (W, …) → (W, …); with `counts` vectors.
        groups: a partition of the replicas into groups of equal size, which exchange by themselves.
        counts: for each vector, how many elements each replica receives, in order, of every replica: of so many in all, replica i receives
            W · counts[i]. Only parts of equal size work in JAX. Empty: the arrays have rows.
    """

    exchanges = True

    arrays: tuple[A, ...]
    groups: Groups | None = None
    counts: tuple[tuple[int, ...], ...] = ()

    per_array = ("arrays", "counts")

    def key(self) -> object:
        return type(self), self.groups, bool(self.counts)

    async def between(self, nodes: Any) -> tuple[A, ...]:
        size = group_size(self.groups, nodes.count)
        answers: tuple[A, ...] = await (nodes.whole(self) if self.counts else nodes.in_parts(self, size, size))
        return answers

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return [-(-nbytes // 2) for nbytes in self.bytes_by_dtype(ops)]

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        if self.counts:
            parts = zip(self.arrays, self.counts, strict=True)
            return tuple(AbstractArray((len(counts) * counts[0],), x.dtype) for x, counts in parts)
        self.require_rows(_told(dry, self.groups, self.arrays[0].shape[0] if self.arrays[0].shape else None))
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
        answers: list[tuple[Any, ...]] = [()] * len(asked)
        for members in _members(asked[0].groups, len(asked), equal=True):
            for i, counts in enumerate(asked[0].parts(len(members))):
                parts = [_split(asked[m].arrays[i].reshape(-1), counts, len(members)) for m in members]
                for place, m in enumerate(members):
                    received = np.concatenate([own[place] for own in parts])
                    answers[m] += (received if asked[0].counts else received.reshape(asked[m].arrays[i].shape),)
        return answers


async def all_to_all(*arrays: A, groups: Groups | None = None) -> tuple[A, ...]:
    """Row i of each of these arrays to replica i, and a row from each: (W, …) → (W, …). See `AllToAll`."""
    return await ask(AllToAll(arrays, groups))


async def all_to_all_parts(arrays: Sequence[A], counts: Parts, *, groups: Groups | None = None) -> tuple[A, ...]:
    """Vectors in parts of their own: to replica i the part of `counts[i]` elements, and from each replica one. See `AllToAll`."""
    return await ask(AllToAll(tuple(arrays), groups, tuple(counts)))


@dataclass(slots=True)
class ReduceScatter(Fusable[A]):
    """This replica's part of the average of each array: half of an all-reduce.

    Attributes:
        arrays: vectors, donated.
        counts: for each array, how many elements each replica receives, in order; they add up to the array's length. Only parts of
            equal size work in JAX.
        groups: a partition of the replicas into groups of equal size, which average and divide by themselves.
    """

    per_array = ("arrays", "counts")

    exchanges = True

    arrays: tuple[A, ...]
    counts: tuple[tuple[int, ...], ...]
    groups: Groups | None = None

    async def between(self, nodes: Any) -> tuple[A, ...]:
        answers: tuple[A, ...] = await nodes.whole(self)
        return answers

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return _parts_payloads(self, ops)

    async def coded(self, coder: Any) -> tuple[A, ...]:
        if not all(coder.shrinks(x) for x in self.arrays):
            return await ask(self)
        return tuple(await coder.parts_of_mean(self.arrays, self.counts, self.groups))

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return tuple(AbstractArray((n[dry.place],), x.dtype) for x, n in zip(self.arrays, self.counts, strict=True))

    def signature(self) -> object:
        return (type(self), self.groups, self.counts, *[x.dtype for x in self.arrays])

    def describe(self) -> str:
        return f"{Fusable.describe(self)} in parts of {list(self.counts)}"

    @staticmethod
    def simulate(asked: Sequence[ReduceScatter[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        answers: list[tuple[Any, ...]] = [()] * len(asked)
        for members in _members(asked[0].groups, len(asked), equal=True):
            for i, counts in enumerate(asked[0].counts):
                average = _combined([asked[m].arrays[i] for m in members], "mean")
                for m, part in zip(members, _split(average, counts, len(members)), strict=True):
                    answers[m] += (part.copy(),)
        world.give([x for r in asked for x in r.arrays])
        return answers


async def reduce_scatter(arrays: Sequence[A], counts: Parts, *, groups: Groups | None = None) -> tuple[A, ...]:
    """This replica's part of the average of each array, see `ReduceScatter`."""
    return await ask(ReduceScatter(tuple(arrays), tuple(counts), groups))


@dataclass(slots=True)
class AllGather(Fusable[A]):
    """The vectors of all replicas one after the other, on every replica: the other half of an all-reduce.

    Attributes:
        arrays: this replica's vectors, donated.
        counts: for each array, how many elements each replica contributes. Only parts of equal size work in JAX.
        out: for each array, a vector for the answer, donated, in whose place this replica's part may lie already; or None.
        groups: a partition of the replicas into groups of equal size, which gather by themselves.
    """

    per_array = ("arrays", "counts", "out")

    exchanges = True

    arrays: tuple[A, ...]
    counts: tuple[tuple[int, ...], ...]
    out: tuple[A | None, ...]
    groups: Groups | None = None

    async def between(self, nodes: Any) -> tuple[A, ...]:
        answers: tuple[A, ...] = await nodes.whole(self)
        return answers

    def carrying(self, arrays: tuple[A, ...], new: Sequence[bool]) -> AllGather[A]:
        out = tuple(None if other else place for place, other in zip(self.out, new, strict=True))
        return replace(self, arrays=arrays, out=out)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return _parts_payloads(self, ops)

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return tuple(AbstractArray((sum(n),), x.dtype) for x, n in zip(self.arrays, self.counts, strict=True))

    def signature(self) -> object:
        return (type(self), self.groups, self.counts, *[x.dtype for x in self.arrays])

    def describe(self) -> str:  # without the shapes, which differ
        return f"AllGather of {', '.join(x.dtype.name for x in self.arrays)} in parts of {list(self.counts)}"

    @staticmethod
    def simulate(asked: Sequence[AllGather[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        answers: list[tuple[Any, ...]] = [()] * len(asked)
        for members in _members(asked[0].groups, len(asked), equal=True):
            for i in range(len(asked[0].arrays)):
                everything = np.concatenate([asked[m].arrays[i] for m in members])
                for m in members:
                    answers[m] += (everything.copy(),)
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


# What is asked of the driver, with no message.


@dataclass(frozen=True)
class WorldSize(Request):
    """How many replicas there are, or in each of `groups` of equal size: an int, also in JAX.

    `assumed` is what a plan takes that has not been told, where what is sent hardly depends on it.
    """

    priority = 0
    shared = True

    groups: Groups | None = None
    assumed: int | None = None

    async def between(self, nodes: Any) -> tuple[Any, ...]:
        return await ask(among(self, nodes.peers))

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return (_told(dry, self.groups, self.assumed),)

    @staticmethod
    def simulate(asked: Sequence[WorldSize], world: LockStep) -> list[tuple[Any, ...]]:
        members = _members(asked[0].groups, len(asked), equal=True)
        return [(len(members[0]),)] * len(asked)


async def world_size(groups: Groups | None = None, *, assumed: int | None = None) -> int:
    """How many replicas there are, or in each of these groups, which must be of one size; `assumed` in a plan that has not been told."""
    return await ask_one(WorldSize(groups, assumed))


@dataclass(frozen=True)
class ReplicaIndex(Request):
    """Which replica this is, or which of its group, from 0 on: an int in torch and NumPy, a traced int32 scalar in JAX."""

    priority = 0
    shared = True

    groups: Groups | None = None

    async def between(self, nodes: Any) -> tuple[Any, ...]:
        return await ask(among(self, nodes.peers))

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return (0,)

    @staticmethod
    def simulate(asked: Sequence[ReplicaIndex], world: LockStep) -> list[tuple[Any, ...]]:
        places = {m: i for members in _members(asked[0].groups, len(asked)) for i, m in enumerate(members)}
        return [(places[replica],) for replica in range(len(asked))]


async def replica_index(groups: Groups | None = None) -> Any:
    """The number of this replica, or its place in its group: an int or a traced int32 scalar."""
    return await ask_one(ReplicaIndex(groups))


@dataclass(frozen=True)
class StepIsFinite(Request):
    """Was every watched answer of this step finite? The same on all replicas, and no message.

    A driver that runs a step as several programs answers only when all of them have asked or ended, so the answer speaks of the
    whole step: a program commits its memory after it, or not at all.
    """

    priority = 3
    shared = True
    settles = True

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return (AbstractArray((), "bool"),)

    @staticmethod
    def simulate(asked: Sequence[StepIsFinite], world: LockStep) -> list[tuple[Any, ...]]:
        return [(np.asarray(world.finite),)] * len(asked)


async def step_is_finite() -> Any:
    """Boolean scalar array: was everything watched in this step so far finite (on all replicas, for all tensors)?"""
    return await ask_one(StepIsFinite())


@dataclass(slots=True)
class Watch(Fusable[A]):
    """The step was finite only if these arrays are: what has arrived in a form that shows no inf or NaN, decoded. Equal on all replicas."""

    priority = 0

    arrays: tuple[A, ...]

    async def coded(self, coder: Any) -> tuple[A, ...]:
        return await ask(self)

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return self.arrays

    @staticmethod
    def simulate(asked: Sequence[Watch[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        world.finite = world.finite and all(np.isfinite(x).all() for x in asked[0].arrays)
        return [r.arrays for r in asked]


async def watch(*arrays: A) -> tuple[A, ...]:
    """The same arrays: `step_is_finite` will say whether they were. They must be equal on all replicas."""
    return await ask(Watch(arrays))


@dataclass(slots=True)
class LocalNorm(Request, Generic[A]):
    """The 2-norm of this replica's gradients, over all programs of the step where a driver runs several.

    Such a driver answers when all of them have asked or ended, so what a program sends after it goes out when the last gradient is there. A driver
    that knows by what the loss was scaled divides by it.

    Attributes:
        arrays: some of the gradients.
    """

    ops: Ops[A]
    arrays: tuple[A, ...]

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return (self.ops.norm_of_all(self.arrays),)

    @staticmethod
    def simulate(asked: Sequence[LocalNorm[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        return [(r.ops.norm_of_all(r.arrays),) for r in asked]


async def local_norm(ops: Ops[A], gradients: Mapping[K, A]) -> A:
    """2-norm of this replica's whole gradient, of which these are a part: a scalar, float32 or wider."""
    return await ask_one(LocalNorm(ops, tuple(gradients.values())))


@dataclass(slots=True)
class Orthonormalize(Fusable[A]):
    """Orthonormal rows for each (r, n) matrix, or stack of them. A request so that equal shapes share one kernel call.

    `fresh` holds, for each matrix, the rows that replace its negligible ones, or is empty: then those come out as zero.
    """

    per_array = ("arrays", "fresh")
    priority = 0
    local = True

    ops: Ops[A]
    arrays: tuple[A, ...]
    fresh: tuple[A, ...]
    epsilon: float

    def key(self) -> object:
        return type(self), bool(self.fresh), self.epsilon

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return self.arrays

    def answer(self) -> tuple[A, ...]:
        """The orthonormal rows."""
        return tuple(self.ops.orthonormalize_each(self.arrays, self.fresh, self.epsilon))

    @staticmethod
    def simulate(asked: Sequence[Orthonormalize[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        """Each matrix is treated by itself, so one call serves all replicas; unless they want it done differently."""
        key, ops = asked[0].key(), asked[0].ops
        if len(asked) == 1 or any(r.ops is not ops or r.key() != key for r in asked[1:]):
            return [r.answer() for r in asked]
        rows, n = Orthonormalize.fuse(asked).answer(), len(asked[0])
        return [rows[i * n : (i + 1) * n] for i in range(len(asked))]


async def orthonormalize(ops: Ops[A], x: A, *, fresh: A | None = None, epsilon: float = 0.0) -> A:
    """Orthonormal rows spanning the rows of `x` (r, n), or of each matrix of a stack, see `gradwire.core.kernels.gram_schmidt.gram_schmidt`.

    Rows of `x` that are zero, or negligible beside the longest, are first replaced by those of `fresh` (r, n) if it is given.
    """
    return await ask_one(Orthonormalize(ops, (x,), () if fresh is None else (fresh,), epsilon))


@dataclass(frozen=True)
class OptimizerStep(Request, Generic[A]):
    """Hand gradients to the optimizer and receive what it makes of them. Only drivers that have an optimizer answer it.

    Attributes:
        pieces: parameter name → averaged gradient of what this replica owns of it.
        ok: boolean scalar, equal on all replicas: False skips the step. None: it is never skipped.
    """

    updates = True

    pieces: dict[str, A]
    ok: A | None

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return (self.pieces,)

    @staticmethod
    def simulate(asked: Sequence[OptimizerStep[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        if world.optimizer is None:
            raise cannot_answer("the simulator", asked[0])
        ok = [None if r.ok is None else bool(r.ok) for r in asked]
        if len(set(ok)) > 1:
            raise ReplicaMismatch(f"the replicas disagree whether the step counts: {dict(enumerate(ok))}")
        counts = () if ok[0] is None else (ok[0],)
        return [(world.optimizer(replica, r.pieces, *counts),) for replica, r in enumerate(asked)]


async def optimizer_step(pieces: dict[str, A], ok: A | None = None) -> dict[str, A]:
    """What the optimizer makes of the gradients of the owned pieces: new parameters or updates, by the same names."""
    return await ask_one(OptimizerStep(pieces, ok))


@dataclass(frozen=True)
class Branch(Request, Generic[T]):
    """Run one of two coroutines. `predicate` must be equal on all replicas: derive it from a counter or from an average.

    torch and NumPy use `if`; JAX uses `lax.cond`, so both coroutines take and return arrays in the same nested containers. Where no `phase` is given,
    dictionaries in the result may lack names that the other side's have: in JAX those are zeros, and the caller must not use them.

    `phase` is given where the predicate is whether a counter in the shared state has a value. A driver may know that counter in a quicker
    way than by reading the predicate, and a plan goes through its values, from 0 to the algorithm's `cycle`. Of any other predicate that is an
    array a plan knows nothing: it counts the side that sends more, and says so (`Traffic.optional_bytes`).
    """

    predicate: Any
    then: Side[T]
    otherwise: Side[T]
    operands: tuple[Any, ...]
    phase: tuple[Any, int] | None = None

    def side(self, truth: bool) -> Program[T]:
        """One of the two coroutines."""
        return (self.then if truth else self.otherwise)(*self.operands)

    def wrapped(self, wrap: Callable[[Program[Any]], Program[Any]]) -> Self:
        then, otherwise = self.then, self.otherwise
        return replace(self, then=lambda *x: wrap(then(*x)), otherwise=lambda *x: wrap(otherwise(*x)))

    def abstract(self, dry: DryRun) -> tuple[Any, ...]:
        return (dry.one_side(self.predicate, self.phase, self.side),)

    @staticmethod
    def simulate(asked: Sequence[Branch[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        predicates = [bool(r.predicate) for r in asked]
        if len(set(predicates)) > 1:
            raise ReplicaMismatch(f"the replicas branch differently: {dict(enumerate(predicates))}")
        return [(result,) for result in world.run([r.side(predicates[0]) for r in asked])]


async def branch(predicate: Any, then: Side[T], otherwise: Side[T], *operands: Any) -> T:
    """`await then(*operands)` if `predicate`, else `await otherwise(*operands)`.

    A Python bool decides at once; an array is left to the driver, and to a plan both sides are possible. Where a counter of phases decides,
    take `branch_on_phase`.
    """
    if isinstance(predicate, bool):
        return await (then if predicate else otherwise)(*operands)
    return await ask_one(Branch(predicate, then, otherwise, operands))


async def branch_on_phase(counter: Any, value: int, then: Side[T], otherwise: Side[T], *operands: Any) -> T:
    """`branch` on `counter == value`, for a counter in the shared state: which of its phases an algorithm is in."""
    return await ask_one(Branch(counter == value, then, otherwise, operands, (counter, value)))


def among(request: Request, groups: Groups) -> Request:
    """A request of a program for which each of these groups is all replicas there are, as one that names the group."""
    names = _fields(request)
    if "groups" not in names:
        return request
    inner = request.groups
    named = groups if inner is None else tuple(tuple(own[m] for m in members) for own in groups for members in inner)
    options: dict[str, Any] = {"groups": named}
    if "watched" in names:
        options["watched"] = False
    return replace(request, **options)  # type: ignore[type-var]


def _fields(request: Request) -> frozenset[str]:
    return frozenset(field.name for field in fields(request)) if is_dataclass(request) else frozenset()


def _all(ops: Ops[Any], finite: Sequence[Any]) -> Any:
    if not finite:
        return ops.all_finite(ops.zeros((), "float32"))
    return functools.reduce(lambda a, b: a & b, finite)


def _by_dtype(ops: Ops[Any], arrays: Sequence[Any]) -> list[Any]:
    """Arrays of floats, with those of one kind joined: a kernel for each costs more than many of them."""
    by_kind: dict[Any, list[Any]] = {}
    for x in arrays:
        if ops.dtype_of(x) in FLOATS and math.prod(x.shape):
            by_kind.setdefault(ops.kind_of(x), []).append(x)
    return [xs[0] if len(xs) == 1 else ops.rows(xs, 1) for xs in by_kind.values()]


def require_partition(groups: Groups, replicas: int, *, equal: bool = False) -> None:
    """Raise ValueError for groups that are no partition of so many replicas; with `equal`, for groups of several sizes."""
    if sorted(member for members in groups for member in members) != list(range(replicas)):
        raise NoPartition(groups, replicas)
    if equal:
        group_size(groups, replicas)


def _told(dry: DryRun, groups: Groups | None, assumed: int | None) -> int:
    try:
        return dry.replicas(groups)
    except UnknownWorldSize:
        if assumed is None:
            raise
        return assumed


def group_size(groups: Groups | None, world_size: int | None) -> int:
    """How many replicas gather together. Raises ValueError for groups of several sizes, and where nobody has said how many there are."""
    if groups is not None:
        sizes = {len(members) for members in groups}
        if len(sizes) > 1:
            raise ValueError(f"groups={groups} differ in size, so what they gather would differ in shape")
        return sizes.pop()
    if world_size is None:
        raise UnknownWorldSize
    return world_size


def _parts_payloads(request: ReduceScatter[A] | AllGather[A], ops: Ops[A]) -> list[int]:
    sizes = [sum(n) * WIRE_ITEMSIZE[ops.dtype_of(x)] for x, n in zip(request.arrays, request.counts, strict=True)]
    return [-(-size // 2) for size in sizes if size]


def _members(groups: Groups | None, replicas: int, *, equal: bool = False) -> Sequence[Sequence[int]]:
    if groups is None:
        return (range(replicas),)
    require_partition(groups, replicas, equal=equal)
    return groups


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
    return np.asarray(sum([v / len(vectors) for v in vectors]), dtype)


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
