"""The frontier's training with a model seven times as large, of 3.3 million parameters, as `gradwire
compare` is given it."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "examples")]
from frontier.runs import Settings  # noqa: E402

from compare.training import training_of  # noqa: E402
from gradwire.torch_backend import Training  # noqa: E402

STEPS, RATE = 300, 0.002
SETTINGS = Settings(steps=STEPS, width=256, layers=4, context=64, batch=4, windows=128)


def make(seed: int) -> Training:
    """What is trained; `gradwire compare larger:make` calls it."""
    return training_of(SETTINGS, RATE, seed)
