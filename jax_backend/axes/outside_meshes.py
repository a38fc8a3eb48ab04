"""What the host computes with arrays of a mesh, whatever mesh is in context, and whatever types its
axes have.

With a mesh in context, `jax.set_mesh(mesh)`, JAX computes on all of its devices, and refuses arrays
that lie on one of them, or on a mesh whose axes have other types. Of axes of `AxisType.Explicit`,
which `jax.make_mesh` makes, every operation must know how its result is sharded: a row of an array
that is sharded by rows cannot be taken. So helpers of the host run outside of every mesh, and see
such axes as if the compiler managed them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

Given = ParamSpec("Given")
T = TypeVar("T")

NO_MESH = Mesh(np.empty((), dtype=object), ())


def outside_meshes(helper: Callable[Given, T]) -> Callable[Given, T]:
    """The helper, run with no mesh in context. Inside a trace, where the context is the program's,
    it runs as it is."""

    @functools.wraps(helper)
    def run(*args: Given.args, **options: Given.kwargs) -> T:
        with _no_mesh():
            return helper(*args, **options)

    return run


def _no_mesh() -> AbstractContextManager[Any]:
    try:
        context: AbstractContextManager[Any] = jax.set_mesh(NO_MESH)
    except ValueError:  # so JAX says that something is traced
        return nullcontext()
    return context


def automatic(x: Any) -> Any:
    """An array on a mesh whose axes are all of `AxisType.Auto`: the same data, of which nothing is
    copied. Anything else as it is."""
    mesh = _explicit_mesh(x)
    return x if mesh is None else _with_axes_of(x, Mesh(mesh.devices, mesh.axis_names))


def with_axes_like(made: T, given: Any) -> T:
    """What was made of `automatic` arrays, a tree, on the mesh of those that were `given`. Nothing
    is copied."""
    mesh = next(filter(None, map(_explicit_mesh, jax.tree.leaves(given))), None)
    if mesh is None:
        return made

    def back(x: Any) -> Any:
        sharding = getattr(x, "sharding", None)
        same = isinstance(sharding, NamedSharding) and sharding.mesh == Mesh(
            mesh.devices, mesh.axis_names
        )
        return _with_axes_of(x, mesh) if same else x

    lying: T = jax.tree.map(back, made)
    return lying


def _explicit_mesh(x: Any) -> Mesh | None:
    """The mesh of an array, if it has explicit axes."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and AxisType.Explicit in mesh.axis_types else None


def _with_axes_of(x: jax.Array, mesh: Mesh) -> jax.Array:
    assert isinstance(x.sharding, NamedSharding)
    sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    return jax.make_array_from_single_device_arrays(
        x.shape, sharding, [shard.data for shard in x.addressable_shards]
    )
