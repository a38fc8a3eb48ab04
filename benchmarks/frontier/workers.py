"""Processes that train: two of torch, one of JAX with two devices. What they find comes line by
line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measuring import told_by_ranks

from frontier.runs import REPLICAS, Run

HERE = Path(__file__).parent


def events(
    backend: str, runs: Sequence[Run], folder: Path, *, timed_steps: int = 0
) -> Iterator[dict[str, Any]]:
    """What the processes of a backend tell, until all of these runs are done.

    Args:
        backend: "torch" or "jax".
        runs: to be trained one after the other; or, if steps are to be timed, all at once.
        folder: for what JAX writes besides: errors, and compiled programs, so that none is compiled
            twice.
        timed_steps: 0 trains.

    Yields:
        `{"run": index, "step": s, "loss": x}` at each evaluation, `{"run": index, "done": true, …}`
        after each run; where steps are timed, `{"step": s}` after each round and `{"seconds": [[…],
        …]}` in the end.

    Raises:
        SystemExit: a process failed; it has said why, or the message has the end of that. No
            process is left in any case.
    """
    jobs = {"timed_steps": timed_steps, "runs": [run.job() for run in runs]}
    if backend == "torch":
        # it imports torch, which who only draws does not need
        from frontier.worker_torch import work

        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        yield from told_by_ranks(work, jobs)
    else:
        yield from _in_jax(jobs, folder)


def _in_jax(jobs: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    file, errors = folder / "jax.json", folder / "jax.stderr"
    file.write_text(json.dumps(jobs))
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parent, HERE.parents[1] / "examples"))),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={REPLICAS}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(HERE / "worker_jax.py"), str(file)]
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, env=os.environ | env, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        assert process.stdout is not None
        try:
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=60)
    if process.returncode:
        tail = "\n".join(errors.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(
            f"{' '.join(command)} failed with {process.returncode}. The end of {errors}:\n\n{tail}"
        )
