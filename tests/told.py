"""What messages tell their readers to write. Each has a row in a table, in which that is done:
`test_executed_advice.py` of the core and of the backends."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOLD = re.compile(r"\b(use|give|pass|take|write|call|set)\b", re.IGNORECASE)
CODE = re.compile(r"[A-Za-z_][\w.]*\(|\w+=[^=\s]")
#: A call; or `file::name` of the test that makes it.
Row = Callable[..., object] | str


def texts(path: Path) -> Iterator[str]:
    """Every text in a file but docstrings, what is filled in as {}."""
    tree = ast.parse(path.read_text())
    passed: set[ast.AST] = set()
    for x in ast.walk(tree):
        if isinstance(x, ast.Expr):
            passed.add(x.value)
        elif isinstance(x, ast.JoinedStr):
            passed |= set(x.values)
            if x not in passed:
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}" for part in x.values
                )
        elif isinstance(x, ast.Constant) and isinstance(x.value, str) and x not in passed:
            yield x.value


def advice(room: str) -> set[str]:
    """The part of each message, raised, warned of or returned, from the word that tells, that names
    code."""
    found = set()
    for path in sorted((ROOT / room).rglob("*.py")):
        for text in texts(path):
            for part in re.split(r"[.;]\s", text):
                told = TOLD.search(part)
                if told and CODE.search(part[told.start() :]):
                    found.add(part[told.start() :])
    return found


def require_done(row: Row, *given: object) -> None:
    """Do it, or see that there is the test that does it."""
    if not isinstance(row, str):
        row(*given)
        return
    path, _, name = row.partition("::")
    assert name in {
        x.name
        for x in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(x, ast.FunctionDef)
    }
