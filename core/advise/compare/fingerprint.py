"""The fingerprint by which a training is known again: how it is written, and what its first steps
come to."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gradwire.core.algorithm import is_ours, nested

#: So many steps are taken anew, under uncompressed averages and with the first seed.
STEPS = 3
#: Losses of a device that adds in another order are as near as this.
NEAR = 1e-4


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a training.

    Attributes:
        source: digest of how it is written, without comments: the module that builds it, those in
            the same folder that it uses, and what it is called with.
        losses, rates: of the first steps.
        held_out: of each held-out window after them.
    """

    source: str
    losses: Sequence[float] = ()
    rates: Sequence[float] = ()
    held_out: Sequence[float] = ()

    @classmethod
    def of(cls, make: Callable[..., Any], first: Any) -> Fingerprint:
        """The fingerprint of what `make` builds, and the `Run` of its first steps."""
        held_out = [loss for losses in first.held_out.values() for loss in losses]
        return cls(source_of(make), list(first.losses), list(first.rates), held_out)

    @classmethod
    def read(cls, written: dict[str, Any]) -> Fingerprint:
        """What `written` gave."""
        numbers = {key: [float(x) for x in written[key]] for key in ("losses", "rates", "held_out")}
        return cls(str(written["source"]), **numbers)

    def written(self) -> dict[str, Any]:
        """The fingerprint as plain data."""
        return asdict(self)

    def difference(self, other: Fingerprint) -> str:
        """The difference between two trainings, in words; "" if it is the same."""
        if self.rates and other.rates and not _near(self.rates, other.rates):
            return "its learning rates"
        if not _near(self.losses, other.losses):
            return "its first losses"
        if not _near(self.held_out, other.held_out):
            return "its held-out losses"
        return "its lines" if self.source != other.source else ""


def _near(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    def same(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=NEAR) or (math.isnan(a) and math.isnan(b))

    return len(mine) == len(theirs) and all(map(same, mine, theirs))


def source_of(make: Callable[..., Any]) -> str:
    """A digest of how a training is written; "" where nobody has its source. What differs in
    comments and layout alone is the same."""
    function, given = make, ""
    while isinstance(function, functools.partial):
        objects = repr((function.args, sorted(function.keywords.items())))
        given += re.sub(r" at 0x[0-9a-fA-F]+", "", objects)  # which are elsewhere in each process
        function = function.func
    function = inspect.unwrap(function)
    given += "".join(
        repr(cell.cell_contents)
        for cell in getattr(function, "__closure__", None) or ()
        if _plain(cell)
    )
    module = inspect.getmodule(function)
    written = "" if module is None else "".join(_read(file) for file in sorted(_files(module)))
    return hashlib.sha256((given + written).encode()).hexdigest()[:16] if written else ""


def source_of_method(algorithm: Any) -> str:
    """A digest of how the classes of somebody's own are written that a method is made of, and of
    their names; "" where it is made of gradwire's alone."""
    own = {type(each) for each in nested(algorithm)}
    modules = {cls: inspect.getmodule(cls) for cls in own if not is_ours(cls)}
    written = [
        f"{cls.__module__}.{cls.__qualname__}"
        + ("" if module is None else "".join(_read(file) for file in sorted(_files(module))))
        for cls, module in modules.items()
    ]
    return hashlib.sha256("".join(sorted(written)).encode()).hexdigest()[:16] if written else ""


def _plain(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, (bool, int, float, str))
    except ValueError:  # an empty one
        return False


def _files(first: ModuleType) -> Iterator[Path]:
    """The files of a module, and of those in its folder or below that its names lead to."""
    todo, seen = [first], set()
    folder = (
        None
        if getattr(first, "__file__", None) is None
        else Path(str(first.__file__)).resolve().parent
    )
    while folder is not None and todo:
        module = todo.pop()
        file = Path(str(getattr(module, "__file__", None) or "")).resolve()
        if file in seen or file.suffix != ".py" or folder not in file.parents:
            continue
        seen.add(file)
        yield file
        for value in vars(module).values():
            near = (
                value
                if isinstance(value, ModuleType)
                else sys.modules.get(str(getattr(value, "__module__", "")))
            )
            todo += [] if near is None else [near]


def _read(file: Path) -> str:
    try:
        return ast.dump(ast.parse(file.read_text()))
    except (OSError, SyntaxError, ValueError):  # it has been edited since, or moved away
        return ""
