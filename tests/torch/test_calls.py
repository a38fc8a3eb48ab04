"""How much Python a registration runs: calls into gradwire's files, which no machine changes. `benchmarks/calls.py` shows more of them."""

import json
import subprocess
import sys

import pytest

from tests.launch import ROOT, environment

pytestmark = pytest.mark.slow

CEILINGS = {
    ("ddp-registration", 1): 700,
    ("ddp-registration", 50): 12_500,
    ("fsdp-registration", 1): 900,
    ("fsdp-registration", 50): 15_500,
}


@pytest.fixture(scope="module")
def counted():
    code = f"import json, calls; print(json.dumps([calls.count(*row) for row in {[*CEILINGS]}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "benchmarks",
        env=environment("calls"),
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(zip(CEILINGS, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("row", CEILINGS, ids=str)
def test_registration_runs_an_algorithm_once(counted, row):
    assert 100 < counted[row] <= CEILINGS[row]
