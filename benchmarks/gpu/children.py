"""Processes of a part: what they print as JSON, within a time limit, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import TORCHRUN

HERE = Path(__file__).parent


def worker(part: str, seconds: float, *, tiny: bool, several: bool = False) -> Any:
    """What `python benchmarks/gpu --worker PART` prints last; `several`: of two processes, the first.

    Raises:
        TimeoutError: it took longer; it has been ended.
        RuntimeError: it failed, with the end of what it said.
    """
    command = [*(TORCHRUN if several else ()), str(HERE), "--worker", part, *(["--tiny"] if tiny else [])]
    # DDP can be captured only if nobody watches for errors of NCCL in the background.
    text = run(command, seconds, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"} if part == "graph" else {})
    return json.loads(text.strip().splitlines()[-1])


def in_jax(size: tuple[int, ...], ranks: list[int], seconds: float, output: Path, *, tiny: bool) -> Any:
    """What `jax_step.py` finds. Raises as `worker`."""
    shape = [f"--{key}={n}" for key, n in zip(("layers", "width", "vocabulary", "context"), size, strict=True)]
    options = [f"--platform={'cpu' if tiny else 'cuda'}", f"--repeats={1 if tiny else 10}", f"--output={output}"]
    command = [str(HERE.parent / "jax_step.py"), *shape, *options, "--no-half-step", "--compile-layers=0"]
    run([*command, "--ranks", *map(str, ranks)], seconds, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    return json.loads(output.read_text())


def run(command: list[str], seconds: float, env: dict[str, str]) -> str:
    """What Python prints with these arguments. Raises as `worker`."""
    child = subprocess.Popen(
        [sys.executable, *command],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with all that it starts
    )
    try:
        out, said = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not done after {seconds:.0f} s") from None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if child.returncode:
        raise RuntimeError(f"it ended with {child.returncode}: {said[-1500:]}")
    return out
