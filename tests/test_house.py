"""Each target of make sets up by itself what it runs, and what it runs is there and is run by a test."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
#: What targets need .venv for, by name. Lines in which make calls itself would be run, not printed.
TARGETS = {
    name: recipe
    for name, recipe in re.findall(r"^([\w-]+):.*\$\(READY\).*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE)
    if "$(MAKE)" not in recipe
}


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_sets_up_by_itself_what_it_runs(target: str) -> None:
    # -W: as if the constraints had just changed, so the set-up must be among what would be done.
    command = ["make", "-n", "-W", "constraints.txt", target, "ARGS=tests/core -k views"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    set_up, ran = done.stdout.split("touch .venv/ready\n")
    assert "pip install --no-compile -q -c constraints.txt torch==2.13.0" in set_up
    assert ".venv/bin/" in ran
    if "$(ARGS)" in TARGETS[target]:
        assert "tests/core -k views" in ran


def test_every_target_that_runs_a_tool_sets_it_up() -> None:
    for name, needs, recipe in re.findall(r"^([\w-]+):(.*)\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE):
        assert "$(BIN)" not in recipe or "$(READY)" in needs + recipe, name


def test_what_targets_run_is_there_and_is_in_a_test() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    run = re.findall(r"python (?:-m )?((?:benchmarks|examples|tests)[/.][\w./]+)", MAKEFILE)
    assert len(run) > 15
    for what in run:
        path = what.removesuffix(".py").replace(".", "/")
        assert (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists(), what
        # They take shaped links for minutes, and other Pythons with gigabytes of packages.
        if what not in ("benchmarks/advice/readme.py", "tests.versions"):
            assert re.search(rf"\b{Path(path).name}\b", tests), what


def test_ci_stops_at_the_first_failure() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert "make test-all" in script.read_text()
