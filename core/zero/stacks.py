"""Whole parameters divided among replicas that all run one program, as devices do under JAX: each has arrays of the same shapes.

    stack of W matrices of one shape  =  one slot, of which replica r owns matrix r

So what a replica owns is a matrix for each slot. What is left of a shape, where W does not divide the number of its parameters, fills one more slot if
it fills at least half of it, and is otherwise kept: every replica has it whole.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.core.ops import A, Ops, Spec
from gradwire.core.zero.sharding import Shards


class StackShards(Shards):
    """Parameters of one shape and dtype in stacks of W, in the order of `specs`. A piece goes by the name of the first of its stack.

    Examples:
        >>> from gradwire import Spec
        >>> from gradwire.core.zero.stacks import StackShards
        >>> shards = StackShards({name: Spec((8, 4)) for name in "abcde"}, world_size=2)
        >>> shards.stacks, shards.is_kept("e")
        ({'a': ('a', 'b'), 'c': ('c', 'd')}, True)
    """

    @functools.cached_property
    def stacks(self) -> dict[str, tuple[str, ...]]:
        """The name of each stack → the parameters in it, that of replica 0 first. A stack that is not full has padding at its end."""
        alike: dict[Spec, list[str]] = {}
        for name, spec in self.specs.items():
            alike.setdefault(spec, []).append(name)
        size = self.world_size
        stacks = {}
        for names in alike.values():
            for start in range(0, len(names), size):
                own = tuple(names[start : start + size])
                if len(own) == size or (len(own) > 1 and 2 * len(own) >= size):
                    stacks[own[0]] = own
        return stacks

    @functools.cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """The stack of each parameter that is in one, and the replica that owns it."""
        return {name: (stack, r) for stack, names in self.stacks.items() for r, name in enumerate(names)}

    def in_pieces(self, name: str) -> bool:
        return False

    def is_kept(self, name: str) -> bool:
        return name not in self.places

    def together(self, names: Sequence[str]) -> list[list[str]]:
        """Those in stacks, and those that are kept."""
        kinds = [[name for name in names if self.is_kept(name) == kept] for kept in (False, True)]
        return [own for own in kinds if own]

    def owned(self, name: str, replica: int) -> tuple[int, int]:
        owns = self.is_kept(name) or self.places[name][1] == replica
        return (0, self.specs[name].size) if owns else (0, 0)

    def layout(self, names: Sequence[str], replica: Any) -> dict[str, tuple[int, ...]]:
        stacks = dict.fromkeys(self.places[name][0] for name in names if name in self.places)
        return {stack: self.specs[stack].shape for stack in stacks}

    def stacked(self, ops: Ops[A], arrays: Mapping[str, A]) -> dict[str, A]:
        """The stacks of these arrays, each (W, *shape), with zeros for those that are not here."""
        result = {}
        for stack, shape in self.layout(list(arrays), 0).items():
            here = [arrays.get(name) for name in self.stacks[stack]]
            like = next(x for x in here if x is not None)
            rows = [*here, *[None] * (self.world_size - len(here))]
            result[stack] = ops.stack([ops.zeros(shape, ops.dtype_of(like)) if x is None else x for x in rows])
        return result

    def message(self, ops: Ops[A], arrays: Mapping[str, A]) -> A:
        return ops.rows(list(self.stacked(ops, arrays).values()), self.world_size).reshape((-1,))

    def whole(self, ops: Ops[A], message: A, names: Sequence[str], out: Mapping[str, A] | None = None) -> dict[str, A]:
        stacks = list(self.layout(names, 0))
        matrix = message.reshape((self.world_size, self.counts(names)[0]))
        arrays = dict(
            zip(stacks, ops.from_rows(matrix, [(self.world_size, *self.specs[s].shape) for s in stacks]), strict=True)
        )
        return {name: arrays[stack][r] for name in names for stack, r in [self.places[name]]}

    def own(self, ops: Ops[A], arrays: Mapping[str, A], replica: Any) -> dict[str, A]:
        size = self.world_size
        own = {
            stack: ops.row_of(x, size, replica).reshape(self.specs[stack].shape)
            for stack, x in self.stacked(ops, arrays).items()
        }
        return own | {name: x for name, x in arrays.items() if self.is_kept(name)}
