"""Mutations of the product, drawn at random, each run against the tests that reach its line: `make
mutate SEED=1`.

    make mutate                                # 120 mutations by seed 1, each at most 60 s; goes on where it was stopped
    make mutate SEED=2 ARGS="--count 20 --only core/codecs"
    make mutate ARGS="--fresh"                 # measure again which test reaches which line

A mutation changes one place of a file's syntax tree: a comparison, an operator, a condition, a
constant, a call whose answer nobody takes, an `await` of one. Text and comments of the source do
not matter, so a seed draws alike before and after a reformatting, not after a change of code.

Two stages, whose results are in runs/mutate: every file of quick tests runs once under coverage.py,
which says what each function of tests reaches. Then, in copies of the repository, the tests of a
mutation's lines run, the quickest first, until one fails. What no test reaches, what passes, and
what passes for 60 seconds has survived. The score is the share of those that were noticed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

import coverage

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "mutate"
PRODUCT = ("core", "torch_backend", "jax_backend")
#: Test processes at a time, and seconds for the tests of a mutation.
JOBS, LIMIT = 2, 60
#: Tests of text, tools and benchmarks find no mutation that others miss, and take long.
LEFT_OUT = ("tests/test_", "tests/examples", "tests/peers", "tests/soak", "tests/fuzz")
QUICK = ("-m", "not slow", "-q", "-p", "no:cacheprovider")

_OPPOSITES = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
_OPPOSITES += ((ast.Add, ast.Sub), (ast.And, ast.Or))
SWAPS: dict[type[Any], type[Any]] = {
    **dict(_OPPOSITES),
    **{b: a for a, b in _OPPOSITES},
    **{ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
}


@dataclass(frozen=True)
class Mutation:
    """The `number`-th place of a file, counted in the order of `places`."""

    file: str
    line: int
    what: str
    number: int


class _Places(ast.NodeTransformer):
    """Counts the places of a tree; changes the one with this number, if any."""

    def __init__(self, change: int | None = None) -> None:
        self.change, self.found = change, list[tuple[int, str]]()

    def _here(self, node: ast.AST, what: str) -> bool:
        self.found.append((node.lineno, what))  # type: ignore[attr-defined]
        return len(self.found) - 1 == self.change

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.AnnAssign):
            node.value = node.value and self.visit(node.value)
            return node
        text = ast.Raise | ast.arg | ast.JoinedStr | ast.Import | ast.ImportFrom
        return node if isinstance(node, text) else super().visit(node)

    def visit_FunctionDef(self, node: Any) -> Any:
        node.body = [self.visit(each) for each in node.body]
        node.args.defaults = [self.visit(each) for each in node.args.defaults]
        node.args.kw_defaults = [each and self.visit(each) for each in node.args.kw_defaults]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        for i, op in enumerate(node.ops):
            if self._here(node, f"{type(op).__name__} -> {SWAPS[type(op)].__name__}"):
                node.ops[i] = SWAPS[type(op)]()
        return node

    def _operator(self, node: Any) -> Any:
        self.generic_visit(node)
        new = SWAPS.get(type(node.op))
        if new and self._here(node, f"{type(node.op).__name__} -> {new.__name__}"):
            node.op = new()
        return node

    visit_BinOp = visit_BoolOp = visit_AugAssign = _operator  # noqa: N815

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub) and self._here(
            node, f"{type(node.op).__name__} dropped"
        ):
            return node.operand
        return node

    def _condition(self, node: Any) -> Any:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Compare | ast.UnaryOp) and self._here(
            node, "condition negated"
        ):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    visit_If = visit_IfExp = visit_While = _condition  # noqa: N815

    def visit_Constant(self, node: ast.Constant) -> Any:
        if isinstance(node.value, bool) and self._here(node, f"{node.value} -> {not node.value}"):
            return ast.Constant(not node.value)
        if type(node.value) in (int, float) and self._here(
            node, f"{node.value!r} -> {node.value!r} + 1"
        ):
            return ast.Constant(node.value + 1)
        return node

    def visit_Expr(self, node: ast.Expr) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call | ast.Await) and self._here(node, "call deleted"):
            return ast.Pass()
        return node


def places(source: str) -> list[tuple[int, str]]:
    """Line and kind of all mutations of a file."""
    visitor = _Places()
    visitor.visit(ast.parse(source))
    return visitor.found


def mutated(source: str, number: int) -> str:
    """The source with one of them. Comments and layout are lost."""
    return ast.unparse(ast.fix_missing_locations(_Places(number).visit(ast.parse(source))))


def lines_of(source: str, line: int) -> set[int]:
    """The lines of which tests that reach one may notice a change in this one: those of its
    statement, of which Python does not count all; and where it runs as the file is imported, those
    of the function or class that it is for, or of all that names what it defines."""
    around, tree = list[Any](), ast.parse(source)
    node: Any = tree
    while inside := [
        n
        for n in ast.iter_child_nodes(node)
        if isinstance(n, ast.stmt) and n.lineno <= line <= _end(n)
    ]:
        around.append(node := inside[0])
    body = getattr(node, "body", None)
    found = {*range(node.lineno, body[0].lineno if body else _end(node) + 1)} if around else {line}
    functions = [n for n in around if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if functions and functions[0].body[0].lineno <= line:
        return found
    whole = functions[:1] or [n for n in around if isinstance(n, ast.ClassDef)]
    if whole:
        return found | {*range(whole[0].lineno, _end(whole[0]) + 1)}
    made = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    return found | {n.lineno for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id in made}


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


@cache
def everything(only: str = "") -> dict[str, list[Mutation]]:
    """All mutations of files whose path begins so, by folder."""
    rooms: dict[str, list[Mutation]] = {}
    for path in (path for top in PRODUCT for path in sorted((ROOT / top).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(only):
            found = [
                Mutation(name, line, what, i)
                for i, (line, what) in enumerate(places(path.read_text()))
            ]
            rooms.setdefault(name.rpartition("/")[0], []).extend(found)
    return {room: found for room, found in rooms.items() if found}


def draw(seed: int, count: int, only: str = "") -> list[Mutation]:
    """So many mutations of all rooms, or all that there are: each folder has a share by the root of
    its number of places, one at least if `count` allows it.

    The places of a room are given out one by one, by d'Hondt's rule: shares that are rounded would
    not add up.
    """
    rooms = everything(only)
    chance, drawn = random.Random(seed), list[Mutation]()
    shares = dict.fromkeys(rooms, 1)
    while sum(shares.values()) < count:
        left = [room for room, found in rooms.items() if shares[room] < len(found)]
        if not left:
            break
        shares[max(left, key=lambda room: len(rooms[room]) ** 0.5 / (shares[room] + 1))] += 1
    for room, found in rooms.items():
        drawn += chance.sample(found, shares[room])
    chance.shuffle(drawn)
    return drawn[:count]


def run(command: Sequence[str], folder: Path, seconds: float, env: Mapping[str, str]) -> int | None:
    """The exit status of a command in a folder; None if time was up. Its processes are ended."""
    log = folder / "runs" / "mutate.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        to: dict[str, Any] = {
            "stdout": out,
            "stderr": out,
            "env": os.environ | dict(env),
            "start_new_session": True,
        }
        process = subprocess.Popen(command, cwd=folder, **to)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


#: Of coverage.py: {0} is the folder of what it finds, {1} what is looked at.
CONFIG = """[run]
parallel = true
concurrency = thread, multiprocessing
patch = subprocess, _exit
dynamic_context = test_function
context = ${{GRADWIRE_CONTEXT}}
data_file = {0}/coverage
source = {1}
"""


def measure(data: Path) -> None:
    """Run every file of quick tests under coverage.py, its name the context of what it reaches."""
    files = [p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "tests").rglob("test_*.py"))]
    files = [name for name in files if not name.startswith(LEFT_OUT)]
    parts, config = data.parent / "parts", data.parent / "coveragerc"
    shutil.rmtree(data.parent, ignore_errors=True)
    parts.mkdir(parents=True)
    config.write_text(CONFIG.format(parts, ", ".join(str(ROOT / p) for p in PRODUCT)))
    seconds: dict[str, float] = {}

    def one(name: str) -> None:
        began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "coverage",
            "run",
            f"--rcfile={config}",
            "-m",
            "pytest",
            *QUICK,
            name,
        ]
        env = os.environ | {"GRADWIRE_CONTEXT": name, "COVERAGE_CORE": "ctrace"}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        seconds[name] = time.monotonic() - began
        said = (
            ""
            if done.returncode in (0, 5)
            else f" ended with {done.returncode}: {done.stdout[-400:]}"
        )
        print(f"{len(seconds)}/{len(files)} {name}{said}", flush=True)

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(one, files))
    whole = coverage.Coverage(data_file=str(data), config_file=False)
    whole.combine([str(parts)])
    whole.save()
    (data.parent / "seconds.json").write_text(json.dumps(seconds))


def reached(data: Path) -> Callable[[Mutation], list[str]]:
    """What to run for a mutation: functions, then files of tests, the quickest first."""
    found = coverage.CoverageData(basename=str(data))
    found.read()
    seconds: dict[str, float] = json.loads((data.parent / "seconds.json").read_text())

    def tests(mutation: Mutation) -> list[str]:
        lines = found.contexts_by_lineno(str(ROOT / mutation.file))
        functions, files = set[tuple[str, str]](), set[str]()
        for line in lines_of((ROOT / mutation.file).read_text(), mutation.line):
            for context in lines.get(line, []):
                file, _, function = context.partition("|")
                # A function within another is called so as well, and is none that pytest finds.
                name = function.rpartition(".")[2]
                if name.startswith("test_") and f"\ndef {name}(" in (ROOT / file).read_text():
                    functions.add((file, name))
                elif file:
                    files.add(file)
        by_time = sorted(functions, key=lambda each: (seconds.get(each[0], 0), each))
        return [
            *(f"{file}::{name}" for file, name in by_time),
            *sorted(files, key=lambda file: seconds.get(file, 0)),
        ]

    return tests


def copies(count: int) -> Iterator[Path]:
    """Copies of the checkout, in which the package is a folder of links to their own rooms."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for folder in (FOLDER / f"copy-{number}" for number in range(count)):
        shutil.rmtree(folder, ignore_errors=True)
        for name in (name for name in names if (ROOT / name).exists()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        subprocess.run(["make", "-s", "build/typed"], cwd=folder, check=True)
        yield folder


def judge(mutation: Mutation, tests: Sequence[str], folder: Path) -> str:
    """ "noticed", "survived", "60 s" or "unreached"."""
    if not tests:
        return "unreached"
    file = folder / mutation.file
    before = file.read_text()
    file.write_text(mutated(before, mutation.number))
    env = {"PYTHONPATH": str(folder / "build" / "typed"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        status = run([sys.executable, "-m", "pytest", "-x", *QUICK, *tests], folder, LIMIT, env)
    finally:
        file.write_text(before)
    return f"{LIMIT} s" if status is None else "survived" if status in (0, 5) else "noticed"


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--count", type=int, default=120)
    p.add_argument("--only", default="", help="files whose path begins so")
    p.add_argument(
        "--fresh", action="store_true", help="measure again which test reaches which line"
    )
    args = p.parse_args()
    data, results = FOLDER / "reached" / "coverage", FOLDER / f"{args.seed}.json"
    if args.fresh or not (data.parent / "seconds.json").exists():
        measure(data)
    tests, free, drawn = reached(data), Queue[Path](), draw(args.seed, args.count, args.only)
    known = json.loads(results.read_text()) if results.exists() and not args.fresh else []
    verdicts = {Mutation(**each["mutation"]): each["verdict"] for each in known}
    for folder in copies(JOBS):
        free.put(folder)

    def one(mutation: Mutation) -> None:
        if mutation not in verdicts:
            folder = free.get()
            verdicts[mutation] = judge(mutation, tests(mutation), folder)
            rows = [
                {"mutation": asdict(each), "verdict": verdict}
                for each, verdict in list(verdicts.items())
            ]
            results.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            print(
                f"{len(rows)} {verdicts[mutation]}: {mutation.file}:{mutation.line} {mutation.what}",
                flush=True,
            )
            free.put(folder)

    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(one, drawn))
    for mutation in sorted(drawn, key=lambda each: each.file):
        if (verdict := verdicts[mutation]) != "noticed":
            print(f"{verdict:10} {mutation.file}:{mutation.line}  {mutation.what}")
    noticed = sum(verdicts[mutation] == "noticed" for mutation in drawn)
    print(f"{noticed} of {len(drawn)} mutations were noticed: {noticed / max(1, len(drawn)):.0%}")


if __name__ == "__main__":
    main()
