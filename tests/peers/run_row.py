"""One row of `python -m tests.peers` in a process of its own: `python -m tests.peers.run_row ROW REPORT [PATTERN]`.

Torch's tests are a mixin, `DistributedTest._DistTestBase`, and a base that starts the ranks of each test, `TestDistBackend`. Here ranks are forked from
this process, which has imported torch already.
"""

import json
import os
import re
import sys
import unittest
from pathlib import Path

import torch

from tests.peers.expected import EXPECTED
from tests.peers.on_cpu import cpu_in_place_of_gpus, skip_nothing_for_gpus, small_inputs
from tests.peers.rows import ROWS

LIMIT = 120  # seconds a test may take


def main(name, report, only=""):
    row = ROWS[name]
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(row.ranks), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT)}
    skip_nothing_for_gpus()
    from torch.testing._internal.distributed import distributed_test as theirs

    class Ranks(theirs.DistributedTest._DistTestBase, theirs.TestDistBackend):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self):
            for process in self.processes:
                process.kill()
                process.join()
            super().tearDown()

        @classmethod
        def _run(cls, *args, **kwargs):
            cpu_in_place_of_gpus()
            small_inputs(theirs)
            row.prepare(theirs)
            super()._run(*args, **kwargs)

    left_out = set() if name == "torch" else set(EXPECTED["torch"])
    Ranks.setUpClass()
    outcomes = {}
    for test in unittest.TestLoader().getTestCaseNames(Ranks):
        if test not in left_out and re.search(row.tests, test, re.IGNORECASE) and re.search(only, test):
            result = unittest.TestResult()
            Ranks(test).run(result)
            outcomes[test] = _ended(result)
            print(f"{name}: {test} {outcomes[test][0]}", flush=True)
    Path(report).write_text(json.dumps(outcomes))


def _ended(result):
    if bad := [*result.failures, *result.errors]:
        return "failed", bad[0][1]
    return ("skipped", result.skipped[0][1]) if result.skipped else ("passed", "")


if __name__ == "__main__":
    main(*sys.argv[1:])
