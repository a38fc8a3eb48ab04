"""Trees of parameters as dictionaries from name to array, and back.

A name is the path of a leaf, joined by "/", as its user writes it: what Flax puts round an array
(`nn.Partitioned`, `nnx.Param`) adds nothing.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from gradwire.core.algorithms.shared.views import StackedShape
from gradwire.core.ops import Spec

#: The name of the only parameter of a tree that is one bare array.
BARE = "params"
#: What Flax's users call an axis that counts layers, stages or experts. Other names of axes are
#: taken for those of a matrix.
STACK_AXES = frozenset(
    {
        "layer",
        "layers",
        "block",
        "blocks",
        "stage",
        "stages",
        "expert",
        "experts",
        "exp",
        "scan",
        "stack",
    }
)


@dataclass(frozen=True)
class NamedTree:
    """A tree taken apart, into leaves by name, in the order of the tree. `holes` are the paths at
    which it holds None or `optax.MaskedNode` in place of an array or of a whole subtree."""

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
        first = 1 if self.leaves else 0  # else the whole tree may be one
        return any("/".join(parts[:n]) in self.holes for n in range(first, len(parts) + 1))


def flatten(tree: Any) -> NamedTree:
    """Take a tree apart. Raises ValueError if two leaves come to the same name."""
    leaves: dict[str, Any] = {}
    found, holes = contents_by_name(tree)
    for name, leaf in found:
        if name in leaves:
            raise ValueError(
                f"two parameters come to the same name {name!r}; rename the key that contains '/'"
            )
        leaves[name] = leaf
    return NamedTree(leaves, frozenset(holes), jax.tree.structure(tree))


def contents_by_name(tree: Any) -> tuple[list[tuple[str, Any]], set[str]]:
    """The leaves of a tree with their names, in the order of the tree, and the paths of its holes,
    see `NamedTree`."""
    leaves: list[tuple[str, Any]] = []
    holes: set[str] = set()
    for path, leaf in contents_by_path(tree):
        name = name_at(path)
        if is_absent(leaf):
            # as a parameter's, and above others
            holes |= {name, BARE} if path and not name else {name}
        else:
            leaves.append((name or BARE, leaf))
    return leaves, holes


def name_at(path: Any) -> str:
    """A path of JAX's as its user writes it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def pure(tree: Any) -> Any:
    """The tree with the contents of each `flax.nnx.Variable` in its place.

    nnx shows an optimizer variables at `init` and bare arrays at `update`; both must come to the
    same names.
    """
    variable = _flax_type("flax.nnx", "Variable")
    if not variable:
        return tree

    def is_variable(x: Any) -> bool:
        return isinstance(x, variable)

    def content(x: Any) -> Any:
        if not is_variable(x):
            return x
        held = jax.tree.leaves(x, is_leaf=lambda inside: inside is not x)
        if not jax.tree.leaves(held):
            return optax.MaskedNode()
        return held[0] if len(held) == 1 else held

    return jax.tree.map(content, tree, is_leaf=is_variable)


def filled(tree: Any, values: Sequence[Any], keep: Callable[[Any, Any], bool]) -> Any:
    """The `pure` tree with these values in place of its leaves. A box of linen says how the axes of
    its array are called, so it stays round a value only where `keep(leaf, value)` says that the
    value has these axes."""
    boxes = _flax_type("flax.core.meta", "AxisMetadata")
    rest = iter(values)

    def put(x: Any) -> Any:
        leaves, structure = jax.tree.flatten(x)
        new = [next(rest) for _ in leaves]
        bare = isinstance(x, boxes) and len(leaves) == 1 and not keep(leaves[0], new[0])
        return new[0] if bare else jax.tree.unflatten(structure, new)

    return jax.tree.map(put, pure(tree), is_leaf=lambda x: isinstance(x, boxes))


def contents_by_path(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda x: False
) -> list[tuple[Any, Any]]:
    """(path, leaf) of every array and every hole. An array in a box of linen (`nn.Partitioned`) has
    the path of the box. `is_leaf`: what is one besides arrays."""

    def ends(x: Any) -> bool:
        return is_absent(x) or is_leaf(x)

    tree, boxes = pure(tree), _flax_type("flax.core.meta", "AxisMetadata")
    if not boxes:
        return list(jax.tree_util.tree_flatten_with_path(tree, is_leaf=ends)[0])
    found: list[tuple[Any, Any]] = []
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: ends(x) or isinstance(x, boxes)
    )
    for path, x in leaves:
        if not isinstance(x, boxes):
            found.append((path, x))
            continue
        inside = jax.tree_util.tree_flatten_with_path(x, is_leaf=ends)[0] or [((), x)]
        found += [((*path, *rest) if len(inside) > 1 else path, leaf) for rest, leaf in inside]
    return found


def stacks_of(tree: Any) -> dict[str, int]:
    """What Flax knows of stacks: name of a parameter → how many of its first axes bear a name of
    `STACK_AXES`. Only stacks are in it.

    Axes have names in boxes of linen (`nn.Partitioned`, `nn.LogicallyPartitioned`) and in the
    metadata of variables of nnx.
    """
    known = (*_flax_type("flax.nnx", "Variable"), *_flax_type("flax.core.meta", "AxisMetadata"))
    found: dict[str, int] = {}
    leaves = (
        jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, known))[0]
        if known
        else []
    )
    for path, x in leaves:
        if isinstance(x, known):
            axes = list(itertools.takewhile(STACK_AXES.__contains__, _axis_names(x)))
            if axes:
                found[name_at(path) or BARE] = len(axes)
    return (
        _with_siblings(found, {name: jnp.shape(x) for name, x in flatten(tree).leaves.items()})
        if found
        else found
    )


def _with_siblings(stacks: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Biases and scales often have no names of axes. They are of the stack if everything below a
    module, a known stack included, has the same first axis."""
    modules: dict[str, list[str]] = {}
    for name in shapes:
        for end in (0, *(i for i, letter in enumerate(name) if letter == "/")):
            modules.setdefault(name[:end], []).append(name)
    found = dict(stacks)
    for members in modules.values():
        first = {shapes[name][:1] for name in members}
        if len(first) == 1 and () not in first and any(name in stacks for name in members):
            found |= {name: 1 for name in members if name not in stacks}
    return found


def _axis_names(x: Any) -> tuple[Any, ...]:
    metadata = (
        x.get_metadata()
        if hasattr(x, "get_metadata")
        else {"out_sharding": getattr(x, "names", None)}
    )
    names = (
        metadata.get("out_sharding")
        or metadata.get("sharding_names")
        or metadata.get("sharding")
        or ()
    )
    return tuple(names) if isinstance(names, (tuple, list, jax.sharding.PartitionSpec)) else ()


def _flax_type(module: str, name: str) -> tuple[Any, ...]:
    """A class of Flax for `isinstance`: an object can be one only if Flax has been imported
    already."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)


def is_absent(x: Any) -> bool:
    """Whether this stands where a tree has no array."""
    return x is None or isinstance(x, optax.MaskedNode)


def specs_of(leaves: Mapping[str, Any], stacks: Mapping[str, int] | None = None) -> dict[str, Spec]:
    """Shapes and dtypes of arrays, tracers, `jax.ShapeDtypeStruct`s or Python numbers; with what
    `stacks_of` says of them."""
    stacks = stacks or {}
    return {
        name: Spec(
            StackedShape(jnp.shape(x), stacks[name]) if name in stacks else tuple(jnp.shape(x)),
            _dtype_name(x),
        )
        for name, x in leaves.items()
    }


def _dtype_name(x: Any) -> str:
    dtype = jnp.result_type(x)
    # What `jax.grad(allow_int=True)` gives for integers is a structured dtype, which NumPy calls
    # "void".
    return "float0" if dtype == jax.dtypes.float0 else str(dtype.name)


def parameter_shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Parameter name → shape: what `gradwire.plan` wants, with the names that rank patterns are
    matched against.

        print(gradwire.plan(parameter_shapes(state.params), PowerSGD(rank=4)))

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire.jax_backend import parameter_shapes
        >>> parameter_shapes({"Dense_0": {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)}})
        {'Dense_0/bias': (2,), 'Dense_0/kernel': (4, 2)}

    Args:
        params: a tree of arrays or `jax.ShapeDtypeStruct`s. The name of a leaf is its path
            (dictionary keys, attributes, indices) joined by "/", as in `"Dense_0/kernel"`; of a
            bare array, "params". What Flax knows of stacks goes along, see `power_sgd`.
    """
    return {
        name: spec.shape
        for name, spec in specs_of(flatten(params).leaves, stacks_of(params)).items()
    }
