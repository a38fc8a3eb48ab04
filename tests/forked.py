"""Ranks of torch in real processes, forked from one that has imported torch already.

    run_ranks(script, 3, "argument")      # like `torchrun` of tests/launch.py, which starts each rank, and itself, from nothing

Importing torch takes two seconds per process, and the suite has hundreds of ranks. A rank finds here what torchrun would have given it:
the environment, a store that outlives rank 0, a session of its own. What torchrun itself does (restarts, lost ranks, its signals) is
tested under torchrun.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from tests.device_branch import take_if_asked
from tests.launch import ROOT

#: What every script imports anyway; `torch._dynamo` is what the first optimizer and the first DDP would.
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.nn.parallel",
    "gradwire.torch_backend",
    "numpy",
    "pytest",
    "gradwire.jax_backend",
    "flax.linen",
]


def run_ranks(script: Path, ranks: int, *args: str, timeout: float = 240) -> str:
    """Run `script` in `ranks` processes on this machine, with one thread each; returns the output of all ranks, as it came.

    The scripts can import `tests...` and what lies beside them. The first rank that fails ends the others.

    Raises:
        AssertionError: with the end of the output, if a rank fails or time is up. No process is left in any case.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.NamedTemporaryFile() as log:
        processes: list[BaseProcess] = []
        try:
            for rank in range(ranks):
                env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(start(script, *args, log=log.name, env=env))
            late = not _ended(processes, timeout)
            if late:  # where does each rank stand?
                for process in processes:
                    os.kill(process.pid or 0, signal.SIGUSR1)
                time.sleep(1)
        finally:
            for process in processes:
                assert process.pid
                process.kill()
                with contextlib.suppress(ProcessLookupError):  # what it started is in its session
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
        output = Path(log.name).read_text(errors="replace")
    codes = [process.exitcode for process in processes]
    if late or any(codes):
        why = f", stopped after {timeout:g} s" if late else ""
        raise AssertionError(f"{Path(script).name} on {ranks} ranks ended with {codes}{why}:\n{output[-6000:]}")
    return output


def start(script: Path, *args: str, log: str, env: Mapping[str, str] | None = None) -> BaseProcess:
    """Run `script` in one process, whose output is added to the file `log`. Who starts it ends it."""
    process = _server().Process(target=_rank, args=(str(script), args, dict(env or {}), log), daemon=True)
    process.start()
    return process


@cache
def _server() -> ForkServerContext:
    """The process that is forked. It starts with the first rank, and ends with the test process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, paths)]))
    return context


def _ended(processes: list[BaseProcess], timeout: float) -> bool:
    """Wait until all have ended well or one has not; False if neither happens in time."""
    deadline = time.monotonic() + timeout
    running = list(processes)
    while running and not any(process.exitcode for process in processes):
        if not wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic())):
            return False
        running = [process for process in running if process.exitcode is None]
    return True


def _rank(script: str, args: tuple[str, ...], env: dict[str, str], log: str) -> None:
    os.setsid()
    gc.freeze()  # frameworks are no garbage, and are not looked through again by every rank
    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(env)
    take_if_asked()
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
