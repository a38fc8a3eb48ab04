"""Pages show what was measured: figures of benchmarks/results."""

import ast
import contextlib
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradwire
from benchmarks.advice import __main__ as advice_tables
from benchmarks.advice.readme import read as read_advice
from benchmarks.shapes import gpt
from tests.chaos import choosing
from tests.launch import ROOT
from tests.pages import pages

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
    assert found["auto"].keys() == choosing.SCRIPTS.keys()
    for auto in found["auto"].values():
        assert not choosing.wrong(auto)
        assert {*choosing.KINDS} == {*auto["events"]}


def test_choosing_costs_what_the_page_says() -> None:
    clock, links = results("auto"), results("auto-links")
    page = (DOCS / "choosing.md").read_text()
    assert [row for row in links["rows"] if not row["holds"]] == []
    beyond = [row["to_best"] for row in clock["rows"] if not row["holds"]]
    assert clock["kept"] == len(clock["rows"]) - len(beyond)
    assert f"{clock['kept']} of {len(clock['rows'])} trainings" in page
    assert beyond == pytest.approx([1.02], abs=0.005)
    assert "The other one took 1.02 of it" in page
    kept, of = clock["others"]
    assert f"{kept:,} of {of:,}" in page
    for row in links["rows"]:
        assert re.search(rf"\| {re.escape(row['trace'])} \|.*\| {row['to_best']:.2f} \|", page), row


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


#: Pages about figures, about what others call their methods, and about what PowerSGD is.
ABOUT_METHODS = {
    *("CHANGELOG.md", "docs/evidence.md", "docs/performance.md", "docs/papers.md"),
    *("docs/coming-from.md", "docs/error-feedback.md"),
}
#: Whoever calls them hands on a method with which to train.
REGISTERING = re.compile(
    r"\b(?:register_comm_hook|compress_replicas|DataParallel|Averager|elastic|local_sgd|reconfigure"
    r"|average_gradients|power_sgd|diloco|zero1|\w+Compression)\("
)


def called(text: str, start: int) -> str:
    """From `start` to the end of the call that begins there; marks of a diff and of a session are
    left out."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return re.sub(r"\n\s*(?:>>>|\.\.\.|\+)", "\n", text[start : found.end()])
    return ""


def registered(text: str) -> Iterator[tuple[str, Any]]:
    """Calls that register a method, as they are written, and the methods: of the call, or of what
    stands in the text as `NAME = …`. Each is whole: `WireDtype(PowerSGD(4), "int8")`, not what is
    inside."""

    def methods(node: ast.AST, seen: frozenset[str]) -> Iterator[Any]:
        if isinstance(node, ast.Name) and node.id not in seen:
            for line in re.findall(rf"^\W*{node.id} = ([^#\n]+)", text, re.MULTILINE):
                if REGISTERING.search(line):  # a handle, or what has one; it is looked at by itself
                    continue
                with contextlib.suppress(SyntaxError):
                    yield from methods(ast.parse(line, mode="eval"), seen | {node.id})
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).split(".")[-1]
            options = [k for k in node.keywords if k.arg not in ("axis_name", "within")]
            if name == "power_sgd":
                node = ast.Call(ast.Name("PowerSGD"), node.args, options)
            with contextlib.suppress(Exception):  # it is no method, or none of gradwire's own
                method = eval(ast.unparse(node).replace("gradwire.", ""), {**vars(gradwire)})
                if callable(getattr(method, "step", None)) or isinstance(method, gradwire.LocalSGD):
                    yield method
                    return
        for child in ast.iter_child_nodes(node):
            yield from methods(child, seen)

    for found in REGISTERING.finditer(text):
        with contextlib.suppress(SyntaxError):
            call = called(text, found.start())
            tree = ast.parse(call, mode="eval")
            yield from ((call, method) for method in methods(tree, frozenset()))


def beaten(method: Any, rows: Mapping[Any, Any], period: int) -> str | None:
    """Which row of the frontier beats a method. The outermost part of it that was measured says so:
    the whole, or what is on two levels, or counts by weights. How often local SGD averages is the
    reader's choice; what it sends then is compared as if that were every `period` steps."""
    if "start_step" in getattr(method, "__dataclass_fields__", ()):
        method = replace(method, start_step=0)
    if isinstance(method, gradwire.LocalSGD):
        if method.compressor == gradwire.LocalSGD(1).compressor:
            return None
        method = replace(method, period=period)
    if method in rows:
        better = rows[method]
        return better and better["name"]
    inside = (getattr(method, name, None) for name in ("algorithm", "compressor"))
    return next((name for each in inside if each and (name := beaten(each, rows, period))), None)


def test_no_sample_registers_a_method_that_another_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a script to copy, nor a docstring."""
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    reading, subjects = (importlib.import_module(f"frontier.{n}") for n in ("reading", "subjects"))
    steps, methods = reading.longest(results("frontier")["methods"])
    rows = {
        subjects.BY_NAME[m["name"]].algorithm: reading.dominating(m, methods, steps)
        for m in methods
        if not subjects.BY_NAME[m["name"]].muon
    }

    def beaten_in(text: str) -> list[str | None]:
        return [beaten(method, rows, subjects.PERIOD) for _, method in registered(text)]

    good, whole = "PowerSGD 16, int8", 'WireDtype(PowerSGD(4), "int8")'
    assert beaten_in("+handle = register_comm_hook(ddp, gradwire.PowerSGD(rank=4))") == [good]
    assert beaten_in("average = power_sgd(4, axis_name=axis, within=n)") == [good]
    assert beaten_in("method = PowerSGD(4, start_step=9)\n...\nAverager(method, shapes)") == [good]
    assert beaten_in("local_sgd(ddp, optimizer, LocalSGD(8, compressor=PowerSGD(4)))") == [good]
    assert beaten_in("reconfigure(TwoLevel(\n>>> Weighted(PowerSGD(4)), within=2))") == [good]
    assert beaten_in('elastic(m, o, diloco(9, compressor=WireDtype(AllReduce(), "e3m0")))')[
        -1:
    ] == ["SparseLoCo"]
    assert beaten_in(f"register_comm_hook(ddp, {whole}), diloco(100)") == [None, None]
    assert beaten_in("plan(model, PowerSGD(4)), register_comm_hook(ddp, PowerSGD(rank))") == []

    sources = [path for path in pages() if path not in ABOUT_METHODS]
    rooms = ("core", "torch_backend", "jax_backend", "examples")
    sources += [str(f.relative_to(ROOT)) for room in rooms for f in (ROOT / room).rglob("*.py")]
    found = {
        (source, call): name
        for source in sources
        for call, method in registered((ROOT / source).read_text())
        if (name := beaten(method, rows, subjects.PERIOD))
    }
    assert not found, "\n".join(
        f"{s}: {call}\n    {name} beats it" for (s, call), name in found.items()
    )


def cell(**rounds: list[float]) -> dict[str, Any]:
    """A cell of the advice, in which "a" was recommended at any loss, and nothing within 1 %."""
    ms = {"plain": [100.0, 100.0], "a": [50.0, 54.0], "b": [40.0, 38.0]} | rounds
    return {
        "ranks": 1,
        "model": "m",
        "answers": [
            {"loss": 0.01, "recommended": "plain", "allowed": ["plain"]},
            {"loss": None, "recommended": "a", "allowed": list(ms)},
        ],
        "methods": [
            {
                "algorithm": name,
                "predicted_ms": sum(both) / 2,
                "measured_ms": sum(both) / 2,
                "rounds_ms": both,
            }
            for name, both in ms.items()
        ],
    }


def test_an_answer_whose_second_round_took_another_time_does_not_count() -> None:
    """With the method that was recommended, or with the fastest that is allowed."""
    slower = {"plain": [100.0, 150.0], "a": [50.0, 75.0], "b": [40.0, 62.0]}
    cells = [cell(), cell(plain=[100.0, 120.0]), cell(a=[50.0, 56.0]), cell(b=[36.0, 41.0])]
    found = advice_tables.counted([*cells, cell(**slower)])
    assert (found["cells"], found["answers"], found["unsteady"]) == (5, 7, 3)
    assert found["predictions"] == 3 * 5 - 3
    limited, any_loss = found["regret"]["all models"]
    assert (limited["cells"], any_loss["cells"]) == (4, 3)


def test_an_answer_is_as_good_as_its_step_beside_the_fastest_that_is_allowed() -> None:
    cells = [cell(), cell(plain=[40.0, 40.0], a=[40.0, 40.0], b=[80.0, 80.0])]
    found = advice_tables.counted(cells)
    limited, any_loss = found["regret"]["all models"]
    assert limited["advice"] == limited["plain"] == {"mean": 0, "worst": 0}
    worst = 52 / 39 - 1
    assert any_loss["advice"] == pytest.approx({"mean": worst / 2, "worst": worst})
    assert any_loss["constant"] == {"answer": "a", **any_loss["advice"]}
    assert found["recommended_is_fast"] == 3


def test_the_tables_of_the_advice_are_those_of_its_figures() -> None:
    shown = advice_tables.page(results("advice"))
    text = (DOCS / "evidence.md").read_text()
    assert f"<!-- advice: begin -->\n{shown}\n<!-- advice: end -->" in text
