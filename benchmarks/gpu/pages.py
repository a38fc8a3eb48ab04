"""Figures of a GPU in docs/performance.md: tables that stand between marks, and nobody writes by hand.

python benchmarks/gpu/pages.py          # after `make bench-gpu` has written benchmarks/results/gpu.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from measuring import write_part  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
Row = dict[str, Any]


def machine(found: Row) -> str:
    at = f", at commit {found['commit']}" if "commit" in found else ""
    return " ".join([f"On one {found['machine']}{at}.", *filter(None, [found.get("note")])])


def steps(rows: list[Row]) -> list[str]:
    lines = ["| | step, ms | to DDP |", "|---|---|---|"]
    return lines + [f"| {_name(r['row'])} | {r['step_ms']:.1f} | {r['to_ddp']:.2f} |" for r in rows]


def hook(rows: list[Row]) -> list[str]:
    heads = "| the hook alone | ms | kernels | those, added up | as a graph | torch's `powerSGD_hook` |"
    lines = [heads, "|---|---|---|---|---|---|"]
    for r in sorted(rows, key=lambda r: (r["size"] != "125M", r["dtype"] != "float32")):
        own, torchs = r["gradwire"], r.get("torch", {})
        cells = [_ms(own["ms"]), f"{own['kernels']:,}" if own.get("kernels") else ""]
        cells += [_ms(own.get("busy_ms")), _ms(own.get("graph_ms")), _ms(torchs.get("ms"))]
        lines.append(f"| {r['size']}, {_name(r['algorithm'])}, {r['dtype']} | {' | '.join(cells)} |")
    return lines


def jax(rows: list[Row]) -> list[str]:
    lines = ["| JAX | step, ms | to `pmean` | compiling, s | of processor time |", "|---|---|---|---|---|"]
    return lines + [
        f"| {_name(r['row'])} | {r['step_ms']:.1f} | {r['step_to_pmean']:.2f} | {r['compile_s']:.1f} | {r['cpu_s']:.0f} |"
        for r in rows
    ]


#: Part of the file → its table.
TABLES: dict[str, Callable[[list[Row]], list[str]]] = {"steps": steps, "hook": hook, "jax": jax, "jax-steps": jax}


def _name(x: str) -> str:
    """As it is written in a program: `WireDtype(PowerSGD(16), "int8")`."""
    if "(" in x:
        return f"`{re.sub(r'(algorithm|dtype|rank|keep)=', '', x)}`".replace("'", '"')
    return re.sub(r"\b(\w+_hook|pmean)\b", r"`\1`", x)


def _ms(x: float | None) -> str:
    return "" if x is None else f"{x:.1f}"


def fill(page: Path, found: Row) -> None:
    """Write the tables of what was measured between their marks."""
    write_part(page, "gpu machine", machine(found))
    for part, table in TABLES.items():
        rows = [r for r in found["parts"].get(part, {"rows": []})["rows"] if "error" not in r]
        if rows:
            write_part(page, f"gpu {part}", "\n".join(["", *table(rows), ""]))


if __name__ == "__main__":
    fill(PAGE, json.loads(RESULTS.read_text()))
