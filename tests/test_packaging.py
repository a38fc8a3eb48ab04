"""The wheel holds what the tree holds, and the pins cover what is installed."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch import LIMIT

ROOT = Path(__file__).parents[1]
#: Folders of Python files that are no part of the package.
OUTSIDE = {"tests", "examples", "benchmarks", "docs", "build", "dist", "runs"}


def modules() -> dict[str, Path]:
    """Where a wheel has each file of Python of the rooms → where it is in the tree, from its
    root."""
    rooms = [
        f
        for f in ROOT.iterdir()
        if f.is_dir() and f.name not in OUTSIDE and not f.name.startswith((".", "__"))
    ]
    files = [file.relative_to(ROOT) for room in rooms for file in room.rglob("*.py")]
    return {f"gradwire/{file.as_posix().removeprefix('core/api/')}": file for file in files}


IMPORT_ALL = """
import importlib.util, pathlib, sys
target = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(target))
for file in sorted(target.glob("gradwire/**/*.py")):
    name = ".".join(file.relative_to(target).with_suffix("").parts).removesuffix(".__init__")
    if name.rpartition(".")[2].startswith("triton_") and importlib.util.find_spec("triton") is None:
        continue
    module = importlib.import_module(name)
    assert module.__file__ == str(file), (module.__file__, file)
"""


#: What can be done without a framework, by who has installed gradwire alone.
ALONE = """
import sys
import gradwire
assert not {"torch", "jax", "pytest"} & {name for name in sys.modules}
assert gradwire.plan({"w": (64, 32)}, gradwire.PowerSGD(rank=4)).wire_bytes == 4 * 4 * (64 + 32)
"""


@pytest.mark.slow
def test_the_sdist_makes_a_wheel_of_every_module_which_imports_in_a_clean_environment(tmp_path):
    """From a copy, because setuptools leaves its build folder in the tree, and a stale one would
    hide a missing file. What PyPI would refuse is refused."""
    tree, out, installed, clean = (
        tmp_path / name for name in ("tree", "dist", "installed", "clean")
    )
    for folder in {file.parts[0] for file in modules().values()}:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    sdist = [
        sys.executable,
        "-c",
        "from setuptools import build_meta as b; import sys; b.build_sdist(sys.argv[1])",
    ]
    subprocess.run(
        [*sdist, str(out)], cwd=tree, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL
    )
    (packed,) = out.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip"]
    options = ["-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run(
        [*pip, "wheel", *options, "--wheel-dir", str(out), str(packed)], check=True, timeout=LIMIT
    )
    (built,) = out.glob("*.whl")
    names = zipfile.ZipFile(built).namelist()
    assert sorted(n for n in names if n.endswith(".py")) == sorted(modules())
    for room in ("", "core/", "torch_backend/", "jax_backend/"):
        assert f"gradwire/{room}py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    twine = [sys.executable, "-m", "twine", "check", "--strict", str(packed), str(built)]
    subprocess.run(twine, check=True, timeout=LIMIT)
    options = ["-q", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run(
        [*pip, "install", *options, "--target", str(installed), str(built)],
        check=True,
        timeout=LIMIT,
    )
    subprocess.run(
        [sys.executable, "-I", "-c", IMPORT_ALL, str(installed)], check=True, timeout=LIMIT
    )
    venv.create(clean, with_pip=False)
    python = clean / "bin" / "python"
    subprocess.run(
        [*pip, "--python", str(python), "install", *options, str(built)], check=True, timeout=LIMIT
    )
    (packages,) = clean.glob("lib/python*/site-packages")
    # the one thing that it needs; nothing is fetched
    for there in Path(np.__file__).parents[1].glob("numpy*"):
        (packages / there.name).symlink_to(there)
    subprocess.run([str(python), "-I", "-c", ALONE], check=True, timeout=LIMIT)


def test_version_is_that_of_the_metadata():
    import gradwire

    assert gradwire.__version__ == metadata.version("gradwire")
    assert f"\nversion: {gradwire.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_everything_that_make_installs_is_pinned():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
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
