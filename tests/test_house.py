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
    set_up = result.stdout.index("pip install --no-compile -q -c constraints.txt torch==2.13.0")
    main = re.search(runs, result.stdout)
    assert main
    assert set_up < main.start()


#: Scripts and modules that targets run, each with the tests that run it with small arguments. None: what it needs, tests do not have.
SMOKE: dict[str, str | None] = {
    "examples/demo.py": "tests/examples/test_demo.py",
    "benchmarks/advice": "tests/test_benchmarks.py",
    "benchmarks/advice/readme.py": None,  # hosts on shaped links, for minutes
    **{
        f"benchmarks/{name}": "tests/test_benchmarks.py"
        for name in (
            *("buckets.py", "compress.py", "error_feedback.py", "frontier", "gpu", "half_step.py", "jax_step.py"),
            *("kernels.py", "network", "overlap.py", "stacks.py", "watching.py", "zero.py"),
        )
    },
    "tests.peers": "tests/peers/test_report.py",
    "tests.portability": "tests/test_portability.py",
    "tests.soak.simulation": "tests/soak/test_simulation.py",
    "tests.soak.torch_soak": "tests/soak/test_torch_soak.py",
    "tests.versions": None,  # other Pythons, and gigabytes of packages
}


def test_what_targets_run_is_there_and_has_a_test():
    # Read, not asked for by `make -n`: that runs lines in which make calls itself.
    run = re.findall(r"python (?:-m )?((?:benchmarks|examples|tests)[/.][\w./]+)", (ROOT / "Makefile").read_text())
    assert set(run) == SMOKE.keys()
    for what, tests in SMOKE.items():
        path = what.removesuffix(".py").replace(".", "/")
        assert (ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists(), what
        assert tests is None or re.search(rf"\b{Path(path).name}\b", (ROOT / tests).read_text()), what


def test_ci_stops_at_the_first_failure():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert [line for line in text.splitlines() if line.startswith("make ")] == ["make -j2 lint types", "make test-all"]
