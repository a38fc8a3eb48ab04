"""Torch's own tests, against gradwire: `make test-peers`, or `python -m tests.peers [ROW ...]
[--only PATTERN]`.

What is run ships with torch, in `torch.testing._internal.distributed.distributed_test`. Each test
starts its ranks as real processes on Gloo, with a limit of two minutes, or torch's own if that is
longer. `rows.py` says where gradwire takes torch's place, `expected.py` which tests need not pass
and why, and what was written for GPUs runs on CPUs: a rank's GPU is the CPU, without NCCL. The exit
status is 1 if any other test fails, or one of those passes. All rows take some minutes on two
cores.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import uuid
from collections.abc import Mapping
from functools import wraps
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.launch import end_all, environment
from tests.peers.expected import EXPECTED
from tests.peers.rows import ROWS

LIMIT = 120  # seconds a test may take
#: Test → how it ended ("passed", "failed", "skipped") and what it said.
Outcomes = Mapping[str, tuple[str, str]]


def run(row, only, limit=1800):
    """The outcomes of a row; None if it has not come to its end. No process is left."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        report, env = Path(folder) / "report.json", environment(mark) | {"CUDA_VISIBLE_DEVICES": ""}
        command = [
            sys.executable,
            "-m",
            "tests.peers",
            row,
            "--only",
            only,
            "--report",
            str(report),
        ]
        try:
            subprocess.run(command, env=env, stdout=log, stderr=log, timeout=limit, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            log.seek(0)
            print(f"{log.read()[-6000:]}\n{error}")
        finally:
            end_all(mark)
        return json.loads(report.read_text()) if report.exists() else None


def run_here(name, only, report):
    """A row in this process, from which its ranks are forked. Torch's tests are a mixin,
    `DistributedTest._DistTestBase`, and a base that starts the ranks of each test,
    `TestDistBackend`."""
    from torch.testing._internal import (
        common_distributed,
    )  # not before: it freezes torch's flags for the rest of the process

    row = ROWS[name]
    os.environ |= {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(row.ranks),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT),
    }
    # Before the tests are imported, which are decorated when they are defined.
    common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(world_size)
    }
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
        if (
            test not in left_out
            and re.search(row.tests, test, re.IGNORECASE)
            and re.search(only, test)
        ):
            result = unittest.TestResult()
            Ranks(test).run(result)
            bad = [("failed", text) for _, text in [*result.failures, *result.errors]]
            outcomes[test] = [
                *bad,
                *(("skipped", why) for _, why in result.skipped),
                ("passed", ""),
            ][0]
            print(f"{name}: {test} {outcomes[test][0]}", flush=True)
    Path(report).write_text(json.dumps(outcomes))


def cpu_in_place_of_gpus():
    """In a rank: the tests' helpers are compiled when they are imported, and would not compile with
    this."""
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda device=None: None)
    torch.cuda.current_device = lambda: 0
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, device=None: self
        owner.to = _at_cpu(owner.to)
    for name in ("empty", "full", "ones", "rand", "randn", "tensor", "zeros"):
        setattr(torch, name, _at_cpu(getattr(torch, name)))
    init = DistributedDataParallel.__init__

    @wraps(init)
    def without_device_ids(self, *args, **kwargs):
        init(
            self,
            *args,
            **{k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")},
        )

    DistributedDataParallel.__init__ = without_device_ids


def _at_cpu(function):
    def is_gpu(device):
        return type(device) is int or str(device).startswith("cuda")

    @wraps(function)
    def wrapper(*args, **kwargs):
        if "device" in kwargs and is_gpu(kwargs["device"]):
            kwargs["device"] = "cpu"
        if function.__name__ == "to" and len(args) > 1 and is_gpu(args[1]):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)

    return wrapper


def small_inputs(tests):
    """`test_ddp_uneven_inputs` takes some hundred steps with convolutions of images of 1000 x 1000,
    25 seconds each on a CPU: nothing else keeps it from its end. Here images are of 32 x 32. Its
    matrix of 1000 x 1000 is one of 64 x 64, for a PowerSGD of full rank."""
    made, linear = tests.DDPUnevenTestInput, torch.nn.Linear(64, 64, bias=False)

    def smaller(**options):
        if options["name"] == "large_conv_model":
            options["inp"] = options["inp"][..., :32, :32]
        elif options["name"].startswith("small_model"):
            options |= {"inp": options["inp"][..., :64], "model": linear}
        return made(**options)

    tests.DDPUnevenTestInput = smaller


def tell(row, outcomes):
    """Print what passed, what failed, and why that need not pass. Returns whether all is as
    expected."""
    expected, wrong = EXPECTED.get(row, {}), []
    counts = [
        f"{sum(how == ended for how, _ in outcomes.values())} {ended}"
        for ended in ("passed", "failed", "skipped")
    ]
    print(f"\n{ROWS[row].title} ({ROWS[row].ranks} ranks): {', '.join(counts)}")
    for test, (outcome, text) in outcomes.items():
        listed = test in expected
        if outcome == ("passed" if listed else "failed"):
            wrong.append(test)
        told = expected[test] if listed and outcome != "skipped" else text.strip()
        print(
            f"  {outcome}{', and should not have' if test in wrong else ''}: {test}{told and ': '}{told}"
        )
    return not wrong


def main():
    parser = argparse.ArgumentParser(description="Torch's own tests, against gradwire.")
    parser.add_argument("rows", nargs="*", default=[], help=f"of {', '.join(ROWS)}; all by default")
    parser.add_argument("--only", default="", help="a pattern of names of tests")
    parser.add_argument("--report", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.report:
        run_here(options.rows[0], options.only, options.report)
        return
    good = []
    for row in options.rows or ROWS:
        print(f"running: {ROWS[row].title}", flush=True)
        outcomes = run(row, options.only)
        good.append(outcomes is not None and tell(row, outcomes))
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
