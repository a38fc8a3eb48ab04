"""What a plan is made of: names, shapes and dtypes, from whatever has them, without importing its
framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from gradwire.core.ops import Spec, name_of_dtype

DEFAULT = "float32"
FIX = (
    "give name → shape, a torch module, or a tree of arrays in nested mappings;"
    " gradwire.jax_backend.parameter_shapes(params) takes any other tree of JAX"
)


def specs_of(model: Any, dtype: str | None = None, what: str = "shapes") -> dict[str, Spec]:
    """Shape and dtype of every parameter.

    Args:
        model: anything with `named_parameters()`, of which those that are frozen are left out, as
            registration does; or a mapping of names to shapes, to anything with a `.shape`, or to
            such mappings. Names of nested ones are joined by "/" and in the order of their letters,
            as in JAX. None in a mapping is no parameter.
        dtype: of all of them. None: their own; float32 for shapes.
        what: the argument, as it is called in messages.

    Raises:
        TypeError: for anything else, by name.
        ValueError: two parameters come to the same name.
    """
    if hasattr(model, "named_parameters") and not isinstance(model, type):
        named = [
            (name, p) for name, p in model.named_parameters() if getattr(p, "requires_grad", True)
        ]
    elif isinstance(model, Mapping):
        named = list(_leaves(model, ""))
    else:
        raise TypeError(f"{what} is a {type(model).__name__}; {FIX}")
    specs: dict[str, Spec] = {}
    for name, x in named:
        if name in specs:
            raise ValueError(
                f"two parameters come to the same name {name!r}; rename the key that contains '/'"
            )
        own = name_of_dtype(getattr(x, "dtype", None))
        specs[name] = Spec(_shape_of(name, x, what), dtype or own or DEFAULT)
    return specs


def _leaves(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    nested = prefix or any(isinstance(x, Mapping) for x in tree.values())
    for key in sorted(tree) if nested else tree:
        if isinstance(tree[key], Mapping):
            yield from _leaves(tree[key], f"{prefix}{key}/")
        elif tree[key] is not None:
            yield f"{prefix}{key}", tree[key]


def _shape_of(name: str, x: Any, what: str) -> tuple[int, ...]:
    shape = getattr(x, "shape", x)
    # One with fields is a node of a tree, such as `optax.MaskedNode`.
    lengths = isinstance(shape, (tuple, list)) and not hasattr(shape, "_fields")
    if lengths and all(isinstance(n, Integral) for n in shape):
        return shape if isinstance(shape, tuple) else tuple(shape)  # which may say of stacks
    raise TypeError(f"{what}[{name!r}] is a {type(x).__name__}, and has no shape; {FIX}")
