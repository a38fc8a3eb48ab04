"""The versions that the metadata promises: `make test-versions`, or `python -m tests.versions
oldest -- tests/core`.

Each row has an environment of its own under build/versions, made by uv, some gigabytes large: a
Python, a torch, and the oldest or the newest of all other packages that `pyproject.toml` accepts. A
row is made and tested after the other. In it run the tests of the core, the parity tables of both
backends, and the quick tests of requests, saved states, FSDP, ZeRO and local SGD in torch, and of
what comes and goes by torchft, where it is installed: torch's own process groups that can be given
other members are there since 2.15. What a version cannot is refused where it is registered; a test
that meets with that is counted as "xfailed", see `tests/torch/conftest.py`.

torch comes from the index that UV_TORCH_BACKEND names, by default "cpu", PyTorch's own of builds
for CPUs. Where that cannot be reached, `UV_TORCH_BACKEND= make test-versions` takes the build of
the package registry, some gigabytes more.
"""

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
#: What the tests below import, of the extra `dev`.
TOOLS = (
    *(
        "flatbuffers",
        "hypothesis",
        "ninja",
        "psutil",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "safetensors",
    ),
    "setuptools",
)
PARITY = ("tests/parity/test_kernels.py", "tests/parity/test_torch.py", "tests/parity/test_jax.py")
TORCH = tuple(
    f"tests/torch/test_{name}.py"
    for name in (
        *(
            "torch_internals",
            "requests",
            "elastic",
            "fsdp",
            "fsdp_checkpoint",
            "compat_zero",
            "compat_local_sgd",
        ),
        *("zero_features", "zero_mixture", "zero_state", "local_sgd", "local_sgd_composition"),
        *("states", "two_levels"),
    )
)
TESTS = ("tests/core", *PARITY, *TORCH, "tests/chaos")


@dataclass(frozen=True)
class Row:
    """An environment.

    Attributes:
        python: its version.
        torch: a requirement, beside that of `pyproject.toml`.
        resolution: how uv chooses other packages.
        extras: of gradwire.
        selected: a selection of tests.
    """

    python: str
    torch: str = "torch"
    resolution: str = "highest"
    extras: str = "all,elastic"
    selected: tuple[str, ...] = ()


ROWS = {
    # An all-gather under shard_map(check_vma=True) needs JAX 0.9, and raises with the fix on 0.8.
    "oldest": Row("3.11", "torch==2.6.0", "lowest-direct", "all", ("-k", "not vma")),
    "torch-2.8": Row("3.11", "torch==2.8.0"),
    "torch-2.11": Row("3.11", "torch==2.11.0"),
    "torch-2.13": Row("3.12", "torch==2.13.0"),
    "newest": Row("3.13"),
}


def main(given: list[str]) -> int:
    """Test the rows that are named, or all. What follows `--` goes to pytest. Returns how many rows
    failed."""
    cut = given.index("--") if "--" in given else len(given)
    names, tests = given[:cut], given[cut + 1 :]
    if unknown := set(names) - set(ROWS):
        raise SystemExit(f"{', '.join(sorted(unknown))}: there are the rows {', '.join(ROWS)}")
    failed = [name for name in names or ROWS if not passes(name, tests)]
    print(f"failed: {', '.join(failed)}" if failed else "all versions pass", flush=True)
    return len(failed)


def passes(name: str, tests: list[str]) -> bool:
    """Whether the tests pass in the environment of a row, which is made if it is not there."""
    row, folder = ROWS[name], ROOT / "build" / "versions" / name
    python = str(folder / "bin" / "python")
    if not (folder / "ready").exists():
        uv("venv", "--clear", "--python", row.python, str(folder))
        wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]["dev"]
        tools = [each for each in wanted if Requirement(each).name in TOOLS]
        packages = ["-e", f"{ROOT}[{row.extras}]", row.torch, *tools]
        uv("pip", "install", "--python", python, "--resolution", row.resolution, *packages)
        (folder / "ready").touch()
    shown = "torch, jax, flax, optax, numpy"
    said = f"import sys, {shown}; print({name!r}, sys.version.split()[0], *(p.__version__ for p in ({shown})))"
    subprocess.run([python, "-c", said], check=True)
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
    ]
    return not subprocess.run(
        [*command, *(tests or [*row.selected, *TESTS])], cwd=ROOT, check=False
    ).returncode


def uv(*arguments: str) -> None:
    env = {"UV_TORCH_BACKEND": "cpu"} | os.environ
    if not env["UV_TORCH_BACKEND"]:
        del env["UV_TORCH_BACKEND"]
    subprocess.run([Path(sys.executable).parent / "uv", *arguments], env=env, check=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
