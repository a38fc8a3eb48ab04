"""How large a method that gathers may grow: from how many replicas on it sends more than an average in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.core.algorithm import Algorithm
from gradwire.core.kernels.abstract import AbstractOps
from gradwire.core.ops import Spec
from gradwire.core.plan.traffic import traffic
from gradwire.core.programs import NoPartition, UnknownWorldSize

__all__ = ["outgrown_at"]

#: Far enough apart that halves of bytes do not show.
FEW, MANY = 2, 1002


def outgrown_at(algorithm: Algorithm, specs: Mapping[str, Spec]) -> int | None:
    """The least number of replicas with which a step sends more than one byte for each element, as an average in 8 bits does without its
    scales. None: what the algorithm sends does not grow with the replicas, or it is made for some number of them."""
    state = algorithm.init(AbstractOps(), specs)

    def sent(replicas: int | None) -> float:
        phases = range(algorithm.cycle)
        steps = [traffic(algorithm, specs, state, algorithm.start_step, p, world_size=replicas) for p in phases]
        return sum(step.nbytes for step in steps) / len(steps)

    try:
        sent(None)
    except UnknownWorldSize:
        pass
    else:
        return None
    try:
        few, many = sent(FEW), sent(MANY)
    except NoPartition:  # its groups are of some number of replicas
        return None
    each = (many - few) / (MANY - FEW)
    elements = sum(spec.size for spec in specs.values())
    return max(1, int((elements - few) // each) + FEW + 1) if each > 0 else None
