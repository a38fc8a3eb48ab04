"""Tables in a terminal."""

from __future__ import annotations

import sys


def table(title: str, heads: list[str], lines: list[list[str]]) -> None:
    """Print columns: figures to the right, the rest and the first one to the left."""
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    print(f"\n{title}")
    for line in [heads, *lines]:
        first, *rest = (x.ljust(width) for x, width in zip(line, widths, strict=True))
        print(
            "  "
            + "  ".join(
                [first, *(x.strip().rjust(len(x)) if _is_figure(x) else x for x in rest)]
            ).rstrip()
        )
    sys.stdout.flush()


def _is_figure(x: str) -> bool:
    return x[:1].isdigit() or x[:1] == "-"
