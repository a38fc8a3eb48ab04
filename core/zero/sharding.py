"""Who owns what when optimizer state is sharded (Rajbhandari et al. 2020, "ZeRO", §5), and how
shards lie in messages.

    shards = shard_by_element(specs, world_size=4)       # every parameter in four pieces
    shards = shard_by_parameter(specs, world_size=4)     # whole parameters, balanced by size
    shards = shard_by_bucket(specs, 4, buckets)          # whole buckets
    shards = MixedShards(specs, 4, (some, others))       # some in the one way, others in the other

Ownership is a property of parameters, by name. It does not depend on the bucket a gradient arrives
in, so it survives the rebuilding of buckets; and a message can be made of any parameters: what
replica r owns of them lies in its r-th part.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Any

from gradwire.core.algorithm import check_specs
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.text.options import AtLeast0, Replicas, check_options, checked

#: Messages of which it is remembered what each replica has: those of a step are the same in all.
REMEMBERED = 64


@dataclass(frozen=True, repr=False)
class Shards(abc.ABC):
    """A partition of all elements of all parameters among the replicas.

    A *piece* is what one replica owns of one parameter; a *shard* is the pieces of some parameters
    as one flat array; a *message* is the shards of all replicas for some parameters, one after the
    other.

    Attributes:
        specs: parameter name → shape and dtype.
        world_size: number of replicas.
    """

    specs: Mapping[str, Spec]
    world_size: Replicas

    def __post_init__(self) -> None:
        check_options(self)
        check_specs(self.specs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.specs)} parameters, world_size={self.world_size})"

    @abc.abstractmethod
    def in_pieces(self, name: str) -> bool:
        """Whether every replica owns a part of this parameter. False: it belongs to one."""

    def is_kept(self, name: str) -> bool:
        """Whether all replicas keep this parameter whole, and update it alike."""
        return False

    def is_sparse(self, name: str) -> bool:
        """Whether a message about this parameter would be padding for the most part: then it is
        averaged whole, and what its owners have is summed."""
        return False

    def together(self, names: Sequence[str]) -> list[list[str]]:
        """Those of these parameters that may share a message."""
        return [list(names)] if names else []

    @abc.abstractmethod
    def owned(self, name: str, replica: int) -> tuple[int, int]:
        """The elements of the flattened parameter that this replica owns: from the first number up
        to, without, the second."""

    @abc.abstractmethod
    def layout(self, names: Sequence[str], replica: Any) -> dict[str, tuple[int, ...]]:
        """Name → shape of the pieces of these parameters in a replica's shard, in their order."""

    @abc.abstractmethod
    def counts(self, names: Sequence[str]) -> tuple[int, ...]:
        """Elements of each replica's shard of these parameters, padding included."""

    def elements(self, names: Sequence[str]) -> int:
        """The elements of a message about these parameters, padding included."""
        return sum(self.counts(names))

    @abc.abstractmethod
    def message(self, ops: Ops[A], arrays: Mapping[str, A]) -> A:
        """Arrays of one dtype as a message, shape (sum of counts,)."""

    @abc.abstractmethod
    def whole(
        self, ops: Ops[A], message: A, names: Sequence[str], out: Mapping[str, A] | None = None
    ) -> dict[str, A]:
        """The arrays in a message; `out` is donated."""

    def place(self, out: Mapping[str, A]) -> A | None:
        """Memory of these arrays in which a message about them may lie as it is; None if they are
        not one vector in its order."""
        name, *others = out
        padded = others or self.elements([name]) != self.specs[name].size
        return None if padded else out[name].reshape((-1,))

    def pieces(self, shard: A, names: Sequence[str], replica: Any) -> dict[str, A]:
        """The pieces in a replica's shard."""
        pieces, start = {}, 0
        for name, shape in self.layout(names, replica).items():
            stop = start + math.prod(shape)
            pieces[name] = shard[start:stop].reshape(shape)
            start = stop
        return pieces

    def shard(self, ops: Ops[A], pieces: Mapping[str, A], names: Sequence[str], replica: Any) -> A:
        """The opposite of `pieces`. Pieces without their padding are welcome."""
        layout = self.layout(names, replica)
        if not layout:
            return ops.zeros((0,), self.specs[names[0]].dtype)
        return ops.rows(
            [_pad(ops, pieces[name], math.prod(shape)) for name, shape in layout.items()], 1
        ).reshape((-1,))

    def alone(
        self, ops: Ops[A], pieces: Mapping[str, A], names: Sequence[str], replica: Any
    ) -> dict[str, A]:
        """Whole arrays of what is sparse, with zeros where other replicas have a piece: the sum
        over all replicas is the arrays."""
        raise AssertionError(f"nothing of {type(self).__name__} is sparse")

    @abc.abstractmethod
    def own(self, ops: Ops[A], arrays: Mapping[str, A], replica: Any) -> dict[str, A]:
        """The pieces of this replica, cut out of whole arrays."""


class ElementShards(Shards):
    """Every parameter in as many pieces as there are replicas, for optimizers that treat each
    element by itself.

    The flattened parameter of n elements is padded with zeros to W·k, k = ⌈n/W⌉; replica r owns
    elements r·k to (r+1)·k. Pieces are all alike, of shape (1, …, 1, k): they keep the parameter's
    number of dimensions, by which many a mask tells weights from biases. A message is a (W, Σk)
    matrix, so one even reduce-scatter serves any number of parameters. Padding is at most W - 1
    elements per parameter.
    """

    def in_pieces(self, name: str) -> bool:
        return True

    def length(self, name: str) -> int:
        """Elements of a piece."""
        return -(-self.specs[name].size // self.world_size)

    def piece_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a piece. A scalar's is (), and all replicas but the first have padding."""
        dimensions = len(self.specs[name].shape)
        return (1,) * (dimensions - 1) + (self.length(name),) if dimensions else ()

    def owned(self, name: str, replica: int) -> tuple[int, int]:
        size, k = self.specs[name].size, self.length(name)
        return min(replica * k, size), min((replica + 1) * k, size)

    def layout(self, names: Sequence[str], replica: Any) -> dict[str, tuple[int, ...]]:
        return {name: self.piece_shape(name) for name in names}

    def counts(self, names: Sequence[str]) -> tuple[int, ...]:
        return (sum(map(self.length, names)),) * self.world_size

    def message(self, ops: Ops[A], arrays: Mapping[str, A]) -> A:
        return ops.rows(list(arrays.values()), self.world_size).reshape((-1,))

    def whole(
        self, ops: Ops[A], message: A, names: Sequence[str], out: Mapping[str, A] | None = None
    ) -> dict[str, A]:
        matrix = message.reshape((self.world_size, self.counts(names)[0]))
        return _named(ops, matrix, names, self.specs, out)

    def own(self, ops: Ops[A], arrays: Mapping[str, A], replica: Any) -> dict[str, A]:
        return {
            name: ops.row_of(x, self.world_size, replica).reshape(self.piece_shape(name))
            for name, x in arrays.items()
        }


@dataclass(frozen=True, repr=False)
class WholeShards(Shards):
    """Whole parameters, for optimizers that need them whole. `replica` must be a number here:
    shards are of different sizes.

    Attributes:
        owners: parameter name → the replica that owns it.
        work: parameter name → what its update costs; of those that are not here their elements.
    """

    owners: Mapping[str, AtLeast0]
    work: Mapping[str, int] = field(default_factory=dict)

    def in_pieces(self, name: str) -> bool:
        return False

    def extend(
        self, specs: Mapping[str, Spec], work: Mapping[str, int] | None = None
    ) -> WholeShards:
        """These shards with further parameters, which go to the replicas that have the least work;
        the others keep their owners."""
        costs = {**self.work, **(work or {})}
        return _greedy(
            {**self.specs, **specs}, self.world_size, [[name] for name in specs], costs, self.owners
        )

    def owned(self, name: str, replica: int) -> tuple[int, int]:
        return (0, self.specs[name].size) if self.owners[name] == replica else (0, 0)

    def layout(self, names: Sequence[str], replica: Any) -> dict[str, tuple[int, ...]]:
        return {name: self.specs[name].shape for name in names if self.owners[name] == replica}

    def counts(self, names: Sequence[str]) -> tuple[int, ...]:
        known, key = self._counted, tuple(names)
        if key not in known:
            counts = [0] * self.world_size
            for name in names:
                counts[self.owners[name]] += self.specs[name].size
            if len(known) == REMEMBERED:
                known.clear()
            known[key] = tuple(counts)
        return known[key]

    def elements(self, names: Sequence[str]) -> int:
        return sum(self.specs[name].size for name in names)

    @functools.cached_property
    def _counted(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        return {}

    def message(self, ops: Ops[A], arrays: Mapping[str, A]) -> A:
        return ops.rows([arrays[name] for name in self._by_owner(list(arrays))], 1).reshape((-1,))

    def whole(
        self, ops: Ops[A], message: A, names: Sequence[str], out: Mapping[str, A] | None = None
    ) -> dict[str, A]:
        arrays = _named(
            ops, message.reshape((1, self.elements(names))), self._by_owner(names), self.specs, out
        )
        return {name: arrays[name] for name in names}

    def own(self, ops: Ops[A], arrays: Mapping[str, A], replica: Any) -> dict[str, A]:
        return {name: arrays[name] for name in self.layout(list(arrays), replica)}

    def _by_owner(self, names: Sequence[str]) -> list[str]:
        return sorted(names, key=lambda name: self.owners[name])


@dataclass(frozen=True, repr=False)
class MixedShards(Shards):
    """Some parameters in pieces, and others whole: a message is about parameters of one part.

    Attributes:
        parts: the shards of each, which have every parameter once between them.
    """

    parts: tuple[Shards, ...]

    def in_pieces(self, name: str) -> bool:
        return self._of([name]).in_pieces(name)

    def is_kept(self, name: str) -> bool:
        """Whether all replicas keep this parameter whole, and update it alike."""
        return False

    def together(self, names: Sequence[str]) -> list[list[str]]:
        by_part = [[name for name in names if name in part.specs] for part in self.parts]
        return [own for own in by_part if own]

    def owned(self, name: str, replica: int) -> tuple[int, int]:
        return self._of([name]).owned(name, replica)

    def layout(self, names: Sequence[str], replica: Any) -> dict[str, tuple[int, ...]]:
        return self._of(names).layout(names, replica)

    def counts(self, names: Sequence[str]) -> tuple[int, ...]:
        return self._of(names).counts(names)

    def message(self, ops: Ops[A], arrays: Mapping[str, A]) -> A:
        return self._of(list(arrays)).message(ops, arrays)

    def whole(
        self, ops: Ops[A], message: A, names: Sequence[str], out: Mapping[str, A] | None = None
    ) -> dict[str, A]:
        return self._of(names).whole(ops, message, names, out)

    def own(self, ops: Ops[A], arrays: Mapping[str, A], replica: Any) -> dict[str, A]:
        pieces: dict[str, A] = {}
        for names in self.together(list(arrays)):
            pieces |= self._of(names).own(ops, {name: arrays[name] for name in names}, replica)
        return pieces

    def _of(self, names: Sequence[str]) -> Shards:
        """The part that has all of these."""
        return next(part for part in self.parts if all(name in part.specs for name in names))


@checked
def shard_by_element(specs: Mapping[str, Spec], world_size: Replicas) -> ElementShards:
    """Cut every parameter in `world_size` equal pieces, one for each replica; padding fills the
    last.

    Args:
        specs: parameter name → shape and dtype.
        world_size: number of replicas.

    Raises:
        ValueError: a world size below 1, or a parameter that is not of floats.

    Examples:
        >>> from gradwire import Spec, shard_by_element
        >>> shards = shard_by_element({"w": Spec((10,))}, world_size=4)
        >>> [shards.owned("w", replica) for replica in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    return ElementShards(specs, world_size)


@checked
def shard_by_parameter(
    specs: Mapping[str, Spec], world_size: Replicas, work: Mapping[str, int] | None = None
) -> WholeShards:
    """Give whole parameters, largest first, each to the replica that has the least work so far
    (Graham 1969).

    No replica has more than the average plus its last parameter.

    Args:
        specs: parameter name → shape and dtype.
        world_size: number of replicas.
        work: parameter name → what its update costs, in any unit; its number of elements where that
            is not said.

    Raises:
        ValueError: a world size below 1, or a parameter that is not of floats.

    Examples:
        >>> from gradwire import Spec, shard_by_parameter
        >>> specs = {"a": Spec((8,)), "b": Spec((5,)), "c": Spec((4,))}
        >>> shards = shard_by_parameter(specs, world_size=2)
        >>> [shards.counts(["a", "b", "c"])[replica] for replica in range(2)]
        [8, 9]
    """
    return _greedy(specs, world_size, [[name] for name in specs], work)


@checked
def shard_by_bucket(
    specs: Mapping[str, Spec],
    world_size: Replicas,
    buckets: Sequence[Sequence[str]],
    *,
    spread: bool = False,
) -> WholeShards:
    """Give whole buckets to replicas, largest first; a message about a bucket then has one sender.

    Examples:
        >>> from gradwire import Spec, shard_by_bucket
        >>> specs = {"a": Spec((8,)), "b": Spec((5,)), "c": Spec((4,))}
        >>> shard_by_bucket(specs, 2, [["a"], ["b", "c"]]).counts(["a", "b", "c"])
        (9, 8)

    Args:
        specs: parameter name → shape and dtype.
        world_size: number of replicas.
        buckets: names of the parameters of each, a partition of `specs`.
        spread: a bucket's parameters may be divided among several replicas, so that each has about
            as many elements: parameters are dealt out in the order of the buckets, every replica up
            to its part of the total.

    Raises:
        ValueError: buckets that do not hold every parameter once.
    """
    named = sorted(name for bucket in buckets for name in bucket)
    if named != sorted(specs):
        raise ValueError(
            f"the buckets hold {len(named)} parameters, not each of the {len(specs)} of specs once"
        )
    if not spread:
        return _greedy(specs, world_size, buckets)
    total = sum(spec.size for spec in specs.values())
    owners: dict[str, int] = {}
    before = 0
    for name in (name for bucket in buckets for name in bucket):
        # By its middle, so that a parameter goes to the replica in whose part most of it lies.
        middle = before + specs[name].size / 2
        owners[name] = min(int(middle * world_size / max(total, 1)), world_size - 1)
        before += specs[name].size
    return WholeShards(specs, world_size, owners)


def _greedy(
    specs: Mapping[str, Spec],
    world_size: int,
    buckets: Sequence[Sequence[str]],
    work: Mapping[str, int] | None = None,
    given: Mapping[str, int] | None = None,
) -> WholeShards:
    """The largest bucket first to the replica that has the least work; some parameters are `given`
    away already."""
    owners, work = dict(given or {}), dict(work or {})
    costs = {name: work.get(name, spec.size) for name, spec in specs.items()}
    load = [0] * world_size
    for name, replica in owners.items():
        load[replica] += costs[name]
    least = [(has, replica) for replica, has in enumerate(load)]
    heapify(least)
    for bucket in sorted(buckets, key=lambda bucket: -sum(costs[name] for name in bucket)):
        has, replica = least[0]
        heapreplace(least, (has + sum(costs[name] for name in bucket), replica))
        owners |= dict.fromkeys(bucket, replica)
    return WholeShards(specs, world_size, owners, work)


def _pad(ops: Ops[A], piece: A, size: int) -> A:
    flat = piece.reshape((-1,))
    return flat if flat.shape[0] == size else ops.pad(flat, size)


def _named(
    ops: Ops[A],
    matrix: A,
    names: Sequence[str],
    specs: Mapping[str, Spec],
    out: Mapping[str, A] | None,
) -> dict[str, A]:
    shapes = [specs[name].shape for name in names]
    into = None if out is None else [out[name] for name in names]
    return dict(zip(names, ops.from_rows(matrix, shapes, out=into), strict=True))
