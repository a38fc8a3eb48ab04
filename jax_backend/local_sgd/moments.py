"""What is averaged along with parameters: what an optimizer remembers of them (kept, averaged as well, or begun anew), and other trees (`Extra`).

Moments are the floating arrays of its state whose path ends in that of a parameter and that have its shape: `0/mu/Dense_0/kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.jax_backend.axes.mapped_axis import AxisName, vary_if_tracked
from gradwire.jax_backend.local_sgd.non_finite import all_finite
from gradwire.jax_backend.state.names import BARE, flatten

Keys = tuple[str, ...]


class Moments:
    """The moments in the state of an optimizer of these parameters, which are given by name."""

    def __init__(self, state: Any, params: Mapping[str, jax.Array]) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(state)
        self._leaves = [x for _, x in leaves]
        self._keys: list[Keys] = [tuple(_name((key,)) for key in path) for path, _ in leaves]
        self._owners = [_owner(keys, x, params) for keys, x in zip(self._keys, self._leaves, strict=True)]

    def by_parameter(self) -> dict[str, dict[str, jax.Array]]:
        """Parameter → path in the state → moment."""
        found: dict[str, dict[str, jax.Array]] = {}
        for keys, owner, x in zip(self._keys, self._owners, self._leaves, strict=True):
            if owner is not None:
                found.setdefault(owner, {})["/".join(keys)] = x
        return found

    def replaced(self, values: Mapping[str, Mapping[str, jax.Array]]) -> Any:
        """The state with these moments."""
        return self._rebuilt(
            [
                x if owner is None else values[owner]["/".join(keys)]
                for keys, owner, x in zip(self._keys, self._owners, self._leaves, strict=True)
            ]
        )

    def restarted(self, fresh: Any, now: jax.Array, axis_name: AxisName) -> Any:
        """The state with the moments of a `fresh` one, if `now`.

        Counters that stand beside moments, as Adam's does for its bias correction, begin again with them; those that stand alone, such as a
        schedule's, go on.
        """
        chosen = self._begin_anew()
        new = jax.tree.leaves(fresh)
        old = vary_if_tracked([jnp.asarray(self._leaves[i]) for i in chosen], axis_name)
        begun = vary_if_tracked([jnp.asarray(new[i], x.dtype) for i, x in zip(chosen, old, strict=True)], axis_name)
        values = dict(zip(chosen, lax.cond(now, lambda: begun, lambda: old), strict=True))
        return self._rebuilt([values.get(i, x) for i, x in enumerate(self._leaves)])

    def mended(self, fresh: Any, now: jax.Array) -> Any:
        """The state with the moments of a `fresh` one and the counters beside them, if `now` and an array of floats in it is not finite. What else is not finite
        becomes that of the fresh one as well."""
        chosen, new = set(self._begin_anew()), jax.tree.leaves(fresh)
        broken = now & ~all_finite(self._leaves)
        leaves = []
        for i, x in enumerate(self._leaves):
            anew = broken if i in chosen else broken & ~all_finite([x])
            floats = jnp.issubdtype(jnp.result_type(x), jnp.floating)
            leaves.append(jnp.where(anew, jnp.asarray(new[i], jnp.result_type(x)), x) if floats or i in chosen else x)
        return self._rebuilt(leaves)

    def _begin_anew(self) -> list[int]:
        """Numbers of the leaves that begin anew: moments, and the counters beside them."""
        beside = {keys[: -len(_path(owner)) - 1] for keys, owner in zip(self._keys, self._owners, strict=True) if owner}
        return [
            i
            for i, (keys, owner) in enumerate(zip(self._keys, self._owners, strict=True))
            if owner is not None or keys[:-1] in beside
        ]

    def _rebuilt(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)


class Extra:
    """A tree that is averaged along with parameters, such as BatchNorm's statistics, as `LocalSGD.average` takes it.

    Attributes:
        arrays: the floating arrays, owner → "" → array, with an owner that is no parameter. To be replaced by their averages.
    """

    def __init__(self, number: int, tree: Any) -> None:
        self._named = flatten(tree)
        self._owners = {
            name: f"extras[{number}]/{name}"
            for name, x in self._named.leaves.items()
            if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        }
        self.arrays = {owner: {"": jnp.asarray(self._named.leaves[name])} for name, owner in self._owners.items()}

    def rebuilt(self) -> Any:
        return self._named.rebuild(
            {
                name: self.arrays[self._owners[name]][""] if name in self._owners else x
                for name, x in self._named.leaves.items()
            }
        )


def _owner(keys: Keys, x: Any, params: Mapping[str, jax.Array]) -> str | None:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return None
    # Longest first: "b/kernel" is no moment of "kernel".
    names = ["/".join(keys[i:]) for i in range(1, len(keys))]
    owner = next((name for name in names if name in params), BARE if BARE in params else None)
    return owner if owner is not None and jnp.shape(params[owner]) == jnp.shape(x) else None


def _path(owner: str | None) -> Keys:
    return () if owner in (None, BARE) else tuple(str(owner).split("/"))


def _name(path: Any) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator="/"))
