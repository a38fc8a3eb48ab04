"""Two levels of replicas in the terms of JAX: `within` as a mesh axis, or as groups of the indices along one axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax import lax

from gradwire.core.algorithms.two_level import TwoLevel, levels_of, with_levels
from gradwire.jax_backend.axis import AxisName, axes_of, is_bound
from gradwire.jax_backend.groups import node_size

T = TypeVar("T")


def with_near_axis(algorithm: Any, axis_name: AxisName) -> AxisName:
    """The axes that all replicas span: that of `within` last, if the algorithm, or what is inside it, has two levels."""
    levels = levels_of(algorithm)
    within = None if levels is None else levels.within
    if not isinstance(within, str) or within == "node":
        return axis_name
    axes = tuple(axis for axis in axes_of(axis_name) if axis != within)
    if not axes:
        raise ValueError(
            f"axis_name={axis_name!r} and within={within!r} are one axis; give the axis between nodes as well"
        )
    return (*axes, within)


def in_map(algorithm: T, axis_name: AxisName) -> T:
    """The algorithm with nodes of so many replicas, which is known inside the map; itself if it has one level."""
    return with_levels(
        algorithm,
        lambda two: two if isinstance(two.within, tuple) else replace(two, within=_places(two, axis_name)),
    )


def _places(algorithm: TwoLevel, axis_name: AxisName) -> int:
    within = algorithm.within
    if isinstance(within, int):
        return within
    if isinstance(within, tuple):
        return len(within[0])
    if within == "node":
        if not is_bound(axis_name):
            raise ValueError(
                "within='node' is known inside the map only: call init there, or give the number of replicas in a node"
            )
        return node_size(axis_name)
    if is_bound(within):
        size: int = lax.axis_size(within)
        return size
    shape = jax.sharding.get_abstract_mesh().shape
    if within not in shape:
        raise ValueError(
            f"within={within!r}: outside the map nobody knows how long that axis is, and memory is divided among its replicas. Call init with the mesh in "
            "context (jax.set_mesh(mesh)), or inside the map, or give the number of replicas"
        )
    return int(shape[within])
