"""The comparison of all methods: its figures in the pages are those of its file, and a run is done again only if it is another one."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gradwire
from tests.launch import ROOT

FILE = ROOT / "benchmarks" / "results" / "frontier.json"


@pytest.fixture
def frontier(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Modules of `benchmarks/frontier`, as its command imports them."""
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return lambda name: importlib.import_module(f"frontier.{name}")


def test_pages_show_the_figures_of_the_file(frontier: Callable[[str], Any]) -> None:
    pages, results = frontier("pages"), json.loads(FILE.read_text())
    for page in pages.PAGES:
        text = (ROOT / page).read_text()
        assert pages.filled(text, results) == text, f"{page} is not what `--only pictures` makes of {FILE.name}"
    kept = pages.filled("a\n<!-- frontier: which -->\nold\n<!-- end -->\nb\n", results)
    assert kept.startswith("a\n<!-- frontier: which -->\n\n| a link of |")
    assert kept.endswith("|\n\n<!-- end -->\nb\n")
    assert "old" not in kept


def test_the_method_to_take_is_the_fastest_that_is_good_enough(frontier: Callable[[str], Any]) -> None:
    def method(name: str, losses: dict[int, float], step: float, slow: float, fast: float) -> dict[str, Any]:
        ends = {str(n): {"loss": x, "losses": {"torch": [x, 2 * x], "jax": [x]}} for n, x in losses.items()}
        wire = {"slow": slow, "fast": fast}
        return {"name": name, "lengths": ends, "step_seconds": {"torch": step}, "wire_seconds": wire}

    reading = frontier("reading")
    methods = [
        method("dense", {10: 2.0, 60: 1.0, 90: 0.9}, 1.0, 9.0, 0.1),
        method("close", {10: 2.009, 60: 1.02}, 1.5, 2.0, 0.01),
        method("quick", {10: 2.03, 60: 1.001}, 1.0, 0.1, 0.01),
        method("poor", {10: 2.5}, 0.5, 0.01, 0.01),
    ]
    assert [reading.best(methods, link, 10)["name"] for link in ("slow", "fast")] == ["close", "dense"]
    assert [reading.best(methods, link, 10, 0.02)["name"] for link in ("slow", "fast")] == ["quick", "quick"]
    methods[2]["wire_seconds"]["fast"] = 0.09  # a hundredth faster
    assert reading.best(methods, "fast", 10, 0.02)["name"] == "dense"
    steps, trained = reading.longest(methods)  # only dense averages were trained for longer
    assert (steps, [m["name"] for m in trained]) == (60, ["dense", "close", "quick"])


def test_only_a_changed_run_is_done_again(frontier: Callable[[str], Any], tmp_path: Path) -> None:
    """And the best rate is looked for beyond the end of those that were asked for."""
    runs, results = frontier("runs"), frontier("results").Results(tmp_path / "frontier.json")
    run = runs.Run("torch", frontier("subjects").BY_NAME["int8"], 1e-3, 0, runs.Settings())
    others = [
        replace(run, backend="jax"),
        replace(run, rate=2e-3),
        replace(run, subject=replace(run.subject, algorithm=gradwire.Sign())),
        replace(run, settings=replace(run.settings, steps=30)),
    ]
    results.add(run, [[120, 2.5], [240, float("nan")]], bytes_sent=1)
    results.save()
    again = frontier("results").Results.at(results.path)
    assert again.missing([run, *others]) == others
    assert again.missing([replace(run, subject=replace(run.subject, name="renamed"))]) == []
    asked = frontier("results").Experiment((run.subject,), (2e-3, 4e-3, 8e-3), 3, run.settings)
    losses = {1e-3: 2.5, 2e-3: 2.4, 4e-3: 2.45}
    results = frontier("results").Results(tmp_path / "another.json")
    while missing := results.missing(results.tuning(asked)):
        for tried in missing:
            results.add(tried, [[240, losses.get(tried.rate, 3.0)]])
    assert {*losses} < {tried.rate for tried in results.tuning(asked)}
    assert results.best_rates(run.subject, asked) == (2e-3, None)


def test_an_outer_rate_is_searched_with_the_best_inner_one(frontier: Callable[[str], Any], tmp_path: Path) -> None:
    runs, results = frontier("runs"), frontier("results").Results(tmp_path / "frontier.json")
    subject = frontier("subjects").BY_NAME["DiLoCo"]
    asked = frontier("results").Experiment((subject,), (1e-3, 2e-3, 4e-3), 1, runs.Settings())
    while missing := results.missing(results.tuning(asked)):
        for tried in missing:
            results.add(tried, [[240, abs(tried.rate - 2e-3) + abs(tried.subject.outer_rate - 0.2)]])
    assert results.best_rates(subject, asked) == (2e-3, 0.2)
    assert {r.subject.outer_rate for r in results.tuning(asked) if r.rate == 2e-3} == {0.1, 0.2, 0.4, 0.7, 1.0}
    assert {r.rate for r in results.tuning(asked) if r.subject.outer_rate != 0.7} == {2e-3}
    found = results.training(asked)
    assert {run.subject.algorithm for run in found} == {gradwire.diloco(30, lr=0.2)}
    assert [runs.Run.of(run.job()) for run in found] == found
