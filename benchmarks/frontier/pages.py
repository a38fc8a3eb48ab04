"""Figures in README.md and docs/methods.md: they stand between marks, and nobody writes them by hand.

<!-- frontier: int8; 4 bits -->      a table of these methods
<!-- frontier: * -->                 of all
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

from frontier.reading import AS_GOOD, NEARLY, Row, best, computing, dense, excess, times_faster

PAGES = ("README.md", "docs/methods.md")
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
        names = list(by_name) if what == "*" else what.split("; ")
        return _table([by_name[name] for name in names if name in by_name], methods)

    return MARKS.sub(lambda found: found[1] + content(found[2]) + found[3], page)


def _table(rows: Sequence[Row], methods: Sequence[Row]) -> str:
    links = list(dense(methods)["wire_seconds"])
    heads = [
        "",
        "loss: torch",
        "JAX",
        "above dense",
        "kB per step",
        "fewer",
        "step",
        *(f"and {link}" for link in links),
    ]
    lines = [[*heads, "rate"], ["---"] * (len(heads) + 1)]
    for m in rows:
        torch, jax = (m["losses"][backend] for backend in ("torch", "jax"))
        lines.append(
            [
                m["name"],
                f"{statistics.mean(torch):.4f}" if torch else "-",
                f"{statistics.mean(jax):.4f}" if jax else "-",
                f"{excess(m, methods):+.1%}",
                f"{m['bytes_per_step'] / 1e3:,.1f}",
                f"{m['dense_bytes_per_step'] / m['bytes_per_step']:,.0f}×",
                f"{computing(m) * 1e3:.0f} ms",
                *(f"{m['wire_seconds'][link] * 1e3:,.1f} ms" for link in links),
                f"{m['rate']:g}",
            ]
        )
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _which(methods: Sequence[Row]) -> str:
    lines = [["a link of", *(f"loss within {within:.1%} of dense averages" for within in (AS_GOOD, NEARLY))]]
    lines.append(["---"] * len(lines[0]))
    for link in dense(methods)["wire_seconds"]:
        found = [best(methods, link, within) for within in (AS_GOOD, NEARLY)]
        lines.append([link, *(f"{m['name']}, {times_faster(m, methods, link):.1f}× faster" for m in found)])
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def _set_up(results: Mapping[str, Any]) -> str:
    s = results["settings"]
    tokens = s["batch"] * s["context"]
    rates = ", ".join(f"{rate:g}" for rate in s["rates"])
    return (
        f"A byte-level Transformer of {s['parameters']:,} parameters, trained on the source of Python's standard library for {s['steps']} steps of AdamW, by "
        f"{s['replicas']} replicas with {tokens} bytes each. Torch and JAX begin with the same weights, and see the same text. Losses are means of "
        f"{s['seeds']} seeds, in nats per byte of text that is held out. Learning rates of {rates} were tried for each method, in torch, with the first seed.\n"
        f"Trained on {results['machine']}; steps measured on {results['times'].get('machine', 'no machine yet')}.\n"
    )
