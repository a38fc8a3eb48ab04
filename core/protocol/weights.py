"""Replicas that count by a weight: the tokens of a batch, say, or 0 for a replica that is absent.

    averages, state = await Weighing(ops, weight).run(algorithm.step(ops, gradients, state, step))

    mean(x)    =  Σ w·x / Σ w          # w·x and w in one message; what an absent replica has is never looked at
    gather(x)  →  x of each replica, and `await replica_weights()` says by what a method has to multiply it

The program is the one that all other replicas run, and knows of no weights: each request says how it is asked (`Request.weighed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from gradwire.core.ops import A, Ops
from gradwire.core.protocol.collective_requests import AllToAll, Gather, Reduce, gather
from gradwire.core.protocol.control_requests import watch
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import (
    AbstractReplica,
    LockStep,
    Program,
    Request,
    UnknownRequest,
    ask,
    ask_one,
    relayed,
)

T = TypeVar("T")

#: Sums of weighted arrays of these dtypes can be divided afterwards. Shorter floats might overflow before.
WIDE = frozenset({"float32", "float64"})


class NobodyCounts(RuntimeError):
    """All replicas have weight 0: there is nothing to average."""

    def __init__(self) -> None:
        super().__init__(
            "all replicas have weight 0, so there is nothing to average. The memory is as it was before the step; give at least one replica a "
            "weight above 0"
        )


class Weights(NamedTuple, Generic[A]):
    """What replicas weigh, those of a group or all: `of_each` (W,) and their `total`, in float32."""

    of_each: A
    total: A

    def times(self, ops: Ops[A], x: A, replica: Any) -> A:
        """What a replica (an int or traced) has sent, times its weight: zeros of one that is absent, whatever it has sent."""
        weight = self.of_each[replica]
        return ops.where(weight > 0, ops.multiply(x, ops.cast(weight, ops.dtype_of(x))), 0.0)

    def present(self, ops: Ops[A], every: A) -> A:
        """Of what all replicas have sent (W, …), zeros for those that are absent."""
        return ops.where(self._beside(every) > 0, every, 0.0)

    def times_each(self, ops: Ops[A], every: A) -> A:
        """`times` of what all replicas have sent (W, …)."""
        weights = ops.cast(self._beside(every), ops.dtype_of(every))
        return ops.multiply(self.present(ops, every), weights)

    def _beside(self, every: A) -> A:
        return self.of_each.reshape((-1, *[1] * (len(every.shape) - 1)))

    def share(self, ops: Ops[A], total: A) -> A:
        """The mean of which this is the weighted sum."""
        return ops.divide(total, ops.cast(self.total, ops.dtype_of(total)), out=total)


def require_weight(weight: Any, what: str = "weight") -> float:
    """A weight as a float. Raises TypeError for what is no number, ValueError for one that is negative, inf or NaN."""
    if isinstance(weight, (bool, str)) or not hasattr(weight, "__float__"):
        raise TypeError(f"{what}={weight!r} is no number; give the tokens of this replica, or 0 if it is absent")
    if not 0 <= (number := float(weight)) < math.inf:
        raise ValueError(f"{what}={weight!r} must be finite and at least 0; 0 is an absent replica")
    return number


def counted_weight(weight: Any, of: object, *, weighted: bool, instead: str) -> float:
    """The weight that a replica is given, as a float, of what runs an algorithm or a schedule. Raises as `require_weight`, and ValueError where its replicas
    all count alike; `instead`: what to give."""
    number = require_weight(weight)
    if not weighted:
        raise ValueError(f"weight={number:g} for {of!r}, whose replicas all count alike; {instead}")
    return number


def weight_of(ops: Ops[A], weight: Any) -> A:
    """A weight, a number or a scalar array, as a scalar array of float32."""
    number = isinstance(weight, (int, float))
    return ops.asarray(weight, "float32") if number else ops.cast(weight, "float32").reshape(())


@dataclass(frozen=True)
class ReplicaWeights(Request):
    """What the replicas of a group weigh; None where all weigh the same."""

    priority = 0
    shared = True
    local = True

    groups: Groups | None = None

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (None,)

    def answer(self) -> tuple[Any, ...]:
        return (None,)

    @staticmethod
    def simulate(asked: Sequence[ReplicaWeights], world: LockStep) -> list[tuple[Any, ...]]:
        return [(None,)] * len(asked)

    async def between(self, nodes: Any) -> tuple[Any, ...]:
        return await ask(self.among(nodes.inter_node))

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        return (await weighing.of_all(self.groups),)


async def replica_weights(groups: Groups | None = None) -> Weights[Any] | None:
    """What each replica weighs, or each of this replica's group: for methods that `gather`. None: all the same.

    Ask after the gather: the weights then travel with it. `Weights.times` multiplies what a replica has sent; divide by `Weights.total`.
    """
    return await ask_one(ReplicaWeights(groups))


@dataclass(frozen=True)
class CountAs(ReplicaWeights):
    """From now on each replica weighs as much as its group of `groups`, whose replicas go on alike."""

    async def between(self, nodes: Any) -> tuple[Any, ...]:
        return await ask(self)

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        return (await weighing.count_as(self.groups),)


async def count_as(groups: Groups) -> None:
    """See `CountAs`."""
    await ask_one(CountAs(groups))


class Weighing(Generic[A]):
    """This replica's weight in the messages of a program.

    Args:
        ops: kernels.
        weight: of this replica, a number or a scalar array, finite and at least 0. A sum of weights is formed in float32.
        keeps: where nobody counts and the host does not know it, averages of all replicas are the arrays themselves, and not NaN.
        name: of the method, for what is said about it.

    Attributes:
        weight: of this replica, or, after `count_as`, of its group.
    """

    def __init__(self, ops: Ops[A], weight: Any, *, keeps: bool = False, name: str = "this method") -> None:
        self.ops, self.keeps, self.name = ops, keeps, name
        self.weight: A = weight_of(ops, weight)
        self._whole: Groups | None = None
        self._totals: dict[Groups | None, A] = {}
        self._of_all: dict[Groups | None, Weights[A]] = {}
        #: Of the program and its branches: what has been gathered, and whether weights have been asked for.
        self._noted: dict[str, bool] = {}

    async def run(self, program: Program[T]) -> T:
        """What the program returns. Raises UnknownRequest for one that sends what no weight can be given to, and `NobodyCounts`, if the host knows that
        all replicas weigh 0."""
        result = await self._relayed(program)
        if "gathered" in self._noted and "asked" not in self._noted:
            raise UnknownRequest(
                f"{self.name} gathers what replicas have sent without asking what they weigh; let it multiply by `await replica_weights()`, "
                "or leave out the weights"
            )
        return result

    async def _relayed(self, program: Program[T]) -> T:
        return await relayed(program, lambda request: request.weighed(self))

    async def inside(self, program: Program[T]) -> T:
        """A program in a branch, of which nothing that is traced may leave."""
        inner = Weighing(self.ops, self.weight, keeps=self.keeps, name=self.name)
        inner._whole, inner._noted = self._whole, self._noted
        inner._totals, inner._of_all = dict(self._totals), dict(self._of_all)
        return await inner._relayed(program)

    def refuse(self, request: Request, why: str) -> UnknownRequest:
        """What is raised for a request that cannot be weighed."""
        return UnknownRequest(f"{self.name} asks for a {type(request).__name__}, {why}: its replicas cannot be weighed")

    @property
    def present(self) -> bool | None:
        """Whether this replica counts; None where the host does not know."""
        return self.ops.truth(self.weight > 0)

    # ---- averages

    async def mean(self, request: Reduce[A]) -> tuple[A, ...]:
        """The answers of a mean: all of them the weighted ones."""
        ops, groups = self.ops, request.groups
        if request.op != "mean":
            raise self.refuse(request, f"and a {request.op} counts all replicas alike")
        if not any(math.prod(x.shape) for x in request.arrays):
            return await ask(request)  # of which nothing is sent
        dtypes = [ops.dtype_of(x) for x in request.arrays]
        if groups not in self._totals and not WIDE.issuperset(dtypes):
            await self.total_of(groups)
        total = self._totals.get(groups)
        sent = tuple(self._times(x, given, total) for x, given in zip(request.arrays, request.donated, strict=True))
        donated = (True,) * len(sent)
        if total is None:
            sent += (ops.cast(self.weight, dtypes[0]).reshape((1,)),)
            donated += (False,)  # it may be the weight itself, of the same dtype
        answers = await ask(replace(request, arrays=sent, donated=donated, op="sum"))
        if total is None:
            total = self._found(groups, ops.cast(answers[-1], "float32").reshape(()))
            answers = answers[:-1]
        return await self._divided(request, answers, total)

    def _times(self, x: A, donated: bool, total: A | None) -> A:
        """This replica's part of a sum. What is absent is left as it is: if nobody counts, nobody has lost anything."""
        ops, dtype, present = self.ops, self.ops.dtype_of(x), self.present
        if present is False:
            return ops.zeros(tuple(x.shape), dtype)
        if dtype in WIDE:
            factor = self.weight
        else:
            assert total is not None
            factor = ops.divide(self.weight, total)
        product = ops.multiply(x, ops.cast(factor, dtype), out=x if donated and present else None)
        return product if present else ops.where(self.weight > 0, product, 0.0)

    async def _divided(self, request: Reduce[A], sums: Sequence[A], total: A) -> tuple[A, ...]:
        ops = self.ops
        apart = (
            request.groups is not None and request.groups != self._whole
        )  # some of the replicas, who may all be absent
        known = ops.truth(total > 0)
        if known is False:
            return request.arrays  # only of a group; see `_found`
        means = []
        for x, mean in zip(request.arrays, sums, strict=True):
            dtype = ops.dtype_of(x)
            if dtype in WIDE:
                mean = ops.divide(mean, ops.cast(total, dtype), out=mean)
            keeps = known is None and (apart or self.keeps)
            means.append(ops.where(total > 0, mean, x) if keeps else mean)
        if known is None and request.watched:
            await self._watch(total)
        return tuple(means)

    async def _watch(self, total: A) -> None:
        """A step in which nobody counts is not finite."""
        await watch(self.ops.divide(self.ops.zeros((), "float32") + 1.0, total))

    def _found(self, groups: Groups | None, total: A) -> A:
        self._totals[groups] = total
        if groups == self._whole and self.ops.truth(total > 0) is False:
            raise NobodyCounts
        return total

    async def total_of(self, groups: Groups | None) -> A:
        """The sum of the weights of a group, by a message of its own if no other has brought it."""
        if groups not in self._totals:
            w = self.weight.reshape((1,))
            total: A = await ask_one(Reduce((w,), (False,), False, groups, op="sum"))
            return self._found(groups, total.reshape(()))
        return self._totals[groups]

    async def whole(self) -> A:
        """The sum of the weights of all replicas."""
        return await self.total_of(self._whole)

    async def count_as(self, groups: Groups) -> None:
        """From now on this replica weighs as much as its group does, and the others in it are the same."""
        self.weight = await self.total_of(groups)
        self._totals, self._of_all = {}, {}
        size = len(groups[0])
        self._whole = tuple(zip(*groups, strict=True)) if size > 1 else None

    # ---- what is gathered

    async def gathered(self, request: Gather[A] | AllToAll[A]) -> tuple[A, ...]:
        """The answers, which are as they would be; the first time the weight goes with them."""
        ops, groups = self.ops, request.groups
        self._noted["gathered"] = True
        if groups in self._of_all:
            return await ask(request)
        mine = self.weight.reshape((1,))
        if isinstance(request, AllToAll):
            mine = ops.zeros((request.arrays[0].shape[0], 1), "float32") + mine
        # As bytes, if there are others: what is of one dtype is one message.
        if "uint8" in [ops.dtype_of(x) for x in request.arrays]:
            mine = ops.view_as(mine, "uint8")
        *answers, every = await ask(replace(request, arrays=(*request.arrays, mine)))
        await self._learn(groups, every, exchanged=isinstance(request, AllToAll))
        return tuple(answers)

    async def _learn(self, groups: Groups | None, every: A, *, exchanged: bool = False) -> None:
        """What replicas weigh has come. If it was `exchanged`, JAX does not know that it is the same on all of them: what a method makes of that is sent, and
        watched, once more."""
        ops = self.ops
        every = ops.view_as(every, "float32").reshape((-1,))
        total: A = ops.zeros((), "float32")
        for i in range(every.shape[0]):  # in order: an absent replica changes no bit
            total = total + every[i]
        self._of_all[groups] = Weights(every, total)
        if groups == self._whole and ops.truth(total > 0) is False:
            raise NobodyCounts
        if not exchanged:
            self._totals[groups] = total
            if groups == self._whole and ops.truth(total > 0) is None:
                await self._watch(total)

    async def of_all(self, groups: Groups | None) -> Weights[A]:
        """What each replica of a group weighs."""
        self._noted["asked"] = True
        if groups not in self._of_all:
            (every,) = await gather(self.weight.reshape((1,)), watched=False, groups=groups)
            await self._learn(groups, every)
        return self._of_all[groups]
