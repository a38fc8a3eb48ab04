"""How much Python a registration runs, and a step in torch's own operations: calls into gradwire's
files, which no machine changes. `benchmarks/calls.py` shows more of them."""

import json

import pytest

from tests.launch import ROOT, run_ranks

pytestmark = pytest.mark.slow

CEILINGS = {
    ("ddp-registration", 1): 780,
    ("ddp-registration", 50): 10_600,
    ("ddp-step", 50): 3_150,
    ("fsdp-registration", 1): 980,
    ("fsdp-registration", 50): 13_800,
}


def test_what_runs_stays_few_calls(tmp_path):
    path = f"import os, sys; os.environ['NUMBA_DISABLE_JIT'] = '1'; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})"
    script = tmp_path / "counted.py"
    script.write_text(
        f"{path}\nimport calls, json\nprint(json.dumps([calls.count(*row) for row in {[*CEILINGS]}]))"
    )
    counted = json.loads(run_ranks(script, 1).splitlines()[-1])
    for found, (row, ceiling) in zip(counted, CEILINGS.items(), strict=True):
        assert 100 < found <= ceiling, row
