"""The table of README.md's first screen, from what `make frontier` and `make bench-network` have
written: what a method sends and loses on one model, and a step of averaging another's gradients on
three links. A line has figures of one model.

python benchmarks/network/first.py
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from frontier.reading import excesses, longest, uncompressed, upper_bound  # noqa: E402
from measuring import write_part  # noqa: E402
from subjects import LEAST, RECOMMENDED  # noqa: E402

RESULTS = Path(__file__).parents[1] / "results"
PAGE = Path(__file__).parents[2] / "README.md"
LINKS = {"1gbit": "at 1 Gbit/s", "10gbit": "at 10 Gbit/s", "unlimited": "without a limit"}
#: A method as the losses name it, and as the steps do.
SHOWN = {
    "uncompressed": "DDP",
    "int8": "int8",
    "PowerSGD 16, int8": RECOMMENDED,
    "PowerSGD 4, int8, Muon": LEAST,
}
#: What the notes below the table are about: the model of the losses, and that of the steps.
LOSSES, STEPS = "¹", "²"


def table(steps: Sequence[Mapping[str, Any]], losses: Sequence[Mapping[str, Any]]) -> str:
    """A column for each method."""
    length, trained = longest(losses)
    dense, by_name = uncompressed(trained), {m["name"]: m for m in trained}
    took = {
        (r["subject"], r["rate"]): r["step_ms"]
        for r in steps
        if (r["backend"], r["hosts"]) == ("torch", 2)
    }

    def loss(name: str) -> str:
        if name == dense["name"]:
            return f"{dense['lengths'][str(length)]['loss']:.3f}"
        above = excesses(by_name[name], trained, length)
        return f"{statistics.mean(above):+.1%} (≤ {upper_bound(above):+.1%})"

    lines = {"": [*SHOWN]}
    lines[f"fewer bytes{LOSSES}"] = [
        f"{dense['bytes_per_step'] / by_name[n]['bytes_per_step']:.0f}×" for n in SHOWN
    ]
    lines[f"loss after {length:,} steps{LOSSES}"] = [loss(name) for name in SHOWN]
    for link, name in LINKS.items():
        cells = [f"{took[subject, link]:.0f} ms" for subject in SHOWN.values()]
        lines[f"a step {name}{STEPS}"] = cells
    heads, *rest = (f"| {name} | {' | '.join(cells)} |" for name, cells in lines.items())
    return "\n".join([heads, "| --- |" + " --- |" * len(SHOWN), *rest])


def read() -> str:
    """The table of the files."""
    steps, losses = (
        json.loads((RESULTS / f"{name}.json").read_text()) for name in ("network-first", "frontier")
    )
    return table(steps["rows"], losses["methods"])


if __name__ == "__main__":
    write_part(PAGE, "network", read())
