"""Training states of which every array differs between replicas: those of local SGD.

    state = per_replica(TrainState.create(...))     # then `replicate` or `distribute`, as ever

    def train_step(state, batch):
        mine = this_replica(state)                                   # as one would train alone
        ...
        return stack_replicas(mine), loss

The same step runs under `pmap` and under `shard_map`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gradwire.jax_backend.axes.outside_meshes import automatic, outside_meshes, with_axes_like
from gradwire.jax_backend.state.survey import Leaf, survey
from gradwire.jax_backend.state.types import PerReplica, require_own_row


@outside_meshes
def stack_replicas(state: Any) -> PerReplica:
    """Mark all of a state as different on every replica: each array receives a leading axis for the
    replicas, one long.

    Arrays in it that are marked already, such as the error memory of `power_sgd`, have that axis.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire.jax_backend import stack_replicas, this_replica
        >>> marked = stack_replicas({"w": jnp.zeros(3)})
        >>> marked.per_replica["w"].shape, this_replica(marked)["w"].shape
        ((1, 3), (3,))

    Args:
        state: any tree of arrays, `jax.ShapeDtypeStruct`s or Python numbers: before training, or in
            the training step.

    Returns:
        The state in local form (see `gradwire.jax_backend.state.types`), for `partition_specs`,
        `distribute`, `replicate` and `unreplicate`.

    Raises:
        TypeError: it is marked already.
    """
    if isinstance(state, PerReplica):
        raise TypeError("stack_replicas was given a state that is marked already")

    def with_axis(leaf: Leaf) -> Any:
        x = leaf.value
        if leaf.marks:
            return x
        struct: Any = jax.ShapeDtypeStruct
        if isinstance(x, struct):
            return struct((1, *x.shape), x.dtype)
        # On a mesh of explicit axes and others JAX loses the memory in which an array lies.
        return with_axes_like(automatic(jnp.asarray(x))[None], x)

    return PerReplica(survey(state).map(with_axis))


def this_replica(state: PerReplica) -> Any:
    """What `stack_replicas` was given, as this replica has it. To be called in the training step.

    Raises:
        TypeError: the state is not marked.
        ValueError: an array that has not exactly one row: `shard_map` was given `P()` for it and so
            hands every replica those of all; or the state is not the one that `distribute` or
            `replicate` made.
    """
    if not isinstance(state, PerReplica):
        raise TypeError(
            f"this_replica takes what stack_replicas(...) marked, not a {type(state).__name__}:"
            " state = stack_replicas(state) before training"
        )

    def without_axis(leaf: Leaf) -> Any:
        require_own_row(leaf.name, leaf.value)
        return leaf.value if leaf.marks else leaf.value.reshape(leaf.value.shape[1:])

    return survey(state.per_replica).map(without_axis)
