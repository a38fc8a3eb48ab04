"""Groups of replicas, in the terms of JAX.

Groups that lie along some of the mesh axes that the replicas span exchange over those axes, which
JAX can do everywhere. Any others take `axis_index_groups`, which JAX has under `pmap` and
`shard_map`, for sums too in groups of unequal size, but not under `vmap`, nor for sums where it
keeps track of what varies (`check_vma=True`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.core.protocol.groups import Groups, require_partition
from gradwire.jax_backend.axes.mapped_axis import AxisName, axes_of, is_manual

T = TypeVar("T")

#: Marks a function of the program all of whose collectives, of one kind and dtype, are one message.
MESSAGE = "gradwire_message"


@dataclass(frozen=True)
class Peers:
    """The replicas that one exchanges with: all along `axes`, or only its group. No axes: nobody.

    Attributes:
        axes: mapped axes.
        groups: of the replicas along all of these axes, in the order in which they count. None: all
            of them.
    """

    axes: tuple[str, ...]
    groups: Groups | None = None

    @property
    def size(self) -> int:
        """How many exchange, this replica included. Of groups of unequal size, those of the
        first."""
        if self.groups is not None:
            return len(self.groups[0])
        size: int = lax.axis_size(self.axes) if self.axes else 1
        return size

    def count(self, dtype: Any) -> int | jax.Array:
        """`size`, of groups of unequal size too, where it is an array of this dtype."""
        if self.groups is None or len({len(members) for members in self.groups}) == 1:
            return self.size
        return self._of_own([[len(members)] * len(members) for members in self.groups], dtype)

    def index(self) -> jax.Array:
        """The index of this replica among them, int32."""
        if self.groups is not None:
            return self._of_own([list(range(len(members))) for members in self.groups], jnp.int32)
        return jnp.asarray(lax.axis_index(self.axes) if self.axes else 0, jnp.int32)

    def _of_own(self, values: list[list[int]], dtype: Any) -> jax.Array:
        by_replica = dict(
            zip(itertools.chain(*self.groups or ()), itertools.chain(*values), strict=True)
        )
        return jnp.asarray([by_replica[i] for i in sorted(by_replica)], dtype)[
            lax.axis_index(self.axes)
        ]

    def exchange(
        self, collective: Callable[..., Any], arrays: list[jax.Array], *args: Any, **options: Any
    ) -> list[jax.Array]:
        """`collective` of `jax.lax`, of these arrays over the axes within the groups, as one
        message. Raises NotImplementedError where JAX cannot, see above."""
        if self.groups is not None:
            options["axis_index_groups"] = self.groups
        try:
            return one_message(lambda xs: collective(xs, self.axes, *args, **options), arrays)
        except AssertionError as error:  # of JAX, which has no message for it
            kinds = {axis: is_manual(axis) for axis in self.axes}
            if len({*kinds.values()}) == 1:
                raise
            mapped = [axis for axis, manual in kinds.items() if not manual]
            raise NotImplementedError(
                f"the axes {self._said()!r}: {', '.join(map(repr, mapped))} of jax.vmap, and the"
                " others of jax.shard_map or jax.pmap. JAX sums over both together, and gathers"
                " over axes of one kind only. Map all of them with jax.shard_map, or average over"
                " them uncompressed: all_reduce_mean"
            ) from error
        except NotImplementedError as error:
            if self.groups is None:
                raise
            raise NotImplementedError(
                f"groups {self.groups} of the axis {self._said()!r}: under jax.vmap, and for sums"
                " under jax.shard_map(check_vma=True), JAX exchanges over whole mesh axes only."
                " Pass check_vma=False to jax.shard_map, or let the replicas span several axes"
                " along which the groups lie, as in axis_name=('node', 'data')"
            ) from error

    def _said(self) -> AxisName:
        return self.axes[0] if len(self.axes) == 1 else self.axes


def one_message(collectives: Callable[[T], T], arrays: T) -> T:
    """`collectives(arrays)`, which counts as one message: JAX has a `psum` for each array of a
    list, and XLA joins them again."""

    def message(xs: T) -> T:
        return collectives(xs)

    message.__name__ = MESSAGE
    result: T = jax.jit(message)(arrays)
    return result


def peers_of(groups: Groups | None, axis_name: AxisName, *, ranked: bool = True) -> Peers:
    """The replicas that one exchanges with, in a partition of the replicas, which are numbered as
    `lax.axis_index(axis_name)` does. None: with all.

    `ranked`: it matters who comes first in a group, and that all groups have one size. For a sum
    neither does. Raises ValueError for groups that are no partition, or of several sizes.
    """
    axes = axes_of(axis_name)
    if groups is None:
        return Peers(axes)
    sizes = tuple(lax.axis_size(a) for a in axes)
    require_partition(groups, math.prod(sizes), equal=ranked)
    if not ranked:
        groups = tuple(tuple(sorted(members)) for members in groups)
    along = axes_along(groups, axes, sizes)
    return Peers(axes, groups) if along is None else Peers(along)


def mean_by_sum(
    total: Callable[[list[jax.Array]], list[jax.Array]],
    arrays: Sequence[jax.Array],
    replicas: int | jax.Array,
) -> list[jax.Array]:
    """The averages of arrays of one dtype, by a function that sums them over `replicas` replicas.

    The sum is divided: XLA does that where the average is used, at no cost. A quotient that is
    summed takes a pass over memory, and as much memory as the array. In float16 the sum may be more
    than the largest number, 65,504, where the average is not, so it is divided first; bfloat16
    reaches as far as float32.
    """
    if any(x.dtype == jnp.float16 for x in arrays):
        return total([x / replicas for x in arrays])
    return [x / replicas for x in total(list(arrays))]


def axes_along(
    groups: Groups, axes: tuple[str, ...], sizes: tuple[int, ...]
) -> tuple[str, ...] | None:
    """Those axes over which replicas exchange as within the groups; None if there are none such, ()
    for groups of one replica each. Axes of one replica are among them: to exchange over these costs
    nothing, and only so JAX knows that the result does not vary along them."""
    wanted = set(groups)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    for count in range(len(axes) + 1):
        for chosen in itertools.combinations(range(len(axes)), count):
            last = np.moveaxis(numbers, chosen, range(-count, 0)) if count else numbers
            rows = last.reshape(-1, math.prod(sizes[i] for i in chosen))
            if {tuple(row.tolist()) for row in rows} == wanted:
                return tuple(a for i, a in enumerate(axes) if i in chosen or sizes[i] == 1)
    return None


def node_size(axis_name: AxisName) -> int:
    """How many consecutive replicas share a machine: those with the same index on the first of
    several axes, or, along one axis, those of a process. Raises ValueError if the replicas cannot
    be divided among the processes."""
    axes = axes_of(axis_name)
    replicas: int = lax.axis_size(axis_name)
    if len(axes) > 1:
        size: int = lax.axis_size(axes[1:])
        return size
    if replicas % jax.process_count():
        raise ValueError(
            f"'node' cannot be {replicas} replicas divided by {jax.process_count()} processes; say"
            " how many replicas share a machine"
        )
    share: int = replicas // jax.process_count()
    return share
