"""Lists in messages: a few of many, said in one way.

some(["a", "b", "c", "d"], 2)  # "'a', 'b' and 2 more"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["some"]


def some(items: Iterable[Any], shown: int = 5, written: Callable[[Any], str] = repr) -> str:
    """The first of these, and how many there are besides; "none" if there are none.

    Args:
        items: to be listed.
        shown: at most so many are named.
        written: how one of them is.
    """
    items = list(items)
    listed = ", ".join(map(written, items[:shown])) or "none"
    return listed + (f" and {len(items) - shown} more" if len(items) > shown else "")
