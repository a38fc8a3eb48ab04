"""The halves of an all-reduce: a reduce-scatter, by which each replica has its part of the average,
and an all-gather of such parts.

    (own,) = await reduce_scatter([gradient], [(n, n)])   # (2 n,) → (n,)
    (whole,) = await all_gather([own], [(n, n)])          # (n,) → (2 n,)

Each request is a class and the function that asks for it. `gradwire.core.protocol` says what a
request knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import WIRE_ITEMSIZE, A, Ops
from gradwire.core.protocol.exchanges import Parts, ask_cast
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.lock_step import answer_by_group, combine, split
from gradwire.core.protocol.programs import (
    AbstractReplica,
    Collective,
    Fusable,
    LockStep,
    Request,
    ask,
)


@dataclass(slots=True)
class ReduceScatter(Fusable[A], Collective):
    """This replica's part of the average of each array: half of an all-reduce.

    Attributes:
        arrays: vectors, donated.
        counts: for each array, how many elements each replica receives, in order; they add up to
            the array's length. Only parts of equal size work in JAX.
        groups: a partition of the replicas into groups of equal size, which average and divide by
            themselves.
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
        return tuple(
            AbstractArray((n[replica.place],), x.dtype)
            for x, n in zip(self.arrays, self.counts, strict=True)
        )

    def signature(self) -> object:
        return (type(self), self.groups, self.counts, *[x.dtype for x in self.arrays])

    def describe(self) -> str:
        return f"{Fusable.describe(self)} in parts of {list(self.counts)}"

    @staticmethod
    def simulate(asked: Sequence[ReduceScatter[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        def parts(group: Sequence[ReduceScatter[Any]], i: int) -> list[Any]:
            average = combine([r.arrays[i] for r in group], "mean")
            return [part.copy() for part in split(average, group[0].counts[i], len(group))]

        answers = answer_by_group(asked, parts)
        world.give([x for r in asked for x in r.arrays])
        return answers


async def reduce_scatter(
    arrays: Sequence[A], counts: Parts, *, groups: Groups | None = None
) -> tuple[A, ...]:
    """This replica's part of the average of each array, see `ReduceScatter`."""
    return await ask(ReduceScatter(tuple(arrays), tuple(counts), groups))


@dataclass(slots=True)
class AllGather(Fusable[A], Collective):
    """The vectors of all replicas one after the other, on every replica: the other half of an
    all-reduce.

    Attributes:
        arrays: this replica's vectors, donated.
        counts: for each array, how many elements each replica contributes. Only parts of equal size
            work in JAX.
        out: for each array, a vector for the answer, donated, in whose place this replica's part
            may lie already; or None.
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
        return await ask_cast(self, coder)

    def among(self, groups: Groups) -> Request:
        return Request.among(self, groups)

    def payloads(self, ops: Ops[A], world_size: int | None) -> list[int]:
        return _parts_payloads(self, ops)

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return tuple(
            AbstractArray((sum(n),), x.dtype) for x, n in zip(self.arrays, self.counts, strict=True)
        )

    def signature(self) -> object:
        return (type(self), self.groups, self.counts, *[x.dtype for x in self.arrays])

    def describe(self) -> str:  # without the shapes, which differ
        return (
            f"AllGather of {', '.join(x.dtype.name for x in self.arrays)} in parts of"
            f" {list(self.counts)}"
        )

    @staticmethod
    def simulate(asked: Sequence[AllGather[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        def joined(group: Sequence[AllGather[Any]], i: int) -> list[Any]:
            everything = np.concatenate([r.arrays[i] for r in group])
            return [everything.copy() for _ in group]

        answers = answer_by_group(asked, joined)
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


def _parts_payloads(request: ReduceScatter[A] | AllGather[A], ops: Ops[A]) -> list[int]:
    sizes = [
        sum(n) * WIRE_ITEMSIZE[ops.dtype_of(x)]
        for x, n in zip(request.arrays, request.counts, strict=True)
    ]
    return [-(-size // 2) for size in sizes if size]
