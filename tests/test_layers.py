"""core/ below the backends, the backends strangers to each other: at run time, and as a lint rule."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from gradwire.core import requests
from gradwire.core.programs import Request

ROOT = Path(__file__).parents[1]
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


#: The file of each room that may name the classes of requests.
TABLES = {"core": "requests.py", "torch_backend": "collectives.py", "jax_backend": "driver.py"}


@pytest.mark.parametrize("room", TABLES)
def test_requests_are_named_in_one_file(room):
    kinds = {name: x for name, x in vars(requests).items() if isinstance(x, type) and issubclass(x, Request)}
    known = {name for name, x in kinds.items() if x.__module__ == requests.__name__}
    alone = {name for name in known if getattr(requests, name).local}  # which answer themselves
    assert {"Reduce", "Gather", "Branch", "OptimizerStep"} < known - alone
    for file in (ROOT / room).rglob("*.py"):
        named = _names(ast.parse(file.read_text())) & known
        if file == ROOT / room / TABLES[room]:
            assert named == (known if room == "core" else known - alone)
        else:
            assert not named, file


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


def test_the_core_imports_numpy_and_the_standard_library_only():
    package = ROOT / "core" / "api"  # `gradwire` itself, which is above the core, and its command line
    for file in (ROOT / "core").rglob("*.py"):
        above = package in file.parents
        tools = ("rich", "typer") if package / "cli" in file.parents else ()
        if file == ROOT / "core" / "kernels" / "numpy.py":  # when a short float is asked for
            tools = ("ml_dtypes",)
        allowed = {*sys.stdlib_module_names, "numpy", "gradwire", *tools}
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno} is a relative import"
                names = [node.module or ""]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{file}:{node.lineno} imports {name}"
                ours = ("gradwire.core", "gradwire.cli", "gradwire.advising") if above else "gradwire.core"
                assert not name.startswith("gradwire.") or name.startswith(ours), f"{file}:{node.lineno}"


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
