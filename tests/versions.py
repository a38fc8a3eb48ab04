"""The versions that the metadata promises: `make test-versions`, or `python -m tests.versions oldest -- tests/core`.

Each row has an environment of its own under build/versions, made by uv: a Python, and the oldest or the newest packages that `pyproject.toml` accepts. In it run
the tests of the core, the parity tables of both backends, and what comes and goes by torchft, where it is installed: torch's own process groups that can be given
other members are there since 2.15. torch comes from the index that UV_TORCH_BACKEND names, by default "cpu", PyTorch's own of
builds for CPUs. Where that cannot be reached, `UV_TORCH_BACKEND= make test-versions` takes the build of the package registry, some gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: What the tests below import, of the extra `dev`.
TOOLS = ("flatbuffers", "hypothesis", "ninja", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "setuptools")
PARITY = ("tests/parity/test_kernels.py", "tests/parity/test_torch.py", "tests/parity/test_jax.py")
TESTS = ("tests/core", *PARITY, "tests/torch/test_elastic.py", "tests/chaos")


@dataclass(frozen=True)
class Row:
    """A Python, and how uv chooses packages for it; `without`: tests of what needs newer ones, and says so where it is asked for; `extras` of gradwire."""

    python: str
    resolution: str
    without: str = ""
    extras: str = "all,elastic"


ROWS = {
    # An all-gather under shard_map(check_vma=True) needs JAX 0.9, and raises with the fix on 0.8.
    "oldest": Row("3.11", "lowest-direct", without="not vma", extras="all"),
    "middle": Row("3.12", "highest"),
    "newest": Row("3.13", "highest"),
}


def main(given: list[str]) -> int:
    """Test the rows that are named, or all. What follows `--` goes to pytest. Returns how many rows failed."""
    names, tests = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    if unknown := set(names) - set(ROWS):
        raise SystemExit(f"{', '.join(sorted(unknown))}: there are the rows {', '.join(ROWS)}")
    failed = [name for name in names or ROWS if not passes(name, tests)]
    print(f"failed: {', '.join(failed)}" if failed else "all versions pass", flush=True)
    return len(failed)


def passes(name: str, tests: list[str]) -> bool:
    """Whether the tests pass in the environment of a row, which is made if it is not there."""
    row, folder = ROWS[name], ROOT / "build" / "versions" / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        uv("venv", "--clear", "--python", row.python, str(folder))
        gradwire = f"{ROOT}[{row.extras}]"
        uv("pip", "install", "--python", str(python), "--resolution", row.resolution, "-e", gradwire, *tools())
        (folder / "ready").touch()
    what = [f"{package}.__version__" for package in ("torch", "jax", "flax", "optax", "numpy")]
    subprocess.run(
        [
            python,
            "-c",
            f"import sys, torch, jax, flax, optax, numpy; print({name!r}, sys.version.split()[0], {', '.join(what)})",
        ],
        check=True,
    )
    selected = ["-k", row.without] if row.without and not tests else []
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *selected, *(tests or TESTS)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def tools() -> list[str]:
    """The requirements of the tests, with the bounds of `pyproject.toml`."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    return [each for each in wanted if Requirement(each).name in TOOLS]


def uv(*arguments: str) -> None:
    env = {"UV_TORCH_BACKEND": "cpu"} | os.environ
    if not env["UV_TORCH_BACKEND"]:
        del env["UV_TORCH_BACKEND"]
    subprocess.run([Path(sys.executable).parent / "uv", *arguments], env=env, check=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
