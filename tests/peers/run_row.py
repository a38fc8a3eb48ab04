"""One row of `python -m tests.peers` in a process of its own: `python -m tests.peers.run_row ROW REPORT [PATTERN]`.

Torch's tests are a mixin, `DistributedTest._DistTestBase`, and a base that starts the ranks of each test, `TestDistBackend`. Here ranks are forked from
this process, which has imported torch already. What was written for GPUs runs on CPUs: a rank's GPU is the CPU. Without NCCL, and without anything that asks a GPU
what it does.
"""

import json
import os
import re
import sys
import unittest
from functools import wraps
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal import common_distributed

from tests.peers.expected import EXPECTED
from tests.peers.rows import ROWS

LIMIT = 120  # seconds a test may take


def main(name, report, only=""):
    row = ROWS[name]
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(row.ranks), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT)}
    # Before the tests are imported, which are decorated when they are defined.
    common_distributed.skip_if_lt_x_gpu = lambda *args, **kwargs: lambda test: test
    common_distributed.skip_if_no_gpu = lambda test: test
    common_distributed.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
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
            bad = [("failed", text) for _, text in [*result.failures, *result.errors]]
            outcomes[test] = [*bad, *(("skipped", why) for _, why in result.skipped), ("passed", "")][0]
            print(f"{name}: {test} {outcomes[test][0]}", flush=True)
    Path(report).write_text(json.dumps(outcomes))


def cpu_in_place_of_gpus():
    """In a rank: the tests' helpers are compiled when they are imported, and would not compile with this."""
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
        init(self, *args, **{k: v for k, v in kwargs.items() if k not in ("device_ids", "output_device")})

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
    """`test_ddp_uneven_inputs` takes some hundred steps with convolutions of images of 1000 x 1000, 25 seconds each on a CPU: nothing else keeps it
    from its end. Here images are of 32 x 32. Its matrix of 1000 x 1000 is one of 64 x 64, for a PowerSGD of full rank."""
    made, linear = tests.DDPUnevenTestInput, torch.nn.Linear(64, 64, bias=False)

    def smaller(**options):
        if options["name"] == "large_conv_model":
            options["inp"] = options["inp"][..., :32, :32]
        elif options["name"].startswith("small_model"):
            options |= {"inp": options["inp"][..., :64], "model": linear}
        return made(**options)

    tests.DDPUnevenTestInput = smaller


if __name__ == "__main__":
    main(*sys.argv[1:])
