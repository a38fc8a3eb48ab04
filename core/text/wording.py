"""How things are written in messages: configurations, and a few of many.

some(["a", "b", "c", "d"], 2)  # "'a', 'b' and 2 more"
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any


def configured(config: Any) -> str:
    """The `repr` of a dataclass, without options that are as by default; those that have none
    first."""
    changed = [
        f
        for f in fields(config)
        if (value := getattr(config, f.name)) is not f.default and value != f.default
    ]
    options = sorted(changed, key=lambda f: f.default is not MISSING)
    written = ", ".join(f"{f.name}={getattr(config, f.name)!r}" for f in options)
    return f"{type(config).__name__}({written})"


def many(n: int, what: str) -> str:
    """How many of them: "1 node", "2 nodes"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def meant(name: str, known: Iterable[str], otherwise: str) -> str:
    """What to write in place of a name that there is not: the one that is most like it, or what
    `otherwise` says."""
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else otherwise


def some(items: Iterable[Any], shown: int = 5, written: Callable[[Any], str] = repr) -> str:
    """The first of these, at most as many as are `shown`, and how many there are besides; "none" if
    there are none."""
    items = list(items)
    listed = ", ".join(map(written, items[:shown])) or "none"
    return listed + (f" and {len(items) - shown} more" if len(items) > shown else "")
