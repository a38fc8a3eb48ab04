"""Real processes for tests: started under torchrun, given a time limit, and gone afterwards whatever happens.

A limit ends what hangs. It is no statement about speed: on one busy core everything takes ten times as long.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
#: In the environment of everything that one launch starts: how its processes are found again, orphans included.
MARK = "GRADWIRE_TEST_LAUNCH"


def torchrun(
    script: Path, ranks: int, *args: str, timeout: float = 240, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `script` in `ranks` processes on this machine, on a free port, with one thread each.

    The scripts can import `tests...`. Output of all ranks is in `stdout`, in the order in which it came.

    Raises:
        AssertionError: with the end of the output, if a rank fails or time is up. No process is left in any case.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(script), *args]
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(mark) | dict(env or {}),
        start_new_session=True,
    )
    late = ""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        late = f", stopped after {timeout:g} s"
    finally:
        end_all(mark)
    if late:
        output, _ = process.communicate(timeout=30)
    if process.returncode or late:
        raise AssertionError(
            f"{Path(script).name} on {ranks} ranks ended with {process.returncode}{late}:\n{output[-6000:]}"
        )
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def jax_processes(script: Path, count: int, *args: str, timeout: float = 240, devices: int = 1) -> None:
    """Run `script PORT PROCESS_ID COUNT ...args` in `count` processes, for `jax.distributed`, with so many CPU devices each.

    Raises:
        AssertionError: with the end of the output of the first that failed, if one does or time is up. No process is left.
    """
    mark = uuid.uuid4().hex
    env = environment(mark) | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(f"--xla_force_host_platform_device_count={devices}"),
    }
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(i) for i in range(count)]
        started = []
        for i, log in enumerate(logs):
            command = [sys.executable, str(script), str(port), str(i), str(count), *args]
            with log.open("w") as out:
                started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env))
        deadline = time.monotonic() + timeout
        # One that fails leaves the others waiting for it: stop at the first.
        while time.monotonic() < deadline and any(p.poll() is None for p in started):
            if any(p.poll() for p in started):
                break
            time.sleep(0.1)
        codes = [p.poll() for p in started]
        end_all(mark)
        for p in started:
            p.wait(timeout=30)
        if any(codes) or None in codes:
            first = next(i for i, code in enumerate(codes) if code != 0 and (code or not any(codes)))
            raise AssertionError(
                f"{script.name} ended with {codes}; process {first}:\n{logs[first].read_text()[-6000:]}"
            )


def free_port() -> int:
    """On this machine, a moment ago; not among those that systems give to whoever asks for any (Linux from 32768 on): nobody takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("", port))
            return port


def environment(mark: str) -> dict[str, str]:
    """For processes of a launch: one thread each, this repository's `tests` importable, and marked for `end_all`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def xla_flags(*flags: str) -> str:
    """`XLA_FLAGS` for a process of the tests: what whoever started the tests has set, except a number of devices, then `flags`.

    `make test-portability` says in this way which processor XLA compiles for. What a conftest adds for its own process is not handed on.
    """
    given = os.environ.setdefault("GRADWIRE_TEST_XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    return " ".join([*(f for f in given.split() if not f.startswith("--xla_force_host_platform_device_count")), *flags])


def quickly_compiled(flags: str) -> str:
    """`XLA_FLAGS` with what makes compilation quick rather than clever, where they do not say otherwise.

    XLA compiles some thousand little programs of the tests, for 20 ms and more each, and runs them for microseconds. Unoptimized code does the same
    arithmetic. The programs of the README run optimized code.
    """
    quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    # For the jaxlib of `constraints.txt` alone: by the emitters of 0.8 a float32 is rounded twice on its way to 8 bits, and 0.12 ends a process for a
    # flag that it does not know.
    if version("jaxlib").startswith("0.10."):
        quick.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join([flags, *(flag for flag in quick if flag.split("=")[0] not in flags)]).strip()


def end_all(mark: str) -> None:
    """Kill every process whose environment holds this mark. torchrun puts its workers into sessions of their own: killing its process
    group would leave them behind."""
    deadline = time.monotonic() + 10
    while (alive := marked(mark)) and time.monotonic() < deadline:
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    if alive:
        raise RuntimeError(f"processes {alive} of a launch cannot be ended")


def marked(mark: str) -> list[int]:
    """The processes whose environment holds this mark, children of children included."""
    found = []
    for process in psutil.process_iter():
        # Gone meanwhile, ended and waiting for its parent, or somebody else's.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process.pid)
    return found
