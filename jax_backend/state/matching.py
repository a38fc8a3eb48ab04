"""Which arrays of a state belong to which parameter: found by structure, since names decide
nothing. A name may hold any sign that joins paths, be a number as the links of a chain are, or a
word of the state, such as "mu" or "count".

A state of optax holds trees like the parameters, with `optax.MaskedNode` where a mask leaves some
out. So a node whose leaves have the names of parameters, of all of them but those in holes, holds
one array for each. So does one that has all these names and shapes, and others beside them: a
module of nnx with its parameters and its statistics.

Some optimizers hold several arrays of a parameter at its place, as SM3 does in a list: one for each
of its axes. Whatever holds them there, a list, a dictionary, a named tuple, a dataclass or some of
these in each other, all of them belong to the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.jax_backend.state.names import (
    BARE,
    contents_by_name,
    contents_by_path,
    is_absent,
    name_at,
    pure,
)


@dataclass(frozen=True)
class Place:
    """The place of an array that belongs to a parameter.

    Attributes:
        name: of the parameter.
        before, within: the path of the tree like the parameters, and the array's own in it, as JAX
            gives them.
        of_several: the array is one of several that stand where its parameter does.
    """

    name: str
    before: tuple[Any, ...]
    within: tuple[Any, ...]
    of_several: bool = False


def places(state: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Place | None]:
    """The one of these parameters to which each leaf of a state belongs, in JAX's order; None: to
    none.

    Args:
        state: any tree of arrays or shapes.
        shapes: of all parameters, by name. Of a single bare array whatever has its shape belongs to
            it.
    """
    found: list[Place | None] = []
    among: dict[tuple[Any, ...], Place] = {}

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        alone, several = _names(node, shapes), None
        # a chain, of as many links as there are parameters, has their names if these are numbers
        if alone is None and not (type(node) is tuple and _hold_several(node, shapes)):
            several = _names_of_several(node, shapes)
        own = several if alone is None else alone
        if own is not None:
            paths = jax.tree_util.tree_flatten_with_path(node)[0]
            found.extend(
                Place(name, path, within, own is several)
                for name, (within, _) in zip(own, paths, strict=True)
            )
            return
        among.update(
            {
                (*path, *within): Place(name, path, within)
                for name, within in _among(node, shapes).items()
            }
        )
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        if len(children) == 1 and not children[0][0]:
            found.append(among.get(path))
            return
        for key, child in children:
            walk(child, (*path, *key))

    walk(state, ())
    return found


def _names(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """The names of the leaves of a tree like the parameters, in JAX's order; None for any other
    node."""
    if jax.tree_util.all_leaves([node]):
        floats = jnp.issubdtype(jnp.result_type(node), jnp.floating)
        return (
            [BARE] if set(shapes) == {BARE} and jnp.shape(node) == shapes[BARE] and floats else None
        )
    leaves, holes = contents_by_name(node)
    names = [name for name, _ in leaves]
    if not names or not _are_all(names, holes, shapes):
        return None
    # A count that stands alone may have the name of the only parameter.
    return None if any(_counts(x) and shapes[name] for name, x in leaves) else names


def _names_of_several(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """The parameter of each leaf, in JAX's order, of a tree like the parameters with several arrays
    in place of some of them; None for any other node."""
    whole = pure(node)
    leaves = jax.tree.leaves(whole)
    if not leaves or any(map(_counts, leaves)):
        return None  # a state of optax, with its count, whose words may be names of parameters
    if set(shapes) == {BARE}:
        return (
            [BARE] * len(leaves)
            if type(whole) is list and jax.tree_util.all_leaves(whole)
            else None
        )
    names: list[str] = []
    inside: dict[str, list[tuple[Any, Any]]] = {}
    holes: set[str] = set()
    for path, x in contents_by_path(node, lambda x: not jax.tree.leaves(x)):
        ends = [n for n in range(1, len(path) + 1) if (name_at(path[:n]) or BARE) in shapes]
        if not ends and not _is_masked(x):
            return None
        if not ends or (ends[0] == len(path) and is_absent(x)):
            holes.add(name_at(path))
            continue
        name = name_at(path[: ends[0]]) or BARE
        inside.setdefault(name, []).append((path[ends[0] :], x))
        names += [name] * len(jax.tree.leaves(x))
    several = [found for found in inside.values() if len(found) > 1 or found[0][0]]
    if not any(jnp.ndim(x) for found in several for x in jax.tree.leaves([x for _, x in found])):
        return None
    if not _are_all(list(inside), holes, shapes) or any(
        _hold_parameters(found, shapes) for found in several
    ):
        return None
    return names


def _hold_several(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether below the node there is a tree like the parameters with several arrays in place of
    some of them."""
    below = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
    return any(
        _hold_several(child, shapes) or _names_of_several(child, shapes)
        for child in below
        if child is not node
    )


def _hold_parameters(found: list[tuple[Any, Any]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether there is a tree like the parameters in what has these paths: then it is a part of a
    state, whose words are names of parameters, or a link of a chain, whose numbers are. Numbers and
    fields alone do not tell, since several arrays of a parameter may have them; shapes do."""
    trees: dict[Any, list[tuple[Any, Any]]] = {}
    for path, x in found:
        for n in range(len(path)):
            trees.setdefault(path[:n], []).append((path[n:], x))
    return any(_are_parameters(tree, shapes) for tree in trees.values())


def _are_parameters(tree: list[tuple[Any, Any]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    names = {name_at(path) or BARE: x for path, x in tree}
    holes = {name for name, x in names.items() if is_absent(x)}
    arrays = {
        name: jnp.shape(x) for name, x in names.items() if name not in holes and jax.tree.leaves(x)
    }
    if (
        isinstance(tree[0][0][0], jax.tree_util.DictKey)
        and arrays
        and _are_all(list(arrays), holes, shapes)
    ):
        return True
    held = {name: shape for name, shape in shapes.items() if not _is_in(holes, name)}
    return bool(held) and all(arrays.get(name) == shape for name, shape in held.items())


def _are_all(
    names: list[str], holes: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> bool:
    """Whether these are the names of parameters, each once, of all but those in holes."""
    if len(set(names)) < len(names) or not shapes.keys() >= set(names):
        return False
    return all(_is_in(holes, name) for name in shapes.keys() - set(names))


def _is_masked(x: Any) -> bool:
    """Whether a node holds nothing but what stands where a tree has no array."""
    leaves = jax.tree.leaves(x, is_leaf=is_absent)
    return bool(leaves) and all(map(is_absent, leaves))


def _counts(x: Any) -> bool:
    """Whether it is a number that is no float."""
    return not jnp.ndim(x) and not jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _is_in(holes: Collection[str], name: str) -> bool:
    return any(f"{name}/".startswith(f"{hole}/") for hole in holes)


def _among(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Any, ...]]:
    """Parameter → path, of a node that holds all of them in their shapes, and something else; {} of
    any other."""
    leaves, _ = contents_by_name(node)
    held = {name: jnp.shape(x) for name, x in leaves}
    if (
        len(held) < len(leaves)
        or not shapes
        or any(held.get(name) != shape for name, shape in shapes.items())
    ):
        return {}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
    return {name: path for (name, _), path in zip(leaves, paths, strict=True) if name in shapes}
