"""Trees of parameters as dictionaries from name to array, and back. A name is the path of a leaf, joined by "/"."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from gradwire.core.ops import Spec

__all__ = ["BARE", "NamedTree", "flatten", "is_absent", "parameter_shapes", "pure", "specs_of"]

#: The name of the only parameter of a tree that is one bare array.
BARE = "params"


@dataclass(frozen=True)
class NamedTree:
    """A tree taken apart.

    Attributes:
        leaves: name → leaf, in the order of the tree.
        holes: paths at which the tree holds None or `optax.MaskedNode` in place of an array or of a whole subtree.
        structure: of the tree.
    """

    leaves: dict[str, Any]
    holes: frozenset[str]
    structure: Any

    def rebuild(self, values: Mapping[str, Any]) -> Any:
        """The same tree with these leaves."""
        return jax.tree.unflatten(self.structure, [values[name] for name in self.leaves])

    def is_hole(self, name: str) -> bool:
        """Whether there is a hole at this path, or above it."""
        if not self.holes:
            return False
        parts = name.split("/")
        return any("/".join(parts[:n]) in self.holes for n in range(len(parts) + 1))


def flatten(tree: Any) -> NamedTree:
    """Take a tree apart. Raises ValueError if two leaves come to the same name."""
    leaves: dict[str, Any] = {}
    holes = set()
    for path, leaf in jax.tree_util.tree_flatten_with_path(pure(tree), is_leaf=is_absent)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if is_absent(leaf):
            holes.add(name)
            continue
        name = name or BARE
        if name in leaves:
            raise ValueError(f"two parameters come to the same name {name!r}; rename the key that contains '/'")
        leaves[name] = leaf
    return NamedTree(leaves, frozenset(holes), jax.tree.structure(tree))


def pure(tree: Any) -> Any:
    """The tree with the contents of each `flax.nnx.Variable` in its place.

    nnx shows an optimizer variables at `init` and bare arrays at `update`; both must come to the same names.
    """
    # An object can be a variable only if flax has been imported already.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree

    def is_variable(x: Any) -> bool:
        return isinstance(x, nnx.Variable)

    def content(x: Any) -> Any:
        if not is_variable(x):
            return x
        leaves = jax.tree.leaves(x)
        return leaves[0] if len(leaves) == 1 else leaves or optax.MaskedNode()

    return jax.tree.map(content, tree, is_leaf=is_variable)


def is_absent(x: Any) -> bool:
    """Whether this stands where a tree has no array."""
    return x is None or isinstance(x, optax.MaskedNode)


def specs_of(leaves: Mapping[str, Any]) -> dict[str, Spec]:
    """Shapes and dtypes of arrays, tracers, `jax.ShapeDtypeStruct`s or Python numbers."""
    return {name: Spec(tuple(jnp.shape(x)), _dtype_name(x)) for name, x in leaves.items()}


def _dtype_name(x: Any) -> str:
    dtype = jnp.result_type(x)
    # What `jax.grad(allow_int=True)` gives for integers is a structured dtype, which NumPy calls "void".
    return "float0" if dtype == jax.dtypes.float0 else str(dtype.name)


def parameter_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Parameter name → shape: what `gradwire.plan` wants, with the names that rank patterns are matched against.

        print(gradwire.plan(parameter_shapes(state.params), PowerSGD(rank=4)))

    Args:
        params: a tree of arrays or `jax.ShapeDtypeStruct`s. The name of a leaf is its path (dictionary keys, attributes, indices)
            joined by "/", as in `"Dense_0/kernel"`; of a bare array, "params".
    """
    return {name: spec.shape for name, spec in specs_of(flatten(params).leaves).items()}
