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


@pytest.fixture
def run(frontier: Callable[[str], Any]) -> Any:
    subjects, runs = frontier("subjects"), frontier("runs")
    return runs.Run("torch", subjects.BY_NAME["int8"], 1e-3, 0, runs.Settings())


def method(name: str, losses: dict[int, float], step: float, slow: float, fast: float) -> dict[str, Any]:
    ends = {str(n): {"loss": x, "losses": {"torch": [x, 2 * x], "jax": [x]}} for n, x in losses.items()}
    wire = {"slow": slow, "fast": fast}
    return {"name": name, "lengths": ends, "step_seconds": {"torch": step}, "wire_seconds": wire}


def test_pages_show_the_figures_of_the_file(frontier: Callable[[str], Any]) -> None:
    pages, subjects = frontier("pages"), frontier("subjects")
    results = json.loads(FILE.read_text())
    marked = set()
    for page in pages.PAGES:
        text = (ROOT / page).read_text()
        assert pages.filled(text, results) == text, f"{page} is not what `--only pictures` makes of {FILE.name}"
        marked |= {
            name for found in pages.MARKS.finditer(text) for name in found[2].removeprefix(pages.LOSSES).split("; ")
        }
    assert marked | {"dense"} == {*subjects.BY_NAME, "*", "which", "set-up"}


def test_a_mark_keeps_what_is_around_it(frontier: Callable[[str], Any]) -> None:
    results = json.loads(FILE.read_text())
    page = frontier("pages").filled("a\n<!-- frontier: which -->\nold\n<!-- end -->\nb\n", results)
    assert page.startswith("a\n<!-- frontier: which -->\n\n| a link of |")
    assert page.endswith("|\n\n<!-- end -->\nb\n")
    assert "old" not in page


def test_the_method_to_take_is_the_fastest_that_is_good_enough(frontier: Callable[[str], Any]) -> None:
    reading = frontier("reading")
    methods = [
        method("dense", {10: 2.0, 60: 1.0, 90: 0.9}, 1.0, 9.0, 0.1),
        method("close", {10: 2.009, 60: 1.02}, 1.5, 2.0, 0.01),
        method("quick", {10: 2.03, 60: 1.001}, 1.0, 0.1, 0.01),
        method("poor", {10: 2.5}, 0.5, 0.01, 0.01),
    ]
    assert [reading.best(methods, link, 10)["name"] for link in ("slow", "fast")] == ["close", "dense"]
    assert [reading.best(methods, link, 10, 0.02)["name"] for link in ("slow", "fast")] == ["quick", "quick"]
    assert reading.best(methods, "fast", 60)["name"] == "quick"
    assert reading.times_faster(methods[1], methods, "slow") == pytest.approx(10 / 3.5)
    steps, trained = reading.longest(methods)  # only dense averages were trained for longer
    assert (steps, [m["name"] for m in trained]) == (60, ["dense", "close", "quick"])


def test_a_step_costs_what_its_cycle_does(frontier: Callable[[str], Any]) -> None:
    """Three steps of nothing and one of an average; the first of all is slow once."""
    cycle = [gradwire.Traffic(0, 0)] * 3 + [gradwire.Traffic(1, 8)]
    seconds = [9.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 7.0]
    assert frontier("runs").per_step(seconds, cycle) == (3 * 1 + 6) / 4


def test_only_a_changed_run_is_done_again(run: Any, frontier: Callable[[str], Any], tmp_path: Path) -> None:
    results = frontier("results").Results(tmp_path / "frontier.json")
    others = [
        replace(run, backend="jax"),
        replace(run, rate=2e-3),
        replace(run, seed=1),
        replace(run, subject=replace(run.subject, algorithm=gradwire.Sign())),
        replace(run, settings=replace(run.settings, steps=30)),
    ]
    results.add(run, [[120, 2.5], [240, float("nan")]], bytes_sent=1)
    results.save()
    again = frontier("results").Results.at(results.path)
    assert again.missing([run, *others]) == others
    assert again.missing([replace(run, subject=replace(run.subject, name="renamed"))]) == []
    assert again.loss(run) == float("inf")


@pytest.mark.parametrize("asked_for", [(1e-3, 2e-3), (2e-3, 4e-3, 8e-3)])
def test_rates_are_tried_beyond_the_end_that_is_best(
    asked_for: tuple[float, ...], run: Any, frontier: Callable[[str], Any], tmp_path: Path
) -> None:
    """The best rate is the second of three: it is found from below, and from above."""
    losses = {1e-3: 2.5, 2e-3: 2.4, 4e-3: 2.45}
    results = frontier("results").Results(tmp_path / "frontier.json")
    asked = frontier("results").Experiment((run.subject,), asked_for, 3, run.settings)
    while missing := results.missing(results.tuning(asked)):
        for tried in missing:
            results.add(tried, [[240, losses.get(tried.rate, 3.0)]])
    assert sorted(tried.rate for tried in results.tuning(asked)) == sorted({*losses, *asked_for})
    assert results.best_rate(run.subject, asked) == 2e-3
    assert [(r.backend, r.seed) for r in results.training(asked)] == [
        ("torch", 0),
        ("torch", 1),
        ("torch", 2),
        ("jax", 0),
    ]
