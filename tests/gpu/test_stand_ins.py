"""What stands in for the emulated accelerator on a GPU has what the tests that run there ask of
it."""

import re
import subprocess
import sys

import pytest
import torch

from tests.gpu import rank
from tests.launch import LIMIT, ROOT

ASKS = (ROOT / "tests" / "emulated" / "test_replays.py").read_text()


def test_modules_have_what_is_imported_from_them() -> None:
    imported = dict(re.findall(r"from tests\.emulated\.(\w+) import ([\w, ]+)\n", ASKS))
    assert imported.keys() == rank.INSTEAD.keys()
    for name, members in imported.items():
        assert set(members.split(", ")) <= rank.INSTEAD[name].keys(), name


@pytest.mark.parametrize("name", ["core", "watched"])
def test_objects_have_what_is_asked_of_them(name: str) -> None:
    asked = set(re.findall(rf"(?<![.\w]){name}\.(\w+)", ASKS))
    assert asked
    assert all(hasattr(rank.INSTEAD["device"][name], each) for each in asked), asked


def test_graphs_count_as_the_emulated_ones() -> None:
    asked = set(re.findall(r"EmulatedGraphs\.(\w+)", ASKS))
    assert asked
    assert all(hasattr(rank.Counted, name) for name in asked)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs the tests there")
def test_without_a_gpu_it_says_so() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
    )
    assert (said.returncode, said.stdout) == (
        0,
        "no GPU of NVIDIA's here: `make test` has the emulated accelerator\n",
    )
