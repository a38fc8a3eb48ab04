"""Meshes whose axes are of `jax.sharding.AxisType.Explicit`, which `jax.make_mesh` makes: there every operation must say how its result is
sharded, and messages that are packed and factors that are orthonormalized have nothing to say. They are computed with the axes left to the
compiler, as on a mesh of `AxisType.Auto`, and results come back as what they were made of lay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec

from gradwire.jax_backend.slices import compiler_axes

T = TypeVar("T")


def left_to_the_compiler(fn: Callable[..., T], *args: Any, like: Any) -> T:
    """`fn(*args)`, of trees of arrays, with explicit mesh axes made automatic.

    `like` is a tree like its result: each leaf an array that is sharded as the result should be, or None for one that is on all devices whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(getattr(mesh, "explicit_axes", ()))
    if not axes:
        # Outside `jax.jit` a map runs its operations one by one, and what it divided is forgotten between them.
        result: T = jax.jit(fn)(*args) if compiler_axes() else fn(*args)
        return result

    def spec_of(x: Any) -> Any:
        return PartitionSpec() if x is None else jax.typeof(x).sharding.spec  # type: ignore[no-untyped-call]

    specs = jax.tree.map(spec_of, like, is_leaf=lambda x: x is None)
    within: T = jax.jit(jax.sharding.auto_axes(fn, axes=axes, out_sharding=specs))(*args)
    return within
