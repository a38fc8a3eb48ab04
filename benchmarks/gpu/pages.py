"""Figures of a GPU in docs/evidence.md, and the picture of a step: tables stand between marks, and
nobody writes them by hand.

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

PAGE = ROOT / "docs" / "evidence.md"
PICTURE = ROOT / "docs" / "h100-step.svg"
RESULTS = ROOT / "benchmarks" / "results" / "gpu.json"
Row = dict[str, Any]


def machine(found: Row) -> str:
    at = f", at commit {found['commit']}" if "commit" in found else ""
    return " ".join([f"On one {found['machine']}{at}.", *filter(None, [found.get("note")])])


def steps(rows: list[Row]) -> list[str]:
    lines = ["| | step, ms | to DDP |", "|---|---|---|"]
    return lines + [f"| {_name(r['row'])} | {r['step_ms']:.1f} | {r['to_ddp']:.2f} |" for r in rows]


def hook(rows: list[Row]) -> list[str]:
    heads = "| the hook alone | eager, ms | replayed | kernels | those, added up | torch's `powerSGD_hook` |"
    lines = [heads, "|---|---|---|---|---|---|"]
    for r in sorted(rows, key=lambda r: (r["size"] != "125M", r["dtype"] != "float32")):
        own, torchs = r["gradwire"], r.get("torch", {})
        cells = [
            _ms(own["ms"]),
            _ms(r["replayed"]["ms"]),
            f"{own['kernels']:,}" if own.get("kernels") else "",
        ]
        cells += [_ms(own.get("busy_ms")), _ms(torchs.get("ms"))]
        lines.append(
            f"| {r['size']}, {_name(r['algorithm'])}, {r['dtype']} | {' | '.join(cells)} |"
        )
    return lines


def jax(rows: list[Row]) -> list[str]:
    lines = [
        "| JAX | step, ms | to `pmean` | compiling, s | of processor time |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {_name(r['row'])} | {r['step_ms']:.1f} | {r['step_to_pmean']:.2f} | {r['compile_s']:.1f} | {r['cpu_s']:.0f} |"
        for r in rows
    ]


#: Part of the file → its table.
TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "steps": steps,
    "hook": hook,
    "jax": jax,
    "jax-steps": jax,
}


#: What the picture shows: a row of the steps, its name there, and what is said of it.
BARS = (
    ("DDP", "PyTorch DDP", "averages in full"),
    ("torch's powerSGD_hook, rank 4", "torch powerSGD_hook", "rank 4"),
    ("WireDtype(algorithm=AllReduce(), dtype='int8')", "gradwire int8", "an average in 8 bits"),
    (
        "WireDtype(algorithm=PowerSGD(rank=16), dtype='int8')",
        "gradwire rank 16, int8",
        "a low-rank average in 8 bits",
    ),
    ("no messages at all", "no messages at all", "what no method can beat"),
)


def picture(rows: list[Row]) -> str:
    """The whole step by each method as bars, in SVG."""
    steps = {r["row"]: r["step_ms"] for r in rows}
    times = [(name, steps[row]) for row, name, _ in BARS]
    title = "One training step on an H100: " + ", ".join(
        f"{name} {ms:.0f} ms" for name, ms in times
    )
    height = 84 + 34 * len(BARS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {height}" width="640" height="{640 * height // 860}" role="img" '
        'font-family="system-ui, sans-serif" font-size="16" fill="#1b1f24">',
        f"<title>{title}</title>",
        f'<rect width="860" height="{height}" rx="10" fill="#ffffff" stroke="#d0d7de"/>',
        '<text x="30" y="36" font-size="20" font-weight="600">Time of one training step</text>',
        '<text x="30" y="60" fill="#57606a">a GPT of 125 million parameters, two ranks on an H100 that talk by '
        "NCCL’s sockets</text>",
    ]
    for i, (_, name, said) in enumerate(BARS):
        ms = times[i][1]
        width, colour = (
            360 * ms / max(each for _, each in times),
            "#d9480f" if "gradwire" in name else "#8c959f",
        )
        lines += [
            f'<g transform="translate(30 {80 + 34 * i})">',
            f'<text y="17" font-weight="600">{name}</text>',
            f'<rect x="230" width="{width:.0f}" height="24" rx="3" fill="{colour}"/>',
            f'<text x="{240 + width:.0f}" y="17"><tspan font-weight="600">{ms:.0f} ms</tspan>'
            f'<tspan dx="10" font-size="14" fill="#57606a">{said}</tspan></text>',
            "</g>",
        ]
    return "\n".join([*lines, "</svg>", ""])


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
    measured = json.loads(RESULTS.read_text())
    fill(PAGE, measured)
    PICTURE.write_text(picture(measured["parts"]["steps"]["rows"]))
