"""What one replica owns of a memory of two levels, as the algorithm knows it."""

from __future__ import annotations

from typing import Any

from gradwire.core.algorithm import State
from gradwire.core.algorithms.two_level import TwoLevel
from gradwire.core.one_program import OWN, SharedMemory
from gradwire.jax_backend.state import DataParallelState

Memory = dict[str, dict[str, Any]]


def owned_memory(
    averages: DataParallelState, memory: Memory, levels: TwoLevel | None, replica: int, replicas: int
) -> Memory:
    """The memory of a replica under local SGD, parameter → name → array, given what all of a node have. None: there is one level."""
    if levels is None:
        return memory
    assert averages.record is not None
    assert averages.record.division is not None
    parts = levels.divided_as(averages.record.division, levels.near(replicas), None)
    vectors = averages.local.per_replica.get(OWN, {})
    own = {dtype: {OWN: x[replica].reshape(-1)} for dtype, x in vectors.items()}
    place = replica % averages.record.division.places
    mine = SharedMemory(parts).of_place(State({}, memory | own), place, memory)
    common = {n: {k: x for k, x in kept.items() if k in ("anchor", "velocity")} for n, kept in memory.items()}
    return {n: kept | mine.tensors.get(n, {}) for n, kept in common.items()}
