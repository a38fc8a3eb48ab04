"""When a comparison looks at held-out losses, and from which step on it says something about a
method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.core.algorithm import nested
from gradwire.core.algorithms.top_k import TopK
from gradwire.core.local_sgd.algorithm import LocalSGD

#: How often a run is evaluated.
LOOKS = 10
#: Averages of all parameters before which nothing is said of a local method.
OUTER_STEPS = 3


def evaluated_at(algorithm: Any, replicas: int, steps: int) -> list[int]:
    """The steps after which a run of this method is evaluated: evenly, the end included. Replicas
    that train by themselves are evaluated right after an average, or not at all."""
    evenly = [-(-steps * k // LOOKS) for k in range(1, LOOKS + 1)]
    if isinstance(algorithm, LocalSGD):
        period, first = _averages(algorithm, replicas)
        evenly = [
            n if n <= algorithm.start_step else first + (n - first) // period * period
            for n in evenly
            if n <= algorithm.start_step or n >= first
        ]
    return sorted(set(evenly))


def ready_at(algorithm: Any, replicas: int) -> int:
    """The number of steps from which on a difference from uncompressed averages says something:
    after the first compressed ones; of a local method after three averages of all parameters."""
    if isinstance(algorithm, LocalSGD):
        period, first = _averages(algorithm, replicas)
        return first + (OUTER_STEPS - 1) * period
    return int(algorithm.start_step) + 1


def _averages(local: LocalSGD, replicas: int) -> tuple[int, int]:
    """The period in which all parameters have been averaged over all replicas once, and the number
    of steps after which they first have."""
    period = local.levels(replicas)[0].period
    return period, local.start_step + period + local.overlap


def doubts(algorithm: Any, replicas: int, steps: int, *, searched: bool = False) -> list[str]:
    """What a reader of the verdict has to know of this method, whose learning rate was searched or
    not; [] if nothing."""
    found = []
    ready = ready_at(algorithm, replicas)
    if steps < ready and isinstance(algorithm, LocalSGD):
        found.append(
            f"no verdict before {OUTER_STEPS} averages of all parameters: give --steps {ready} or"
            " more"
        )
    elif steps < ready:
        found.append(f"begins at step {algorithm.start_step}: give more --steps")
    elif steps < 2 * algorithm.start_step:
        found.append(
            f"averages in full until step {algorithm.start_step}: {steps} steps say little of the"
            " rest"
        )
    if _rate_matters(algorithm) and not searched:
        found.append(
            "its best learning rate is often not that of uncompressed averages, which it was given:"
            " search it with --rates 0.5 1 2"
        )
    return found


def _rate_matters(algorithm: Any) -> bool:
    """Families of which a rate that suits uncompressed averages says too little: most of a gradient
    is left out, or differences have 2 bits."""
    inner = [*nested(algorithm)]
    two_bits = any(getattr(each, "dtype", None) == "int2" for each in inner)
    return any(isinstance(each, TopK) for each in inner) or (
        isinstance(algorithm, LocalSGD) and two_bits
    )


def warm_up(rates: Sequence[float]) -> int:
    """The number of steps in which the rate of a run has risen."""
    return rates.index(max(rates)) if rates else 0
