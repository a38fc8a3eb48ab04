"""What replicas count for: the tokens of a batch, say, or 0 for a replica that is absent.
`gradwire.core.algorithms.shared.weighing` runs programs by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from gradwire.core.ops import A, Ops
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import AbstractReplica, LockStep, Request, ask, ask_one

#: Weights that count lie between these. Arrays are multiplied by them before they are sent, when no
#: replica knows the weights of others: so values of any size from 1e-20 to 1e16 come out of sums in
#: float32 with all their digits, of ten thousand replicas too.
SMALLEST, LARGEST = 1e-18, 1e18
#: The exponent of a float32.
_EXPONENT = 0x7F800000
#: What float32 holds without loss.
_TINY = 2.0**-100


class NobodyCounts(RuntimeError):
    """All replicas have weight 0: there is nothing to average."""

    def __init__(self) -> None:
        super().__init__(
            "all replicas have weight 0, so there is nothing to average. The memory is as it was"
            " before the step; give at least one replica a weight above 0"
        )


class Weights(NamedTuple, Generic[A]):
    """What replicas weigh, those of a group or all: `of_each` (W,) and their `total`, in float32,
    all divided by one power of two, so that the largest is between 1 and 2. Only their ratios mean
    anything."""

    of_each: A
    total: A

    @classmethod
    def of(cls, ops: Ops[A], every: A) -> Weights[A]:
        """The weights of all replicas, of an array (W,)."""
        largest = ops.max_abs(every)
        power: A = ops.view_as(ops.view_as(largest, "int32") & _EXPONENT, "float32")
        scaled = ops.divide(every, ops.where(largest > 0, power, 1.0))
        # Beside far larger ones a replica that counts still does.
        scaled = ops.where((every > 0) & (scaled < _TINY), scaled * 0.0 + _TINY, scaled)
        return cls(scaled, ops.sum_in_order(scaled))

    def present(self, ops: Ops[A], every: A) -> A:
        """What all replicas have sent, (W, …), with zeros for those that are absent."""
        return ops.where(self._beside(every) > 0, every, 0.0)

    def present_codes(self, ops: Ops[A], every: A) -> A:
        """The same of integers, such as positions, which may be anything where a replica is
        absent."""
        return ops.multiply(every, ops.cast(self._beside(every) > 0, ops.dtype_of(every)))

    def times_each(self, ops: Ops[A], every: A) -> A:
        """What all replicas have sent (W, …), times their weights: zeros of those that are absent,
        whatever they have sent."""
        weights = ops.cast(self._beside(every), ops.dtype_of(every))
        return ops.multiply(self.present(ops, every), weights)

    def _beside(self, every: A) -> A:
        own = tuple(self.of_each.shape)
        return self.of_each.reshape((*own, *[1] * (len(every.shape) - len(own))))

    def share(self, ops: Ops[A], total: A) -> A:
        """The mean of which this is the weighted sum."""
        return ops.divide(total, ops.cast(self.total, ops.dtype_of(total)), out=total)


def require_weight(weight: Any, what: str = "weight") -> float:
    """A weight as a float. Raises TypeError for what is no number, ValueError for one that is
    negative, inf or NaN, or so large or so small that sums of float32 would lose it."""
    if isinstance(weight, (bool, str)) or not hasattr(weight, "__float__"):
        raise TypeError(
            f"{what}={weight!r} is no number; give the tokens of this replica, or 0 if it is absent"
        )
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    if not 0 <= number < math.inf:
        raise ValueError(f"{what}={weight!r} must be finite and at least 0; 0 is an absent replica")
    if number and not SMALLEST <= number <= LARGEST:
        raise ValueError(
            f"{what}={weight!r} is out of the range of sums in float32, {SMALLEST:g} to"
            f" {LARGEST:g}; divide the weights of all replicas by one number"
        )
    return number


def counted_weight(weight: Any, of: object, *, weighted: bool, instead: str) -> float:
    """The weight that a replica is given, as a float, of what runs an algorithm or a schedule.
    Raises as `require_weight`, and ValueError where its replicas all count alike; `instead`: what
    to give."""
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
    """What each replica weighs, or each of this replica's group: for methods that `gather`. None:
    all the same.

    Ask after the gather: the weights then travel with it. `Weights.times_each` multiplies what
    replicas have sent; divide by `Weights.total`.
    """
    return await ask_one(ReplicaWeights(groups))


@dataclass(frozen=True)
class CountAs(ReplicaWeights):
    """Let each replica from now on weigh as much as its group of `groups`, whose replicas go on
    alike."""

    async def between(self, nodes: Any) -> tuple[Any, ...]:
        return await ask(self)

    async def weighed(self, weighing: Any) -> tuple[Any, ...]:
        return (await weighing.count_as(self.groups),)


async def count_as(groups: Groups) -> None:
    """See `CountAs`."""
    await ask_one(CountAs(groups))
