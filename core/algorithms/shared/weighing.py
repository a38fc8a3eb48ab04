"""Programs whose replicas count by a weight.

    averages, state = await Weighing(ops, weight).run(algorithm.step(ops, gradients, state, step))

    mean(x)    =  Σ w·x / Σ w    # w·x and w in one message; an absent replica's is not looked at
    gather(x)  →  x of each replica, and `await replica_weights()` says what each one weighs

The program is the one that all other replicas run, and knows of no weights: each request says how
it is asked (`Request.weighed`).

Floats of 16 bits are not multiplied before they are sent: weights rounded to so few bits do not sum
to 1, and an average that is taken again and again would grow or shrink. They are sent as they are,
summed in float32 where they arrive, and rounded once: the mean of a `Coder` whose codes are they
themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.coder import Coder
from gradwire.core.kernels.arrays import group_by, message_key
from gradwire.core.ops import A, Ops
from gradwire.core.protocol.control_requests import watch
from gradwire.core.protocol.exchanges import gather
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Program, Request, UnknownRequest, ask, relay
from gradwire.core.protocol.reductions import reduce_sum
from gradwire.core.protocol.weights import NobodyCounts, Weights, weight_of

T = TypeVar("T")

#: Arrays of these dtypes are multiplied by weights before they are sent.
WIDE = frozenset({"float32", "float64"})


class Weighing(Generic[A]):
    """This replica's weight in the messages of a program.

    Args:
        ops: kernels.
        weight: of this replica, a number or a scalar array, finite and at least 0. A sum of weights
            is formed in float32.
        keeps: where nobody counts and the host does not know it, averages of all replicas are the
            arrays themselves, and not NaN.
        name: of the method, for what is said about it.

    Attributes:
        weight: of this replica, or, after `count_as`, of its group.
        counts: whether that is above 0, an array.
    """

    def __init__(
        self, ops: Ops[A], weight: Any, *, keeps: bool = False, name: str = "this method"
    ) -> None:
        self.ops, self.keeps, self.name = ops, keeps, name
        self.weight: A = weight_of(ops, weight)
        self.counts: A = self.weight > 0
        self._whole: Groups | None = None
        self._totals: dict[Groups | None, A] = {}
        self._of_all: dict[Groups | None, Weights[A]] = {}
        #: Of the program and its branches: what has been gathered, and whether weights have been
        #: asked for.
        self._noted: dict[str, bool] = {}

    async def run(self, program: Program[T]) -> T:
        """What the program returns. Raises UnknownRequest for one that sends what no weight can be
        given to, and `NobodyCounts`, if the host knows that all replicas weigh 0."""
        result = await self._relay(program)
        if "gathered" in self._noted and "asked" not in self._noted:
            raise UnknownRequest(
                f"{self.name} gathers what replicas have sent without asking what they weigh; let"
                " it multiply by `await replica_weights()`, or leave out the weights"
            )
        return result

    async def _relay(self, program: Program[T]) -> T:
        return await relay(program, lambda request: request.weighed(self))

    async def inside(self, program: Program[T]) -> T:
        """A program in a branch, of which nothing that is traced may leave."""
        inner = Weighing(self.ops, self.weight, keeps=self.keeps, name=self.name)
        inner._whole, inner._noted = self._whole, self._noted
        inner._totals, inner._of_all = dict(self._totals), dict(self._of_all)
        return await inner._relay(program)

    def refuse(self, request: Request, why: str) -> UnknownRequest:
        """What is raised for a request that cannot be weighed."""
        return UnknownRequest(
            f"{self.name} asks for a {type(request).__name__}, {why}: its replicas cannot be"
            " weighed"
        )

    @property
    def present(self) -> bool | None:
        """Whether this replica counts; None where the host does not know."""
        return self.ops.truth(self.counts)

    def _counted(self, total: A) -> bool | None:
        """Whether anybody of whom this is the sum does; None where the host does not know."""
        return self.ops.truth(total > 0)

    # ---- averages

    async def mean(self, request: Any) -> tuple[A, ...]:
        """The answers of a mean: all of them the weighted ones."""
        if request.op != "mean":
            raise self.refuse(request, f"and a {request.op} counts all replicas alike")
        if not any(math.prod(x.shape) for x in request.arrays):
            return await ask(request)  # of which nothing is sent
        wide = [i for i, x in enumerate(request.arrays) if self.ops.dtype_of(x) in WIDE]
        answers: dict[int, A] = {}
        for chosen, means in (
            (wide, self._wide_means),
            (_others(request, wide), self._short_means),
        ):
            if chosen:
                arrays = tuple(request.arrays[i] for i in chosen)
                asked = replace(
                    request, arrays=arrays, donated=tuple(request.donated[i] for i in chosen)
                )
                answers |= zip(chosen, await means(asked), strict=True)
        return tuple(answers[i] for i in range(len(request)))

    async def _wide_means(self, request: Any) -> tuple[A, ...]:
        ops, groups = self.ops, request.groups
        total = self._totals.get(groups)
        sent = self._parts(request.arrays, request.donated)
        donated = (True,) * len(sent)
        if total is None:
            sent += (ops.cast(self.weight, ops.dtype_of(request.arrays[0])).reshape((1,)),)
            donated += (False,)  # it may be the weight itself, of the same dtype
        sums = await ask(replace(request, arrays=sent, donated=donated, op="sum"))
        came = total is None
        if total is None:
            total = self._found(groups, ops.cast(sums[-1], "float32").reshape(()))
            sums = sums[:-1]
        if self._counted(total) is False:
            return tuple(request.arrays)  # only of a group; see `_found`
        means = self._each(lambda x: ops.divide(x, ops.cast(total, ops.dtype_of(x)), out=x), sums)
        if (request.watched or (came and self._watches(groups))) and self._counted(total) is None:
            await self._watch(total)
        return self._kept(request, means, total)

    def _watches(self, groups: Groups | None) -> bool:
        """Whether weights are looked at also of an uncompressed average, which watches nothing
        else: by them all of it may be NaN."""
        return groups == self._whole and not self.keeps

    def _parts(self, arrays: Sequence[A], donated: Sequence[bool]) -> tuple[A, ...]:
        """This replica's parts of sums. What is absent is left as it is: if nobody counts, nobody
        has lost anything."""
        ops, present = self.ops, self.present
        if present is False:
            return tuple(ops.zeros(tuple(x.shape), ops.dtype_of(x)) for x in arrays)

        def times(x: A, *, in_place: bool) -> A:
            weight = ops.cast(self.weight, ops.dtype_of(x))
            product = ops.multiply(x, weight, out=x if in_place else None)
            return product if present else ops.where(self.counts, product, 0.0)

        parts: dict[int, A] = {}
        for in_place in (True, False):
            chosen = [i for i, given in enumerate(donated) if (given and bool(present)) == in_place]
            products = self._each(partial(times, in_place=in_place), [arrays[i] for i in chosen])
            parts |= zip(chosen, products, strict=True)
        return tuple(parts[i] for i in range(len(arrays)))

    def _each(self, f: Callable[..., A], *lists: Sequence[A]) -> list[A]:
        """`elementwise_each` of lists of any dtypes, each the same."""
        found: dict[int, A] = {}
        for chosen in group_by(range(len(lists[0])), map(message_key, lists[0])):
            own = [[xs[i] for i in chosen] for xs in lists]
            found |= zip(chosen, self.ops.elementwise_each(f, *own), strict=True)
        return [found[i] for i in range(len(lists[0]))]

    async def _short_means(self, request: Any) -> tuple[A, ...]:
        """The means of arrays of 16 bits: of each dtype by itself."""
        ops, groups, means = self.ops, request.groups, list(request.arrays)
        if not any(math.prod(x.shape) for x in request.arrays):
            return tuple(request.arrays)
        # which cannot hand each other equal parts
        if groups is not None and len(set(map(len, groups))) > 1:
            longer = tuple(ops.cast(x, "float32") for x in request.arrays)
            found = await self._wide_means(
                replace(request, arrays=longer, donated=(False,) * len(longer))
            )
            return tuple(
                ops.cast(y, ops.dtype_of(x)) for x, y in zip(request.arrays, found, strict=True)
            )
        noted = dict(self._noted)
        for dtype in dict.fromkeys(map(ops.dtype_of, request.arrays)):
            chosen = [i for i, x in enumerate(request.arrays) if ops.dtype_of(x) == dtype]
            arrays = [request.arrays[i] for i in chosen]
            watched = request.watched or self._watches(groups)
            averages = Coder(ops, Cast(dtype)).mean(arrays, watched=watched, groups=groups)
            for i, mean in zip(chosen, await self._relay(averages), strict=True):
                means[i] = mean
        self._noted.clear()  # it was not the method that has gathered
        self._noted.update(noted)
        total = self._of_all[groups].total
        if self._counted(total) is False:
            return tuple(request.arrays)
        return self._kept(request, means, total)

    def _kept(self, request: Any, means: Sequence[A], total: A) -> tuple[A, ...]:
        """The means; or the arrays themselves where nobody may count, and they are to stay."""
        ops, some = self.ops, total > 0
        # Some of the replicas may all be absent.
        apart = request.groups is not None and request.groups != self._whole
        if (apart or self.keeps) and self._counted(total) is None:
            means = self._each(lambda y, x: ops.where(some, y, x), means, request.arrays)
        return tuple(means)

    async def _watch(self, total: A) -> None:
        """A step in which nobody counts is not finite, nor is one whose weights sum to what is no
        number above 0."""
        await watch(self.ops.where(total > 0, total, math.nan))

    def _found(self, groups: Groups | None, total: A) -> A:
        self._totals[groups] = total
        if groups == self._whole and self._counted(total) is False:
            raise NobodyCounts
        return total

    async def total_of(self, groups: Groups | None) -> A:
        """The sum of the weights of a group, by a message of its own if no other has brought it."""
        if groups not in self._totals:
            w = self.weight.reshape((1,))
            total = await reduce_sum(w, watched=False, groups=groups)
            return self._found(groups, total.reshape(()))
        return self._totals[groups]

    async def whole(self) -> A:
        """The sum of the weights of all replicas."""
        return await self.total_of(self._whole)

    async def count_as(self, groups: Groups) -> None:
        """Let this replica weigh as much as its group does from now on, and the others in it are
        the same."""
        self.weight = await self.total_of(groups)
        self.counts = self.weight > 0
        self._totals, self._of_all = {}, {}
        size = len(groups[0])
        self._whole = tuple(zip(*groups, strict=True)) if size > 1 else None

    # ---- what is gathered

    async def gathered(self, request: Any, *, exchanged: bool = False) -> tuple[A, ...]:
        """The answers, which are as they would be; the first time the weight goes with them.
        `exchanged`: each replica receives its own rows."""
        ops, groups = self.ops, request.groups
        self._noted["gathered"] = True
        if groups in self._of_all:
            return await ask(request)
        mine = self.weight.reshape((1,))
        if exchanged:
            mine = ops.zeros((request.arrays[0].shape[0], 1), "float32") + mine.reshape((1, 1))
        # As bytes, if there are others: what is of one dtype is one message.
        if "uint8" in [ops.dtype_of(x) for x in request.arrays]:
            mine = ops.view_as(mine, "uint8")
        *answers, every = await ask(replace(request, arrays=(*request.arrays, mine)))
        await self._learn(groups, every, exchanged=exchanged)
        return tuple(answers)

    async def _learn(self, groups: Groups | None, every: A, *, exchanged: bool = False) -> None:
        """What replicas weigh has come. If it was `exchanged`, JAX does not know that it is the
        same on all of them: what a method makes of that is sent, and watched, once more."""
        ops = self.ops
        every = ops.view_as(every, "float32").reshape((-1,))
        self._of_all[groups], total = Weights.of(ops, every), ops.sum_in_order(every)
        if groups == self._whole and self._counted(total) is False:
            raise NobodyCounts
        if not exchanged:
            self._totals[groups] = total
            if groups == self._whole and self._counted(total) is None:
                await self._watch(total)

    async def of_all(self, groups: Groups | None) -> Weights[A]:
        """What each replica of a group weighs."""
        self._noted["asked"] = True
        if groups not in self._of_all:
            (every,) = await gather(self.weight.reshape((1,)), watched=False, groups=groups)
            await self._learn(groups, every)
        return self._of_all[groups]


def _others(request: Any, chosen: Sequence[int]) -> list[int]:
    taken = set(chosen)
    return [i for i in range(len(request)) if i not in taken]
