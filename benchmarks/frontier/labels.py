"""Names beside points, none upon another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.transforms import Bbox

#: Pixels from a point to its name, at 100 dots per inch, and directions, in the order in which they
#: are tried.
DISTANCES = (9, 18, 28, 40, 54, 70, 90)
DIRECTIONS = (0, 180, 90, 270, 45, 315, 135, 225, 20, 340, 160, 200)


def label(
    axes: Any,
    points: Sequence[tuple[float, float, str, dict[str, Any]]],
    lines: Sequence[tuple[float, float, float]] = (),
) -> None:
    """Write a name beside each point, where there is room, with a line to the point where that is
    far.

    Args:
        axes: with its scales and limits as they stay, in a figure whose layout stays.
        points: x, y, name, and how the text looks.
        lines: level ones to be kept free, as far as may be: from x to x, at y.
    """
    figure = axes.figure
    renderer, scale = figure.canvas.get_renderer(), figure.dpi / 100
    places = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [
        Bbox.from_bounds(x - 5 * scale, y - 5 * scale, 10 * scale, 10 * scale) for x, y in places
    ]
    for start, end, y in lines:
        (left, middle), (right, _) = axes.transData.transform(((start, y), (end, y)))
        taken.append(Bbox.from_bounds(left, middle - scale, right - left, 2 * scale))
    inside = axes.get_window_extent(renderer)
    # Those in a crowd have the least choice.
    order = sorted(
        range(len(points)), key=lambda i: sorted(math.dist(places[i], p) for p in places)[1:3]
    )
    for i in order:
        x, y, name, look = points[i]
        text = axes.annotate(name, (x, y), (0, 0), textcoords="offset pixels", **look)
        size = text.get_window_extent(renderer)
        least: tuple[float, Any, int] | None = None
        for distance in DISTANCES:
            for direction in DIRECTIONS:
                box, offset, sides = _at(places[i], size, distance * scale, math.radians(direction))
                cost = sum(_common(box, other) for other in taken) + (
                    box.width * box.height - _common(box, inside)
                )
                if least is None or cost < least[0] - 1:
                    least = cost, (box, offset, sides), distance
            if least is not None and least[0] < 1:
                break
        assert least is not None
        box, offset, (horizontal, vertical) = least[1]
        text.set_position(offset)
        text.set_ha(horizontal)
        text.set_va(vertical)
        taken.append(box)
        if least[2] > DISTANCES[0]:
            line = {
                "arrowstyle": "-",
                "color": look.get("color", "black"),
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 3,
            }
            axes.annotate("", (x, y), offset, textcoords="offset pixels", arrowprops=line)


def _at(
    point: Any, size: Bbox, distance: float, angle: float
) -> tuple[Bbox, tuple[float, float], tuple[str, str]]:
    """Where a text of this size would lie, how far its anchor is from the point, and which of its
    sides the anchor is."""
    dx, dy = distance * math.cos(angle), distance * math.sin(angle)
    right, up = math.cos(angle), math.sin(angle)
    horizontal = "left" if right > 0.3 else "right" if right < -0.3 else "center"
    vertical = "bottom" if up > 0.3 else "top" if up < -0.3 else "center"
    left = point[0] + dx - {"left": 0.0, "center": 0.5, "right": 1.0}[horizontal] * size.width
    bottom = point[1] + dy - {"bottom": 0.0, "center": 0.5, "top": 1.0}[vertical] * size.height
    return Bbox.from_bounds(left, bottom, size.width, size.height), (dx, dy), (horizontal, vertical)


def _common(a: Bbox, b: Bbox) -> float:
    """The area that both cover."""
    common = Bbox.intersection(a, b)
    return 0.0 if common is None else float(common.width * common.height)
