"""The table of README.md: a step of averaging on three links, from what `make bench-network` has written.

python benchmarks/network/first.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from measuring import write_part  # noqa: E402
from subjects import RECOMMENDED  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "network-first.json"
PAGE = Path(__file__).parents[2] / "README.md"
LINKS = {"1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s", "unlimited": "no limit"}
#: What is shown of a subject, as the table of losses calls it.
SHOWN = {"DDP": "uncompressed (DDP)", "int8": "int8", RECOMMENDED: "PowerSGD 16, int8"}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each method, a column for each link."""
    took = {
        (row["subject"], row["rate"]): row["step_ms"] for row in rows if (row["backend"], row["hosts"]) == ("torch", 2)
    }
    lines = [f"| a step between two hosts | {' | '.join(LINKS.values())} |", "| --- |" + " --- |" * len(LINKS)]
    for subject, name in SHOWN.items():
        lines.append(f"| {name} | {' | '.join(f'{took[subject, link]:.0f} ms' for link in LINKS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    write_part(PAGE, "network", table(json.loads(RESULT.read_text())["rows"]))
