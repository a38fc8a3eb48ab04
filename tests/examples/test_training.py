"""The training scripts, run for a few steps; and a run that was cut off continues as if nothing had
happened."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import flax.serialization
import jax
import numpy as np
import pytest
import torch

from tests.examples.conftest import EXAMPLES, TINY, examples_importable
from tests.launch import ROOT, free_port, run_ranks
from tests.pages import bash, blocks

pytestmark = pytest.mark.slow

with examples_importable():
    import checkpoints
    import convert

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCH = [EXAMPLES / "train_torch.py"]
JAX = [EXAMPLES / "train_flax.py", "--devices=2"]
STOPPED = Path(__file__).with_name("stopped.py")
AT_MOST = [STOPPED, "60", "for-ever"]
#: For the scripts with other options.
SMALL = ("--width=32", "--layers=1", "--context=16", "--batch-size=4", "--rank=2")


def torch_ranks(*flags, ranks=2):
    """Train in torch, where torchrun has no part in what is tested."""
    return run_ranks(*TORCH, ranks, *TINY, *flags)


def curve(path):
    """All that the complete lines of a metrics file say so far, but for the time it took."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    read = (json.loads(line) for line in lines if line.endswith("\n"))
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "compress_seconds")} for line in read
    ]


def torch_state(path):
    leaves, _ = torch.utils._pytree.tree_flatten_with_path(torch.load(path, weights_only=True))
    return {
        str(k): np.asarray(v)
        for k, v in leaves
        if not isinstance(v, str) and "seconds" not in str(k)
    }


def flax_state(path):
    tree = flax.serialization.msgpack_restore(checkpoints.read(path))["state"]
    return {
        jax.tree_util.keystr(k): np.asarray(v)
        for k, v in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def cut_and_resume(start, folder, train, launcher, script, read_state):
    """Train once as a whole (`train(*flags)`), once killed and resumed, and compare all that is
    left of both."""

    def flags(name):
        files = [f"--checkpoint={folder / name}.checkpoint", f"--metrics={folder / name}.jsonl"]
        return ["--steps=80", "--rank=2", "--checkpoint-every=10", "--eval-every=8", *files]

    train(*flags("whole"))
    killed = start(*launcher, *AT_MOST, *script, *TINY, *flags("cut"))
    killed.wait_for(lambda: len(curve(folder / "cut.jsonl")) >= 15)
    killed.kill()
    assert 15 <= len(curve(folder / "cut.jsonl")) < 80
    train(*flags("cut"), "--resume")

    whole = curve(folder / "whole.jsonl")
    assert [line["step"] for line in whole] == list(range(1, 81))
    assert [line["step"] for line in whole if "val_loss" in line] == list(range(8, 81, 8))
    assert whole[-1]["val_loss"] < whole[0]["loss"] - 0.3
    assert curve(folder / "cut.jsonl") == whole
    expected, found = read_state(folder / "whole.checkpoint"), read_state(folder / "cut.checkpoint")
    assert sum("error" in name for name in expected) >= 4  # the compression error
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    assert not list(folder.glob("*.unfinished"))


def test_a_killed_torch_run_resumes_bit_for_bit(start, tmp_path):
    # With all the memory there is: errors, two factors, whose turn it is, and moments in shards.
    memory = ["--half-step", "--start-step=3"]
    cut_and_resume(
        start,
        tmp_path,
        partial(torch_ranks, *memory, "--zero"),
        TORCHRUN,
        [*TORCH, *memory, "--zero"],
        torch_state,
    )

    # One process goes on from what two have left, with an optimizer that is whole.
    alone = [
        f"--checkpoint={tmp_path / 'cut.checkpoint'}",
        "--resume",
        "--rank=2",
        *memory,
        "--steps=81",
    ]
    assert "step 81/81" in torch_ranks(*alone, ranks=1)
    state = torch.load(tmp_path / "cut.checkpoint", weights_only=True)["compressor"]
    assert (state["step"], state["replicas"]) == (81, 1)


def test_torchrun_goes_on_from_the_last_checkpoint_when_a_rank_is_lost(tmp_path):
    """The command of the page, with a small model."""
    method = ["--steps=30", "--rank=2", "--checkpoint-every=10", "--eval-every=12"]
    (command,) = (
        block.code
        for block in blocks("docs/how-to/several-nodes.md")
        if "--auto-resume" in block.code
    )
    assert "examples/train_torch.py" in command
    lost = command.rstrip().replace(
        "examples/train_torch.py", f"{STOPPED} 15 once {EXAMPLES}/train_torch.py"
    )
    printed = bash(" ".join([lost, *TINY, *method, "--metrics=lost.jsonl"]), tmp_path)
    assert printed.count("step 12/30") == 2  # before and again
    torch_ranks(*method, f"--metrics={tmp_path / 'whole.jsonl'}")
    assert len(curve(tmp_path / "whole.jsonl")) == 30
    assert curve(tmp_path / "lost.jsonl") == curve(tmp_path / "whole.jsonl")


def test_a_killed_jax_run_resumes_bit_for_bit(start, tmp_path):
    # With all the memory there is: errors, factors, and moments in pieces.
    command = [*JAX, "--zero"]
    cut_and_resume(
        start,
        tmp_path,
        lambda *flags: start(*command, *TINY, *flags).finish(),
        [],
        command,
        flax_state,
    )
    state = flax_state(tmp_path / "cut.checkpoint")
    weights = [x for name, x in state.items() if "['params']" in name]
    pieces = [x for name, x in state.items() if "pieces" in name]
    assert all(x.shape[0] == 2 for x in pieces)
    assert sum(x.size for x in pieces) == 2 * sum(x.size for x in weights)  # all sizes are even


def test_the_jax_run_of_diloco_goes_on_after_ctrl_c(start, tmp_path):
    files = [f"--checkpoint={tmp_path / 'checkpoint'}", f"--metrics={tmp_path / 'metrics.jsonl'}"]
    method = ["--rank=2", "--diloco=3", "--start-step=2"]
    command = [
        *JAX,
        *TINY,
        *method,
        "--steps=200",
        "--checkpoint-every=9",  # never right after an average
        "--eval-every=50",
        *files,
    ]
    running = start(*AT_MOST, *command)
    running.wait_for(lambda: len(curve(tmp_path / "metrics.jsonl")) >= 11)
    running.process.send_signal(signal.SIGINT)
    running.output()
    assert running.process.returncode in (1, 130, -signal.SIGINT)
    assert not running.left_behind()
    assert len(curve(tmp_path / "metrics.jsonl")) < 200
    # All of the state is per replica: its weights, too.
    kernels = [
        x
        for name, x in flax_state(tmp_path / "checkpoint").items()
        if "kernel" in name and "params" in name
    ]
    assert all(len(x) == 2 for x in kernels)
    assert any((x[0] != x[1]).any() for x in kernels)  # not just averaged

    start(*command, "--resume").finish()
    lines = curve(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 201))
    # Two steps average gradients, every third one after them parameters, in two messages each.
    assert [line["collectives"] for line in lines] == [
        min(s, 2) + 2 * (max(s - 2, 0) // 3) for s in range(1, 201)
    ]


def test_a_run_moves_to_flax_and_back_as_if_it_had_stayed(start, tmp_path, monkeypatch):
    options = [*TINY, "--layers=2", "--rank=2", "--half-step", "--lr=0.01", "--steps=20"]
    torch_ranks(*options, f"--metrics={tmp_path / 'stayed'}", ranks=1)

    def part(script, name, last, *more):
        """Train to this step; the checkpoint before it is left."""
        metrics = tmp_path / f"{name} metrics"
        files = [f"--checkpoint={tmp_path / name}", f"--metrics={metrics}", "--checkpoint-every=1"]
        run = start(STOPPED, str(last), "for-ever", EXAMPLES / script, *options, *files, *more)
        run.wait_for(lambda: any(line["step"] == last for line in curve(metrics)))
        run.kill()
        return curve(metrics)

    def convert_to(*arguments):
        monkeypatch.setattr("sys.argv", ["convert.py", *map(str, arguments), *options])
        convert.main()

    begun, flax, back = (tmp_path / name for name in ("begun", "flax", "back"))
    moved = part("train_torch.py", "begun", 7)
    convert_to("flax", begun, flax)
    moved += part("train_flax.py", "flax", 14, "--devices=1", "--resume")
    convert_to("torch", flax, back)
    torch_ranks(*options, f"--checkpoint={back}", f"--metrics={back}.jsonl", "--resume", ranks=1)
    by_step = {line["step"]: line["loss"] for line in [*moved, *curve(tmp_path / "back.jsonl")]}
    stayed = {line["step"]: line["loss"] for line in curve(tmp_path / "stayed")}
    assert by_step.keys() == stayed.keys()
    np.testing.assert_allclose([by_step[step] for step in stayed], [*stayed.values()], rtol=1e-4)
    assert abs(stayed[7] - stayed[20]) > 0.01  # they moved by more than the tolerance
    monkeypatch.setattr("sys.argv", ["convert.py", "flax", str(begun), str(flax), "--zero"])
    with pytest.raises(SystemExit):
        convert.main()
    # a file of other options does not become one of these
    options += ["--start-step=3"]
    for to, source in (("flax", begun), ("torch", flax)):
        with pytest.raises(SystemExit, match=r"is of a run with .*, not with .*start_step=3"):
            convert_to(to, source, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_a_file_is_what_was_written_and_damage_is_noticed(tmp_path):
    path, data = tmp_path / "new" / "file", bytes(range(256)) * 20
    checkpoints.write(path, b"something older")
    checkpoints.write(path, data)
    assert checkpoints.read(path) == data
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    content = path.read_bytes()
    for length in (0, 10, 40, len(data) // 2, len(data), len(data) + 39):
        assert length < len(content)
        path.write_bytes(content[:length])
        with pytest.raises(SystemExit, match="cut off"):
            checkpoints.read(path)
    for place in (0, 1000, len(data) - 1, len(data), len(content) - 1):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(SystemExit, match=r"damaged|no checkpoint"):
            checkpoints.read(path)


def test_torch_alone_and_uncompressed(start, tmp_path):
    text, metrics = tmp_path / "text.txt", tmp_path / "metrics.jsonl"
    text.write_text("abcdefghij" * 500)
    options = [
        "--compress=none",
        "--steps=6",
        "--eval-every=3",
        f"--text={text}",
        f"--metrics={metrics}",
    ]
    output = start(*TORCH, *TINY, *options, python=sys.executable).finish()
    # Embedding and head, positions, norms, a block.
    numbers = 2 * 256 * 32 + 16 * 32 + 256 + 2 * 32 + 12 * 32 * 32 + 9 * 32 + 4 * 32
    assert [line["bytes_sent"] for line in curve(metrics)] == [
        4 * numbers * step for step in range(1, 7)
    ]
    assert "step 3/6" in output
    assert "step 6/6" in output


def went_on(first, second):
    """Whether the losses of 12 steps, and of four more after a restart, are those of a model that
    learns."""
    begun, resumed = (
        {
            int(step): float(loss)
            for step, loss in re.findall(r"^step (\d+)  loss ([\d.]+)$", said, re.MULTILINE)
        }
        for said in (first, second)
    )
    assert [*begun, *resumed] == [*range(1, 17)]
    return begun[12] < begun[1] - 0.3 and resumed[13] < begun[1] - 0.3


def test_the_sharded_model_goes_on_with_other_shards(tmp_path):
    script = EXAMPLES / "train_sharded.py"
    first = run_ranks(script, 4, *SMALL, "--steps=12", f"--checkpoint={tmp_path}")
    said = re.search(
        r"ReplicaHandle\(PowerSGD\(rank=2\): (\d+) of (\d+) tensors.*\(([\d.]+)×\).*; 12 steps, ",
        first,
    )
    assert said
    assert float(said[3]) > 1.5
    second = run_ranks(script, 4, *SMALL, "--steps=16", "--replicas=4", f"--resume={tmp_path}")
    assert went_on(first, second)
    assert "; 16 steps, " in second


def test_the_sharded_jax_model_goes_on_with_slices_of_another_size(start, tmp_path):
    script = EXAMPLES / "train_sharded_flax.py"
    first = start(script, *SMALL, "--steps=12", f"--checkpoint={tmp_path}").finish()
    said = re.search(
        r"^each slice sends ([\d,]+) bytes a step, in place of ([\d,]+)$", first, re.MULTILINE
    )
    assert said
    compressed, dense = (int(n.replace(",", "")) for n in said.groups())
    assert compressed < dense / 5
    more = ("--steps=16", "--chips=1", "--batch-size=8", f"--resume={tmp_path}")
    assert went_on(first, start(script, *SMALL, *more).finish())


@contextmanager
def lighthouse(sites):
    """The port of one that waits for so many."""
    pytest.importorskip("torchft")
    port = free_port()
    command = [
        sys.executable,
        ROOT / "tests" / "lighthouse.py",
        f"--bind=127.0.0.1:{port}",
        f"--min_replicas={sites}",
        "--heartbeat_timeout_ms=1000",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            yield port
        finally:
            server.kill()


def site_of(start, port, number):
    options = (
        f"--site={number}",
        f"--text={ROOT / 'README.md'}",
        *SMALL,
        "--period=5",
        "--steps=100000",
    )
    return start(
        EXAMPLES / "train_elastic.py", *options, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}"
    )


def test_ctrl_c_ends_a_site_that_waits_for_others(start):
    with lighthouse(sites=2) as port:
        site = site_of(start, port, 0)

        def waits():
            with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as page:
                found = re.search(rb"\[(\d+)/\d+ participants healthy\]", page.read())
                return found and int(found[1]) > 0

        site.wait_for(waits)
        for pid in site.alive():
            os.kill(pid, signal.SIGINT)
        assert not site.left_behind()
        assert site.process.wait(60) != 0


def test_a_site_that_is_killed_comes_back(start):
    with lighthouse(sites=1) as port:
        site = partial(site_of, start, port)

        def says(site, pattern):
            site.wait_for(lambda: re.search(pattern, site.log.read_text()))

        says(first := site(0), r"round 2 of 1 sites")
        says(second := site(1), r"of 2 sites")
        second.kill()
        says(first, r"of 2 sites(?s:.*)of 1 sites")
        says(again := site(1), r"of 2 sites")
    steps = [
        int(re.search(r"step (\d+),", each.log.read_text())[1]) for each in (first, second, again)
    ]
    assert steps == sorted(set(steps))
