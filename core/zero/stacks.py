"""Whole parameters divided among replicas that all run one program, as devices do under JAX: each
has arrays of the same shapes.

    stack of W matrices of one shape        =  one slot, of which replica r owns matrix r
    one array of L layers                   =  one slot, of which replica r owns ⌈L/W⌉ layers
    matrices of several shapes, left over   =  ragged slots: vectors of one length, each beginning
                                               with the matrix that its replica owns

What a replica owns is one array for each slot. Where W does not divide the number of matrices of a
shape, those that are left over have owners: each goes to the replica that has the least work,
n·m·min(n, m), if that lets the last replica be ready earlier than a padded stack for each shape
would. So no replica works more than 1/W of the whole and one matrix. The wire carries at most what
two all-reduces would: a slot that is filled to less than half is averaged whole, and its results
are summed, with zeros from all but their owners.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.core.ops import A, Ops, Spec
from gradwire.core.zero.sharding import Shards, shard_by_parameter


@dataclass(frozen=True, repr=False)
class StackShards(Shards):
    """Parameters of one shape and dtype in stacks of W, in the order of `specs`. A piece goes by
    the name of the first of its slot.

    Attributes:
        layers: names of arrays whose first axis counts layers, and is divided.
        pooled: whether what is left over may have owners.

    Examples:
        >>> from gradwire import Spec
        >>> from gradwire.core.zero.stacks import StackShards
        >>> shards = StackShards({name: Spec((8, 4)) for name in "abcde"}, world_size=2)
        >>> shards.stacks, shards.is_kept("e")
        ({'a': ('a', 'b'), 'c': ('c', 'd')}, True)
        >>> specs = {"wide": Spec((8, 64)), "tall": Spec((32, 8)), "square": Spec((8, 8))}
        >>> shards = StackShards(specs, world_size=2)
        >>> shards.stacks, shards.slot_shape("wide"), shards.slot_shape("square")
        ({'wide': ('wide', 'tall'), 'square': ('', 'square')}, (512,), (64,))
    """

    layers: frozenset[str] = frozenset()
    pooled: bool = True

    @functools.cached_property
    def cut(self) -> frozenset[str]:
        """The arrays of which each replica owns some layers."""
        several = {name for name in self.layers if self.specs[name].shape[0] > 1}
        return frozenset(several if self.world_size > 1 else ())

    @functools.cached_property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The name of each slot of whole parameters → those in it, that of replica 0 first. What is
        missing at its end is padding, and so is ""."""
        return {next(filter(None, own)): own for own in (*self._slots[0], *self._slots[1])}

    @functools.cached_property
    def ragged(self) -> frozenset[str]:
        """The slots of parameters that have owners: of several shapes, or of fewer than there are
        replicas."""
        return frozenset(next(filter(None, own)) for own in self._slots[1])

    @functools.cached_property
    def _slots(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Stacks, and ragged slots."""
        alike: dict[Spec, list[str]] = {}
        for name, spec in self.specs.items():
            if name not in self.cut:
                alike.setdefault(spec, []).append(name)
        size = self.world_size
        slots = [
            tuple(names[i : i + size])
            for names in alike.values()
            for i in range(0, len(names) - size + 1, size)
        ]
        left = {spec: tuple(names[len(names) // size * size :]) for spec, names in alike.items()}
        matrices = {
            spec: names
            for spec, names in left.items()
            if names and len(spec.shape) > 1 and spec.size
        }
        # A vector that is left over is not worth a message of its own.
        slots += [
            names
            for spec, names in left.items()
            if spec not in matrices and 1 < len(names) >= size / 2
        ]
        ragged: list[tuple[str, ...]] = []
        for dtype in dict.fromkeys(spec.dtype for spec in matrices):
            left = {spec: names for spec, names in matrices.items() if spec.dtype == dtype}
            own = self._with_owners(left) if self.pooled else []
            ragged += own
            slots += [names for names in left.values() if len(names) > 1 and not own]
        return slots, ragged

    def _with_owners(self, left: Mapping[Spec, tuple[str, ...]]) -> list[tuple[str, ...]]:
        """The slots of these matrices, fewer than W of each shape; none if a stack for each shape
        is as good."""
        specs = {name: spec for spec, names in left.items() for name in names}
        work = {name: work_of(spec) for name, spec in specs.items()}
        owners = shard_by_parameter(specs, self.world_size, work).owners
        own: list[list[str]] = [[] for _ in range(self.world_size)]
        for name in sorted(specs, key=lambda name: -work[name]):
            own[owners[name]].append(name)
        longest = max(sum(work[name] for name in names) for names in own)
        if longest >= sum(map(work_of, left)):
            return []
        return [
            tuple(names[i] if i < len(names) else "" for names in own)
            for i in range(max(map(len, own)))
        ]

    @functools.cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """The slot of each parameter that is in one, and the replica that owns it; 0 for layers, of
        which each owns some."""
        places = {
            name: (stack, r)
            for stack, names in self.stacks.items()
            for r, name in enumerate(names)
            if name
        }
        return places | {name: (name, 0) for name in self.cut}

    def slot_shape(self, slot: str) -> tuple[int, ...]:
        """The shape of what a replica has of a slot."""
        shape = self.specs[slot].shape
        if slot in self.ragged:
            return (max(self.specs[name].size for name in self.stacks[slot] if name),)
        return (-(-shape[0] // self.world_size), *shape[1:]) if slot in self.cut else shape

    def in_pieces(self, name: str) -> bool:
        return name in self.cut

    def is_kept(self, name: str) -> bool:
        return name not in self.places

    def is_sparse(self, name: str) -> bool:
        if name not in self.places:
            return False
        slot = self.places[name][0]
        used = sum(self.specs[n].size for n in self.stacks.get(slot, (slot,)) if n)
        return self.world_size * math.prod(self.slot_shape(slot)) > 2 * used

    def together(self, names: Sequence[str]) -> list[list[str]]:
        """Those in slots, those in sparse ones, and those that are kept."""
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for name in names:
            kinds.setdefault((self.is_kept(name), self.is_sparse(name)), []).append(name)
        return [kinds[kind] for kind in sorted(kinds)]

    def owned(self, name: str, replica: int) -> tuple[int, int]:
        size = self.specs[name].size
        if name in self.cut:
            k = math.prod(self.slot_shape(name))
            return min(replica * k, size), min((replica + 1) * k, size)
        owns = self.is_kept(name) or self.places[name][1] == replica
        return (0, size) if owns else (0, 0)

    def layout(self, names: Sequence[str], replica: Any) -> dict[str, tuple[int, ...]]:
        slots = dict.fromkeys(self.places[name][0] for name in names if name in self.places)
        return {slot: self.slot_shape(slot) for slot in slots}

    def counts(self, names: Sequence[str]) -> tuple[int, ...]:
        return (sum(map(math.prod, self.layout(names, 0).values())),) * self.world_size

    def stacked(self, ops: Ops[A], arrays: Mapping[str, A]) -> dict[str, A]:
        """The slots of these arrays, each (W, *shape), with zeros for those that are not here."""
        result, size = {}, self.world_size
        for slot, shape in self.layout(list(arrays), 0).items():
            if slot in self.cut:
                result[slot] = ops.pad(
                    arrays[slot].reshape((-1,)), size * math.prod(shape)
                ).reshape((size, *shape))
                continue
            here = [arrays.get(name) for name in self.stacks[slot]]
            like = next(x for x in here if x is not None)
            filled = [
                x if x is None or slot not in self.ragged else ops.pad(x.reshape((-1,)), shape[0])
                for x in here
            ]
            filled += [None] * (size - len(here))
            result[slot] = ops.stack(
                [ops.zeros(shape, ops.dtype_of(like)) if x is None else x for x in filled]
            )
        return result

    def message(self, ops: Ops[A], arrays: Mapping[str, A]) -> A:
        return ops.rows(list(self.stacked(ops, arrays).values()), self.world_size).reshape((-1,))

    def whole(
        self, ops: Ops[A], message: A, names: Sequence[str], out: Mapping[str, A] | None = None
    ) -> dict[str, A]:
        layout = self.layout(names, 0)
        matrix = message.reshape((self.world_size, self.counts(names)[0]))
        shapes = [(self.world_size, *shape) for shape in layout.values()]
        slots = dict(zip(layout, ops.from_rows(matrix, shapes), strict=True))
        return {name: self._taken(name, slots[self.places[name][0]]) for name in names}

    def _taken(self, name: str, rows: A) -> A:
        """A parameter out of its slot, (W, *shape)."""
        shape = self.specs[name].shape
        if name in self.cut:
            return rows.reshape((-1, *shape[1:]))[: shape[0]]
        slot, r = self.places[name]
        return self.member(name, rows[r]) if slot in self.ragged else rows[r]

    def member(self, name: str, row: A) -> A:
        """A parameter out of what its owner has of a ragged slot."""
        return row[: self.specs[name].size].reshape(self.specs[name].shape)

    def alone(
        self, ops: Ops[A], pieces: Mapping[str, A], names: Sequence[str], replica: Any
    ) -> dict[str, A]:
        result, place = {}, ops.zeros((), "int32") + replica
        for name in names:
            slot, r = self.places[name]
            piece, shape = pieces[slot], self.specs[name].shape
            if name in self.cut:
                k = self.slot_shape(name)[0]
                rows = ops.stack(
                    [ops.where(place == i, piece, 0.0) for i in range(-(-shape[0] // k))]
                )
                result[name] = rows.reshape((-1, *shape[1:]))[: shape[0]]
            else:
                x = self.member(name, piece) if slot in self.ragged else piece
                result[name] = ops.where(place == r, x, 0.0)
        return result

    def own(self, ops: Ops[A], arrays: Mapping[str, A], replica: Any) -> dict[str, A]:
        size = self.world_size
        own = {
            slot: ops.row_of(x, size, replica).reshape(self.slot_shape(slot))
            for slot, x in self.stacked(ops, arrays).items()
        }
        return own | {name: x for name, x in arrays.items() if self.is_kept(name)}


def work_of(spec: Spec) -> int:
    """What it costs to orthogonalize a matrix, n·m·min(n, m), or each matrix of an array of more
    axes."""
    return spec.size * min(spec.shape[-2:])
