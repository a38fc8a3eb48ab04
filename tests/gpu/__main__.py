"""What is tested on the emulated accelerator and under Triton's interpreter, on a GPU of NVIDIA's:
`make test-gpu`, in some minutes. Without a GPU it says so.

- What the kernels in Triton compute, beside NumPy and torch (`tests/torch/triton_numbers.py`).
- Replayed steps beside eager ones, on two ranks that share the GPU and talk by NCCL's sockets
  (`tests/emulated/test_replays.py`), but for what is about the emulated graphs themselves, and
  faults that nobody but the emulated accelerator notices.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gradwire.core.simulate.doctor.processes import as_host, free_port
from gradwire.core.simulate.self_check import VARIABLE
from tests.launch import ROOT, of_rank

RANKS, SECONDS = 2, 400
#: Names of cases that are left out.
LEFT_OUT = "what_cuda_forbids|an_error_that_was_swallowed|a_graph_does_not_keep|memory_of_a_pool|planted_faults|others_have_dropped"


def kernels() -> int:
    """Runs the tests of kernels; 0 if all pass."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    return subprocess.run(
        [sys.executable, *command, "tests/torch/triton_numbers.py"], cwd=ROOT
    ).returncode


def replays(folder: Path) -> int:
    """Runs the cases of replays; how many have failed, or were not run to their end."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), VARIABLE: "0"}
    common |= {"GRADWIRE_TEST_CASES": rf"^(?!test_({LEFT_OUT})|cost)"}
    command = [sys.executable, "-m", "tests.gpu.rank", str(folder)]
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | common | of_rank(rank, RANKS) | as_host(rank)
        )
        for rank in range(RANKS)
    ]
    wrong = 0
    try:
        wrong = sum(rank.wait(SECONDS) != 0 for rank in ranks)
    except subprocess.TimeoutExpired:
        wrong = RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    files = sorted(folder.glob("*.pt"))
    failed = {
        file.stem: error for file in files if (error := torch.load(file, weights_only=False)[1])
    }
    for name, error in failed.items():
        print(f"\n{name}\n{error}")
    print(
        f"replays: {len(files) - len(failed)} passed, {len(failed)} failed"
        + (f", {wrong} ranks as well" if wrong else "")
    )
    return len(failed) + wrong + (not files)


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU of NVIDIA's here: `make test` has the emulated accelerator")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return int(bool(kernels() + replays(Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
