"""Pages show what was measured: figures of benchmarks/results."""

import json
import re

import gradwire
from benchmarks.shapes import gpt
from gradwire.core.advise.advice import MethodAdvice
from tests.launch import ROOT

README = (ROOT / "README.md").read_text()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()


def test_the_page_on_error_feedback_shows_what_was_measured() -> None:
    page = (ROOT / "docs" / "error-feedback.md").read_text()
    found = json.loads((ROOT / "benchmarks" / "results" / "error-feedback.json").read_text())
    rows = [
        [cell.strip(" `*") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:2] == "| "
    ]

    def shown(first: str, second: str) -> list[str]:
        """The row after the heading of a table's second column that begins with `first`."""
        start = next(i for i, row in enumerate(rows) if row[1] == second)
        return next(row for row in rows[start:] if row[0] == first)[1:]

    for rank in (1, 2, 4):
        for text, way in (("as usual", "as usual"), ("with a remedy", "discarded")):
            drift, *_ = shown(f"rank {rank}, {text}", "140 steps")
            assert drift == f"{found['gan_drift'][f'rank {rank}, {way}']:.1f}"
    for text, way in (("as usual", "as usual"), ("with a remedy", "discarded")):
        assert shown(f"rank 1, {text}", "140 steps")[1] == f"{found['gan_drift_of_a_longer_run'][f'rank 1, {way}']:.1f}"
    clipped, skipped, forgetting = (found[f"disturbed_{how}"] for how in ("clipped", "skipped", "skipped_forgetting"))
    tables = [i for i, row in enumerate(rows) if row[1] == "as it is"]
    for subject in ("rank 1", "rank 4", "rank 4, half-step"):
        outliers, skips = (next(row for row in rows[i:] if row[0] == subject)[1:] for i in tables)
        assert outliers == [str(clipped[subject]), str(clipped[f"{subject}, max_norm=1"])]
        assert skips == [str(skipped[subject]), str(forgetting[subject]), str(skipped[f"{subject}, max_norm=1"])]


NETWORK = {
    ("torch", "2"): "network.json",
    ("JAX", "2"): "network-jax.json",
    ("torch", "4"): "network-4-hosts.json",
}


def test_pages_show_the_steps_that_were_measured() -> None:
    """The tables of steps between hosts, and the README's part of them."""
    page = (ROOT / "docs" / "performance.md").read_text()
    tables = re.findall(r"^\| (torch|JAX), (\d) hosts.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert len(tables) == 3
    tables.append(("torch", "2", re.findall(r"^\| ms per step.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE)[0]))
    for backend, hosts, rows in tables:
        measured = json.loads((ROOT / "benchmarks" / "results" / NETWORK[backend, hosts]).read_text())["rows"]
        steps = {(r["backend"], r["subject"], r["rate"]): f"{r['step_ms']:,.0f}" for r in measured}
        for row in rows.splitlines():
            subject, *shown = (cell.strip() for cell in row.strip("|").split("|"))
            name = subject.removesuffix(", [at a price](methods.md#half-steps)").replace("`", "")
            name = name.replace("gradwire, rank 4", "PowerSGD, rank 4").replace("gradwire, int8", "int8")
            assert shown == [steps[backend.lower(), name, rate] for rate in ("100mbit", "1gbit", "unlimited")], subject


def test_the_picture_of_two_hosts_shows_what_was_measured() -> None:
    picture = (ROOT / "docs" / "two-hosts.svg").read_text()
    measured = json.loads((ROOT / "benchmarks" / "results" / "network.json").read_text())["rows"]
    of = {r["subject"]: r for r in measured if (r["backend"], r["rate"]) == ("torch", "1gbit")}
    rows = [of[name] for name in ("DDP", "torch's powerSGD_hook, rank 4", "PowerSGD, rank 4")]
    assert re.findall(r">(\d+) ms<", picture) == [f"{r['step_ms']:.0f}" for r in rows]
    assert re.findall(r">\D*(\d[\d.]*) MB", picture.partition("</title>")[2]) == [
        f"{r['wire_bytes'] / 1e6:.1f}" for r in rows
    ]
    widths = [float(width) for width in re.findall(r'<rect x="250" width="(\d+)"', picture)]
    assert all(abs(w / widths[0] - r["step_ms"] / rows[0]["step_ms"]) < 0.01 for w, r in zip(widths, rows, strict=True))


def test_the_advice_is_the_one_that_was_measured() -> None:
    """And sends what its methods send today."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "advice-readme.json").read_text())["advice"]
    advice = gradwire.Advice(**{**measured, "methods": tuple(MethodAdvice(**m) for m in measured["methods"])})
    assert f"```\n{advice}\n```" in re.sub(r"```text .*", "```", CHOOSING)
    for method in measured["methods"]:
        algorithm = (
            gradwire.AllReduce() if method["algorithm"] == "plain" else eval(method["algorithm"], vars(gradwire))
        )
        planned = gradwire.plan(gpt(), algorithm, world_size=2)
        assert (planned.wire_bytes, planned.memory_bytes) == (method["wire_bytes"], method["memory_bytes"]), method
