"""The form in which an algorithm has its averages, before they are multiplied out: arrays, or factors of them.

    averages, state = await step_in_factors(PowerSGD(4), ops, gradients, state, step)      # name → array, or LowRank

Who hands averages on sends factors, which are as many times smaller as what was compressed. Of a `Compressor` whose `compress` returns a `LowRank` that
is known. Any other algorithm has arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.factors import LowRank
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.programs import Program


class FactorSpecs(NamedTuple):
    """Shapes and dtype of the factors of an average."""

    p: Spec
    q: Spec


def step_in_factors(
    algorithm: Algorithm, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
) -> Program[tuple[dict[str, A | LowRank[A]], State[A]]]:
    """`algorithm.step` after its `start_step`, with averages that are not multiplied out where the algorithm knows them as factors."""
    own: Any = algorithm
    program: Program[tuple[dict[str, A | LowRank[A]], State[A]]] = (
        own.step_in_factors if knows_factors(algorithm) else own.step
    )(ops, gradients, state, step)
    return program


def knows_factors(algorithm: Algorithm) -> bool:
    """Whether it has a `step_in_factors`, and not one that was written for another `step` than its own."""
    kind = type(algorithm)
    owner = next((each for each in kind.__mro__ if {"step", "step_in_factors"} & vars(each).keys()), kind)
    return {"step", "step_in_factors"} <= vars(owner).keys()
