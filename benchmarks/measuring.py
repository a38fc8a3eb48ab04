"""Steps that take turns, workers that say what they measured, and the file for all of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

REPLICAS = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}")
#: Rounds before the clock starts: buckets are rebuilt after the first.
WARM_UP = 3


def interleaved(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, by subject; the subjects take turns, and in every other round in reverse."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(WARM_UP + repeats):
        for name in list(steps)[:: 1 if round_ % 2 else -1]:
            began = time.perf_counter()
            steps[name]()
            if round_ >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def on_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` in `REPLICAS` new processes with one thread each, as ranks of a Gloo process group.

    They are forked from a process that has imported torch, so that each begins at once.

    Args:
        function: of a module. What it returns on rank 0 can be written as JSON.

    Returns:
        That.

    Raises:
        SystemExit: a rank failed, and has said why. The others have been ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "gradwire.torch_backend"])  # dynamo: the first DDP would import it
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, folder, function, args), daemon=True) for rank in range(REPLICAS)
        ]
        for process in ranks:
            process.start()
        while running := [process for process in ranks if process.exitcode is None]:
            wait([process.sentinel for process in running])
            if any(process.exitcode for process in ranks):
                for process in ranks:
                    process.kill()
                raise SystemExit(f"{function.__name__} failed on a rank")
        return json.loads((Path(folder) / "found").read_text())


def _rank(rank: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=REPLICAS)
    found = function(*args)
    dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(found))


def last_line(*command: str, **env: str) -> Any:
    """Run Python with these arguments; what a worker found is the last line that it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def save(result: dict[str, Any], path: Path) -> None:
    """Write what a benchmark found as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
