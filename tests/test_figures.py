"""Pages show what was measured: figures of benchmarks/results."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradwire
from benchmarks.advice.readme import read as read_advice
from benchmarks.shapes import gpt
from tests.launch import ROOT

DOCS = ROOT / "docs"


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_page_on_error_feedback_shows_what_was_measured() -> None:
    found, page = results("error-feedback"), (DOCS / "error-feedback.md").read_text()
    rows = [
        [cell.strip(" `*") for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line[:2] == "| "
    ]
    clipped, skipped, forgetting = (
        found[f"disturbed_{how}"] for how in ("clipped", "skipped", "skipped_forgetting")
    )
    for subject in ("rank 1", "rank 4", "rank 4, half-step"):
        limited = f"{subject}, max_norm=1"
        assert [subject, str(clipped[subject]), str(clipped[limited])] in rows
        assert [
            subject,
            str(skipped[subject]),
            str(forgetting[subject]),
            str(skipped[limited]),
        ] in rows
    for text, way in (("as usual", "as usual"), ("with a remedy", "discarded")):
        drift = {rank: f"{found['gan_drift'][f'rank {rank}, {way}']:.1f}" for rank in (1, 2, 4)}
        assert all(
            any(row[:2] == [f"rank {rank}, {text}", shown] for row in rows)
            for rank, shown in drift.items()
        )
        longer = f"{found['gan_drift_of_a_longer_run'][f'rank 1, {way}']:.1f}"
        assert any(row[:3] == [f"rank 1, {text}", drift[1], longer] for row in rows)


NETWORK = {
    ("torch", "2"): "network",
    ("JAX", "2"): "network-jax",
    ("torch", "4"): "network-4-hosts",
}


def test_pages_show_the_steps_that_were_measured() -> None:
    """The tables of steps between hosts."""
    table = r"^\| {}.*\n\|[-|]+\n((?:\|.*\n)+)"
    pages = "".join((DOCS / f"{name}.md").read_text() for name in ("performance", "evidence"))
    tables = re.findall(table.format(r"(torch|JAX), (\d) hosts"), pages, re.MULTILINE)
    assert len(tables) == 3
    for backend, hosts, its in tables:
        measured = results(NETWORK[backend, hosts])["rows"]
        steps = {(r["backend"], r["subject"], r["rate"]): f"{r['step_ms']:,.0f}" for r in measured}
        for row in its.splitlines():
            subject, *shown = (cell.strip() for cell in row.strip("|").split("|"))
            name = subject.removesuffix(", [at a price](methods.md#half-steps)").replace("`", "")
            assert shown == [
                steps[backend.lower(), name, rate] for rate in ("100mbit", "1gbit", "unlimited")
            ], subject


def test_the_picture_of_a_gpus_step_shows_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And whoever cannot see it reads the same."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages, rows = importlib.import_module("gpu.pages"), results("gpu")["parts"]["steps"]["rows"]
    assert (DOCS / "h100-step.svg").read_text() == pages.picture(rows), (
        "run `python benchmarks/gpu/pages.py`"
    )
    of = {row["row"]: f"{row['step_ms']:.0f}" for row in rows}
    (told,) = re.findall(
        r"!\[(One training step.*?)\]\(\S*h100-step.svg\)", (ROOT / "README.md").read_text()
    )
    assert re.findall(r"(\d+) ms", told) == [of[row] for row, *_ in pages.BARS]


def test_the_first_screen_shows_what_methods_lose_and_links_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/network"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    shown = importlib.import_module("first").read()
    assert (
        f"<!-- network: begin -->\n{shown}\n<!-- network: end -->"
        in (ROOT / "README.md").read_text()
    )


def test_what_a_step_needs_grows_no_faster_than_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every curve that was published; and pages show them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pages, rows = importlib.import_module("scale.pages"), results("scale")["rows"]
    assert len(rows) > 100
    assert [row for row in rows if not row["holds"]] == []
    assert pages.table(rows) in (DOCS / "evidence.md").read_text()
    assert pages.short_table(rows) in (DOCS / "performance.md").read_text()


def test_the_advice_is_the_one_that_was_measured() -> None:
    """And sends what its methods send today."""
    advice = read_advice(results("advice-readme")["advice"])
    assert f"```\n{advice}\n```" in re.sub(r"```text .*", "```", (DOCS / "advise.md").read_text())
    for method in results("advice-readme")["advice"]["methods"]:
        name = method["algorithm"]
        planned = gradwire.plan(
            gpt(),
            gradwire.AllReduce() if name == "plain" else eval(name, vars(gradwire)),
            world_size=2,
        )
        assert (planned.wire_bytes, planned.memory_bytes) == (
            method["wire_bytes"],
            method["memory_bytes"],
        ), method


def test_pages_show_the_figures_of_the_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    pages, found = importlib.import_module("frontier.pages"), results("frontier")
    for page in pages.PAGES:
        text = (ROOT / page).read_text()
        assert pages.filled(text, found) == text, (
            f"{page} is not what `--only pictures` makes of frontier.json"
        )
    evidence, known = (
        importlib.import_module(n) for n in ("frontier.evidence", "gradwire.core.advise.evidence")
    )
    assert evidence.source(found) == known.SOURCE
    assert evidence.differences(found["methods"]) == known.MEASURED
    kept = pages.filled("a\n<!-- frontier: which -->\nold\n<!-- end -->\nb\n", found)
    assert re.fullmatch(
        r"a\n<!-- frontier: which -->\n\n\| a link of \|(?s:.*)\|\n\n<!-- end -->\nb\n", kept
    )
    assert "old" not in kept


def test_intervals_of_the_frontier_are_students(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    reading, stats = (
        importlib.import_module("frontier.reading"),
        importlib.import_module("scipy.stats"),
    )
    drawn = np.random.default_rng(0).normal(0.02, 0.01, 8)
    for n in range(2, 9):
        error = stats.sem(drawn[:n])
        right = drawn[:n].mean() + error * stats.t.ppf(0.9, n - 1)
        assert abs(reading.upper_bound(drawn[:n].tolist()) - right) < 1e-3 * error


def test_no_page_recommends_a_row_that_another_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    reading = importlib.import_module("frontier.reading")

    def row(name: str, sent: int, *losses: float) -> dict[str, Any]:
        of = {"loss": sum(losses) / len(losses), "losses": {"torch": losses}}
        return {"name": name, "bytes_per_step": sent, "lengths": {"9": of}}

    rows = [
        row("a", 9, 1.0, 1.1),
        row("b", 5, 0.9, 0.99),
        row("c", 4, 0.9, 1.2),
        row("d, Muon", 1, 0.1, 0.1),
    ]
    names = [
        better and better["name"] for better in (reading.dominating(each, rows, 9) for each in rows)
    ]
    assert names == ["b", None, None, None]
    steps, methods = reading.longest(reading.timed(results("frontier")["methods"]))
    for link in reading.uncompressed(methods)["wire_seconds"]:
        for within in (reading.AS_GOOD, reading.NEARLY):
            assert (
                reading.dominating(reading.best(methods, link, steps, within), methods, steps)
                is None
            )
    headlined = ("int8", "PowerSGD 16, int8", "uncompressed")
    assert all(
        reading.dominating(m, methods, steps) is None for m in methods if m["name"] in headlined
    )


def test_the_page_shows_what_a_gpu_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    pages, found = importlib.import_module("gpu.pages"), results("gpu")
    page, text = tmp_path / "evidence.md", pages.PAGE.read_text()
    page.write_text(text)
    pages.fill(page, found)
    assert page.read_text() == text, (
        "docs/evidence.md is not what `python benchmarks/gpu/pages.py` makes of gpu.json"
    )


def test_the_published_chaos_found_nothing() -> None:
    found = results("chaos")
    assert not found["rounds after which live replicas differed"]
    assert max(row["rounds lost by a survivor, at most"] for row in found["events"].values()) <= 1
    assert max(row.get("rounds to heal, at most", 0) for row in found["events"].values()) <= 2
    assert abs(found["standard errors from undisturbed"]) <= 2
    assert found["minutes"] == 10


#: What stands between marks is written by programs, blocks of code are run, and nobody reads other
#: comments.
WRITTEN = re.compile(
    r"<!-- (?:frontier: .*?<!-- end|(\w[\w ]*): begin -->.*?<!-- \1: end) -->|^```.*?^```|<!-- (?!figure:).*?-->",
    re.DOTALL | re.MULTILINE,
)
FIGURE = re.compile(r"\d ?%|\d×|\d times (?:as|fewer|more|shorter|longer|faster|slower)")
MARK = re.compile(r"<!-- figure: (\S+?)(?:::(\w+))? -->")


def unfounded(page: str) -> list[str]:
    """Paragraphs, points and tables with a ratio or a percentage, but neither a link to where it is
    from nor a mark."""
    parts = re.split(r"\n\s*\n|\n(?=- )", WRITTEN.sub("", page))
    figures = [part for part in parts if FIGURE.search(re.sub(r"<!--.*?-->|`[^`]*`", "", part))]
    return [part for part in figures if "](" not in part and not MARK.search(part)]


def test_a_ratio_says_where_it_is_from() -> None:
    assert unfounded("a\n\nIt is 3.4× faster.") == ["It is 3.4× faster."]
    for page in (
        "README.md",
        "docs/index.md",
        "docs/choosing.md",
        "docs/advise.md",
        "docs/methods.md",
    ):
        text = (ROOT / page).read_text()
        assert not unfounded(text), page
        for file, name in MARK.findall(text):
            assert f"def {name}" in (ROOT / file).read_text() if name else (ROOT / file).exists(), (
                page,
                file,
                name,
            )


def test_sums_in_16_bits_are_off_as_the_page_says() -> None:
    """Added up as round a ring, one replica after the other."""
    rng, off = np.random.default_rng(0), []
    for replicas in (64, 512, 4096):
        values = torch.from_numpy(rng.normal(1.0, 1.0, (replicas, 4096))).bfloat16()
        total = values[0].clone()
        for each in values[1:]:
            total += each
        right = values.double().sum(0)
        off.append(float((total.double() - right).norm() / right.norm()))
    page = (DOCS / "methods.md").read_text()
    (said,) = re.findall(
        r"has an error of ([\d.]+) % with 64 replicas, of (\d+) % with 512, and of\s+(\d+) % with 4,096",
        page,
    )
    assert [float(x) / 100 for x in said] == pytest.approx(off, rel=0.15)


def test_what_is_kept_in_two_bits() -> None:
    model = {"w": (1024, 4096)}
    fewer = (
        4 * 1024 * 4096 / gradwire.plan(model, gradwire.TopK(64, bits=2), world_size=2).wire_bytes
    )
    assert f"{fewer:.0f} times fewer than float32" in (DOCS / "methods.md").read_text()
