"""The demo, in small: it asks whether compression helps, compares six trainings, says what went wrong, and leaves nothing running."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES, TINY
from tests.launch import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = EXAMPLES / "demo.py"
#: Pages, or commands, that its last lines name.
NEXT = ("docs/choosing.md", "gradwire advise", "docs/tutorials/torch.md")
#: In place of `advise.py`: it sends few and small messages.
QUICK = f"""
import runpy
from tests.cli.commands import few_and_small

few_and_small()
runpy.run_path({str(EXAMPLES / "advise.py")!r}, run_name="__main__")
"""
#: Where the advice is not what is looked at.
ADVISED = """
import argparse, pathlib

parser = argparse.ArgumentParser()
parser.add_argument("--to", type=pathlib.Path)
parser.parse_known_args()[0].to.write_text("Leave it: nothing was measured.")
"""


def demo(folder, advise) -> Path:
    """A copy of the demo with another script for advice."""
    copy = shutil.copytree(EXAMPLES, folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "advise.py").write_text(advise)
    return copy / "demo.py"


@pytest.fixture
def advised(tmp_path) -> Path:
    """The demo, whose advice comes at once: it begins to train."""
    return demo(tmp_path, ADVISED)


def test_it_ends_with_a_table_and_a_picture(start, tmp_path):
    options = ("--steps=4", "--rank=2", f"--out={tmp_path}", "--", *TINY, f"--text={ROOT / 'README.md'}")
    output = start(demo(tmp_path, QUICK), *options).finish(560)
    number = r"([\d.,]+)"
    advice, trainings = output.split("Six trainings")
    assert re.search(r"^[→ ] plain +\S+ .*exact$", advice, re.MULTILINE), output
    assert re.search(r"^[→ ] PowerSGD\(rank=4\) +\S+ .*feedback$", advice, re.MULTILINE), output
    here, elsewhere = advice.split("Between two machines at 100 Mbit/s:")
    assert all(re.search(r"^(Take .*|Leave it): ", said, re.MULTILINE) for said in (here, elsewhere)), output
    last = trainings.rstrip().splitlines()[-3:]
    assert all(what in line for what, line in zip(NEXT, last, strict=True)), last
    assert all((EXAMPLES.parent / page).exists() for page in re.findall(r"docs/\S+\.md", "".join(last)))
    for framework in ("torch", "JAX"):
        plain = re.search(rf"{framework}, plain +{number} +{number} MB +1.0× +1 ", output)
        compressed = re.search(rf"{framework}, PowerSGD +{number} +{number} MB +{number}× +2 ", output)
        assert plain, output
        assert compressed, output
        last = {
            name: json.loads((tmp_path / "demo" / f"{framework.lower()}-{name}.jsonl").read_text().splitlines()[-1])
            for name in ("none", "powersgd")
        }
        assert [run["step"] for run in last.values()] == [4, 4]
        assert float(plain[1]) == pytest.approx(last["none"]["val_loss"], abs=1e-3)
        assert float(compressed[1]) == pytest.approx(last["powersgd"]["val_loss"], abs=1e-3)
        ratio = last["none"]["bytes_sent"] / last["powersgd"]["bytes_sent"]
        assert ratio > 5
        assert float(compressed[3]) == pytest.approx(ratio, abs=0.06)
    for method in ("local SGD", "DiLoCo"):  # one average, at the end, in place of four
        assert re.search(rf"torch, {method} +{number} +{number} MB +4.0× +0.25 ", output), output
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_training_is_shown(start, advised, tmp_path):
    demo = start(advised, "--steps=4", f"--out={tmp_path}", "--", *TINY, f"--text={tmp_path / 'absent.txt'}")
    output = demo.output()
    assert demo.process.returncode == 1
    assert "Leave it: nothing was measured." in output
    assert "torch, plain failed with exit status 1" in output
    assert "absent.txt: No such file or directory" in output
    assert "Traceback" not in output.split("failed with exit status")[0]
    assert not demo.left_behind()


def test_it_leaves_nothing_running_on_ctrl_c(start, advised, tmp_path):
    demo = start(advised, "--steps=100000", f"--out={tmp_path}", "--", *TINY)
    metrics = tmp_path / "demo" / "torch-none.jsonl"
    demo.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    assert len(demo.alive()) >= 4  # the demo, torchrun and its two processes
    os.kill(demo.process.pid, signal.SIGINT)
    assert "stopped" in demo.output()
    assert demo.process.returncode == 130
    assert not demo.left_behind()


def test_it_leaves_nothing_running_when_it_is_ended_early(start, tmp_path):
    demo = start(DEMO, f"--out={tmp_path}", "--", *TINY, python=sys.executable)
    demo.wait_for(lambda: len(demo.alive()) >= 2)  # torchrun has not got far yet
    os.kill(demo.process.pid, signal.SIGTERM)
    demo.output()
    assert demo.process.returncode == 128 + signal.SIGTERM
    assert not demo.left_behind()
