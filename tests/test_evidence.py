"""What the benchmarks of the advice and of comparisons say of their figures."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.advice.regret import regrets
from benchmarks.compare.order import best_of, curves_of, final_of, kendall, told_apart
from tests.launch import ROOT

FRONTIER = json.loads((ROOT / "benchmarks" / "results" / "frontier.json").read_text())["runs"]


@given(st.lists(st.floats(1, 2), min_size=2, max_size=12, unique=True), st.randoms())
def test_kendall_is_kendall(final, random):
    stats = pytest.importorskip("scipy.stats")
    names = [str(i) for i in range(len(final))]
    losses = random.sample(final, len(final))
    order = sorted(names, key=lambda name: final[int(name)])
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]
    expected = stats.kendalltau(losses, final).statistic
    assert kendall(dict(zip(names, losses, strict=True)), pairs) == pytest.approx(expected)


def test_pairs_beyond_noise_are_those_whose_interval_holds_no_zero():
    stats = pytest.importorskip("scipy.stats")
    seeds = (0, 1, 2)
    curves = curves_of(FRONTIER, 240, seeds)
    assert len(curves) > 2
    pairs = told_apart(curves, 240, seeds)
    told = {frozenset(pair) for pair in pairs}
    for a in curves:
        for b in curves:
            losses = [[curves[name][seed][240] for seed in seeds] for name in (a, b)]
            if a < b:
                assert (frozenset((a, b)) in told) == (stats.ttest_rel(*losses).pvalue < 0.05), (a, b)
    assert all(final_of(curves[a], 240, seeds) < final_of(curves[b], 240, seeds) for a, b in pairs)


def test_a_method_is_taken_with_its_best_rates_the_outer_one_included():
    def run(outer_rate, seed, loss):
        return {
            "subject": "DiLoCo",
            "backend": "torch",
            "rate": 1.0,
            "outer_rate": outer_rate,
            "seed": seed,
            "curve": [[2, loss]],
        }

    runs = [run(0.7, 0, 3.0), run(0.7, 1, 3.0), run(0.4, 0, 2.0), run(0.4, 1, 2.5), run(1.0, 0, 1.0)]
    assert best_of(runs, 2, (0, 1)) == {"DiLoCo": ((1.0, 0.4), {0: {2: 2.0}, 1: {2: 2.5}})}


def test_regret_is_against_the_fastest_and_the_best_constant_answer():
    def row(recommended, **times):
        return {"recommended": recommended, "methods": [{"algorithm": a, "measured_ms": t} for a, t in times.items()]}

    found = regrets([row("a", plain=4.0, a=2.0, b=1.0), row("plain", plain=1.0, a=1.5, b=3.0)])
    assert found["advice"] == {"mean": 0.5, "worst": 1.0}
    assert found["plain"] == {"mean": 1.5, "worst": 3.0}
    assert found["constant"] == {"answer": "a", "mean": 0.75, "worst": 1.0}
