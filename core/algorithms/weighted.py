"""Replicas that count by their weight: `Weighted(PowerSGD(rank=4))`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.core.algorithm import Algorithm, State, Stepped
from gradwire.core.algorithms.shared.weighing import Weighing
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.ops import A, Ops
from gradwire.core.protocol.programs import Program
from gradwire.core.protocol.weights import require_weight
from gradwire.core.text.options import check_options
from gradwire.core.text.wording import configured


@dataclass(frozen=True, repr=False)
class Weighted(Wrapper):
    """Another algorithm, whose means count each replica by its weight, `Σ w·x / Σ w`: the tokens of
    its batch, say. Weight 0 is an absent replica.

    The weight of a step is given to the driver: `handle.weight = tokens` in torch, `tx.update(…,
    weight=tokens)` in JAX, `simulator.step(…, weights=[…])`; it is 1 where nothing is said, and 0
    or a number from 1e-18 to 1e18. It travels in float32 in the first message of what is averaged,
    4 bytes more. Floats of 16 bits are sent as they are, with weights in a message beside them,
    summed in float32 and rounded once: as many bytes as an all-reduce. What others compute is that
    of a run without the absent replica, and what is there does not matter, inf and NaN included. It
    receives the average, and its own memory, the error, stays as it was.

    If all weights are 0 nothing is averaged: the memory stays as it was, and `NobodyCounts` is
    raised on all replicas. Where the host cannot know it, in a compiled program or on an
    accelerator, the averages are NaN instead.

    Memory is that of `algorithm`: a checkpoint goes on with weights or without.

    Examples:
        >>> import numpy as np
        >>> from gradwire import AllReduce, Simulator, Weighted
        >>> replicas = Simulator(Weighted(AllReduce()), {"w": (2,)}, replicas=3)
        >>> gradients = [{"w": [1.0, 2.0]}, {"w": [4.0, 8.0]}, {"w": [np.nan, np.inf]}]
        >>> replicas.step(gradients, weights=[2, 1, 0])["w"].tolist()
        [2.0, 4.0]

    Args:
        algorithm: any whose replicas average or gather: all of gradwire's but `Zero`. It goes
            outermost: `Weighted(WireDtype(…))`.

    Raises:
        TypeError: `algorithm` is none, or is weighted already. And where it is registered: it sums,
            or gathers without asking for `replica_weights`.
    """

    weighted = True

    def __post_init__(self) -> None:
        check_options(self)

    def __repr__(self) -> str:
        return configured(self)

    @property
    def biased(self) -> bool:
        """Whether something of the gradients is lost for good, as with `algorithm` alone: see
        `Compressor.biased`."""
        return bool(getattr(self.algorithm, "biased", False))

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any, weight: Any = 1.0
    ) -> Stepped[A]:
        """A step of the inner algorithm. Arguments and results are those of `Algorithm.step`, and
        `weight`, of this replica: a number, or a scalar array."""
        return await weighed(
            Weighing(ops, weight, name=repr(self.algorithm)),
            lambda own: self.algorithm.step(ops, gradients, own, step),
            state,
            self.per_replica,
        )


async def weighed(
    weighing: Weighing[A],
    program: Callable[[State[A]], Program[Stepped[A]]],
    state: State[A],
    per_replica: frozenset[str],
) -> Stepped[A]:
    """A program by weight, which is donated the state: an absent replica keeps what differs between
    replicas as it was."""
    if weighing.present:
        return await weighing.run(program(state))
    ops = weighing.ops
    places = [
        (name, key, x)
        for name, memory in state.tensors.items()
        for key, x in memory.items()
        if key in per_replica
    ]
    given = {name: dict(memory) for name, memory in state.tensors.items()}
    kept = [x for *_, x in places]
    for (name, key, _), x in zip(places, ops.copies(kept), strict=True):
        given[name][key] = x
    averages, after = await weighing.run(program(State(dict(state.shared), given, state.whole)))
    new = [after.tensors[name][key] for name, key, _ in places]
    for (name, key, _), x in zip(places, ops.where_each(weighing.counts, new, kept), strict=True):
        after.tensors[name][key] = x
    return averages, after


def weighted(algorithm: Algorithm) -> Weighted:
    """The algorithm, weighted if it is not."""
    return algorithm if isinstance(algorithm, Weighted) else Weighted(algorithm)


def checked_weights(weights: Sequence[float], replicas: int) -> list[float]:
    """The weights of so many replicas. Raises TypeError, ValueError for what is none."""
    if len(weights) != replicas:
        raise ValueError(f"{len(weights)} weights for {replicas} replicas")
    return [require_weight(w, f"weights[{i}]") for i, w in enumerate(weights)]
