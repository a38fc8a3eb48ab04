"""Steps that take turns, workers that say what they measured, and the file for all of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

REPLICAS = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}")
#: Rounds before the clock starts: buckets are rebuilt after the first.
WARM_UP = 3


def interleaved(steps: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, by subject; the subjects take turns, and in every other round in
    reverse."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(WARM_UP + repeats):
        for name in list(steps)[:: 1 if round_ % 2 else -1]:
            began = time.perf_counter()
            steps[name]()
            if round_ >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def on_ranks(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(*args)` on ranks as `told_by_ranks` does; what it returns on rank 0."""
    (found,) = told_by_ranks(_tell_result, function, args)
    return found


def told_by_ranks(
    function: Callable[..., None], *args: Any, replicas: int = REPLICAS
) -> Iterator[Any]:
    """Run `function(tell, *args)` in so many new processes with one thread each, as ranks of a Gloo
    process group.

    They are forked from a process that has imported torch, so that each begins at once.

    Args:
        function: of a module. `tell(x)` hands something over, on rank 0; on the others it does
            nothing.

    Yields:
        What rank 0 tells, as it comes.

    Raises:
        SystemExit: a rank failed, and has said why. No process is left in any case.
    """
    context = multiprocessing.get_context("forkserver")
    # dynamo: the first DDP would import it
    context.set_forkserver_preload(["torch._dynamo", "gradwire.torch_backend"])
    told, teller = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        common = (replicas, f"file://{folder}/store", teller, function, args)
        ranks = [
            context.Process(target=_rank, args=(rank, *common), daemon=True)
            for rank in range(replicas)
        ]
        try:
            for process in ranks:
                process.start()
            teller.close()
            waited: list[Any] = [told, *(process.sentinel for process in ranks)]
            while waited:
                ready = wait(waited)
                if told in ready:
                    try:
                        yield told.recv()
                        continue
                    except EOFError:  # all have ended
                        pass
                waited = [each for each in waited if each not in ready]
                if any(process.exitcode for process in ranks):
                    raise SystemExit("a rank failed")
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _tell_result(
    tell: Callable[[Any], None], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    tell(function(*args))


def _rank(
    rank: int,
    replicas: int,
    store: str,
    teller: Any,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it is asked too, and ends it
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=replicas)
    function(teller.send if rank == 0 else lambda _: None, *args)
    dist.destroy_process_group()


def last_line(*command: str, **env: str) -> Any:
    """Run Python with these arguments; what a worker found is the last line that it prints, as
    JSON."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def save(result: dict[str, Any], path: Path) -> None:
    """Write what a benchmark found as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def write_part(page: Path, name: str, text: str) -> None:
    """Put `text` between the marks of this name in a page."""
    begin, end = (f"<!-- {name}: {mark} -->" for mark in ("begin", "end"))
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
