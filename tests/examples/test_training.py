"""The training scripts, run for a few steps; and a run that was cut off continues as if nothing had happened."""

import json
import signal
import sys
from functools import partial
from pathlib import Path

import flax.serialization
import jax
import numpy as np
import pytest
import torch

from tests.examples import at_most, lost_once
from tests.examples.conftest import EXAMPLES, TINY, examples_importable
from tests.forked import run_ranks
from tests.pages import bash, blocks

pytestmark = pytest.mark.slow

with examples_importable():
    import checkpoints

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCH = [EXAMPLES / "train_torch.py"]
JAX = [EXAMPLES / "train_flax.py", "--devices=2"]
#: A script that is run by this one stops when it has made so many steps, until it is killed: however late a test looks at it.
AT_MOST = [Path(at_most.__file__), "60"]


def torch_ranks(*flags, ranks=2):
    """Train in torch, where torchrun has no part in what is tested."""
    return run_ranks(EXAMPLES / "train_torch.py", ranks, *TINY, *flags)


def read(path):
    """The complete lines so far."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curve(path):
    """All that a metrics file says, but for the time it took."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read(path)]


def torch_state(path):
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(torch.load(path, weights_only=True))
    return {str(k): np.asarray(v) for k, v in leaves if not isinstance(v, str) and "seconds" not in str(k)}


def flax_state(path):
    tree = flax.serialization.msgpack_restore(checkpoints.read(path))["state"]
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_flatten_with_path(tree)[0]}


def cut_and_resume(start, folder, train, launcher, script, read_state):
    """Train once as a whole (`train(*flags)`), once killed and resumed, and compare all that is left of both."""

    def flags(name):
        files = [f"--checkpoint={folder / name}.checkpoint", f"--metrics={folder / name}.jsonl"]
        return ["--steps=80", "--rank=2", "--checkpoint-every=10", "--eval-every=8", *files]

    train(*flags("whole"))
    killed = start(*launcher, *AT_MOST, *script, *TINY, *flags("cut"))
    killed.wait_for(lambda: len(read(folder / "cut.jsonl")) >= 15)
    killed.kill()
    assert 15 <= len(read(folder / "cut.jsonl")) < 80
    train(*flags("cut"), "--resume")

    whole = curve(folder / "whole.jsonl")
    assert [line["step"] for line in whole] == list(range(1, 81))
    assert [line["step"] for line in whole if "val_loss" in line] == list(range(8, 81, 8))
    assert whole[-1]["val_loss"] < whole[0]["loss"] - 0.3
    assert curve(folder / "cut.jsonl") == whole
    expected, found = read_state(folder / "whole.checkpoint"), read_state(folder / "cut.checkpoint")
    assert sum("error" in name for name in expected) >= 4  # what compression left out
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    assert not list(folder.glob("*.unfinished"))


def test_a_killed_torch_run_resumes_bit_for_bit(start, tmp_path):
    # With all the memory there is: errors, two factors, and whose turn it is.
    memory = ["--half-step", "--start-step=3"]
    cut_and_resume(start, tmp_path, partial(torch_ranks, *memory), TORCHRUN, [*TORCH, *memory], torch_state)

    # One process goes on from what two have left.
    alone = [f"--checkpoint={tmp_path / 'cut.checkpoint'}", "--resume", "--rank=2", *memory, "--steps=81"]
    assert "step 81/81" in torch_ranks(*alone, ranks=1)
    state = torch.load(tmp_path / "cut.checkpoint", weights_only=True)["compressor"]
    assert (state["step"], state["replicas"]) == (81, 1)


def test_torchrun_goes_on_from_the_last_checkpoint_when_a_rank_is_lost(tmp_path):
    """The command of the page, with a small model."""
    lost = f"{lost_once.__file__} 15 {EXAMPLES}/train_torch.py"
    method = ["--steps=30", "--rank=2", "--checkpoint-every=10", "--eval-every=12"]
    (command,) = (block.code for block in blocks("docs/how-to/several-nodes.md") if "--auto-resume" in block.code)
    assert "examples/train_torch.py" in command
    command = " ".join(
        [command.rstrip().replace("examples/train_torch.py", lost), *TINY, *method, "--metrics=lost.jsonl"]
    )
    printed = bash(command, tmp_path)
    assert printed.count("step 12/30") == 2  # before and again
    torch_ranks(*method, f"--metrics={tmp_path / 'whole.jsonl'}")
    assert len(curve(tmp_path / "whole.jsonl")) == 30
    assert curve(tmp_path / "lost.jsonl") == curve(tmp_path / "whole.jsonl")


def test_a_killed_jax_run_resumes_bit_for_bit(start, tmp_path):
    # With all the memory there is: errors, factors, and moments in pieces.
    command = [*JAX, "--zero"]
    cut_and_resume(start, tmp_path, lambda *flags: start(*command, *TINY, *flags).finish(), [], command, flax_state)
    state = flax_state(tmp_path / "cut.checkpoint")
    weights = [x for name, x in state.items() if "['params']" in name]
    pieces = [x for name, x in state.items() if "pieces" in name]
    assert all(x.shape[0] == 2 for x in pieces)
    # All sizes are even.
    assert sum(x.size for x in pieces) == 2 * sum(x.size for x in weights)


def test_the_jax_run_of_diloco_goes_on_after_ctrl_c(start, tmp_path):
    files = [f"--checkpoint={tmp_path / 'checkpoint'}", f"--metrics={tmp_path / 'metrics.jsonl'}"]
    method = ["--rank=2", "--diloco=3", "--start-step=2"]
    command = [*JAX, *TINY, *method, "--steps=200", "--checkpoint-every=7", "--eval-every=50", *files]
    running = start(*AT_MOST, *command)
    running.wait_for(lambda: len(read(tmp_path / "metrics.jsonl")) >= 9)
    running.process.send_signal(signal.SIGINT)
    running.output()
    assert running.process.returncode in (1, 130, -signal.SIGINT)
    assert not running.left_behind()
    assert len(read(tmp_path / "metrics.jsonl")) < 200
    # All of the state is per replica: its weights, too.
    kernels = [x for name, x in flax_state(tmp_path / "checkpoint").items() if "kernel" in name and "params" in name]
    assert all(len(x) == 2 for x in kernels)
    assert any((x[0] != x[1]).any() for x in kernels)  # not just averaged

    start(*command, "--resume").finish()
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 201))
    # Two steps average gradients, every third one after them parameters, in two messages each.
    assert [line["collectives"] for line in lines] == [min(s, 2) + 2 * (max(s - 2, 0) // 3) for s in range(1, 201)]


def test_a_sharded_torch_run_goes_on_unsharded(tmp_path):
    def run(name, *more):
        files = [f"--checkpoint={tmp_path / name}.checkpoint", f"--metrics={tmp_path / name}.jsonl"]
        torch_ranks("--rank=2", "--steps=8", "--checkpoint-every=4", *files, *more)
        return read(tmp_path / f"{name}.jsonl")

    plain = run("plain")
    run("sharded", "--zero")
    state = torch.load(tmp_path / "sharded.checkpoint", weights_only=True)["optimizer"]
    expected = torch.load(tmp_path / "plain.checkpoint", weights_only=True)["optimizer"]
    assert state["state"].keys() == expected["state"].keys()
    for number, memory in expected["state"].items():
        for key, value in memory.items():
            torch.testing.assert_close(state["state"][number][key], value, rtol=1e-4, atol=1e-8)
    sharded = read(tmp_path / "sharded.jsonl")
    assert [line["loss"] for line in sharded] == pytest.approx([line["loss"] for line in plain], rel=1e-5)
    assert sharded[-1]["bytes_sent"] > plain[-1]["bytes_sent"]  # the parameters too
    more = torch_ranks("--rank=2", "--steps=12", "--resume", f"--checkpoint={tmp_path / 'sharded.checkpoint'}")
    assert "step 12/12" in more


def test_torch_alone_and_uncompressed(start, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abcdefghij" * 500)
    metrics = tmp_path / "metrics.jsonl"
    output = start(
        EXAMPLES / "train_torch.py",
        *TINY,
        "--compress=none",
        "--steps=6",
        "--eval-every=3",
        f"--text={text}",
        f"--metrics={metrics}",
        python=sys.executable,
    ).finish()
    lines = read(metrics)
    numbers = (
        2 * 256 * 32 + 16 * 32 + 256 + 2 * 32 + 12 * 32 * 32 + 9 * 32 + 4 * 32
    )  # embedding and head, positions, norms, a block
    assert [line["bytes_sent"] for line in lines] == [4 * numbers * step for step in range(1, 7)]
    assert "step 3/6" in output
    assert "step 6/6" in output


def test_windows_that_cannot_be_shared_are_refused(start):
    refused = start(EXAMPLES / "train_flax.py", "--devices=3", "--eval-windows=4", python=sys.executable)
    assert "--eval-windows 4 is not a multiple of the 3 devices" in refused.output()
    assert refused.process.returncode == 2
