"""The table of docs/evidence.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import write_part

HEADINGS = {
    "counted": "one imagined rank of many",
    "ranks": "real ranks over Gloo",
    "tensors": "two ranks, many tensors",
    "plans": "`gradwire.plan`",
    "leaves": "JAX, many leaves",
}


def number(value: float) -> str:
    """Counts whole, seconds with two digits."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """All curves: where each is above its peer, in bold."""
    lines = []
    for measured, heading in HEADINGS.items():
        own = [row for row in rows if row["measured"] == measured]
        for sizes in dict.fromkeys(tuple(row["values"]) for row in own):
            lines += [
                f"| {heading} | {' | '.join(f'{int(n):,}' for n in sizes)} | exponent |",
                f"|---|{'---|' * len(sizes)}---|",
            ]
            for row in own:
                if tuple(row["values"]) == sizes:
                    lines.append(
                        f"| {row['subject']}: {row['what']} | {' | '.join(map(number, row['values'].values()))} | {exponent(row)} |"
                    )
            lines.append("")
    return "\n".join(lines).rstrip()


def exponent(row: Mapping[str, Any]) -> str:
    """As it is shown."""
    shown = f"{row['exponent']:.2f}".replace("-0.00", "0.00")
    if row["gathered"]:
        return f"{shown}, gathered"
    return shown if row["holds"] else f"**{shown}, above {row['peer']:.2f}**"


def fill(page: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the table between the marks of the page."""
    write_part(page, "scale", table(rows))
