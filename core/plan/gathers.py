"""How large a method that gathers may grow: from how many replicas on it sends more than an average
in 8 bits, `WireDtype(AllReduce(), "int8")`."""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.two_level import levels_of, without_levels
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol.groups import NoPartition

#: Far enough apart that halves of bytes do not show.
FEW, MANY = 2, 1002
#: Parts of what is sent that do not count as growth: equal shares are filled up.
FILLED = 0.03


def outgrown_at(algorithm: Algorithm, specs: Mapping[str, Spec]) -> int | None:
    """The least number of replicas with which a step sends more than an average in 8 bits. None:
    what the algorithm sends does not grow with the replicas, or it is made for some number of
    them."""

    levels = levels_of(algorithm)
    if levels is not None:  # nodes count as replicas do otherwise
        nodes = outgrown_at(without_levels(algorithm), specs)
        return (
            nodes * levels.within if nodes is not None and isinstance(levels.within, int) else None
        )

    def sent(algorithm: Algorithm, replicas: int) -> float:
        steps = dry_run(algorithm, specs, replicas).traffic
        return sum(step.nbytes for step in steps) / len(steps)

    def gathered(replicas: int) -> float:
        """Bytes of gathers alone: the second half of an average, filled up, does not count."""
        steps = dry_run(algorithm, specs, replicas).traffic
        parts = [part for step in steps for part in step.parts if part.pattern != "all_reduce"]
        sign = [1 if part.pattern == "all_gather" else -1 for part in parts]
        return sum(s * part.nbytes for s, part in zip(sign, parts, strict=True)) / len(steps)

    try:
        few, many = sent(algorithm, FEW), sent(algorithm, MANY)
        if gathered(MANY) <= FILLED * few:
            return None
    except NoPartition:  # its groups are of some number of replicas
        return None
    if many - few <= FILLED * few:
        return None
    eight_bits = WireDtype(AllReduce(), "int8")
    room, filled = sent(eight_bits, FEW) - few, sent(eight_bits, MANY) - sent(eight_bits, FEW)
    # of a model so small that replicas have less than a block each, the average grows as much
    if many - few <= filled:
        return None
    each = (many - few) / (MANY - FEW)
    return max(1, int(room // each) + FEW + 1)
