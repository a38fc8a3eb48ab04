"""The schedule that somebody wrote down by hand, and what a driver must show of it: which fragments
leave and are applied after which steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gradwire import LocalSGD, diloco

GOLDEN = json.loads((Path(__file__).parent / "golden_schedule.json").read_text())
SETTING, PARTS = GOLDEN["setting"], GOLDEN["parameters of each fragment"]
NAMES = [name for part in PARTS for name in part]
STEPS = SETTING["steps"]
#: Without momentum and at rate 1 outer parameters become the mean of what left.
SCHEDULES: dict[str, LocalSGD] = {
    "overlap": diloco(6, fragments=3, overlap=2, lr=1.0, momentum=0.0),
    "eager": diloco(6, fragments=3, eager=True, lr=1.0, momentum=0.0),
}


def gradient(replica: int, step: int) -> float:
    """Of every element, no two alike."""
    return 0.1 + 0.01 * step + 0.2 * replica


def event(schedule: str, step: int) -> dict[str, Any]:
    """What is written of a step; nothing, if nothing happens."""
    return next((row for row in GOLDEN[schedule] if row["after"] == step), {})


def assert_golden(
    schedule: str, memory_after: Callable[[int], Mapping[str, Mapping[str, Any]]]
) -> None:
    """`memory_after(n)` takes step n, and gives parameter → memory → array of one replica; of n =
    -1, before the first step."""
    before = _copied(memory_after(-1))
    for step in range(STEPS):
        after, row = _copied(memory_after(step)), event(schedule, step)
        for what, key in (("leaves", "difference"), ("applied", "outer")):
            # What has arrived is forgotten, and becomes zeros.
            changed = {
                n
                for n in NAMES
                if not np.array_equal(before[n][key], after[n][key]) and after[n][key].any()
            }
            assert changed == set(PARTS[row[what]] if what in row else ()), (step, what)
        before = after


def _copied(memory: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {n: {key: np.array(memory[n][key]) for key in ("difference", "outer")} for n in NAMES}
