"""Two levels of replicas in the terms of JAX: `within` as a mesh axis, or as groups of the indices along one axis; and their memory in portable form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.two_level import (
    TwoLevel,
    TwoLevelOnReplica,
    levels_of,
    with_levels,
    without_levels,
)
from gradwire.core.division import Division, divide
from gradwire.core.one_program import OWN, SharedMemory
from gradwire.core.ops import Spec
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


def divided_at_init(algorithm: T, specs: dict[str, Spec], axis_name: AxisName) -> T:
    """The algorithm, or the schedule that has it for a compressor, with its work divided, where it may not be known how many nodes there are; itself if
    it has one level. Raises ValueError where it is not known how many replicas are in a node."""

    def divided(levels: TwoLevel) -> Algorithm:
        places = _places(levels, axis_name)
        if places == 1:
            return levels.algorithm
        return levels.divided_as(divide(levels.algorithm, specs, places), (tuple(range(places)),), None)

    return with_levels(algorithm, divided)


def divided_in_map(algorithm: T, division: Division | None, axis_name: AxisName) -> T:
    """The algorithm as all replicas run it, inside the map; itself if it has one level. Raises ValueError where replicas cannot be divided so, or not as
    in `init`, where nothing is divided among the replicas of nodes of one."""

    def divided(levels: TwoLevel) -> Algorithm:
        within, places = levels.within, _places(levels, axis_name)
        before = 1 if division is None else division.places
        if places != before:
            raise ValueError(
                f"within={within!r} are {places} replicas, and the state was made for {before}: make it anew, or take over what fits "
                "with from_portable(to_portable(state, algorithm), …)"
            )
        by_number = TwoLevel(levels.algorithm, within if isinstance(within, tuple) else places)
        near = by_number.near(lax.axis_size(axis_name))
        return levels.algorithm if division is None else levels.divided_as(division, near, None)

    return with_levels(algorithm, divided)


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


def portable_parts(
    state: State[Any], rows: Mapping[str, Any], algorithm: Algorithm, division: Division, *, mean: bool
) -> tuple[int, dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """How many nodes there are; what is equal on all replicas, by name of the block; and the errors, a row for each node, or the `mean`.

    Args:
        state: what is equal on all replicas.
        rows: dtype → of each replica, what it owns.
        algorithm: that was given to `average_gradients`, or the one inside.
        division: in the state.
    """
    own = {dtype: x if x.shape[0] > 1 else np.repeat(x, division.places, 0) for dtype, x in rows.items()}
    replicas = max((len(x) for x in own.values()), default=division.places)
    parts, near = _in_groups(algorithm, division, replicas)
    memory = SharedMemory(parts)
    tensors: dict[str, dict[str, Any]] = {}
    local: dict[str, dict[str, Any]] = {}
    for place in range(division.places):
        states = []
        for members in near:
            mine = {dtype: {OWN: x[members[place]]} for dtype, x in own.items()}
            whole = State(dict(state.shared), {**state.tensors, **mine})
            states.append(memory.of_place(whole, place, division.specs_of(place)))
        for name in states[0].tensors:
            block = _block_name(division, name, place)
            first = states[0].tensors[name]
            tensors[block] = {key: x for key, x in first.items() if key not in parts.per_replica}
            for key in first.keys() & parts.per_replica:
                stacked = np.stack([each.tensors[name][key] for each in states])
                if mean:
                    stacked = stacked.mean(axis=0, keepdims=True, dtype=np.float64).astype(stacked.dtype)
                local.setdefault(block, {})[key] = stacked
    return len(near), tensors, local


def from_portable_parts(
    given: Mapping[str, Any], algorithm: Algorithm, like: State[Any], division: Division, replicas: int
) -> tuple[State[Any], dict[str, Any]]:
    """What is equal on all replicas, of a portable state of any nodes or of one level; and dtype → of each replica, what it owns. A factor of a block
    that the state has not begins as in `like`.

    Raises:
        ValueError: the state is of another algorithm, or of other parameters.
    """
    parts, near = _in_groups(algorithm, division, replicas)
    memory, inner = SharedMemory(parts), repr(without_levels(algorithm))
    theirs = {_parameter(name)[0] for section in ("tensors", "local") for name in given[section]}
    if given["algorithm"] != inner:
        raise ValueError(f"the state is of {given['algorithm']}, not of {inner}")
    if theirs != memory.compressed:
        raise ValueError(
            f"the state is of another model: {sorted(theirs ^ memory.compressed)} are compressed there or here alone"
        )
    new: State[Any] = State(
        {key: given["shared"].get(key, x) for key, x in like.shared.items()},
        {name: dict(kept) for name, kept in like.tensors.items()},
    )
    vectors = {d: np.zeros((replicas, n), d) for d, n in memory.lengths(own=True).items()}
    for place, mine in enumerate(memory.kept):
        starts = dict.fromkeys(vectors, 0)
        for k in mine:
            block = division.block(k.name, place)
            assert block is not None
            if k.own:
                error = _assembled(given["local"], k.name, k.key)[:, block.start : block.stop]
                each = (
                    error if len(error) == len(near) else np.broadcast_to(error.mean(0), (len(near), *error.shape[1:]))
                )
                start = starts[k.spec.dtype]
                starts[k.spec.dtype] = start + k.spec.size
                for node, members in enumerate(near):
                    vectors[k.spec.dtype][members[place], start : start + k.spec.size] = each[node].reshape(-1)
                continue
            for name, kept in given["tensors"].items():
                exact = name == _block_name(division, k.name, place)
                x = kept.get(k.key) if _parameter(name)[0] == k.name else None
                if x is not None and tuple(x.shape) == k.spec.shape:
                    new.tensors[k.name][k.stored] = x
                    if exact:
                        break
    return new, vectors


def joined(given: Mapping[str, Any]) -> dict[str, Any]:
    """A portable state with the blocks of each parameter put together: its errors, and the first block's factor, as a start for that of the whole."""
    parameters = dict.fromkeys(_parameter(name)[0] for name in (*given["tensors"], *given["local"]))
    tensors: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for name, memory in given["tensors"].items():
        tensors[_parameter(name)[0]] = memory | tensors[_parameter(name)[0]]
    local: dict[str, dict[str, Any]] = {}
    for name, memory in given["local"].items():
        parameter = _parameter(name)[0]
        local[parameter] = {key: _assembled(given["local"], parameter, key) for key in memory}
    return {**given, "tensors": tensors, "local": local}


def _in_groups(
    algorithm: Algorithm, division: Division, replicas: int
) -> tuple[TwoLevelOnReplica, Sequence[tuple[int, ...]]]:
    levels = levels_of(algorithm)
    within = division.places if levels is None else levels.within
    two = TwoLevel(without_levels(algorithm), within if isinstance(within, tuple) else division.places)
    near = two.near(replicas)
    return two.divided_as(division, near, None), near


def _block_name(division: Division, name: str, place: int) -> str:
    block = division.block(name, place)
    assert block is not None
    return name if block.whole else f"{name}[{block.start}:{block.stop}]"


def _parameter(name: str) -> tuple[str, int]:
    """The parameter that a block is of, and its first row."""
    found = re.fullmatch(r"(.*)\[(\d+):\d+\]", name)
    return (found[1], int(found[2])) if found else (name, 0)


def _assembled(local: Mapping[str, Any], parameter: str, key: str) -> Any:
    """The errors of all blocks of a parameter, along the rows; the first axis is that of the nodes."""
    blocks = [(_parameter(name)[1], memory[key]) for name, memory in local.items() if _parameter(name)[0] == parameter]
    return np.concatenate([np.asarray(x) for _, x in sorted(blocks, key=lambda b: b[0])], axis=1)
