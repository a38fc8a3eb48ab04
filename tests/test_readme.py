"""The README's snippets run as they are printed."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import gradwire
from gradwire.core.requests import mean, orthonormalize
from gradwire.core.simulate import NumpyOps, lock_step
from tests.launch import ROOT
from tests.pages import block, differs, expected_output, printed, read, run_blocks
from tests.shell import command

TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    steps = read(TEXT, tmp_path)
    assert len(steps) == 2
    for step, output in zip(steps, printed(steps, tmp_path, to_the_letter=True), strict=True):
        assert step.expected is not None
        assert not differs(output, step.expected), output


def test_the_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150


def test_two_lines_make_a_training_compressed() -> None:
    (code,) = re.findall(r"^```python title=.*?\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert sum("gradwire" in line for line in code.splitlines()) == 2


def test_the_page_on_views_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    run_blocks("views", [0, 1], {"PowerSGD": gradwire.PowerSGD})
    assert capsys.readouterr().out == expected_output("views", 0)


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


NETWORK = {2: "network.json", 4: "network-4-hosts.json"}


def test_pages_show_the_steps_that_were_measured() -> None:
    """The tables of steps between hosts, and the README's part of them."""
    page = (ROOT / "docs" / "performance.md").read_text()
    tables = re.findall(r"^\| (torch|JAX), (\d) hosts.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert len(tables) == 3
    tables.append(("torch", "2", re.findall(r"^\| \| 100 Mbit/s.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT, re.MULTILINE)[0]))
    for backend, hosts, rows in tables:
        measured = json.loads((ROOT / "benchmarks" / "results" / NETWORK[int(hosts)]).read_text())["rows"]
        steps = {(r["backend"], r["subject"], r["rate"]): f"{r['step_ms']:,.0f}" for r in measured}
        for row in rows.splitlines():
            subject, *shown = (cell.strip() for cell in row.strip("|").split("|"))
            name = subject.removesuffix(", [at a price](half-steps.md)").replace("`", "")
            name = name.replace("gradwire, rank 4", "PowerSGD, rank 4").replace("gradwire, int8", "int8")
            assert shown == [steps[backend.lower(), name, rate] for rate in ("100mbit", "1gbit", "unlimited")], subject


def test_the_coroutine_is_the_source_and_runs() -> None:
    """On two replicas: the mean of two matrices of rank 2, and what each of them sent."""
    shown = block("architecture", 0)
    rng = np.random.default_rng(0)
    matrices = [rng.standard_normal((12, 1)) @ rng.standard_normal((1, 8)) for _ in range(2)]
    body = textwrap.indent(shown, "    ")
    names = {"mean": mean, "orthonormalize": orthonormalize, "ops": NumpyOps(), "self": gradwire.PowerSGD(2)}
    names |= {"low_rank": lambda basis, local: basis.mT @ local, "residual": None, "on_q": False}
    names |= {"q": rng.standard_normal((2, 8))}
    exec(compile(f"async def step(matrix):\n{body}", "architecture.md", "exec"), names)
    (sent, received), (also, received_too) = lock_step([names["step"](matrix) for matrix in matrices])
    assert np.allclose(received, np.mean(matrices, axis=0))
    assert np.array_equal(received, received_too)
    assert np.allclose([sent, also], matrices)
    source = (ROOT / "core" / "algorithms" / "power_sgd.py").read_text()
    for line in shown.splitlines():
        statement = line.split("#")[0].strip()
        if not statement.startswith("return"):
            assert statement in source


def test_files_that_pages_name_are_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for path in re.findall(
            r"\b(?:core|torch_backend|jax_backend|tests|examples|benchmarks)/[\w/]+\.py\b", page.read_text()
        ):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def _advised() -> str:
    (shown,) = [code for language, code in BLOCKS if language == "text" and " of gradients, " in code]
    return shown.rstrip("\n")


FIGURES = ROOT / "benchmarks" / "results" / "advice-readme.json"


def test_the_advice_is_the_one_that_was_measured() -> None:
    assert str(gradwire.Advice.from_dict(json.loads(FIGURES.read_text())["advice"])) == _advised()


@pytest.mark.slow
def test_the_command_gives_such_an_advice(tmp_path: Path) -> None:
    """All but the times of this machine, and what follows from them."""
    (tmp_path / "my_model.py").write_text(
        f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import torch
from shapes import gpt
def build():
    return torch.nn.ParameterDict({{name: torch.nn.Parameter(torch.empty(shape)) for name, shape in gpt().items()}})
"""
    )
    (tmp_path / "probe.json").write_text(json.dumps(json.loads(FIGURES.read_text())["probe"]))
    done = subprocess.run(
        [sys.executable, "-m", *command("README", 5).split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    def without_times(text: str) -> list[list[str]]:
        heading, *rows = text.split("\n\n")[0].splitlines()
        cells = [re.split(r"  +", row.strip("→ ")) for row in rows[1:]]
        return [[heading], *([row[0], row[2], *row[-3:]] for row in cells)]

    assert without_times(done.stdout) == without_times(_advised())
    assert re.search(r"^(Take .*|Leave it): ", done.stdout, re.MULTILINE)
