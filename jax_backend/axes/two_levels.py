"""Two levels of replicas in the terms of JAX: `within` as a mesh axis, or as groups of the indices
along one axis. In a portable state each node has one row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax import lax

from gradwire.core.algorithms.two_level import TwoLevel, levels_of, with_levels
from gradwire.core.protocol.groups import Groups
from gradwire.jax_backend.axes.mapped_axis import AxisName, axes_of, is_bound
from gradwire.jax_backend.axes.replica_groups import node_size

T = TypeVar("T")


def with_near_axis(algorithm: Any, axis_name: AxisName) -> AxisName:
    """The axes that all replicas span: that of `within` last, if the algorithm, or what is inside
    it, has two levels."""
    levels = levels_of(algorithm)
    within = None if levels is None else levels.within
    if not isinstance(within, str) or within == "node":
        return axis_name
    axes = tuple(axis for axis in axes_of(axis_name) if axis != within)
    if not axes:
        raise ValueError(
            f"axis_name={axis_name!r} and within={within!r} are one axis; give the axis between"
            " nodes as well"
        )
    return (*axes, within)


def with_numbers(algorithm: T, axis_name: AxisName) -> T:
    """The algorithm with nodes of so many replicas, in place of "node" and of a mesh axis; itself
    if it has one level. Raises ValueError where nobody knows."""

    def numbered(levels: TwoLevel) -> TwoLevel:
        return (
            replace(levels, within=_size(levels.within, axis_name))
            if isinstance(levels.within, str)
            else levels
        )

    return with_levels(algorithm, numbered)


def nodes_of(algorithm: Any, axis_name: AxisName, replicas: int) -> Groups:
    """The replicas of each node, of so many that run this algorithm; with one level each by itself.

    Raises:
        ValueError: they cannot be divided so, or it is not known here how many are in a node.
    """
    levels = levels_of(with_numbers(algorithm, axis_name))
    return (
        tuple((replica,) for replica in range(replicas))
        if levels is None
        else levels.near(replicas)
    )


def _size(within: str, axis_name: AxisName) -> int:
    if within == "node":
        if is_bound(axis_name):
            return node_size(axis_name)
        raise ValueError(
            "within='node' is known inside the map only; give the number of replicas in a node"
        )
    if is_bound(within):
        size: int = lax.axis_size(within)
        return size
    shape = jax.sharding.get_abstract_mesh().shape
    if within not in shape:
        raise ValueError(
            f"within={within!r}: outside the map nobody knows how long that axis is. Put the mesh"
            " in context, `with jax.set_mesh(mesh)`, or give the number of replicas in a node"
        )
    return int(shape[within])
