"""Torch's own tests, against gradwire: `make test-peers`, or `python -m tests.peers [ROW ...] [--only PATTERN]`.

What is run ships with torch, in `torch.testing._internal.distributed.distributed_test`. Each test starts its ranks as real processes on Gloo, with a
limit of two minutes, or torch's own if that is longer. `rows.py` says where gradwire takes torch's place, `expected.py` which tests need not pass and why, and `on_cpu.py` how tests
for GPUs run without. The exit status is 1 if any other test fails, or one of those passes. All rows take some minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

from tests.launch import end_all, environment
from tests.peers.expected import EXPECTED
from tests.peers.rows import ROWS

#: Test → how it ended ("passed", "failed", "skipped") and what it said.
Outcomes = Mapping[str, tuple[str, str]]


def run(row, only, limit=1800):
    """The outcomes of a row; None if it has not come to its end. No process is left."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tests.peers.run_row", row, str(report), only]
        with (Path(folder) / "log").open("w+") as log:
            try:
                subprocess.run(
                    command,
                    env=environment(mark) | {"CUDA_VISIBLE_DEVICES": ""},
                    stdout=log,
                    stderr=log,
                    timeout=limit,
                    check=True,
                )
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                log.seek(0)
                print(f"{log.read()[-6000:]}\n{error}")
            finally:
                end_all(mark)
        return json.loads(report.read_text()) if report.exists() else None


def tell(row, outcomes):
    """Print what passed, what failed, and why that need not pass. Returns whether all is as expected."""
    expected, good = EXPECTED.get(row, {}), True
    count = {how: sum(outcome == how for outcome, _ in outcomes.values()) for how in ("passed", "failed", "skipped")}
    print(f"\n{ROWS[row].title} ({ROWS[row].ranks} ranks): {', '.join(f'{n} {how}' for how, n in count.items())}")
    for test, (outcome, text) in outcomes.items():
        if outcome == "failed" and test in expected:
            print(f"  need not pass  {test}: {expected[test]}")
        elif outcome == "failed":
            good = False
            print(f"  FAILED         {test}\n{text}")
        elif outcome == "skipped":
            print(f"  torch skips    {test}: {text.strip()}")
        elif test in expected:
            good = False
            print(f"  PASSED, and expected.py says that it need not   {test}")
        else:
            print(f"  passed         {test}")
    return good


def main():
    parser = argparse.ArgumentParser(description="Torch's own tests, against gradwire.")
    parser.add_argument("rows", nargs="*", default=[], help=f"of {', '.join(ROWS)}; all by default")
    parser.add_argument("--only", default="", help="a pattern of names of tests")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    found = {}
    for row in options.rows or ROWS:
        print(f"running: {ROWS[row].title}", flush=True)
        found[row] = run(row, options.only)
    good = [outcomes is not None and tell(row, outcomes) for row, outcomes in found.items()]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
