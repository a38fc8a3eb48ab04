"""The commands that the README promises exist and run what they say."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("test", r"\.venv/bin/pytest -n"),
        ("lint", r"ruff check \.\n.*ruff format --check \."),
        ("types", r"mypy --strict -p gradwire"),
        ("demo", r"python examples/demo\.py"),
        ("bench", r"python benchmarks/compress\.py"),
        ("check", r"ruff check(.|\n)*mypy --strict(.|\n)*pytest"),
    ],
)
def test_each_target_sets_up_by_itself_what_it_runs(target, runs):
    # -W: as if the constraints had just changed, so the set-up must be among what would be done.
    result = subprocess.run(
        ["make", "-n", "-W", "constraints.txt", target], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    set_up = result.stdout.index("pip install -q -c constraints.txt torch==2.13.0")
    main = re.search(runs, result.stdout)
    assert main
    assert set_up < main.start()


def test_ci_stops_at_the_first_failure():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert [line for line in text.splitlines() if line.startswith("make ")] == ["make -j2 lint types", "make test-all"]
