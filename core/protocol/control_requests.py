"""What decides how a step goes on: whether it was finite, one of two coroutines, the update by an
optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np

from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import A
from gradwire.core.protocol.programs import (
    AbstractReplica,
    Fusable,
    LockStep,
    Program,
    ReplicaMismatch,
    Request,
    ask,
    ask_one,
    cannot_answer,
)

T = TypeVar("T")

#: One side of a branch.
Side = Callable[..., Program[T]]


@dataclass(frozen=True)
class StepIsFinite(Request):
    """Was every watched answer of this step finite? The same on all replicas, and no message.

    A driver that runs a step as several programs answers only when all of them have asked or ended,
    so the answer speaks of the whole step: a program commits its memory after it, or not at all.
    """

    priority = 3
    shared = True

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (AbstractArray((), "bool"),)

    @staticmethod
    def simulate(asked: Sequence[StepIsFinite], world: LockStep) -> list[tuple[Any, ...]]:
        return [(np.asarray(world.finite),)] * len(asked)


async def step_is_finite() -> Any:
    """Boolean scalar array: was everything watched in this step so far finite (on all replicas, for
    all tensors)?"""
    return await ask_one(StepIsFinite())


@dataclass(slots=True)
class Watch(Fusable[A]):
    """The step was finite only if these arrays are: what has arrived in a form that shows no inf or
    NaN, decoded. Equal on all replicas."""

    priority = 0

    arrays: tuple[A, ...]

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return self.arrays

    @staticmethod
    def simulate(asked: Sequence[Watch[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        world.finite = world.finite and all(np.isfinite(x).all() for x in asked[0].arrays)
        return [r.arrays for r in asked]


async def watch(*arrays: A) -> tuple[A, ...]:
    """The same arrays: `step_is_finite` will say whether they were. They must be equal on all
    replicas."""
    return await ask(Watch(arrays))


@dataclass(frozen=True)
class Branch(Request, Generic[T]):
    """Run one of two coroutines. `predicate` must be equal on all replicas: derive it from a
    counter or from an average.

    torch and NumPy use `if`; JAX uses `lax.cond`, so both coroutines take and return arrays in the
    same nested containers. Where no `phase` is given, dictionaries in the result may lack names
    that the other side's have: in JAX those are zeros, and the caller must not use them.

    `phase` is given where the predicate is whether a counter in the shared state has a value. A
    driver may know that counter in a quicker way than by reading the predicate, and a plan goes
    through its values, from 0 to the algorithm's `cycle`. Of any other predicate that is an array a
    plan knows nothing: it counts the side that sends more, and says so (`Traffic.optional_bytes`).
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
        return replace(
            self, then=lambda *x: wrap(then(*x)), otherwise=lambda *x: wrap(otherwise(*x))
        )

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (replica.one_side(self.predicate, self.phase, self.side),)

    @staticmethod
    def simulate(asked: Sequence[Branch[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        predicates = [bool(r.predicate) for r in asked]
        if len(set(predicates)) > 1:
            raise ReplicaMismatch(f"the replicas branch differently: {dict(enumerate(predicates))}")
        return [(result,) for result in world.run([r.side(predicates[0]) for r in asked])]


async def branch(predicate: Any, then: Side[T], otherwise: Side[T], *operands: Any) -> T:
    """`await then(*operands)` if `predicate`, else `await otherwise(*operands)`.

    A Python bool decides at once; an array is left to the driver, and to a plan both sides are
    possible. Where a counter of phases decides, take `branch_on_phase`.
    """
    if isinstance(predicate, bool):
        return await (then if predicate else otherwise)(*operands)
    return await ask_one(Branch(predicate, then, otherwise, operands))


async def branch_on_phase(
    counter: Any, value: int, then: Side[T], otherwise: Side[T], *operands: Any
) -> T:
    """`branch` on `counter == value`, for a counter in the shared state: which of its phases an
    algorithm is in."""
    return await ask_one(Branch(counter == value, then, otherwise, operands, (counter, value)))


@dataclass(frozen=True)
class OptimizerStep(Request, Generic[A]):
    """Hand gradients to the optimizer and receive what it makes of them. Only drivers that have an
    optimizer answer it.

    Attributes:
        pieces: parameter name → averaged gradient of what this replica owns of it.
        ok: boolean scalar, equal on all replicas: False skips the step. None: it is never skipped.
    """

    updates = True

    pieces: dict[str, A]
    ok: A | None

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (self.pieces,)

    @staticmethod
    def simulate(asked: Sequence[OptimizerStep[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        if world.optimizer is None:
            raise cannot_answer("the simulator", asked[0])
        ok = [None if r.ok is None else bool(r.ok) for r in asked]
        if len(set(ok)) > 1:
            raise ReplicaMismatch(
                f"the replicas disagree whether the step counts: {dict(enumerate(ok))}"
            )
        counts = () if ok[0] is None else (ok[0],)
        return [(world.optimizer(replica, r.pieces, *counts),) for replica, r in enumerate(asked)]


async def optimizer_step(pieces: dict[str, A], ok: A | None = None) -> dict[str, A]:
    """What the optimizer makes of the gradients of the owned pieces: new parameters or updates, by
    the same names."""
    return await ask_one(OptimizerStep(pieces, ok))
