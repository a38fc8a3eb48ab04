"""Real processes for tests, forked from one that has imported torch and jax already; given a time
limit, and gone afterwards whatever happens.

    run_ranks(script, 3, "argument")      # as torchrun starts them
    python = interpreter()                # the path of a program that is called as `python` is: script.py …, -m module …, -c code …

To import the frameworks takes some seconds of a core, and a small training less. A limit ends what
hangs. It is no statement about speed: on one busy core everything takes ten times as long.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
#: Seconds in which anything ends that does not hang, also where two slow cores do much besides. A
#: little less than a test has, so that what hangs is shown.
LIMIT = 560.0
#: In the environment of everything that one launch starts: how its processes are found again,
#: orphans included.
MARK = "GRADWIRE_TEST_LAUNCH"
#: The program of `interpreter`, for processes that start commands themselves.
PYTHON = "GRADWIRE_TEST_PYTHON"


class Process(subprocess.Popen[str]):
    """A command that was started."""

    join = subprocess.Popen.wait


@cache
def interpreter() -> str:
    """The path of the program, see `interpreter.py`. The process that is forked begins with the
    first call, and ends with the test process."""
    if PYTHON in os.environ:
        return os.environ[PYTHON]
    folder = Path(tempfile.mkdtemp(prefix="gradwire-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, program, log = folder / "server", folder / "python", folder / "log"
    program.write_text(
        f'#!/bin/sh\nexec {sys.executable} -I -S {ROOT}/tests/called.py {address} "$@"\n'
    )
    program.chmod(0o755)
    command = [sys.executable, str(ROOT / "tests" / "interpreter.py"), str(address), str(program)]
    with log.open("w") as out:
        server = Process(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment(), text=True
        )
    try:
        while not address.exists():
            assert server.poll() is None, log.read_text()
            time.sleep(0.02)
    except BaseException:  # a test's time is up: the next one begins another
        server.kill()
        server.communicate()
        raise
    atexit.register(server.communicate)  # it ends with the pipe that it reads
    return str(program)


def start(
    *command: object, log: str, env: Mapping[str, str] | None = None, python: str = ""
) -> Process:
    """Run a script with its arguments, or what else Python takes, in a process whose output is
    added to the file `log`. Who starts it ends it."""
    words = [python or interpreter(), *map(str, command)]
    new = {"env": environment() | dict(env or {}), "start_new_session": True}
    with Path(log).open("a") as out:
        return Process(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True, **new)


def run_ranks(script: Path, ranks: int, *args: object, timeout: float = LIMIT) -> str:
    """Run `script` in `ranks` processes on this machine, with one thread each; returns the output
    of all ranks, as it came.

    A rank finds what torchrun would have given it: the environment, a store that outlives rank 0, a
    session of its own. What torchrun itself does (restarts, its signals) is tested under torchrun.
    The scripts can import `tests...` and what lies beside them.

    Raises:
        AssertionError: with the end of the output, if a rank fails or time is up. No process is
            left in any case.
    """
    with started_ranks(script, ranks, *args) as launch:
        return launch.wait(timeout)


@contextmanager
def started_ranks(script: Path, ranks: int, *args: object) -> Iterator[Launch]:
    """The ranks of `run_ranks`, for the time of a `with`, after which none is left."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "test"}
    with _started(
        [(script, *args)] * ranks, [shared | of_rank(rank, ranks) for rank in range(ranks)]
    ) as launch:
        yield launch


def of_rank(local: int, here: int, node: int = 0, nodes: int = 1) -> dict[str, str]:
    """What torchrun says to one of `here` ranks of a node about its place."""
    place = {
        "RANK": node * here + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": nodes * here,
        "LOCAL_WORLD_SIZE": here,
    }
    return {name: str(number) for name, number in place.items()}


def jax_processes(
    script: Path, count: int, *args: object, timeout: float = LIMIT, devices: int = 1
) -> None:
    """Run `script PORT PROCESS_ID COUNT ...args` in `count` processes, for `jax.distributed`, with
    so many CPU devices each. Raises as `run_ranks`."""
    count_of = f"--xla_force_host_platform_device_count={devices}"
    flags, port = quickly_compiled(xla_flags(count_of)), free_port()
    env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with _started([(script, port, i, count, *args) for i in range(count)], [env] * count) as launch:
        launch.wait(timeout)


@dataclass(frozen=True)
class Launch:
    """Processes that were started together.

    Attributes:
        name: of what they run.
        processes: in the order of their ranks.
        log: the file of their output.
    """

    name: str
    processes: Sequence[Process]
    log: Path

    def is_over(self) -> bool:
        """Whether all have ended well, or one has not."""
        return _are_over(self.processes)

    def outcome(self, late: str = "") -> str:
        """Their output; it raises with its end where a process has failed, or where they are
        `late`, which says why they have to be stopped."""
        if late:
            for process in self.processes:  # where does each stand?
                process.send_signal(signal.SIGUSR1)
            time.sleep(1)
        codes = [process.poll() for process in self.processes]
        output = self.log.read_text(errors="replace")
        if late or any(codes):
            raise AssertionError(
                f"{self.name} in {len(codes)} processes ended with {codes}{late}:\n{output[-6000:]}"
            )
        return output

    def wait(self, timeout: float) -> str:
        """Their outcome, in so many seconds."""
        in_time = ended(self.processes, timeout)
        return self.outcome("" if in_time else f", stopped after {timeout:g} s")


@contextmanager
def _started(
    commands: Sequence[Sequence[object]], envs: Sequence[Mapping[str, str]]
) -> Iterator[Launch]:
    mark = {MARK: uuid.uuid4().hex}
    with tempfile.NamedTemporaryFile() as log:
        started: list[Process] = []
        try:
            for command, env in zip(commands, envs, strict=True):
                started.append(start(*command, log=log.name, env={**env, **mark}))
            yield Launch(Path(str(commands[0][0])).name, started, Path(log.name))
        finally:
            for process in started:
                process.kill()
                process.wait()
            end_all(mark[MARK])


def ended(processes: Sequence[Process], timeout: float = float("inf")) -> bool:
    """Wait until all have ended well or one has not; False if neither happens in time."""
    deadline = time.monotonic() + timeout
    while not _are_over(processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _are_over(processes: Sequence[Process]) -> bool:
    codes = [process.poll() for process in processes]
    return None not in codes or any(codes)


def free_port() -> int:
    """On this machine, a moment ago; not among those that systems give to whoever asks for any
    (Linux from 32768 on): nobody takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port


def environment(mark: str = "") -> dict[str, str]:
    """For processes of a launch: one thread each, this repository's `tests` importable, and marked
    for `end_all`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def xla_flags(*flags: str) -> str:
    """`XLA_FLAGS` for a process of the tests: what whoever started the tests has set, except a
    number of devices, then `flags`.

    `make test-portability` says in this way which processor XLA compiles for. What a conftest adds
    for its own process is not handed on.
    """
    given = os.environ.setdefault("GRADWIRE_TEST_XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    kept = [f for f in given.split() if not f.startswith("--xla_force_host_platform_device_count")]
    # XLA aborts where devices wait for each other for 40 seconds: on a busy machine they do. A test
    # has a limit of its own.
    patient = "--xla_cpu_collective_call_terminate_timeout_seconds=330"
    return " ".join([*kept, *flags, *([patient] if _is_pinned() else [])])


def _is_pinned() -> bool:
    """Whether jaxlib is that of `constraints.txt`. By the emitters of 0.8 a float32 is rounded
    twice on its way to 8 bits, and 0.12 ends a process for a flag that it does not know."""
    return version("jaxlib").startswith("0.10.")


def quickly_compiled(flags: str) -> str:
    """`XLA_FLAGS` with what makes compilation quick rather than clever, where they do not say
    otherwise.

    XLA compiles some thousand little programs of the tests, for 20 ms and more each, and runs them
    for microseconds. Unoptimized code does the same arithmetic. The programs of the README run
    optimized code.
    """
    quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if _is_pinned():
        quick += ["--xla_cpu_use_fusion_emitters=false"]
    return " ".join([flags, *(flag for flag in quick if flag.split("=")[0] not in flags)]).strip()


def take_device_branch() -> list[object]:
    """With GRADWIRE_TEST_DEVICE_BRANCH=1 (`make test-device-branch`) this process takes the branch
    for tensors on a device, where the host must not look at them, while what is returned is
    held."""
    if os.environ.get("GRADWIRE_TEST_DEVICE_BRANCH") != "1":
        return []
    from benchmarks.dry import on_a_device

    branch = on_a_device()
    branch.__enter__()
    return [branch]


def end_all(mark: str) -> None:
    """Kill every process whose environment holds this mark. torchrun puts its workers into sessions
    of their own: killing its process group would leave them behind."""
    deadline = time.monotonic() + 60
    while (alive := marked(mark)) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if alive:
        raise RuntimeError(f"processes {alive} of a launch cannot be ended")


def marked(mark: str) -> list[int]:
    """The processes whose environment holds this mark, children of children included."""
    found = []
    for process in psutil.process_iter():
        # Gone meanwhile, ended and waiting for its parent, or somebody else's.
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                found.append(process.pid)
    return found
