"""core/ below the backends, the backends strangers to each other, no circles: at run time, and in
all imports of the tree."""

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
from gradwire.core.kernels.storage import Storage
from gradwire.core.ops import Ops
from gradwire.core.protocol.programs import Request
from tests.launch import LIMIT

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
#: Where each room of the package is.
ROOMS = {package: ROOT / folder for package, folder in SETTINGS["package-dir"].items()}
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax")

USE_THE_CORE = """
import gradwire
simulator = gradwire.Simulator(gradwire.PowerSGD(rank=1), {"w": (8, 8), "b": (8,)}, replicas=2)
simulator.step([{"w": [[1.0] * 8] * 8, "b": [1.0] * 8}] * 2)
print(gradwire.plan({"w": (8, 8)}, gradwire.WireDtype(gradwire.PowerSGD(rank=1), "float16")))
import pkgutil, importlib
import gradwire.core
for module in pkgutil.walk_packages(gradwire.core.__path__, "gradwire.core."):
    importlib.import_module(module.name)
"""
USE_A_BACKEND = """
import gradwire
assert {0!r} in dir(gradwire)
assert not {{"Any", "importlib"}} & {{*dir(gradwire)}}
assert gradwire.{0} is sys.modules["gradwire.{0}"]
"""


@pytest.mark.parametrize(
    ("program", "strangers"),
    [
        (USE_THE_CORE, FRAMEWORKS),
        (USE_A_BACKEND.format("torch_backend"), FRAMEWORKS[1:]),
        (USE_A_BACKEND.format("jax_backend"), ("torch",)),
    ],
    ids=["core", "torch", "jax"],
)
def test_what_is_used_loads_no_framework_but_its_own(program, strangers):
    """And `import gradwire` none."""
    loaded = "{name.split('.')[0] for name in sys.modules}"
    before = f"import sys, gradwire\nassert not set({FRAMEWORKS}) & {loaded}\n"
    after = f"assert not set({strangers}) & {loaded}\n"
    subprocess.run(
        [sys.executable, "-c", before + program + after],
        check=True,
        timeout=LIMIT,
        stdout=subprocess.DEVNULL,
    )


def test_what_gradwire_has_not_is_said():
    with pytest.raises(
        AttributeError, match="module 'gradwire' has no attribute 'tensorflow_backend'"
    ):
        _ = gradwire.tensorflow_backend


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
    """The core NumPy and the standard library, and nothing that is above it; the backends not each
    other."""
    for name, (file, tree) in modules().items():
        tools = {"rich", "typer"} if name.startswith("gradwire.cli") else set()
        short_floats = {"ml_dtypes"} if name == "gradwire.core.kernels.numpy" else set()
        known = {*sys.stdlib_module_names, "numpy"} | tools | short_floats
        for imported in imports(tree):
            if imported.split(".")[0] == "gradwire":
                assert imported in modules(), f"{file} imports {imported}, which is not there"
                assert room_of(imported) in (room_of(name), "gradwire.core"), (
                    f"{file} imports {imported}"
                )
            elif room_of(name) in ("gradwire", "gradwire.core"):
                assert imported.split(".")[0] in known, f"{file} imports {imported}"


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest sets of nodes that reach each other."""

    def reached(start: str) -> set[str]:
        found, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - found
            found |= new
            todo += new
        return found

    from_each = {node: reached(node) for node in graph}
    return {
        frozenset(other for other in found if node in from_each[other])
        for node, found in from_each.items()
    } - {frozenset()}


def test_neither_files_nor_folders_of_a_room_import_each_other_in_a_circle():
    """Beside the room's own folder, whose files show the others, and serve them."""
    assert circles(
        {"a": set("b"), "b": set("cd"), "c": set("a"), "d": set("e"), "e": set("d"), "f": set("a")}
    ) == {
        frozenset("abc"),
        frozenset("de"),
    }
    files = {
        name: {*imports(tree)} & modules().keys() - {name} for name, (_, tree) in modules().items()
    }
    folders: dict[str, set[str]] = {}
    for name, imported in files.items():
        here = modules()[name][0].parent
        there = {modules()[each][0].parent for each in imported} - {here}
        between = {str(to) for to in there if {to, here}.isdisjoint(ROOMS.values())}
        folders.setdefault(str(here), set()).update(between)
    assert not circles(files)
    assert not circles(folders)


def test_no_folder_has_more_than_a_reader_can_hold():
    """Files and folders, without `__init__.py` and what is for tools."""
    for folder in {file.parent for file, _ in modules().values()}:
        entries = {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
        few = 15 if folder in ROOMS.values() else 12
        assert len(entries - {"__init__", "__pycache__"}) <= few, f"{folder}: {sorted(entries)}"


# ---- where tensors come to life


def test_no_tensor_is_made_where_and_of_what_a_user_has_set():
    """`torch.set_default_device` and `torch.set_default_dtype` are for the model's code. Each call
    says both, or is of a kind that neither changes."""
    from torch.utils._device import _device_constructors

    made = {function.__name__ for function in _device_constructors()}
    assert {"tensor", "as_tensor", "empty", "zeros", "arange", "randn"} < made
    counted = 0
    for name, (file, tree) in modules().items():
        if room_of(name) != "gradwire.torch_backend":
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Call(
                    func=ast.Attribute(ast.Name("torch"), made_by), keywords=keywords
                ) if made_by in made:
                    missing = {"device", "dtype"} - {keyword.arg for keyword in keywords}
                    assert not missing, (
                        f"{file}, line {node.lineno}: torch.{made_by} without {missing}"
                    )
                    counted += 1
    assert counted > 20


# ---- kernels


def test_a_backend_must_have_few_primitives():
    """What is fast has a name and a body besides: a composite, of which there may be as many as
    have a caller."""
    assert 30 < len(Ops.__abstractmethods__) <= 36
    composites = {name for name in (*vars(Ops), *vars(Storage)) if not name.startswith("_")}
    called = set().union(*(called_names(tree) for _, tree in modules().values()))
    assert composites <= called


def called_names(tree: ast.AST) -> set[str]:
    """The attributes that are read of anything but `super()`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not (isinstance(node.value, ast.Call) and "super" in ast.dump(node.value))
    }


def test_methods_do_not_ask_which_kernels_or_payloads_there_are():
    """Both know what to do: `gradwire.core.kernels.payloads`."""
    payloads = {"Dense", "LowRank", "Coded", "Payload"}
    seen = 0
    for name, (file, tree) in modules().items():
        if not name.startswith("gradwire.core.algorithms."):
            continue
        seen += 1
        for node in ast.walk(tree):
            where = f"{file}, line {getattr(node, 'lineno', 0)}"
            match node:
                case ast.Attribute(attr="fused"):
                    raise AssertionError(f"{where}: a method asks for kernels")
                case ast.Call(func=ast.Name("isinstance"), args=[_, kinds]):
                    assert not names(kinds) & payloads, f"{where}: a method asks what a payload is"
    assert seen > 10


# ---- requests


def names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.name for alias in node.names}
        found |= {
            getattr(node, field)
            for field in ("id", "attr")
            if isinstance(getattr(node, field, None), str)
        }
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
    return found


def test_requests_are_named_where_they_are_defined_and_in_one_file_of_a_backend():
    for module in pkgutil.walk_packages(gradwire.core.__path__, "gradwire.core."):
        if not module.name.startswith("gradwire.core.api"):
            importlib.import_module(module.name)
    kinds, todo = {}, [Request]
    while todo:
        below = todo.pop().__subclasses__()
        todo += below
        kinds |= {
            k.__name__: k
            for k in below
            if k.__module__.startswith("gradwire.core.") and not k.__subclasses__()
        }
    assert {"Reduce", "Gather", "Branch", "OptimizerStep"} < kinds.keys()
    naming = {
        name: used for name, (_, tree) in modules().items() if (used := names(tree) & kinds.keys())
    }
    core = {name: used for name, used in naming.items() if room_of(name) == "gradwire.core"}
    assert core.keys() == {kind.__module__ for kind in kinds.values()}
    assert set().union(*core.values()) == kinds.keys()
    for room in ("gradwire.torch_backend", "gradwire.jax_backend"):
        ((_, named),) = ((name, used) for name, used in naming.items() if room_of(name) == room)
        # the others answer themselves
        assert named == {name for name, kind in kinds.items() if not kind.local}


# ---- what would take as long as tensors times tensors


def lists_of(function: ast.AST) -> set[str]:
    """Names that are lists in a function, or sequences that it is given."""
    kinds = (ast.List, ast.ListComp)
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                found |= {
                    name.id
                    for name, x in pairs
                    if isinstance(name, ast.Name) and isinstance(x, kinds)
                }
        given = node.annotation if isinstance(node, (ast.arg, ast.AnnAssign)) else None
        if given is not None and re.match(r"(list|Sequence)\[", ast.unparse(given)):
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            found.add(name)
    return found


#: Where a list is short whatever the model.
SHORT = {
    "jax_backend/zero/independent.py": "kinds of parameters",
}


def test_no_loop_looks_through_a_list():
    """Ten thousand tensors, each looked for among ten thousand, take half a second in every step."""
    loops = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.For, ast.While)
    seen, slow = 0, set()
    for file, tree in modules().values():
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            lists = lists_of(function)
            for loop in ast.walk(function):
                for node in ast.walk(loop) if isinstance(loop, loops) else ():
                    if isinstance(node, ast.Compare) and isinstance(
                        node.ops[0], (ast.In, ast.NotIn)
                    ):
                        seen += 1
                        (among,) = node.comparators[:1]
                        text = ast.unparse(among)
                        if text in lists or text.endswith(".values()"):
                            slow.add((str(file.relative_to(ROOT)), ast.unparse(node)))
    assert seen > 300
    assert {file for file, _ in slow} == SHORT.keys(), sorted(slow)


# ---- names that the page about the architecture gives


def test_the_way_of_a_gradient_is_told_with_names_that_exist():
    named = re.findall(r"`([\w/]+\.py)::([\w.]+)`", (ROOT / "docs/architecture.md").read_text())
    assert len({file for file, _ in named}) > 15
    for file, name in named:
        found: ast.AST | None = ast.parse((ROOT / file).read_text())
        for part in name.split("."):
            found = next(
                (each for each in ast.iter_child_nodes(found) if getattr(each, "name", "") == part),
                None,
            )
            assert found is not None, f"{file} has no {name}"


# ---- docstrings


#: Words with which a sentence goes on that began elsewhere.
FRAGMENTS = re.compile(
    r"(Of|Where|As|With|And|Or|Likewise|In|By|At|To|For|From|Then|Into|After|Before|Under|Between|Within|Whose|Without|While)\b"
)


def test_docstrings_begin_with_their_subject():
    """A line in a list of functions is read by itself."""
    seen = 0
    for file, tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text, name = ast.get_docstring(node), getattr(node, "name", "the file")
                seen += text is not None
                assert not FRAGMENTS.match(text or ""), f"{file}::{name}: {text[:60]}"
    assert seen > 1_000
