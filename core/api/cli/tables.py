"""How tables are printed: in columns of text, as wide as they are where nobody looks at a
terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

#: Where output goes to a file.
WIDE = 200
#: How far a column of names may shrink.
NARROW = 12
#: Of an algorithm's name before numbers: a table of totals then has 80 columns.
NAME = 24


def screen_width() -> int | None:
    """Characters of a line of the terminal. None: output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def console() -> Console:
    """The console that tables are printed on: without any codes where NO_COLOR is set
    (https://no-color.org)."""
    plain = bool(os.environ.get("NO_COLOR"))
    return Console(
        width=screen_width() or WIDE, highlight=False, color_system=None if plain else "auto"
    )


def show(table: Table) -> None:
    """Print it. Of a screen that is narrower than its numbers, lines are broken by the terminal,
    and nothing is left out."""
    out, names = console(), [column for column in table.columns if not column.no_wrap]
    for column in names:  # which may be folded anywhere
        column.max_width = NARROW
    least = Measurement.get(out, out.options.update(max_width=WIDE), table).minimum
    for column in names:
        column.max_width = None
    out.width = max(out.width, least)
    out.print(table)


def say(text: str) -> None:
    """A sentence, broken between words on a screen, and in one line elsewhere."""
    console().print(text, markup=False, soft_wrap=screen_width() is None)


def plain_table(*columns: str | tuple[str, str]) -> Table:
    """A table with these headings; of those with "right" numbers, which are never broken in two."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for column in columns:
        heading, justify = (column, "left") if isinstance(column, str) else column
        right = justify == "right"
        table.add_column(
            heading, justify="right" if right else "left", overflow="fold", no_wrap=right
        )
    return table


def in_lines(name: str, most: int = 0) -> str:
    """The name of an algorithm that has more characters than this, in lines where it may be broken:
    as a heading it is longer than the numbers below it."""
    if len(name) <= most:
        return name
    return re.sub(r"=(\w+\()", r"=\n  \1", name.replace("(", "\n(", 1).replace(", ", ",\n "))
