"""What is averaged, summed or maximized over replicas: all-reduces, and the sum of a scalar.

    p = await mean(p)                                     # the average over all replicas

Each request is a class and the function that asks for it. `gradwire.core.protocol` says what a
request knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from gradwire.core.kernels.payloads import Residual
from gradwire.core.ops import ITEMSIZE, WIRE_ITEMSIZE, A, Ops
from gradwire.core.protocol.groups import Groups, members_of
from gradwire.core.protocol.local_requests import world_size
from gradwire.core.protocol.lock_step import combine, cut, join
from gradwire.core.protocol.programs import (
    AbstractReplica,
    Collective,
    Fusable,
    LockStep,
    Request,
    ask,
    ask_one,
)

K = TypeVar("K")


# not frozen: one is made for every matrix, and that would take three times as long
@dataclass(slots=True)
class Reduce(Fusable[A], Collective):
    """Each array averaged, summed or maximized over all replicas: one all-reduce per dtype,
    whatever the number of arrays.

    Attributes:
        arrays: floats; for "sum" and "max" integers too, which are summed in their own dtype.
        donated: whether the answer may overwrite the array, for each.
        watched: the driver notes whether the answers were finite (see `StepIsFinite`); an algorithm
            with no memory of its own can spare itself that pass over the data.
        groups: a partition of the replicas: each group by itself, all with one request. None: all
            replicas together. What a group averages cannot be watched, since the groups would come
            to different answers.
        overlap: what the senders keep of what they send: a driver may compute it while the message
            is on its way, each once, or not at all.
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
                f"an average in groups {self.groups} differs between them and cannot be watched;"
                " pass watched=False"
            )

    def key(self) -> object:
        return type(self), self.groups, self.op

    def carrying(self, arrays: tuple[A, ...], new: Sequence[bool]) -> Reduce[A]:
        return replace(
            self,
            arrays=arrays,
            donated=tuple(d or n for d, n in zip(self.donated, new, strict=True)),
        )

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
        shrinks = [self.op != "max" and coder.shrinks(x) for x in self.arrays]
        mine = [i for i, does in enumerate(shrinks) if does]
        rest = [i for i, does in enumerate(shrinks) if not does]
        asked = replace(
            self,
            arrays=tuple(self.arrays[i] for i in rest),
            donated=tuple(self.donated[i] for i in rest),
        )
        answers = dict(zip(rest, await ask(asked), strict=True))
        if mine:
            donated = all(self.donated[i] for i in mine)
            # Also where what travels as it is would not be watched: scales show it for next to
            # nothing, and what is cast is being read.
            means = await coder.mean(
                [self.arrays[i] for i in mine], donated=donated, groups=self.groups
            )
            factor = 1 if self.op == "mean" else await world_size(self.groups, assumed=1)
            answers |= {
                i: x if factor == 1 else x * float(factor) for i, x in zip(mine, means, strict=True)
            }
        return tuple(answers[i] for i in range(len(self)))

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        for x in self.arrays:
            if x.dtype not in ITEMSIZE and (self.op == "mean" or x.dtype.startswith("float")):
                advice = (
                    "gather it" if x.dtype.startswith("float") else "ask for reduce_sum, or cast it"
                )
                raise ValueError(
                    f"the {self.op} of {x.dtype} cannot be formed on the wire; {advice}"
                )
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
        parts = (
            [range(n)]
            if len({x.dtype for x in first.arrays}) == 1
            else [range(i, i + 1) for i in range(n)]
        )
        for members in members_of(first.groups, len(asked)):
            for part in parts:
                like = [first.arrays[i] for i in part]
                result = combine(
                    [join([asked[m].arrays[i] for i in part]) for m in members], first.op
                )
                world.finite = world.finite and not (
                    first.watched and not np.isfinite(result).all()
                )
                for m in members:
                    answers[m] += tuple(cut(result.copy(), like))
        world.give(
            [x for r in asked for x, donated in zip(r.arrays, r.donated, strict=True) if donated]
        )
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
    """Average `x` over all replicas; `out=x` lets the answer overwrite it. Every replica receives
    the same bits.

    With `groups`, a partition of the replicas, over those of this replica's group; that is never
    watched, see `Reduce`. `overlap` may be computed while `x` is on its way, see
    `gradwire.core.algorithms.compressor.StepContext`.
    """
    residuals = () if overlap is None else (overlap,)
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, residuals))


async def mean_each(
    arrays: Mapping[K, A],
    *,
    donated: bool = True,
    watched: bool = True,
    groups: Groups | None = None,
) -> dict[K, A]:
    """Average each of these arrays, all `donated` or none, with one request: a coroutine for each
    would cost more than a small array itself. `groups` as for `mean`."""
    if not arrays:
        return {}
    request = Reduce(
        tuple(arrays.values()), (donated,) * len(arrays), watched and groups is None, groups
    )
    answers = await ask(request)
    return dict(zip(arrays, answers, strict=True))


async def reduce_sum(
    x: A, *, out: A | None = None, watched: bool = True, groups: Groups | None = None
) -> A:
    """`x` summed over all replicas, in its own dtype: int8 wraps round beyond 127. Arguments as for
    `mean`."""
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, op="sum"))


async def reduce_max(
    x: A, *, out: A | None = None, watched: bool = True, groups: Groups | None = None
) -> A:
    """The largest of each element over all replicas. It may swallow a NaN: send inf in its place.
    Arguments as for `mean`."""
    return await ask_one(Reduce((x,), (out is x,), watched and groups is None, groups, op="max"))


@dataclass(slots=True)
class SumScalar(Collective, Generic[A]):
    """The sum of a scalar over all replicas, and over all programs of the step where a driver runs
    several: one message for all of them."""

    array: A

    async def between(self, nodes: Any) -> tuple[A, ...]:
        (total,) = await ask(self)  # to which each replica of a node adds the same
        return (total / nodes.size,)

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        return await ask(self)

    async def coded(self, coder: Any) -> tuple[A, ...]:
        return await ask(self)

    def among(self, groups: Groups) -> Request:
        raise TypeError(
            f"a sum_scalar is of all replicas, and cannot be asked in groups {groups}; take"
            " reduce_sum"
        )

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
