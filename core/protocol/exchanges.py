"""What replicas hand over to each other as it is: gathers and all-to-alls.

    values, indices = await gather(values, indices)       # those of all replicas: (...) → (W, ...)

Each request is a class and the function that asks for it. `gradwire.core.protocol` says what a
request knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import A, Ops
from gradwire.core.protocol.groups import Groups, group_size
from gradwire.core.protocol.lock_step import answer_by_group, split
from gradwire.core.protocol.programs import (
    AbstractReplica,
    Collective,
    Fusable,
    LockStep,
    Request,
    ask,
)

#: For each array, how many elements each replica receives, or contributes.
Parts = Sequence[tuple[int, ...]]


@dataclass(slots=True)
class Gather(Fusable[A], Collective):
    """Each array of every replica, on every replica: (…) → (W, …). The same shapes everywhere; one
    all-gather per dtype.

    Attributes:
        arrays: of any dtype that can be sent.
        watched: the driver notes whether what it received was finite, as for `Reduce`.
        groups: a partition of the replicas into groups of equal size G: (…) → (G, …), from this
            replica's group. Not watched.
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
        return await ask_cast(self, coder)

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
            world.finite = world.finite and not (
                asked[0].watched and not np.isfinite(everything).all()
            )
            return [everything.copy() for _ in group]

        return answer_by_group(asked, stacked)


async def gather(
    *arrays: A, watched: bool = True, groups: Groups | None = None, assumed: int | None = None
) -> tuple[A, ...]:
    """Each of these arrays of every replica, stacked: (…) → (W, …). See `Gather`."""
    return await ask(Gather(arrays, watched and groups is None, groups, assumed))


@dataclass(slots=True)
class AllToAll(Fusable[A], Collective):
    """Send to each replica its part of each array, and receive a part from each: one all-to-all per
    dtype.

    Attributes:
        arrays: with a row for each replica, (W, …) → (W, …); with `counts` vectors.
        groups: a partition of the replicas into groups of equal size, which exchange by themselves.
        counts: for each vector, how many elements each replica receives, in order, of every
            replica: of so many in all, replica i receives W · counts[i]. Only parts of equal size
            work in JAX. Empty: the arrays have rows.
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
        return await ask_cast(self, coder)

    def among(self, groups: Groups) -> Request:
        return Request.among(self, groups)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return [-(-nbytes // 2) for nbytes in self.bytes_by_dtype(ops)]

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        if self.counts:
            parts = zip(self.arrays, self.counts, strict=True)
            return tuple(AbstractArray((len(counts) * counts[0],), x.dtype) for x, counts in parts)
        self.require_rows(
            replica.replicas(self.groups, self.arrays[0].shape[0] if self.arrays[0].shape else None)
        )
        return self.arrays

    def signature(self) -> object:
        return (*Fusable.signature(self), self.counts)  # type: ignore[misc]

    def parts(self, size: int) -> list[tuple[int, ...]]:
        """The elements of each array that each of so many replicas receives. Raises ValueError for
        an array that has not a row for each."""
        if self.counts:
            return list(self.counts)
        self.require_rows(size)
        return [(math.prod(x.shape[1:]),) * size for x in self.arrays]

    def require_rows(self, size: int) -> None:
        """Raise ValueError for an array that has no row for each of so many replicas."""
        for x in self.arrays:
            if not x.shape or x.shape[0] != size:
                raise ValueError(
                    f"an all-to-all of {list(x.shape)} among {size} replicas: the first axis must"
                    f" be {size}"
                )

    @staticmethod
    def simulate(asked: Sequence[AllToAll[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        def exchanged(group: Sequence[AllToAll[Any]], i: int) -> list[Any]:
            counts = group[0].parts(len(group))[i]
            parts = [split(r.arrays[i].reshape(-1), counts, len(group)) for r in group]
            received = [np.concatenate(own) for own in zip(*parts, strict=True)]
            return (
                received
                if asked[0].counts
                else [x.reshape(asked[0].arrays[i].shape) for x in received]
            )

        return answer_by_group(asked, exchanged)


async def all_to_all(*arrays: A, groups: Groups | None = None) -> tuple[A, ...]:
    """Row i of each of these arrays to replica i, and a row from each: (W, …) → (W, …). See
    `AllToAll`."""
    return await ask(AllToAll(arrays, groups))


async def all_to_all_parts(
    arrays: Sequence[A], counts: Parts, *, groups: Groups | None = None
) -> tuple[A, ...]:
    """Vectors in parts of their own: to replica i the part of `counts[i]` elements, and from each
    replica one. See `AllToAll`."""
    return await ask(AllToAll(tuple(arrays), groups, tuple(counts)))


async def ask_cast(request: Fusable[A], coder: Any) -> tuple[A, ...]:
    """The answers, of arrays that are cast to a shorter float: what is handed over, and not
    averaged, is not quantized."""
    if not coder.casts:
        return await ask(request)
    ops, shrinks = coder.ops, [coder.shrinks(x) for x in request.arrays]
    pairs = zip(request.arrays, shrinks, strict=True)
    sent = tuple(ops.cast(x, coder.codec.dtype) if shorter else x for x, shorter in pairs)
    answers = await ask(request.carrying(sent, shrinks))
    dtypes = [ops.dtype_of(x) for x in request.arrays]
    return tuple(ops.cast(y, dtype) for y, dtype in zip(answers, dtypes, strict=True))
