"""Two levels of replicas in the terms of JAX: `within` as a mesh axis, or as groups of the indices along one axis."""

from __future__ import annotations

import jax
from jax import lax

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.two_level import TwoLevel, TwoLevelOnReplica, without_levels
from gradwire.core.division import Division, divide
from gradwire.core.ops import Spec
from gradwire.jax_backend.axis import AxisName, axes_of, is_bound
from gradwire.jax_backend.groups import node_size


def with_near_axis(algorithm: Algorithm, axis_name: AxisName) -> AxisName:
    """The axes that all replicas span, that of `within` last. Raises TypeError for two levels inside another algorithm."""
    if not isinstance(algorithm, TwoLevel):
        if without_levels(algorithm) is not algorithm:
            raise TypeError(
                f"{algorithm!r} has two levels inside; give TwoLevel itself, with the other algorithm inside"
            )
        return axis_name
    within = algorithm.within
    if not isinstance(within, str) or within == "node":
        return axis_name
    axes = tuple(axis for axis in axes_of(axis_name) if axis != within)
    if not axes:
        raise ValueError(
            f"axis_name={axis_name!r} and within={within!r} are one axis; give the axis between nodes as well"
        )
    return (*axes, within)


def divided_at_init(algorithm: TwoLevel, specs: dict[str, Spec], axis_name: AxisName) -> TwoLevelOnReplica:
    """The algorithm with its work divided, where it may not be known how many nodes there are. Raises ValueError where it is not known how many replicas
    are in one."""
    places = _places(algorithm, axis_name)
    return algorithm.divided_as(divide(algorithm.algorithm, specs, places), (tuple(range(places)),), None)


def divided_in_map(algorithm: TwoLevel, division: Division, axis_name: AxisName) -> TwoLevelOnReplica:
    """The algorithm as all replicas run it, inside the map. Raises ValueError where replicas cannot be divided so, or not as in `init`."""
    within = algorithm.within
    places = _places(algorithm, axis_name)
    if places != division.places:
        raise ValueError(
            f"within={within!r} are {places} replicas, and the state was made for {division.places}: make it anew, or take over what fits with "
            "from_portable(to_portable(state, algorithm), …)"
        )
    by_number = TwoLevel(algorithm.algorithm, within if isinstance(within, tuple) else places)
    return algorithm.divided_as(division, by_number.near(lax.axis_size(axis_name)), None)


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
