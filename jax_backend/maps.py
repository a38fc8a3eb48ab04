"""Which kind of map binds the axis of the replicas: `jax.shard_map` (and `jax.pmap`, which is one), or `jax.vmap`.

Under `jax.vmap(step, axis_name="data", spmd_axis_name="data")` XLA divides the replicas among devices, as DrJAX and MaxText have it. There a
branch whose predicate has an axis for the replicas becomes a selection: both sides are computed, and their collectives sent, in
every step. `agreed` takes the axis away.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.jax_backend.axis import AxisName, axes_of

T = TypeVar("T")

#: The name of the function that is left out of what a step sends: under `jax.vmap` alone it is there, and 4 bytes.
AGREED = "_agreed_under_vmap"


def is_manual(axis_name: AxisName) -> bool:
    """Whether each device runs the code for itself along this axis: inside `jax.shard_map` and `jax.pmap`, not inside `jax.vmap`."""
    return frozenset(axes_of(axis_name)) <= frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def agreed(x: T, axis_name: AxisName) -> T:
    """Integers that are equal on all replicas, known to be: `lax.cond` on them stays a branch under `jax.vmap`. A tree of scalars."""
    if is_manual(axis_name):
        return x

    def _agreed_under_vmap(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: (
                lax.pmax(leaf, axis_name)  # type: ignore[no-untyped-call]
                if jnp.issubdtype(jnp.result_type(leaf), jnp.integer)
                else leaf
            ),
            tree,
        )

    same: T = jax.jit(_agreed_under_vmap)(x)
    return same
