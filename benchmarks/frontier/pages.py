"""Figures in README.md, docs/choosing.md, docs/evidence.md and docs/frontier.md: they stand between
marks, and nobody writes them by hand.

<!-- frontier: * -->                 two tables of all methods: losses, and bytes and times
<!-- frontier: loss: int8; 4 bits -->  a table of their losses at all lengths
<!-- frontier: first -->             the methods of the first screen by both optimizers, as far as they were trained
<!-- frontier: which -->             which method to take on which link
<!-- frontier: set-up -->            what was trained, and where
<!-- end -->
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from frontier.reading import (
    AS_GOOD,
    NEARLY,
    Row,
    apart,
    best,
    dominating,
    excesses,
    lengths,
    longest,
    timed,
    times_faster,
    uncompressed,
    upper_bound,
)
from frontier.subjects import FIRST, MUON

PAGES = ("README.md", "docs/choosing.md", "docs/evidence.md", "docs/frontier.md")
LOSSES = "loss: "
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
        if what == "first":
            return _first(methods)
        if what == "which":
            return _which(methods)
        if what == "set-up":
            return _set_up(results)
        if what == "*":
            return _table(methods)
        rows = [by_name[name] for name in what.removeprefix(LOSSES).split("; ") if name in by_name]
        return _losses(rows, methods)

    return MARKS.sub(lambda found: f"{found[1]}\n{content(found[2])}\n{found[3]}", page)


def _losses(rows: Sequence[Row], methods: Sequence[Row]) -> str:
    def cell(m: Row, steps: int) -> str:
        return _uncertain(excesses(m, methods, steps)) if str(steps) in m["lengths"] else "-"

    heads = [
        "loss above uncompressed averages",
        *(f"after {n:,} steps" for n in lengths(methods)),
        "fewer bytes",
    ]
    fewer = [f"{m['dense_bytes_per_step'] / m['bytes_per_step']:,.0f}×" for m in rows]
    body = [
        [m["name"], *(cell(m, n) for n in lengths(methods)), times]
        for m, times in zip(rows, fewer, strict=True)
    ]
    return _lines([heads, ["---"] * len(heads), *body])


def _table(methods: Sequence[Row]) -> str:
    def at(m: Row, steps: int) -> dict[str, str]:
        if str(steps) not in m["lengths"]:
            return dict.fromkeys(
                (f"loss, {steps:,} steps", "above uncompressed", "JAX", "rate"), "-"
            )
        of, jax = m["lengths"][str(steps)], apart(m, steps)
        return {
            f"loss, {steps:,} steps": f"{of['loss']:.4f}",
            "above uncompressed": ""
            if m is uncompressed(methods)
            else _uncertain(excesses(m, methods, steps)),
            "JAX": "-" if jax is None else _percent(jax, 2),
            "rate": of["rates"],
        }

    def trained(m: Row) -> list[tuple[str, str]]:
        """Heads of columns, and what is below them."""
        steps, of = longest(methods)
        better = dominating(m, of, steps) if m in of else None
        cells = [cell for steps in lengths(methods) for cell in at(m, steps).items()]
        return [("", m["name"]), *cells, ("beaten by", better["name"] if better else "")]

    def sent(m: Row) -> list[tuple[str, str]]:
        return [
            ("", m["name"]),
            ("kB per step", f"{m['bytes_per_step'] / 1e3:,.1f}"),
            ("fewer", f"{m['dense_bytes_per_step'] / m['bytes_per_step']:,.0f}×"),
            ("step: torch", _ms(m["step_seconds"]["torch"])),
            ("in JAX", _ms(m["step_seconds"]["jax"])),
            *((f"wire at {link}", _ms(wire)) for link, wire in m["wire_seconds"].items()),
        ]

    def table(cells: Callable[[Row], list[tuple[str, str]]]) -> str:
        heads = [head for head, _ in cells(uncompressed(methods))]
        return _lines(
            [heads, ["---"] * len(heads), *([cell for _, cell in cells(m)] for m in methods)]
        )

    return f"{table(trained)}\n{table(sent)}"


def _first(methods: Sequence[Row]) -> str:
    """A line for each method, a column for each optimizer that was tried; all beside uncompressed
    averages and AdamW, after the longest training."""
    steps, trained = longest(methods)
    by_name = {m["name"]: m for m in trained}

    def cell(name: str) -> str:
        if name not in by_name:
            return "-"
        apart = excesses(by_name[name], trained, steps)
        if name == "uncompressed":
            return f"{by_name[name]['lengths'][str(steps)]['loss']:.3f}"
        if len(apart) == 1:
            return f"{_percent(apart[0])} (1 seed)"
        return f"{_percent(statistics.mean(apart))} (≤ {_percent(upper_bound(apart))}, {len(apart)} seeds)"

    optimizers = {"AdamW": ""} | (
        {"Muon": MUON} if any(s.muon and s.name in by_name for s in FIRST) else {}
    )
    rows = []
    for s in FIRST:
        if not s.muon and s.name in by_name:
            fewer = uncompressed(trained)["bytes_per_step"] / by_name[s.name]["bytes_per_step"]
            rows.append(
                [s.name, f"{fewer:,.0f}×", *(cell(s.name + after) for after in optimizers.values())]
            )
    heads = [f"loss after {steps:,} steps", "fewer bytes", *optimizers]
    return _lines([heads, ["---"] * len(heads), *rows])


def _which(methods: Sequence[Row]) -> str:
    steps, methods = longest(timed(methods))

    def told(m: Row, link: str) -> str:
        return (
            "uncompressed averages"
            if m is uncompressed(methods)
            else f"{m['name']}, {times_faster(m, methods, link):.1f}× faster"
        )

    limits = (AS_GOOD, NEARLY)
    heads = [
        "a link of",
        *(f"loss within {within:.1%} of uncompressed after {steps:,} steps" for within in limits),
    ]
    links = uncompressed(methods)["wire_seconds"]
    rows = [
        [link, *(told(best(methods, link, steps, within), link) for within in limits)]
        for link in links
    ]
    return _lines([heads, ["---"] * len(heads), *rows])


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _percent(part: float, digits: int = 1) -> str:
    return f"{round(part, digits + 2) + 0.0:+.{digits}%}"


def _uncertain(parts: Sequence[float]) -> str:
    """Their mean, and its standard error where there are several."""
    mean = _percent(statistics.mean(parts))
    return f"{mean} ± {statistics.stdev(parts) / len(parts) ** 0.5:.1%}" if len(parts) > 1 else mean


def _set_up(results: Mapping[str, Any]) -> str:
    s = results["settings"]
    tokens = s["batch"] * s["context"]
    rates, outer = (", ".join(f"{rate:g}" for rate in s[of]) for of in ("rates", "outer_rates"))
    steps = " and for ".join(f"{n:,}" for n in s["steps"])
    machine, other = results["machine"], results["times"]["machine"]
    where = (
        f"On {machine}."
        if machine == other
        else f"Trained on {machine}; steps measured on {other}."
    )
    return (
        f"A byte-level Transformer of {s['parameters']:,} parameters, trained on the source of Python's standard library for {steps} steps of AdamW, by "
        f"{s['replicas']} replicas with {tokens} bytes each. Torch and JAX begin with the same weights, and see the same text. Losses are means of "
        f"{s['seeds']} seeds in torch, in nats per byte of held-out text, with the standard error of the difference to uncompressed averages; JAX trains the first seed. Learning rates of {rates} were tried for each method and length, in torch, with the first seed, and up to two more where the best was the highest or the lowest; then outer learning rates of {outer} in the same way.\n"
        f"{where}\n"
    )
