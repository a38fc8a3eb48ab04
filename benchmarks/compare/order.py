"""Whether the order of methods part of the way is that of the end, by Kendall's tau."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np

from gradwire.core.advise.compare.verdicts import quantile

#: Of a method with its learning rates: seed → steps done → held-out loss.
Curves = dict[int, dict[int, float]]
#: The learning rate, and the outer one where there is one.
Rates = tuple[float, float | None]
Pair = tuple[str, str]


def best_of(
    runs: Sequence[Mapping[str, Any]], steps: int, seeds: Sequence[int]
) -> dict[str, tuple[Rates, Curves]]:
    """The frontier's trainings of this length in torch, of the methods that have all these seeds
    with the same rates: those of least loss, if several have."""
    found: dict[tuple[str, Rates], Curves] = defaultdict(dict)
    for run in runs:
        if run["backend"] == "torch" and run["curve"][-1][0] == steps:
            found[run["subject"], (run["rate"], run.get("outer_rate"))][run["seed"]] = {
                step: math.inf if loss is None else loss for step, loss in run["curve"]
            }
    best: dict[str, tuple[Rates, Curves]] = {}
    for (subject, rates), curves in found.items():
        if set(seeds) <= set(curves) and (
            subject not in best
            or final_of(curves, steps, seeds) < final_of(best[subject][1], steps, seeds)
        ):
            best[subject] = rates, curves
    return best


def curves_of(
    runs: Sequence[Mapping[str, Any]], steps: int, seeds: Sequence[int]
) -> dict[str, Curves]:
    """Their curves alone."""
    return {subject: curves for subject, (_, curves) in best_of(runs, steps, seeds).items()}


def final_of(curves: Curves, steps: int, seeds: Sequence[int]) -> float:
    """The loss in the end, the mean over seeds."""
    return mean(curves[seed][steps] for seed in seeds)


def told_apart(curves: Mapping[str, Curves], steps: int, seeds: Sequence[int]) -> list[Pair]:
    """The pairs of methods that differ in the end by more than noise: the interval of their
    difference, paired by seed, does not hold zero. The lower loss is first."""
    found = []
    for pair in combinations(curves, 2):
        a, b = ([curves[name][seed][steps] for seed in seeds] for name in pair)
        differences = np.subtract(a, b)
        if abs(differences.mean()) > quantile(len(seeds) - 1) * differences.std(ddof=1) / math.sqrt(
            len(seeds)
        ):
            found.append(pair if differences.mean() < 0 else pair[::-1])
    return found


def kendall(losses: Mapping[str, float], pairs: Sequence[Pair]) -> float:
    """Kendall's tau among these pairs, of which the first is the lower in the end: those whose
    losses have this order, less those that have the other, of all."""
    return mean(float(np.sign(losses[b] - losses[a])) for a, b in pairs)
