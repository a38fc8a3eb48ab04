"""Two pictures: the loss in the end against the bytes sent, at all lengths, and against the time
that the longest training takes on three links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from frontier.labels import label
from frontier.reading import (
    AS_GOOD,
    NEARLY,
    Row,
    best,
    computing,
    excess,
    lengths,
    longest,
    seconds,
    timed,
    times_faster,
    uncompressed,
)

INK, MUTED, GRID, GOOD = "#1b1f24", "#6b7480", "#e6e9ed", "#e9f7ec"
COLOURS = {
    "uncompressed": INK,
    "codes": "#1971c2",
    "low rank": "#d9480f",
    "sparse": "#9c36b5",
    "local": "#2f9e44",
}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
}
Methods = Sequence[Row]


def draw(methods: Methods, settings: dict[str, Any], folder: Path) -> list[Path]:
    """Write both as PNG; returns their paths."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        return [
            _bytes(methods, settings, folder / "frontier-bytes.png"),
            _time(methods, folder / "frontier-time.png"),
        ]


def _bytes(methods: Methods, settings: dict[str, Any], path: Path) -> Path:
    """A method's losses at all lengths stand above each other; the longest is filled, and its last
    has the name."""
    figure, axes = plt.subplots(figsize=(9, 5.4), dpi=160, layout="constrained")
    last, _ = longest(methods)
    shown = [n for n in lengths(methods) if n <= last]
    named: list[tuple[float, float, str, dict[str, Any]]] = []
    for m in methods:
        x: float = m["bytes_per_step"]
        look: Any = {"color": COLOURS[m["kind"]], "zorder": 3}
        mine = [n for n in shown if str(n) in m["lengths"]]
        means = [100 * excess(m, methods, n) for n in mine]
        axes.plot([x] * len(means), means, "-", linewidth=1.2, alpha=0.45, **look)
        for steps, mean in zip(mine, means, strict=True):
            face: Any = {} if steps == last else {"markerfacecolor": "white"}
            axes.plot(x, mean, "o", markersize=7, markeredgewidth=1.4, **face, **look)
        named.append((x, means[-1], m["name"], {"color": COLOURS[m["kind"]], "fontsize": 9}))
    _losses(axes, methods, shown)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _size(n)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12)
    axes.set_xlabel("sent by each of 2 replicas, per step")
    axes.set_ylabel("final loss, above that of uncompressed averages")
    marks = ", ".join(f"{'●' if n == last else '○'} {n:,}" for n in shown)
    axes.set_title(
        f"The same model and text, trained for {marks} steps; {settings['seeds']} seeds",
        loc="left",
        color=MUTED,
        fontsize=10,
    )
    figure.canvas.draw()
    figure.set_layout_engine("none")
    label(axes, named)
    figure.savefig(path)
    plt.close(figure)
    return path


def _time(methods: Methods, path: Path) -> Path:
    links = list(uncompressed(methods)["wire_seconds"])
    steps, methods = longest(timed(methods))
    figure, panels = plt.subplots(len(links), 1, figsize=(9, 15), dpi=130, layout="constrained")
    for axes, link in zip(panels, links, strict=True):
        chosen = [best(methods, link, steps, within) for within in (AS_GOOD, NEARLY)]
        for m in methods:
            y = 100 * excess(m, methods, steps)
            look: Any = {"color": COLOURS[m["kind"]], "zorder": 3}
            alone, whole = steps * computing(m), steps * seconds(m, link)
            axes.plot([alone, whole], [y, y], "-", linewidth=1.2, alpha=0.5, **look)
            axes.plot(alone, y, "|", markersize=7, alpha=0.7, **look)
            axes.plot(whole, y, "o", markersize=7, markeredgecolor="white", **look)
        for m in chosen:
            place = steps * seconds(m, link), 100 * excess(m, methods, steps)
            axes.plot(
                *place,
                "o",
                markersize=12.5,
                markerfacecolor="none",
                markeredgecolor=INK,
                markeredgewidth=1.6,
                zorder=4,
            )
        _losses(axes, methods, [steps])
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s:g} s"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.15)
        axes.set_xlabel(f"time of {steps} steps:  |  computing,  ●  and the wire")
        axes.set_title(
            f"{link}: {_advice(methods, link, chosen)}", loc="left", fontsize=11, weight="bold"
        )
    panels[1].set_ylabel("final loss, above that of uncompressed averages")
    figure.canvas.draw()
    figure.set_layout_engine("none")
    for axes, link in zip(panels, links, strict=True):
        points = []
        for m in methods:
            weight = (
                "bold"
                if m in [best(methods, link, steps, within) for within in (AS_GOOD, NEARLY)]
                else "normal"
            )
            look = {"color": COLOURS[m["kind"]], "fontsize": 9, "weight": weight}
            points.append(
                (steps * seconds(m, link), 100 * excess(m, methods, steps), m["name"], look)
            )
        lines = [
            (steps * computing(m), steps * seconds(m, link), 100 * excess(m, methods, steps))
            for m in methods
        ]
        label(axes, points, lines)
    figure.savefig(path)
    plt.close(figure)
    return path


def _advice(methods: Methods, link: str, chosen: Sequence[Any]) -> str:
    names = [
        m["name"]
        if m is uncompressed(methods)
        else f"{m['name']} ({times_faster(m, methods, link):.1f}× faster)"
        for m in chosen
    ]
    if chosen[0] is chosen[1]:
        return f"take {names[0]}"
    return f"take {names[0]},\nor {names[1]} at up to {NEARLY:.0%} more loss"


def _losses(axes: Any, methods: Methods, steps: Sequence[int]) -> None:
    """The axis of losses: percent above dense, in even steps up to one and in decades from there
    on."""
    all_of = [100 * excess(m, methods, n) for m in methods for n in steps if str(n) in m["lengths"]]
    worst = max(all_of)
    axes.set_yscale("symlog", linthresh=1, linscale=0.8)
    lowest = min(-0.3, 1.4 * min(all_of))
    axes.set_ylim(lowest, 1.5 * max(worst, 2))
    axes.set_yticks([0, 0.5, *(t for t in (1, 2, 5, 10, 20, 50, 100) if t < 1.5 * max(worst, 2))])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g} %" if y else "uncompressed"))
    axes.axhspan(lowest, 100 * AS_GOOD, color=GOOD, zorder=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(which="both", color=MUTED, labelcolor=MUTED)


def _size(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:g} {unit}"
    return f"{n:g} B"
