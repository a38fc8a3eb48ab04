"""Averages by sums, over all replicas and within groups of them.

Groups that lie along some of the mesh axes that the replicas span are sums over those axes, which JAX can do everywhere. Any others take
`axis_index_groups`, which JAX has under `pmap` and `shard_map(check_vma=False)`, with groups of unequal size too, but not where it keeps
track of what varies (`check_vma=True`), nor under `vmap`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.core.programs import Groups
from gradwire.jax_backend.axis import AxisName, axes_of, tracked, vary_if_tracked

__all__ = ["axes_along", "mean_by_sum", "mean_in_groups", "node_size"]


def mean_by_sum(
    total: Callable[[list[jax.Array]], list[jax.Array]], arrays: Sequence[jax.Array], replicas: int | jax.Array
) -> list[jax.Array]:
    """The averages of arrays of one dtype, by a function that sums them over `replicas` replicas.

    The sum is divided: XLA does that where the average is used, at no cost. A quotient that is summed takes a pass over memory, and as much
    memory as the array. In float16 the sum may be more than the largest number, 65,504, where the average is not, so it is divided first;
    bfloat16 reaches as far as float32.
    """
    if any(x.dtype == jnp.float16 for x in arrays):
        return total([x / replicas for x in arrays])
    return [x / replicas for x in total(list(arrays))]


def mean_in_groups(arrays: Sequence[jax.Array], groups: Groups, axis_name: AxisName) -> list[jax.Array]:
    """The averages of arrays of one dtype over this replica's group.

    Args:
        arrays: of any shapes.
        groups: a partition of the replicas, which are numbered as `lax.axis_index(axis_name)` does.
        axis_name: the axis of the replicas, or axes.

    Raises:
        NotImplementedError: for groups that JAX cannot sum in, see above.
    """
    axes = axes_of(axis_name)
    along = axes_along(groups, axes, tuple(lax.axis_size(a) for a in axes))
    if along is None and tracked(axis_name):
        raise NotImplementedError(
            f"averages in the groups {groups} of the axis {axis_name!r}: under jax.shard_map(check_vma=True) JAX sums over whole mesh axes "
            "only. Pass check_vma=False to jax.shard_map, or let the replicas span several axes along which the groups lie, as in "
            "axis_name=('node', 'data')"
        )
    own = vary_if_tracked(list(arrays), axis_name)
    if along == ():
        return own

    def total(xs: list[jax.Array]) -> list[jax.Array]:
        result: list[jax.Array] = (
            lax.psum(xs, axis_name, axis_index_groups=groups) if along is None else lax.psum(xs, along)  # type: ignore[no-untyped-call]
        )
        return result

    return mean_by_sum(total, own, _size_of_own(groups, axis_name, own[0].dtype))


def axes_along(groups: Groups, axes: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[str, ...] | None:
    """Those axes over which a sum is the sum within the groups; None if there are none such, () for groups of one replica each."""
    wanted = {frozenset(members) for members in groups}
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(range(len(axes)), count):
            last = np.moveaxis(numbers, chosen, range(-count, 0)) if count else numbers
            rows = last.reshape(-1, math.prod(sizes[i] for i in chosen))
            if {frozenset(row.tolist()) for row in rows} == wanted:
                return tuple(axes[i] for i in chosen)
    return None


def node_size(axis_name: AxisName) -> int:
    """How many consecutive replicas share a machine: those with the same index on the first of several axes, or, along one axis, those
    of a process, if every process has equally many.

    Raises:
        ValueError: if the replicas cannot be divided among the processes.
    """
    axes = axes_of(axis_name)
    replicas: int = lax.axis_size(axis_name)
    if len(axes) > 1:
        size: int = lax.axis_size(axes[1:])
        return size
    if replicas % jax.process_count():
        raise ValueError(
            f"'node' cannot be {replicas} replicas divided by {jax.process_count()} processes; say how many replicas share a machine"
        )
    share: int = replicas // jax.process_count()
    return share


def _size_of_own(groups: Groups, axis_name: AxisName, dtype: jnp.dtype) -> int | jax.Array:
    sizes = {len(members) for members in groups}
    if len(sizes) == 1:
        return sizes.pop()
    by_replica = {replica: len(members) for members in groups for replica in members}
    return jnp.asarray([by_replica[i] for i in sorted(by_replica)], dtype)[lax.axis_index(axis_name)]
