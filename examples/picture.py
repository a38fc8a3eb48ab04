"""The picture of the demo: loss against bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullFormatter

INK, MUTED, GRID = "#1b1f24", "#6b7480", "#e6e9ed"
COLOURS = {
    ("torch", "none"): "#5c6773",
    ("JAX", "none"): "#a5afba",
    ("torch", "powersgd"): "#d9480f",
    ("JAX", "powersgd"): "#f7a145",
    ("torch", "local_sgd"): "#1971c2",
    ("torch", "diloco"): "#2f9e44",
}
STROKES = {"torch": "-", "JAX": (0, (5, 2))}
#: Points between the names of two lines that begin at one place.
LINE = 15


def draw(runs: Sequence[Any], title: str, path: Path) -> None:
    """Write a PNG.

    Args:
        runs: with `framework`, `method`, and `validation`: pairs (bytes sent per replica so far,
            loss).
        title: of the picture.
        path: of the file.
    """
    mpl.use("Agg")
    with mpl.rc_context(
        {"font.family": "sans-serif", "font.size": 11, "text.color": INK, "axes.labelcolor": INK}
    ):
        figure, axes = plt.subplots(figsize=(9, 4.6), dpi=200, layout="constrained")
        for run in runs:
            sent, losses = zip(*run.validation, strict=True)
            look: dict[str, Any] = {
                "color": COLOURS[run.framework, run.method],
                "zorder": 3 if run.framework == "JAX" else 2,
            }
            axes.plot(sent, losses, linestyle=STROKES[run.framework], linewidth=2.2, **look)
            axes.plot(
                sent[-1],
                losses[-1],
                "o",
                markersize=7,
                markeredgecolor="white",
                markeredgewidth=1.2,
                **look,
            )
        _name(axes, runs)
        _compare(axes, runs)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: _bytes(n)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("sent by each replica")
        axes.set_ylabel("validation loss (nats per byte)")
        axes.set_title(f"{title}; JAX is dashed", loc="left", color=MUTED, fontsize=11)
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(MUTED)
        axes.tick_params(which="both", color=MUTED, labelcolor=MUTED)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _name(axes: Any, runs: Sequence[Any]) -> None:
    """The method beside the beginning of its line, once for both frameworks. To the right of it,
    where lines that fall leave room."""
    first: dict[str, Any] = {}
    for run in runs:
        first.setdefault(run.method, run)
    begun: list[float] = []
    for run in sorted(first.values(), key=lambda run: -run.validation[0][1]):
        sent, loss = run.validation[0]
        below = sum(sent / 1.5 < other < sent * 1.5 for other in begun)
        begun.append(sent)
        axes.annotate(
            run.name.partition(", ")[2],
            (sent, max(run.validation[0][1] for run in first.values()) if below else loss),
            (10 + LINE * below, -LINE * below),
            textcoords="offset points",
            color=COLOURS[run.framework, run.method],
            weight="bold",
            va="center",
        )


def _compare(axes: Any, runs: Sequence[Any]) -> None:
    """An arrow from where whole gradients end to where compressed ones do."""
    ends = {(run.framework, run.method): run.validation[-1] for run in runs}
    whole, compressed = ends["torch", "none"][0], ends["torch", "powersgd"][0]
    lowest = min(loss for _, loss in ends.values())
    highest = max(loss for run in runs for _, loss in run.validation)
    below = lowest - 0.08 * (highest - lowest)
    axes.set_ylim(lowest - 0.2 * (highest - lowest), highest + 0.05 * (highest - lowest))
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (compressed, below), (whole, below), arrowprops=arrow)
    axes.annotate(
        f"{whole / compressed:.0f}× fewer bytes",
        ((whole * compressed) ** 0.5, below),
        (0, 6),
        textcoords="offset points",
        ha="center",
        weight="bold",
    )


def _bytes(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:g} {unit}"
    return f"{n:g} B"
