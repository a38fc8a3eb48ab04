"""Figures in README.md, docs/choosing.md, docs/frontier.md and docs/methods.md: they stand between marks, and nobody writes them by hand.

<!-- frontier: * -->                 a table of all methods
<!-- frontier: int8; 4 bits -->      these methods in a line
<!-- frontier: which -->             which method to take on which link
<!-- frontier: set-up -->            what was trained, and where
<!-- end -->
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier.reading import AS_GOOD, NEARLY, Row, best, dense, excess, times_faster

PAGES = ("README.md", "docs/choosing.md", "docs/frontier.md", "docs/methods.md")
MARKS = re.compile(r"(<!-- frontier: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(results: Mapping[str, Any], root: Path) -> list[Path]:
    """Write the figures into the pages; returns those that have changed."""
    changed = []
    for page in (root / name for name in PAGES):
        before = page.read_text()
        after = filled(before, results)
        if after != before:
            page.write_text(after)
            changed.append(page)
    return changed


def filled(page: str, results: Mapping[str, Any]) -> str:
    """A page with the figures of these results, the content of benchmarks/results/frontier.json."""
    methods = results["methods"]
    by_name = {m["name"]: m for m in methods}

    def content(what: str) -> str:
        if what == "which":
            return _which(methods)
        if what == "set-up":
            return _set_up(results)
        if what == "*":
            return _table(methods)
        return _line([by_name[name] for name in what.split("; ") if name in by_name], methods)

    return MARKS.sub(lambda found: f"{found[1]}\n{content(found[2])}\n{found[3]}", page)


def _line(rows: Sequence[Row], methods: Sequence[Row]) -> str:
    def said(m: Row) -> str:
        torch, jax = (_ms(m["step_seconds"][backend]) for backend in ("torch", "jax"))
        loss = f"{round(excess(m, methods), 3) + 0.0:+.1%}"
        fewer = f"{m['dense_bytes_per_step'] / m['bytes_per_step']:,.0f}× fewer bytes"
        return f"{m['name']} (loss {loss}, {fewer}, steps of {torch}, in JAX {jax})"

    return f"Measured: {'; '.join(map(said, rows))}.\n" if rows else ""


def _table(methods: Sequence[Row]) -> str:
    def cells(m: Row) -> dict[str, str]:
        """By the heads of the columns."""
        torch, jax = (f"{statistics.mean(of):.4f}" if of else "-" for of in (m["losses"]["torch"], m["losses"]["jax"]))
        return {
            "": m["name"],
            "loss: torch": torch,
            "JAX": jax,
            "above dense": f"{round(excess(m, methods), 3) + 0.0:+.1%}",
            "kB per step": f"{m['bytes_per_step'] / 1e3:,.1f}",
            "fewer": f"{m['dense_bytes_per_step'] / m['bytes_per_step']:,.0f}×",
            "step: torch": _ms(m["step_seconds"]["torch"]),
            "in JAX": _ms(m["step_seconds"]["jax"]),
            **{f"wire at {link}": _ms(wire) for link, wire in m["wire_seconds"].items()},
            "rate": f"{m['rate']:g}",
        }

    heads = list(cells(dense(methods)))
    return _lines([heads, ["---"] * len(heads), *(list(cells(m).values()) for m in methods)])


def _which(methods: Sequence[Row]) -> str:
    def told(m: Row, link: str) -> str:
        return "dense averages" if m is dense(methods) else f"{m['name']}, {times_faster(m, methods, link):.1f}× faster"

    limits = (AS_GOOD, NEARLY)
    heads = ["a link of", *(f"loss within {within:.1%} of dense averages" for within in limits)]
    links = dense(methods)["wire_seconds"]
    rows = [[link, *(told(best(methods, link, within), link) for within in limits)] for link in links]
    return _lines([heads, ["---"] * len(heads), *rows])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _set_up(results: Mapping[str, Any]) -> str:
    s = results["settings"]
    tokens = s["batch"] * s["context"]
    rates = ", ".join(f"{rate:g}" for rate in s["rates"])
    machine, other = results["machine"], results["times"]["machine"]
    where = f"On {machine}." if machine == other else f"Trained on {machine}; steps measured on {other}."
    return (
        f"A byte-level Transformer of {s['parameters']:,} parameters, trained on the source of Python's standard library for {s['steps']} steps of AdamW, by "
        f"{s['replicas']} replicas with {tokens} bytes each. Torch and JAX begin with the same weights, and see the same text. Losses are means of "
        f"{s['seeds']} seeds, in nats per byte of text that is held out. Learning rates of {rates} were tried for each method, in torch, with the first seed, and twice the highest where that was the best.\n"
        f"{where}\n"
    )
