"""Which arrays of a state belong to which parameter: found by structure, since names decide nothing. A name may hold any sign that joins paths, be a number as
the links of a chain are, or a word of the state, such as "mu" or "count".

A state of optax holds trees like the parameters, with `optax.MaskedNode` where a mask leaves some out. So a node whose leaves have the names of parameters,
of all of them but those in holes, holds one array for each. So does one that has all these names and shapes, and others beside them: a module of nnx with its
parameters and its statistics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.jax_backend.state.names import BARE, contents_by_name


@dataclass(frozen=True)
class Place:
    """The place of an array that belongs to a parameter.

    Attributes:
        name: of the parameter.
        before, within: the path of the tree like the parameters, and the array's own in it, as JAX gives them.
    """

    name: str
    before: tuple[Any, ...]
    within: tuple[Any, ...]


def places(state: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Place | None]:
    """For each leaf of a state, in JAX's order, to which of these parameters it belongs; None: to none.

    Args:
        state: any tree of arrays or shapes.
        shapes: of all parameters, by name. Of a single bare array whatever has its shape belongs to it.
    """
    found: list[Place | None] = []
    among: dict[tuple[Any, ...], Place] = {}

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        own = _names(node, shapes)
        if own is not None:
            paths = jax.tree_util.tree_flatten_with_path(node)[0]
            found.extend(Place(name, path, within) for name, (within, _) in zip(own, paths, strict=True))
            return
        among.update({(*path, *within): Place(name, path, within) for name, within in _among(node, shapes).items()})
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        if len(children) == 1 and not children[0][0]:
            found.append(among.get(path))
            return
        for key, child in children:
            walk(child, (*path, *key))

    walk(state, ())
    return found


def _names(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """Of a tree like the parameters the names of its leaves, in JAX's order; None for any other node."""
    if jax.tree_util.all_leaves([node]):
        floats = jnp.issubdtype(jnp.result_type(node), jnp.floating)
        return [BARE] if set(shapes) == {BARE} and jnp.shape(node) == shapes[BARE] and floats else None
    leaves, holes = contents_by_name(node)
    names = [name for name, _ in leaves]
    if not names or len(set(names)) < len(names) or not shapes.keys() >= set(names):
        return None
    missing = shapes.keys() - set(names)
    return names if all(any(f"{name}/".startswith(f"{hole}/") for hole in holes) for name in missing) else None


def _among(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Any, ...]]:
    """Parameter → path, of a node that holds all of them in their shapes, and something else; {} of any other."""
    leaves, _ = contents_by_name(node)
    held = {name: jnp.shape(x) for name, x in leaves}
    if len(held) < len(leaves) or not shapes or any(held.get(name) != shape for name, shape in shapes.items()):
        return {}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
    return {name: path for (name, _), path in zip(leaves, paths, strict=True) if name in shapes}
