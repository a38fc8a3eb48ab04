"""The bytes that an algorithm remembers on a replica, from step to step, beside parameters and gradients.

memory_bytes(PowerSGD(4), specs, 8)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run, state_bytes
from gradwire.core.plan.local_sgd import local_memory


def memory_bytes(algorithm: Any, specs: Mapping[str, Spec], replicas: int | None) -> int:
    """Bytes of the memory of an algorithm, or of local SGD, on each replica, but for what an outer optimizer of a framework remembers. Raises what its
    `init` raises."""
    if not isinstance(algorithm, LocalSGD):
        return state_bytes(dry_run(algorithm, specs, replicas).memory)
    # What is remembered does not depend on who averages.
    period = max(algorithm.fragments, algorithm.overlap + 1)
    alone = without_levels(replace(algorithm.without_factory(), period=period, subgroup=None))
    return state_bytes(local_memory(alone, specs, 1))
