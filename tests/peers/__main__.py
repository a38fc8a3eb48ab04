"""Torch's own tests, against gradwire: `make test-peers`, or `python -m tests.peers [ROW ...] [--only PATTERN]`.

What is run ships with torch, in `torch.testing._internal.distributed.distributed_test`. Each test starts its ranks as real processes on Gloo, with a
limit of two minutes, or torch's own if that is longer. `rows.py` says where gradwire takes torch's place, `expected.py` which tests need not pass and why, and
`run_row.py` how tests for GPUs run without. The exit status is 1 if any other test fails, or one of those passes. All rows take some minutes on two cores.
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
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        report, env = Path(folder) / "report.json", environment(mark) | {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "tests.peers.run_row", row, str(report), only]
        try:
            subprocess.run(command, env=env, stdout=log, stderr=log, timeout=limit, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            log.seek(0)
            print(f"{log.read()[-6000:]}\n{error}")
        finally:
            end_all(mark)
        return json.loads(report.read_text()) if report.exists() else None


def tell(row, outcomes):
    """Print what passed, what failed, and why that need not pass. Returns whether all is as expected."""
    expected, wrong = EXPECTED.get(row, {}), []
    counts = [
        f"{sum(how == ended for how, _ in outcomes.values())} {ended}" for ended in ("passed", "failed", "skipped")
    ]
    print(f"\n{ROWS[row].title} ({ROWS[row].ranks} ranks): {', '.join(counts)}")
    for test, (outcome, text) in outcomes.items():
        listed = test in expected
        if outcome == ("passed" if listed else "failed"):
            wrong.append(test)
        told = expected[test] if listed and outcome != "skipped" else text.strip()
        print(f"  {outcome}{', and should not have' if test in wrong else ''}: {test}{told and ': '}{told}")
    return not wrong


def main():
    parser = argparse.ArgumentParser(description="Torch's own tests, against gradwire.")
    parser.add_argument("rows", nargs="*", default=[], help=f"of {', '.join(ROWS)}; all by default")
    parser.add_argument("--only", default="", help="a pattern of names of tests")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    good = []
    for row in options.rows or ROWS:
        print(f"running: {ROWS[row].title}", flush=True)
        outcomes = run(row, options.only)
        good.append(outcomes is not None and tell(row, outcomes))
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
