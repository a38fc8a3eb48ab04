"""The wheel holds what the tree holds, and the pins cover what is installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
#: Folders of Python files that are no part of the package.
OUTSIDE = {"tests", "examples", "benchmarks", "docs", "build", "dist", "runs"}


def folders_with_modules(root: Path) -> set[str]:
    found = set()
    for folder, children, files in os.walk(root):
        children[:] = [c for c in children if not c.startswith((".", "__")) and not c.endswith(".egg-info")]
        if folder == str(root):
            children[:] = [c for c in children if c not in OUTSIDE]
        if any(f.endswith(".py") for f in files):
            found.add(Path(folder).relative_to(root).as_posix())
    return found


@pytest.fixture(scope="module")
def settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because setuptools leaves its build folder in the tree, and a stale one would hide a missing file."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in {f.split("/")[0] for f in folders_with_modules(ROOT)}:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    out = tmp_path_factory.mktemp("wheel")
    command = ["wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out), str(tree)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, timeout=240)
    (built,) = out.glob("*.whl")
    return built


def test_every_folder_with_modules_is_a_listed_package(settings):
    assert set(settings["package-dir"].values()) == folders_with_modules(ROOT)
    assert set(settings["package-dir"]) == set(settings["packages"])


def test_the_wheel_holds_every_module_and_the_type_marker(settings, wheel):
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"{package.replace('.', '/')}/{file.name}"
        for package, folder in settings["package-dir"].items()
        for file in (ROOT / folder).glob("*.py")
    }
    assert {n for n in names if n.endswith(".py")} == expected
    assert "gradwire/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_the_wheel_installs_and_every_module_imports(wheel, tmp_path):
    command = ["install", "-q", "--no-deps", "--no-index", "--no-compile", "--target", str(tmp_path), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, timeout=240)
    program = f"""
import importlib, pathlib, sys
target = pathlib.Path({str(tmp_path)!r})
sys.path.insert(0, str(target))
for file in sorted(target.glob("gradwire/**/*.py")):
    name = ".".join(file.relative_to(target).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    assert module.__file__ == str(file), (module.__file__, file)
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True, timeout=240)


def test_version_is_that_of_the_metadata():
    import gradwire

    assert gradwire.__version__ == metadata.version("gradwire")
    assert f"\nversion: {gradwire.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_everything_that_make_installs_is_pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), lines
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines}
    todo, seen = [("gradwire", extra) for extra in ("dev", "all", "torch", "jax", "")], set()
    while todo:
        name, extra = todo.pop()
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            key = canonicalize_name(needed.name)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                for wanted in ("", *needed.extras):
                    if (key, wanted) not in seen:
                        seen.add((key, wanted))
                        todo.append((key, wanted))
    missing = {name for name, _ in seen} - pinned - {"gradwire"}
    assert not missing, f"add to constraints.txt: {sorted(missing)}"
