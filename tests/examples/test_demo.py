"""The demo, in small: with --all it asks whether compression helps and compares six trainings; it
says what went wrong, and leaves nothing running. README.md runs it as it is printed there."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, TINY, examples_importable
from tests.launch import ROOT

pytestmark = pytest.mark.slow

#: In place of `advise.py`: it sends few and small messages.
QUICK = f"""
import runpy
from tests.cli.commands import few_and_small

few_and_small()
runpy.run_path({str(EXAMPLES / "advise.py")!r}, run_name="__main__")
"""
#: Where the advice is not what is looked at: it comes at once.
ADVISED = """
import argparse, pathlib

parser = argparse.ArgumentParser()
parser.add_argument("--to", type=pathlib.Path)
parser.parse_known_args()[0].to.write_text("Leave it: nothing was measured.")
"""


@pytest.fixture
def demo(start, tmp_path):
    """Start a copy of the demo with another script for advice."""

    def started(advise, options, *of_trainings):
        copy = shutil.copytree(
            EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
        (copy / "advise.py").write_text(advise)
        return start(copy / "demo.py", *options, f"--out={tmp_path}", "--", *TINY, *of_trainings)

    return started


def test_all_of_it_ends_with_a_table_and_a_picture(demo, tmp_path):
    output = demo(QUICK, ["--all", "--steps=4", "--rank=2"], f"--text={ROOT / 'README.md'}").finish(
        560
    )
    number = r"([\d.,]+)"
    advice, trainings = output.split("Six trainings")
    assert re.search(r"^[→ ] plain +\S+ .*bytes$", advice, re.MULTILINE), output
    assert re.search(r"^[→ ] Sign\(\) +\S+ .*≤\d+ %$", advice, re.MULTILINE), output
    for said in advice.split("Between two machines at 100 Mbit/s:"):
        assert re.search(
            r"^(Take .*|Leave it|Within 0.5 % of the loss .*): ", said, re.MULTILINE
        ), output
    last = trainings.rstrip().splitlines()[-3:]  # pages, or commands, to go on with
    for what, line in zip(
        ("docs/advise.md", "gradwire advise", "docs/tutorials/torch.md"), last, strict=True
    ):
        assert what in line
        assert what.startswith("gradwire") or (ROOT / what).exists()
    for framework in ("torch", "JAX"):
        plain = re.search(rf"{framework}, plain +{number} +{number} MB +1.0× +1 ", output)
        compressed = re.search(
            rf"{framework}, PowerSGD +{number} +{number} MB +{number}× +2 ", output
        )
        assert plain, output
        assert compressed, output
        files = [
            tmp_path / "demo" / f"{framework.lower()}-{name}.jsonl" for name in ("none", "powersgd")
        ]
        dense, small = (json.loads(file.read_text().splitlines()[-1]) for file in files)
        assert dense["step"] == small["step"] == 4
        assert float(plain[1]) == pytest.approx(dense["val_loss"], abs=1e-3)
        assert float(compressed[1]) == pytest.approx(small["val_loss"], abs=1e-3)
        ratio = dense["bytes_sent"] / small["bytes_sent"]
        assert ratio > 5
        assert float(compressed[3]) == pytest.approx(ratio, abs=0.06)
    # whose model is too small for them
    assert "PowerSGD ran without compiled loops in torch" in output
    for method in ("local SGD", "DiLoCo"):  # one average, at the end, in place of four
        assert re.search(rf"torch, {method} +{number} +{number} MB +4.0× +0.25 ", output), output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_what_compiled_loops_save_is_measured_where_there_are_such(monkeypatch, tmp_path):
    """By a few more steps, in processes that compile none."""
    with examples_importable():
        import demo

    trained = []

    def train(run, flags):
        trained.append((run.environment, run.file.name, flags[-2:]))
        run.lines.append({"compress_seconds": 0.0085, "compiled_loops": ""})
        yield

    monkeypatch.setattr(demo, "train", train)
    run = demo.Run("torch", "powersgd", tmp_path)
    run.lines.append({"compress_seconds": 0.0042, "compiled_loops": "numba"})
    assert "takes 4.2 ms" in (said := demo.compiled_loops(run, 80, ["--steps=80"], demo.Console()))
    assert "8.5 ms without them, in 10 steps" in said
    assert trained == [
        (
            {"NUMBA_DISABLE_JIT": "1"},
            "torch-powersgd-uncompiled.jsonl",
            ["--steps=10", "--eval-every=10"],
        )
    ]


def test_a_failed_training_is_shown(demo, tmp_path):
    failing = demo(ADVISED, ["--all", "--steps=4"], f"--text={tmp_path / 'absent.txt'}")
    output = failing.output()
    assert failing.process.returncode == 1
    assert "Leave it: nothing was measured." in output
    assert "torch, plain failed with exit status 1" in output
    assert "absent.txt: No such file or directory" in output
    assert "Traceback" not in output.split("failed with exit status")[0]
    assert not failing.left_behind()


def test_it_leaves_nothing_running_on_ctrl_c(demo, tmp_path):
    running, metrics = demo(ADVISED, ["--steps=100000"]), tmp_path / "demo" / "torch-none.jsonl"
    running.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    assert len(running.alive()) >= 4  # the demo, torchrun and its two processes
    os.kill(running.process.pid, signal.SIGINT)
    assert "stopped" in running.output()
    assert running.process.returncode == 130
    assert not running.left_behind()


def test_it_leaves_nothing_running_when_it_is_ended_early(start, tmp_path):
    running = start(
        Path(EXAMPLES, "demo.py"), f"--out={tmp_path}", "--", *TINY, python=sys.executable
    )
    running.wait_for(lambda: len(running.alive()) >= 2)  # torchrun has not got far yet
    os.kill(running.process.pid, signal.SIGTERM)
    running.output()
    assert running.process.returncode == 128 + signal.SIGTERM
    assert not running.left_behind()
