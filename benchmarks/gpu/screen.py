"""Progress and tables in a terminal. With rich where it is installed: a machine with a GPU may have little but frameworks."""

from __future__ import annotations

import sys
from typing import Any, Self


class Progress:
    """Which row of a part is being measured, on stderr.

    Args:
        part: its name.
        rows: how many it has.
    """

    def __init__(self, part: str, rows: int) -> None:
        self._part, self._rows, self._begun = part, rows, 0
        self._bar: Any = None
        if sys.stderr.isatty():
            try:
                from rich.console import Console
                from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
                from rich.progress import Progress as Bar
            except ImportError:
                return
            columns = (TextColumn(f"{part:<9}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, TextColumn("{task.description}"), console=Console(stderr=True))
            self._task = self._bar.add_task("", total=rows)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self._begun, description="")
            self._bar.stop()

    def begin(self, row: str) -> None:
        self._begun += 1
        if self._bar:
            self._bar.update(self._task, completed=self._begun - 1, description=row)
        else:
            print(f"{self._part} {self._begun}/{self._rows}: {row}", file=sys.stderr, flush=True)


def table(title: str, heads: list[str], lines: list[list[str]]) -> None:
    """Print columns: figures to the right, the rest and the first one to the left."""
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    print(f"\n{title}")
    for line in [heads, *lines]:
        first, *rest = (x.ljust(width) for x, width in zip(line, widths, strict=True))
        print("  " + "  ".join([first, *(x.strip().rjust(len(x)) if _is_figure(x) else x for x in rest)]).rstrip())
    sys.stdout.flush()


def _is_figure(x: str) -> bool:
    return x[:1].isdigit() or x[:1] == "-"
