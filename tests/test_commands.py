"""Commands of pages run as they are printed: with fewer processes where a page has eight, on this machine where it has two, and with short messages."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from tests.launch import ROOT, free_port, quickly_compiled, xla_flags
from tests.pages import block, replaced
from tests.shell import SLURM, at_once, command, run_bash

pytestmark = pytest.mark.slow

EIGHT = "--nproc-per-node=8"
ONE = "--nproc-per-node=1"


# --- a link is probed


def test_one_machine_is_probed(tmp_path: Path) -> None:
    printed = run_bash(command("choosing", 0, {EIGHT: "--nproc-per-node=2"}), tmp_path).splitlines()
    shown = block("choosing", 0, "text").splitlines()
    assert printed[0] == shown[0]
    assert printed[1].split() == shown[1].split()
    assert printed[-1] == shown[-1]
    assert gradwire.Probe.load(tmp_path / "probe.json").replicas == 2


def test_two_machines_are_probed(tmp_path: Path) -> None:
    there = {"HOST:29400": f"127.0.0.1:{free_port()}"}
    line = command("choosing", 1, there | {EIGHT: ONE})
    assert command("README", 4, there) == line
    printed = run_bash(at_once([line, line]), tmp_path)
    assert printed.startswith("2 replicas on ")
    assert gradwire.Probe.load(tmp_path / "probe.json").framework == "torch"


def test_two_machines_are_probed_in_jax(tmp_path: Path) -> None:
    first = command("choosing", 2, {"HOST:1234": f"127.0.0.1:{free_port()}"})
    flags = quickly_compiled(xla_flags("--xla_force_host_platform_device_count=1"))
    run_bash(
        at_once([first, replaced("choosing", first, {"--process 0": "--process 1"})]), tmp_path, {"XLA_FLAGS": flags}
    )
    probe = gradwire.Probe.load(tmp_path / "probe.json")
    assert (probe.framework, probe.replicas) == ("jax", 2)


# --- several nodes

TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(torch.nn.Linear(256, 256))
{}
ddp(torch.randn(8, 256)).square().mean().backward()
if dist.get_rank() == 0:
    print(dist.get_world_size(), "ranks,", handle.stats().steps, "step")
dist.destroy_process_group()
"""


def test_two_levels_are_started_by_hand(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(block("two-levels", 1)))
    there = {EIGHT: "--nproc-per-node=2", "node0": "127.0.0.1", "29500": str(free_port())}
    lines = command("two-levels", 0, there), command("two-levels", 1, there)
    assert run_bash(at_once(lines), tmp_path) == "4 ranks, 1 step\n"


def test_two_levels_are_started_by_slurm(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN.format(block("two-levels", 1)))
    script = block("two-levels", 1, "bash", {EIGHT: ONE, "29500": str(free_port())})
    assert run_bash(script, tmp_path, SLURM) == "2 ranks, 1 step\n"


def test_several_nodes_are_started_by_slurm(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("how-to/several-nodes", 0))
    script = block("how-to/several-nodes", 1, "bash", {EIGHT: ONE, "29500": str(free_port())})
    assert run_bash(script, tmp_path, SLURM) == block("how-to/several-nodes", 0, "text")


# --- scripts and targets


def test_the_sharded_example(tmp_path: Path) -> None:
    line = command("sharded-models", 0, {"examples/": f"{ROOT}/examples/"})
    tiny = "--width=32 --layers=1 --context=16 --batch-size=4 --steps=2"
    assert "; 2 steps, " in run_bash(f"{line} {tiny}", tmp_path)


def test_the_benchmark_of_half_steps(tmp_path: Path) -> None:
    line = command("half-steps", 0, {"benchmarks/": f"{ROOT}/benchmarks/"})
    run_bash(f"{line} --rates 0.1 --seeds 1 --epochs 1 --output half-step.json", tmp_path)
    assert len(json.loads((tmp_path / "half-step.json").read_text())["accuracy_percent"]) == 12


COUNT = """
import jax, numpy as np
from gradwire.jax_backend import all_reduce_mean
tx, given = all_reduce_mean(axis_name="data"), {name: np.ones((4, 8, 8), np.float32) for name in "abc"}
step = jax.pmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data", devices=jax.devices()[:4])
print(step.lower(given).compile().as_text().count(" all-reduce("))
"""


def test_the_flags_that_leave_all_reduces_apart(tmp_path: Path) -> None:
    """The one for a GPU is known to XLA; on a CPU it changes nothing."""
    on_cpu, on_gpu = command("buckets", 0), command("buckets", 1, {"=…": "=1000"})
    (tmp_path / "count.py").write_text(COUNT)
    devices = xla_flags("--xla_force_host_platform_device_count=4")
    found = []
    for line in ("XLA_FLAGS=", on_gpu, on_cpu):
        setting = line.replace("XLA_FLAGS=", f"XLA_FLAGS='{devices} ", 1)
        found.append(int(run_bash(f"{setting}' python count.py", tmp_path)))
    assert found == [1, 1, 3]


def test_make_runs_some_of_the_tests() -> None:
    """The command that it would run, by this Python."""
    line = command("CONTRIBUTING", 1)
    # Not as a part of the make that may have started these tests.
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    made = subprocess.run(
        ["make", "-n", *shlex.split(line)[1:], "JOBS=0"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    program, *arguments = shlex.split(made.stdout.splitlines()[-1])
    assert Path(program).name == "pytest"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed, \d+ deselected", done.stdout)
