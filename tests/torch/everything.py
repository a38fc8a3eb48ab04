"""An algorithm that asks for everything a driver without an optimizer answers, and comes to an
average whatever it asks."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import State
from gradwire.core import protocol as rq
from gradwire.core.protocol.groups import Groups


@dataclass(frozen=True)
class Everything:
    """The average of the gradients, taken in several ways, times numbers that depend on all of
    them; plus half of the one before.

    `groups`: of one size, in which is gathered, exchanged and averaged besides.
    """

    groups: Groups | None = None
    per_replica = frozenset()
    start_step = 0
    cycle = 1

    def init(self, ops, specs):
        return State(
            tensors={
                name: {"last": ops.zeros(spec.shape, spec.dtype)} for name, spec in specs.items()
            }
        )

    async def step(self, ops, gradients, state, step):
        averages = await rq.together(self._one(ops, g) for g in gradients.values())
        # of those that this program has, as the driver adds up
        own = ops.norm_of_all(list(gradients.values()))
        total = await rq.sum_scalar(own * own)
        total = total + await rq.mean(await rq.local_norm(ops, gradients))
        ok = await rq.step_is_finite()
        results = {}
        for (name, g), average in zip(gradients.items(), averages, strict=True):
            scaled = ops.cast(average / (total + 1.0), ops.dtype_of(g)).reshape(tuple(g.shape))
            results[name] = ops.where(
                ok, ops.add(scaled, state.tensors[name]["last"] * 0.5), state.tensors[name]["last"]
            )
        return results, State(state.shared, {name: {"last": x} for name, x in results.items()})

    async def _one(self, ops, g):
        size, own, groups = await rq.world_size(), await rq.replica_index(), self.groups
        flat = g.reshape((-1,))
        # Own rows of what everybody has gathered: every replica is handed its own gradient by all.
        (everything,) = await rq.gather(flat)
        (mine,) = await rq.all_to_all(everything * 1.0)
        average = await rq.branch(
            ops.all_finite(everything), self._mean, self._mean, mine[size - 1]
        )
        # Both halves of an all-reduce, in parts that differ in size.
        n = flat.shape[0]
        counts = tuple(len(range(r, n, size)) for r in range(size))
        (part,) = await rq.reduce_scatter([average * 1.0], [counts])
        (average,) = await rq.all_gather([part], [counts])
        if groups is not None:
            inside, place = await rq.world_size(groups), await rq.replica_index(groups)
            (members,) = await rq.gather(flat, groups=groups)
            (theirs,) = await rq.all_to_all(members * 1.0, groups=groups)
            (part,) = await rq.reduce_scatter(
                [theirs[place] * 1.0], [(n, *[0] * (inside - 1))], groups=groups
            )
            (part,) = await rq.all_gather([part], [(n, *[0] * (inside - 1))], groups=groups)
            average = (average + await rq.mean(await rq.mean(part, groups=groups))) * 0.5
        # Integers, whose sums are known.
        numbers = ops.iota(3) + own
        counted = [
            await rq.reduce_sum(ops.cast(numbers, dtype)) for dtype in ("int32", "int8", "uint8")
        ]
        expected = 2 * size + size * (size - 1) / 2
        for count in counted:
            average = average * (ops.cast(count, ops.dtype_of(g))[2] / expected)
        largest = await rq.reduce_max(ops.max_abs(g.reshape((1, -1))))
        row = await rq.orthonormalize(ops, average.reshape((1, -1)) * 1.0)
        return (row * largest).reshape((-1,)) + average

    async def _mean(self, x):
        return await rq.mean(x)
