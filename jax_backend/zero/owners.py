"""Parameters of several shapes, each with an owner: all replicas run one program, in which each
takes a branch of its own.

What a replica owns, and the optimizer's state for it, lies in vectors that are as long on the
others (`StackShards.ragged`). A branch makes the parameters of its owner out of them, under their
own names, updates these, and makes vectors again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax import lax

from gradwire.core.zero.stacks import StackShards
from gradwire.jax_backend.axes.mapped_axis import AxisName, vary_if_tracked
from gradwire.jax_backend.state.names import flatten
from gradwire.jax_backend.state.types import by_path, dotted
from gradwire.jax_backend.zero.stacked_names import owners_key, parameters_in

Vectors = dict[str, jax.Array]
#: Parameters by name → their tree, with `optax.MaskedNode` for all others.
Build = Callable[[Mapping[str, Any]], Any]
STRUCT: Any = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class _Array:
    """The vectors of one array of the state.

    Attributes:
        paths: where it lies in the state of each replica; "" for none.
        length: of the vectors.
    """

    paths: tuple[str, ...]
    length: int
    dtype: Any


class Owners:
    """An optimizer on the parameters of each owner.

    Args:
        inner: the optimizer.
        shards: how parameters are divided.
        build: makes a tree of parameters.
    """

    def __init__(
        self, inner: optax.GradientTransformationExtraArgs, shards: StackShards, build: Build
    ) -> None:
        self._inner, self._shards, self._build = inner, shards, build
        self.slots = {slot: own for slot, own in shards.stacks.items() if slot in shards.ragged}
        self.names = [
            {slot: own[r] for slot, own in self.slots.items() if own[r]}
            for r in range(shards.world_size)
        ]
        every = {name: slot for own in self.names for slot, name in own.items()}
        structs = {
            name: STRUCT(shards.specs[name].shape, shards.specs[name].dtype) for name in every
        }
        self._state: Any = jax.eval_shape(inner.init, build(structs)) if every else ()
        self._leaves = dict(by_path(self._state))
        known = {dotted(name): name for name in shards.specs}
        members: dict[tuple[Any, ...], dict[int, tuple[str, str]]] = {}
        found = parameters_in(
            self._state, {name: spec.shape for name, spec in shards.specs.items()}
        )
        for (path, x), (before, name, after) in zip(self._leaves.items(), found, strict=True):
            if name and (own := known[name]) in every:
                kind = before, after, every[own], x.dtype
                members.setdefault(kind, {})[shards.places[own][1]] = (name, path)
        #: Key in `ZeroState.pieces` → its array.
        self.arrays: dict[str, _Array] = {}
        for (before, after, _, dtype), rows in members.items():
            each = [rows.get(r, ("", "")) for r in range(shards.world_size)]
            paths = tuple(path for _, path in each)
            length = max(self._leaves[path].size for path in paths if path)
            self.arrays[owners_key(before, [name for name, _ in each], after)] = _Array(
                paths, length, dtype
            )

    def init(self, params: Mapping[str, Any]) -> Vectors:
        """The state of all replicas, each array (W, length), of all parameters."""
        if not self.arrays:
            return {}
        owned = [name for own in self.names for name in own.values()]
        leaves = dict(
            by_path(self._inner.init(self._build({name: params[name] for name in owned})))
        )
        rows = [self._packed(leaves, r) for r in range(self._shards.world_size)]
        return {key: jnp.stack([row[key] for row in rows]) for key in self.arrays}

    def update(
        self,
        pieces: Vectors,
        state: Vectors,
        common: Any,
        params: Vectors | None,
        extra: Mapping[str, Any],
        axis: AxisName,
    ) -> tuple[Vectors, Vectors]:
        """Updates of the slots, and the state after them.

        Args:
            pieces: of gradients.
            state: of this replica.
            common: the state of the other parameters, with the numbers that all share.
            params: pieces of them; None: `inner` is given none.
            extra: other arguments of `inner`.
            axis: of the replicas.
        """
        if not pieces:
            return {}, {}
        shared = dict(by_path(common))

        def updated(r: int) -> tuple[Any, Any]:
            before = self._state_of(r, state, shared)
            own = None if params is None else self._build(self._members(params, r))
            new, after = self._inner.update(
                self._build(self._members(pieces, r)), before, own, **extra
            )
            return new, after

        busy = [r for r, own in enumerate(self.names) if own]
        made = {r: jax.eval_shape(lambda r=r: updated(r)) for r in busy}
        dtypes = {
            slot: flatten(made[r][0]).leaves[name].dtype
            for r in busy
            for slot, name in self.names[r].items()
        }

        def branch(r: int) -> Callable[[], tuple[Vectors, Vectors]]:
            def run() -> tuple[Vectors, Vectors]:
                new, after = updated(r) if r in made else ({}, ())
                leaves = flatten(new).leaves
                names = self.names[r] if r in made else {}
                updates = {
                    slot: _vector(leaves.get(names.get(slot, "")), pieces[slot].size, dtype)
                    for slot, dtype in dtypes.items()
                }
                result = updates, self._packed(dict(by_path(after)), r)
                varied: tuple[Vectors, Vectors] = jax.tree.map(
                    lambda x: vary_if_tracked([x], axis)[0], result
                )
                return varied

            return run

        idle = [r for r in range(len(self.names)) if r not in made][:1]
        places = [*busy, *idle]
        place_of = {r: i for i, r in enumerate(busy)}
        numbers = [place_of.get(r, len(busy)) for r in range(len(self.names))]
        chosen = jnp.asarray(numbers)[lax.axis_index(axis)]
        result: tuple[Vectors, Vectors] = lax.switch(chosen, [branch(r) for r in places])
        return result

    def _members(self, pieces: Mapping[str, jax.Array], r: int) -> dict[str, jax.Array]:
        return {
            name: self._shards.member(name, pieces[slot]) for slot, name in self.names[r].items()
        }

    def _state_of(self, r: int, state: Vectors, shared: Mapping[str, Any]) -> Any:
        """The inner state of a replica, out of its vectors."""
        own = {
            path: state[key][: (leaf := self._leaves[path]).size].reshape(leaf.shape)
            for key, array in self.arrays.items()
            if (path := array.paths[r])
        }

        # Of these parameters alone: where others stand, an optimizer has no list of arrays either.
        structs = {
            n: STRUCT(self._shards.specs[n].shape, self._shards.specs[n].dtype)
            for n in self.names[r].values()
        }
        state = jax.eval_shape(self._inner.init, self._build(structs))
        return jax.tree.unflatten(
            jax.tree.structure(state),
            [own[path] if path in own else shared[path] for path, _ in by_path(state)],
        )

    def _packed(self, leaves: Mapping[str, Any], r: int) -> Vectors:
        return {
            key: _vector(leaves.get(a.paths[r]), a.length, a.dtype)
            for key, a in self.arrays.items()
        }


def _vector(x: Any, length: int, dtype: Any) -> jax.Array:
    """An array as a vector of this length; zeros for None."""
    if x is None:
        return jnp.zeros(length, dtype)
    flat = jnp.asarray(x).reshape(-1)
    return jnp.pad(flat, (0, length - flat.size))
