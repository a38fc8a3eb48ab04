"""What a replica is told or has computed, with no message: how many there are, which it is, the
norm of its gradient, orthonormal rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gradwire.core.ops import A, Ops
from gradwire.core.protocol.groups import Groups, members_of
from gradwire.core.protocol.programs import (
    AbstractReplica,
    Fusable,
    LockStep,
    Request,
    ask,
    ask_one,
)

K = TypeVar("K")


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
        return await ask(self.among(nodes.inter_node))

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (replica.replicas(self.groups, self.assumed),)

    @staticmethod
    def simulate(asked: Sequence[WorldSize], world: LockStep) -> list[tuple[Any, ...]]:
        members = members_of(asked[0].groups, len(asked), equal=True)
        return [(len(members[0]),)] * len(asked)


async def world_size(groups: Groups | None = None, *, assumed: int | None = None) -> int:
    """How many replicas there are, or in each of these groups, which must be of one size; `assumed`
    in a plan that has not been told."""
    return await ask_one(WorldSize(groups, assumed))


@dataclass(frozen=True)
class ReplicaIndex(Request):
    """Which replica this is, or which of its group, from 0 on: an int in torch and NumPy, a traced
    int32 scalar in JAX."""

    priority = 0
    shared = True

    groups: Groups | None = None

    async def between(self, nodes: Any) -> tuple[Any, ...]:
        return await ask(self.among(nodes.inter_node))

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (0,)

    @staticmethod
    def simulate(asked: Sequence[ReplicaIndex], world: LockStep) -> list[tuple[Any, ...]]:
        index = {
            m: i
            for members in members_of(asked[0].groups, len(asked))
            for i, m in enumerate(members)
        }
        return [(index[replica],) for replica in range(len(asked))]


async def replica_index(groups: Groups | None = None) -> Any:
    """The number of this replica, or its index in its group: an int or a traced int32 scalar."""
    return await ask_one(ReplicaIndex(groups))


@dataclass(slots=True)
class LocalNorm(Request, Generic[A]):
    """The 2-norm of this replica's gradients, over all programs of the step where a driver runs
    several.

    Such a driver answers when all of them have asked or ended, so what a program sends after it
    goes out when the last gradient is there. A driver that knows by what the loss was scaled
    divides by it.

    Attributes:
        arrays: some of the gradients.
    """

    ops: Ops[A]
    arrays: tuple[A, ...]

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return (self.ops.norm_of_all(self.arrays),)

    @staticmethod
    def simulate(asked: Sequence[LocalNorm[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        return [(r.ops.norm_of_all(r.arrays),) for r in asked]


async def local_norm(ops: Ops[A], gradients: Mapping[K, A]) -> A:
    """2-norm of this replica's whole gradient, of which these are a part: a scalar, float32 or
    wider."""
    return await ask_one(LocalNorm(ops, tuple(gradients.values())))


@dataclass(slots=True)
class Orthonormalize(Fusable[A]):
    """Orthonormal rows for each (r, n) matrix, or stack of them. A request so that equal shapes
    share one kernel call.

    `fresh` holds, for each matrix, the rows that replace its negligible ones, or is empty: then
    those come out as zero. `lasting`: see `Fusable`.
    """

    per_array = ("arrays", "fresh")
    priority = 0
    local = True

    ops: Ops[A]
    arrays: tuple[A, ...]
    fresh: tuple[A, ...]
    epsilon: float
    lasting: bool = False

    def key(self) -> object:
        return type(self), bool(self.fresh), self.epsilon, self.lasting

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return self.arrays

    def answer(self) -> tuple[A, ...]:
        """The orthonormal rows."""
        return tuple(self.ops.orthonormalize_each(self.arrays, self.fresh, self.epsilon))

    @staticmethod
    def simulate(asked: Sequence[Orthonormalize[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        """Each matrix is treated by itself, so one call serves all replicas; unless they want it
        done differently."""
        key, ops = asked[0].key(), asked[0].ops
        if len(asked) == 1 or any(r.ops is not ops or r.key() != key for r in asked[1:]):
            return [r.answer() for r in asked]
        rows, n = Orthonormalize.fuse(asked).answer(), len(asked[0])
        return [rows[i * n : (i + 1) * n] for i in range(len(asked))]


@dataclass(slots=True)
class Multiply(Fusable[A]):
    """The product of each array with its matrix in `others`. A request so that many share a kernel
    call."""

    per_array = ("arrays", "others")
    priority = 0
    local = True

    ops: Ops[A]
    arrays: tuple[A, ...]
    others: tuple[A, ...]

    def key(self) -> object:
        return type(self)

    def abstract(self, replica: AbstractReplica) -> tuple[Any, ...]:
        return self.answer()

    def answer(self) -> tuple[A, ...]:
        """The products."""
        return tuple(self.ops.matmul_each(self.arrays, self.others))

    @staticmethod
    def simulate(asked: Sequence[Multiply[Any]], world: LockStep) -> list[tuple[Any, ...]]:
        return [each.answer() for each in asked]


async def multiply(ops: Ops[A], x: A, y: A) -> A:
    """`x @ y` of a thin factor `x` (r, k) and a matrix (k, m), or of stacks of both."""
    if not ops.multiplies_together:
        return ops.matmul(x, y)
    return await ask_one(Multiply(ops, (x,), (y,)))


async def orthonormalize(
    ops: Ops[A], x: A, *, fresh: A | None = None, epsilon: float = 0.0, lasting: bool = False
) -> A:
    """Orthonormal rows spanning the rows of `x` (r, n), or of each matrix of a stack, see
    `gradwire.core.kernels.gram_schmidt.gram_schmidt`.

    Rows of `x` that are zero, or negligible beside the longest, are first replaced by those of
    `fresh` (r, n) if it is given. `lasting`: `x` is memory, see
    `gradwire.core.protocol.programs.Fusable`.
    """
    return await ask_one(
        Orthonormalize(ops, (x,), () if fresh is None else (fresh,), epsilon, lasting)
    )
