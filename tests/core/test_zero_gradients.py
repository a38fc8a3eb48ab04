"""What methods make of elements whose gradient is zero on all replicas is what the page says."""

import re
from pathlib import Path

import numpy as np
import pytest

import gradwire
from gradwire import Simulator

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
SECTION = PAGE.split("## Gradients that are zero on all replicas")[1].split("\n## ")[0]
ROWS = dict(re.findall(r"^\| `(.*?)` \| (.*) \|$", SECTION, re.MULTILINE))

SHAPES = {"matrix": (48, 64), "pruned": (64, 32), "vector": (96,)}
KEPT = np.random.default_rng(0).random(SHAPES["pruned"]) < 0.5


def gradients(generator):
    found = {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}
    found["matrix"][5:13] = 0
    found["matrix"][:, 40:] = 0
    found["pruned"] *= KEPT
    found["vector"][::3] = 0
    return found


@pytest.mark.filterwarnings("ignore::gradwire.core.plan.advice.CompressionWarning")
@pytest.mark.parametrize("method", ROWS)
def test_the_page_says_what_moves(method):
    simulator, generator = (
        Simulator(eval(method, vars(gradwire)), SHAPES, 2),
        np.random.default_rng(1),
    )
    moved = np.zeros(4, bool)
    for _ in range(8):
        average = simulator.step([gradients(generator) for _ in range(2)])
        matrix, pruned, vector = (np.asarray(average[name]) for name in SHAPES)
        moved |= [x.any() for x in (matrix[5:13, :40], matrix[:5, 40:], pruned[~KEPT], vector[::3])]
    assert ROWS[method].split(" | ") == ["moves" if each else "stays" for each in moved]


def test_the_page_has_every_kind():
    assert len(ROWS) == 16
