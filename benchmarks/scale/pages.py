"""The tables of docs/evidence.md, and what docs/performance.md has of them."""

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


#: The columns of the short table: a part, what was counted or measured in it, and a heading.
SHORT = (
    ("counted", "operations of a step", "operations, ranks"),
    ("ranks", "processor seconds of a step", "time, ranks"),
    ("tensors", "processor seconds of a step", "time, tensors"),
    ("leaves", "equations", "JAX: equations, leaves"),
)
#: What others are beside.
PEERS = {"DDP": "DDP, `pmean`", "pmean": "DDP, `pmean`"}


def short_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The exponents of a step for each method."""
    found: dict[str, dict[str, str]] = {}
    sizes: dict[str, str] = {}
    for measured, what, heading in SHORT:
        for row in rows:
            if (row["measured"], row["what"]) == (measured, what):
                subject = PEERS.get(row["subject"], row["subject"])
                found.setdefault(subject, {})[heading] = exponent(row)
                first, *_, last = row["values"]
                sizes[heading] = f"{heading} {int(first):,} to {int(last):,}"
    order = sorted(found, key=lambda subject: subject not in PEERS.values())
    lines = [f"| exponent of | {' | '.join(sizes.values())} |", f"|---|{'---|' * len(sizes)}"]
    for subject in order:
        cells = [found[subject].get(heading, "") for heading in sizes]
        lines.append(f"| {subject} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(page: Path, short: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the tables between the marks of the pages."""
    write_part(page, "scale", table(rows))
    write_part(short, "growth", short_table(rows))
