"""The versions that the metadata promises: `make test-versions`, or `python -m tests.versions oldest -- tests/core`.

Each row has an environment of its own under build/versions, made by uv: a Python, and the oldest or the newest packages that `pyproject.toml` accepts. In it run
the tests of the core, the parity tables of both backends, and what comes and goes by torchft, where it is installed: torch's own process groups that can be given
other members are there since 2.15. torch comes from the index that UV_TORCH_BACKEND names, by default "cpu", PyTorch's own of
builds for CPUs. Where that cannot be reached, `UV_TORCH_BACKEND= make test-versions` takes the build of the package registry, some gigabytes.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: What the tests below import, of the extra `dev`.
TOOLS = ("flatbuffers", "hypothesis", "ninja", "psutil", "pytest", "pytest-timeout", "pytest-xdist", "setuptools")
PARITY = ("tests/parity/test_kernels.py", "tests/parity/test_torch.py", "tests/parity/test_jax.py")
TESTS = ("tests/core", *PARITY, "tests/torch/test_elastic.py", "tests/chaos")
#: A Python, how uv chooses packages for it, extras of gradwire, and a selection of tests. An all-gather under shard_map(check_vma=True) needs JAX 0.9, and raises
#: with the fix on 0.8.
ROWS = {
    "oldest": ("3.11", "lowest-direct", "all", ["-k", "not vma"]),
    "middle": ("3.12", "highest", "all,elastic", []),
    "newest": ("3.13", "highest", "all,elastic", []),
}


def main(given: list[str]) -> int:
    """Test the rows that are named, or all. What follows `--` goes to pytest. Returns how many rows failed."""
    cut = given.index("--") if "--" in given else len(given)
    names, tests = given[:cut], given[cut + 1 :]
    if unknown := set(names) - set(ROWS):
        raise SystemExit(f"{', '.join(sorted(unknown))}: there are the rows {', '.join(ROWS)}")
    failed = [name for name in names or ROWS if not passes(name, tests)]
    print(f"failed: {', '.join(failed)}" if failed else "all versions pass", flush=True)
    return len(failed)


def passes(name: str, tests: list[str]) -> bool:
    """Whether the tests pass in the environment of a row, which is made if it is not there."""
    (version, resolution, extras, selected), folder = ROWS[name], ROOT / "build" / "versions" / name
    python = str(folder / "bin" / "python")
    if not (folder / "ready").exists():
        uv("venv", "--clear", "--python", version, str(folder))
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
        tools = [each for each in wanted if Requirement(each).name in TOOLS]
        uv("pip", "install", "--python", python, "--resolution", resolution, "-e", f"{ROOT}[{extras}]", *tools)
        (folder / "ready").touch()
    packages = "torch, jax, flax, optax, numpy"
    said = f"import sys, {packages}; print({name!r}, sys.version.split()[0], *(p.__version__ for p in ({packages})))"
    subprocess.run([python, "-c", said], check=True)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    return not subprocess.run([*command, *(tests or [*selected, *TESTS])], cwd=ROOT, check=False).returncode


def uv(*arguments: str) -> None:
    env = {"UV_TORCH_BACKEND": "cpu"} | os.environ
    if not env["UV_TORCH_BACKEND"]:
        del env["UV_TORCH_BACKEND"]
    subprocess.run([Path(sys.executable).parent / "uv", *arguments], env=env, check=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
