"""How tables are printed: in columns of text, as wide as they are where nobody looks at a terminal."""

from __future__ import annotations

import sys

from rich import box
from rich.table import Table

#: Where output goes to a file.
WIDE = 200


def as_printed() -> int | None:
    """The width for a rich console. None: that of the terminal."""
    return None if sys.stdout.isatty() else WIDE


def plain_table(*columns: str | tuple[str, str]) -> Table:
    """A table with these headings; of those with "right" numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        heading, justify = (column, "left") if isinstance(column, str) else column
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    return table
