"""The bytes that an algorithm remembers on a replica, from step to step, beside parameters and gradients.

memory_bytes(PowerSGD(4), specs, 8)
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from gradwire.core.algorithm import State, on_replica
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps, abstract_arrays
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec


def state_bytes(state: State[AbstractArray], of: Container[str] | None = None) -> int:
    """Bytes of all memories of tensors; or `of` those with these names alone."""
    return sum(x.nbytes for memory in state.tensors.values() for key, x in memory.items() if of is None or key in of)


def memory_bytes(algorithm: Any, specs: Mapping[str, Spec], replicas: int | None) -> int:
    """Bytes of the memory of an algorithm, or of local SGD, on the first replica. Raises what its `init` raises."""
    first, ops = on_replica(algorithm, specs, 0, replicas), AbstractOps()
    if not isinstance(first, LocalSGD):
        return state_bytes(first.init(ops, specs))
    # What is remembered does not depend on who averages.
    alone = replace(first, period=first.fragments, subgroup=None)
    params = abstract_arrays(specs)
    return state_bytes(alone.init(ops, params, 1))
