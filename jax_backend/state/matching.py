"""Which arrays of a state belong to which parameter: found by structure, since names decide nothing. A name may hold any sign that joins paths, be a number as
the links of a chain are, or a word of the state, such as "mu" or "count".

A state of optax holds trees like the parameters, with `optax.MaskedNode` where a mask leaves some out. So a node whose leaves have the names of parameters,
of all of them but those in holes, holds one array for each. So does one that has all these names and shapes, and others beside them: a module of nnx with its
parameters and its statistics.

Some optimizers hold several arrays of a parameter at its place, as SM3 does in a list: one for each of its axes. In a list, a tuple or a dictionary with nothing
else in it all of them belong to the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.jax_backend.state.names import BARE, contents_by_name, is_absent, pure


@dataclass(frozen=True)
class Place:
    """The place of an array that belongs to a parameter.

    Attributes:
        name: of the parameter.
        before, within: the path of the tree like the parameters, and the array's own in it, as JAX gives them.
        of_several: the array is one of several that stand where its parameter does.
    """

    name: str
    before: tuple[Any, ...]
    within: tuple[Any, ...]
    of_several: bool = False


def places(state: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[Place | None]:
    """The one of these parameters to which each leaf of a state belongs, in JAX's order; None: to none.

    Args:
        state: any tree of arrays or shapes.
        shapes: of all parameters, by name. Of a single bare array whatever has its shape belongs to it.
    """
    found: list[Place | None] = []
    among: dict[tuple[Any, ...], Place] = {}

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        alone, several = _names(node, shapes), None
        if alone is None:
            several = _names_of_several(node, shapes)
        own = several if alone is None else alone
        if own is not None:
            paths = jax.tree_util.tree_flatten_with_path(node)[0]
            found.extend(
                Place(name, path, within, own is several) for name, (within, _) in zip(own, paths, strict=True)
            )
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
    """The names of the leaves of a tree like the parameters, in JAX's order; None for any other node."""
    if jax.tree_util.all_leaves([node]):
        floats = jnp.issubdtype(jnp.result_type(node), jnp.floating)
        return [BARE] if set(shapes) == {BARE} and jnp.shape(node) == shapes[BARE] and floats else None
    leaves, holes = contents_by_name(node)
    names = [name for name, _ in leaves]
    return names if names and _are_all(names, holes, shapes) else None


def _names_of_several(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str] | None:
    """The parameter of each leaf, in JAX's order, of a tree like the parameters with several arrays in place of some of them; None for any other node."""
    whole = pure(node)
    leaves = jax.tree.leaves(whole)
    if not leaves or not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves):
        return None  # a state of optax, with its count, whose words may be names of parameters
    if _is_several(whole):
        return [BARE] * len(leaves) if set(shapes) == {BARE} and type(whole) is list else None
    found, holes = contents_by_name(node, _is_several)
    each: list[tuple[str, Any]] = []
    for name, x in found:
        if _is_several(x) and name not in shapes:  # a module
            inside, more = contents_by_name(x)
            each += [(f"{name}/{key}", leaf) for key, leaf in inside]
            holes |= {f"{name}/{key}" for key in more}
        else:
            each.append((name, x))
    several = [x for _, x in each if _is_several(x)]
    if not several or not _are_all([name for name, _ in each], holes, shapes):
        return None
    # Parts of a state, whose words may be names of parameters, and links of a chain, which are numbers as parameters in a list are.
    if any(_names(x, shapes) if type(x) is dict else _among(x, shapes) for x in several):
        return None
    return [name for name, x in each for _ in jax.tree.leaves(x)]


def _is_several(x: Any) -> bool:
    """Whether this holds arrays, in no class of its own, and nothing else."""
    inside = x.values() if type(x) is dict else x if type(x) in (list, tuple) else None
    return inside is not None and all(is_absent(child) or jax.tree_util.all_leaves([child]) for child in inside)


def _are_all(names: list[str], holes: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether these are the names of parameters, each once, of all but those in holes."""
    if len(set(names)) < len(names) or not shapes.keys() >= set(names):
        return False
    missing = shapes.keys() - set(names)
    return all(any(f"{name}/".startswith(f"{hole}/") for hole in holes) for name in missing)


def _among(node: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Any, ...]]:
    """Parameter → path, of a node that holds all of them in their shapes, and something else; {} of any other."""
    leaves, _ = contents_by_name(node)
    held = {name: jnp.shape(x) for name, x in leaves}
    if len(held) < len(leaves) or not shapes or any(held.get(name) != shape for name, shape in shapes.items()):
        return {}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(node)[0]]
    return {name: path for (name, _), path in zip(leaves, paths, strict=True) if name in shapes}
