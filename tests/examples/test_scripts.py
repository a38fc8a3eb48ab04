"""The scripts to copy, each by the commands in its first lines, one after the other: the second
goes on where the first has ended."""

import ast
import re

import pytest

from tests.examples.conftest import EXAMPLES
from tests.launch import quickly_compiled, xla_flags
from tests.pages import bash

pytestmark = pytest.mark.slow

SCRIPTS = EXAMPLES / "scripts"
#: Of each what it prints in the end, all runs together. `make examples` runs what needs packages of
#: its own.
ENDS = {
    "ddp": r"step 100: \d+% .*CommHook\(.* 100 steps, .*step 150: .*CommHook\(.* 200 steps, ",
    "fsdp2": r"step 50  loss .*ReplicaHandle\(.* 50 steps, .*step 75  loss .*ReplicaHandle\(.* 100 steps, ",
    "hf_trainer": r"'train_runtime'.*'train_runtime'",
    "linen": r"step 50  loss .*Stats\(steps=Array\(50,.*step 75  loss .*Stats\(steps=Array\(100,",
    "nnx_two_axes": r"step 50  loss .*Stats\(steps=Array\(50,.*step 75  loss .*Stats\(steps=Array\(100,",
    "torchft_sites": r"step 100, round 6 of 2 sites.*ElasticLocalSGD\(.* 6 rounds",
}
ELSEWHERE = {"ray_train"}


def commands(script):
    """Those of its docstring."""
    lines = ast.get_docstring(ast.parse(script.read_text())).splitlines()
    return [
        line for line in lines if re.match(r"(torchrun|python|torchft_lighthouse|export) ", line)
    ]


def test_there_are_no_others():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == ENDS.keys() | ELSEWHERE
    assert all(len(path.read_text().splitlines()) <= 80 for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("name", ENDS)
def test_a_script_runs_as_it_says(name, tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    flags = quickly_compiled(xla_flags("--xla_force_host_platform_device_count=4"))
    given, end = (
        f"export XLA_FLAGS='{flags}'",
        ["wait $!", "kill %1"] if name == "torchft_sites" else [],
    )
    printed = bash("\n".join([given, *commands(SCRIPTS / f"{name}.py"), *end]), tmp_path)
    assert re.search(ENDS[name], printed, re.DOTALL), printed


def test_the_file_of_slurm(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    given = "export SLURM_JOB_ID=1 SLURM_GPUS_ON_NODE=1 SLURM_SUBMIT_DIR=$PWD\n"
    printed = bash(
        given + (SCRIPTS / "slurm.sbatch").read_text().replace("--steps 1000", "--steps 50"),
        tmp_path,
    )
    assert "step 50: " in printed
    assert (tmp_path / "ddp.pt").exists()
