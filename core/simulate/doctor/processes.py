"""Processes that check something and say a row a line: started together, read as they speak, and
gone afterwards whatever happens.

job = Job("torch, 2 ranks, gloo, cpu", [(command, environment)] * 2, seconds=60)
run_job(job, report.add)
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

from gradwire.core.simulate.doctor.report import FAULT, Row

#: Before the JSON of a row, and of what a process says of its machine.
ROW, MACHINE = "gradwire-row ", "gradwire-machine "
#: Seconds after which processes that ought to have ended are ended; and lines of output that
#: explain one that failed.
PATIENCE, LINES = 60.0, 12
#: NCCL refuses two ranks of one host that share a GPU. With names of their own they are two hosts
#: to it, which talk by sockets, as on Ethernet.
SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
}


@dataclass(frozen=True)
class Job:
    """Processes of one part.

    Attributes:
        part: as in their rows.
        module: that each runs, by `python -m`.
        arguments: of each process, its place among them included: anything of JSON.
        environment: what each has besides this process's.
        seconds: that the checks may take.
    """

    part: str
    module: str
    arguments: Sequence[Mapping[str, Any]]
    environment: Sequence[Mapping[str, str]]
    seconds: float


def as_host(number: int) -> dict[str, str]:
    """The environment of a process that shares its GPU with others."""
    return {"NCCL_HOSTID": f"host{number}", **SOCKETS}


def say_row(row: Row) -> None:
    """Print a row for the process that reads."""
    print(ROW + json.dumps(asdict(row)), flush=True)


def say_machine(facts: Mapping[str, Any]) -> None:
    """Print what this process runs on."""
    print(MACHINE + json.dumps(facts, default=str), flush=True)


def run_job(
    job: Job, add: Callable[[Row], object], machine: Callable[[dict[str, Any]], object]
) -> None:
    """Run it, adding rows as they come: all of the first process, and faults of the others. A
    process that fails or does not end is a fault, too."""
    lines: queue.Queue[tuple[int, str | None]] = queue.Queue()
    started, readers = [], []
    try:
        for number, (arguments, environment) in enumerate(
            zip(job.arguments, job.environment, strict=True)
        ):
            started.append(_start(job.module, arguments, environment))
            readers.append(
                threading.Thread(
                    target=_read, args=(number, started[-1].stdout, lines), daemon=True
                )
            )
            readers[-1].start()
        _listen(job, started, lines, add, machine)
    finally:
        for process in started:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in readers:
            reader.join()


def _start(
    module: str, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, json.dumps(arguments)],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "GRADWIRE_SELFCHECK": "0", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _read(number: int, stream: IO[str] | None, lines: queue.Queue[tuple[int, str | None]]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            lines.put((number, line))
    lines.put((number, None))


def _listen(
    job: Job,
    started: Sequence[subprocess.Popen[str]],
    lines: queue.Queue[tuple[int, str | None]],
    add: Callable[[Row], object],
    machine: Callable[[dict[str, Any]], object],
) -> None:
    end = time.monotonic() + job.seconds + PATIENCE
    talking, rest = set(range(len(started))), {number: [""] for number in range(len(started))}
    last = "its start"
    while talking:
        try:
            number, line = lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            who = ", ".join(f"process {n}" for n in sorted(talking))
            add(
                Row(
                    job.part,
                    "all in time",
                    FAULT,
                    f"{who} did not end: the last check that ended was {last}",
                )
            )
            return
        if line is None:
            talking.discard(number)
            code = started[number].wait()
            if code:
                said = " | ".join(rest[number][-LINES:]).strip(" |") or "nothing"
                add(
                    Row(
                        job.part,
                        f"process {number}",
                        FAULT,
                        f"it ended with status {code} after {last}; it said: {said}",
                    )
                )
                return
        elif line.startswith(ROW):
            row = Row(**json.loads(line[len(ROW) :]))
            last = row.check
            if number == 0:
                add(row)
            elif row.verdict == FAULT:
                add(Row(row.part, f"{row.check}, process {number}", FAULT, row.detail, row.seconds))
        elif line.startswith(MACHINE):
            machine({"part": job.part, "process": number, **json.loads(line[len(MACHINE) :])})
        else:
            rest[number].append(line.rstrip())


def free_port() -> int:
    """A port on this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
