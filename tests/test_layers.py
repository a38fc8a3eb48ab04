"""core/ below the backends, the backends strangers to each other, no circles: at run time, in all imports of the tree, and as a lint rule."""

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gradwire
import gradwire.core
from gradwire.core.protocol.programs import Request

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
#: Where each room of the package is.
ROOMS = {package: ROOT / folder for package, folder in SETTINGS["package-dir"].items()}
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax")

USE_THE_CORE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FRAMEWORKS:
            raise AssertionError(f"{name} was imported")
sys.meta_path.insert(0, Refuse())

import gradwire
simulator = gradwire.Simulator(gradwire.PowerSGD(rank=1), {"w": (8, 8), "b": (8,)}, replicas=2)
simulator.step([{"w": [[1.0] * 8] * 8, "b": [1.0] * 8}] * 2)
print(gradwire.plan({"w": (8, 8)}, gradwire.WireDtype(gradwire.PowerSGD(rank=1), "float16")))

import pkgutil, importlib
import gradwire.core
for module in pkgutil.walk_packages(gradwire.core.__path__, "gradwire.core."):
    importlib.import_module(module.name)
assert not set(FRAMEWORKS) & {name.split(".")[0] for name in sys.modules}
"""


def test_the_core_works_and_no_framework_is_loaded():
    program = f"FRAMEWORKS = {FRAMEWORKS}\n{USE_THE_CORE}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, stdout=subprocess.DEVNULL)


def kinds_of_requests() -> dict[str, type[Request]]:
    for module in pkgutil.walk_packages(gradwire.core.__path__, "gradwire.core."):
        if not module.name.startswith("gradwire.core.api"):
            importlib.import_module(module.name)
    todo, found = [Request], {}
    while todo:
        todo += (kinds := todo.pop().__subclasses__())
        found |= {kind.__name__: kind for kind in kinds if kind.__module__.startswith("gradwire.core.")}
    return {name: kind for name, kind in found.items() if not kind.__subclasses__()}  # the others are bases


@pytest.mark.parametrize("room", ["gradwire.core", "gradwire.torch_backend", "gradwire.jax_backend"])
def test_requests_are_named_where_they_are_defined_and_in_one_file_of_a_backend(room):
    kinds = kinds_of_requests()
    assert {"Reduce", "Gather", "Branch", "OptimizerStep"} < kinds.keys()
    here = {name: tree for name, (_, tree) in modules().items() if room_of(name) == room}
    naming = {name: used for name, tree in here.items() if (used := _names(tree) & kinds.keys())}
    if room == "gradwire.core":
        defined = {kind.__module__ for kind in kinds.values()}
        assert naming.keys() == defined
        assert set().union(*naming.values()) == kinds.keys()
    else:
        ((_, named),) = naming.items()
        assert named == {name for name, kind in kinds.items() if not kind.local}  # the others answer themselves


def _names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.name for alias in node.names}
        found |= {getattr(node, field) for field in ("id", "attr") if isinstance(getattr(node, field, None), str)}
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
    return found


BACKENDS = [("torch_backend", FRAMEWORKS[1:]), ("jax_backend", ("torch",))]


@pytest.mark.parametrize(("mine", "other"), BACKENDS)
def test_a_backend_is_loaded_when_it_is_first_asked_for(mine, other):
    program = f"""
import sys, gradwire
assert {mine!r} in dir(gradwire)
assert not set({FRAMEWORKS}) & {{name.split(".")[0] for name in sys.modules}}
assert gradwire.{mine} is sys.modules["gradwire.{mine}"]
assert not set({other}) & {{name.split(".")[0] for name in sys.modules}}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_what_gradwire_has_not_is_said():
    missing = "tensorflow_backend"
    with pytest.raises(AttributeError, match=f"module 'gradwire' has no attribute '{missing}'"):
        getattr(gradwire, missing)


# ---- what each file imports, wherever in it, for type checkers too


@cache
def modules() -> dict[str, tuple[Path, ast.Module]]:
    """The modules of the package by name: file, and what Python reads in it."""
    found = {}
    for package, folder in ROOMS.items():
        for file in sorted(folder.rglob("*.py")):
            if package != "gradwire.core" or ROOMS["gradwire"] not in file.parents:
                name = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
                found[name.removesuffix(".__init__")] = file, ast.parse(file.read_text())
    return found


def room_of(module: str) -> str:
    return max((package for package in ROOMS if f"{module}.".startswith(f"{package}.")), key=len)


def imports(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, and those of which it imports something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno} is a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules() else node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_rooms_import_downwards():
    """The core NumPy and the standard library, and nothing that is above it; the backends not each other."""
    below = {room: {room, "gradwire.core"} for room in ROOMS}
    for name, (file, tree) in modules().items():
        for imported in imports(tree):
            if imported.split(".")[0] == "gradwire":
                assert imported in modules(), f"{file} imports {imported}, which is not there"
                assert room_of(imported) in below[room_of(name)], f"{file} imports {imported}"
            elif room_of(name) in ("gradwire", "gradwire.core"):
                tools = ("rich", "typer") if name.startswith("gradwire.cli") else ()
                asked_for = ("ml_dtypes",) if name == "gradwire.core.kernels.numpy" else ()  # short floats
                assert imported.split(".")[0] in {*sys.stdlib_module_names, "numpy", *tools, *asked_for}, (
                    f"{file} imports {imported}"
                )


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of nodes that reach each other."""
    reached = {node: _reached(graph, node) for node in graph}
    return {
        frozenset(circle)
        for node in graph
        if len(circle := {node} | {other for other in reached[node] if node in reached[other]}) > 1
    }


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found, todo = set(), [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def test_files_do_not_import_each_other_in_a_circle():
    graph = {name: {*imports(tree)} & modules().keys() - {name} for name, (_, tree) in modules().items()}
    assert not circles(graph)


def test_folders_of_a_room_do_not_import_each_other_in_a_circle():
    """Beside the room's own folder, whose files show the others, and serve them."""
    graph: dict[str, set[str]] = {}
    for file, tree in modules().values():
        imported = {modules()[each][0].parent for each in imports(tree) if each in modules()}
        graph.setdefault(_folder(file.parent), set()).update(
            _folder(to) for to in imported if to != file.parent and {to, file.parent}.isdisjoint(ROOMS.values())
        )
    assert not circles(graph)


def _folder(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("room", ["core", "torch_backend", "jax_backend"])
def test_no_folder_has_more_than_a_reader_can_hold(room):
    """Files and folders, without `__init__.py` and what is for tools."""
    for folder in [
        ROOT / room,
        *(path for path in (ROOT / room).rglob("*") if path.is_dir() and path.name != "__pycache__"),
    ]:
        entries = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"} - {
            "__init__",
            "__pycache__",
        }
        assert len(entries) <= (15 if folder == ROOT / "core" else 12), f"{_folder(folder)}: {sorted(entries)}"


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(graph) == {frozenset("abc"), frozenset("de")}


@pytest.mark.parametrize(
    ("room", "banned"),
    [
        ("core", [*FRAMEWORKS, "gradwire.torch_backend", "gradwire.jax_backend"]),
        ("core/api", [*FRAMEWORKS, "gradwire.torch_backend", "gradwire.jax_backend"]),
        ("torch_backend", [*FRAMEWORKS[1:], "gradwire.jax_backend"]),
        ("jax_backend", ["torch", "gradwire.torch_backend"]),
    ],
)
def test_the_linter_refuses_imports_across_layers(room, banned):
    forms = ("import {}", "from {}.some import thing", "def load() -> None: import {}.some")
    lines = [form.format(module) for module in banned for form in forms]
    allowed = ["import numpy", "from gradwire.core.ops import Spec"]
    command = [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename", f"{room}/x.py"]
    source = "\n".join([*lines, *allowed, "from .ops import Spec\n"])
    said = subprocess.run([*command, "-"], input=source, cwd=ROOT, capture_output=True, text=True, timeout=240).stdout

    def refused(rule: str) -> list[str]:
        numbers = {int(n) for n in re.findall(rf"x\.py:(\d+):\d+: {rule} ", said)}
        return [line for number, line in enumerate(source.splitlines(), 1) if number in numbers]

    assert refused("TID251") == lines
    assert refused("TID252") == ["from .ops import Spec"]
