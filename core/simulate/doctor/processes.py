"""Processes that check something and say a row a line: started together, read as they speak, and
gone afterwards whatever happens.

job = Job("torch, 2 ranks, gloo, cpu", [(command, environment)] * 2, seconds=60)
run_job(job, report.add)
"""

from __future__ import annotations

import base64
import json
import os
import pickle
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

from gradwire.core.algorithm import nested
from gradwire.core.simulate.doctor.report import FAULT, Row

#: Before the JSON of a row, and of what a process says of its machine.
ROW, MACHINE = "gradwire-row ", "gradwire-machine "
#: Seconds after which processes that ought to have ended are ended; and lines of output that
#: explain one that failed.
PATIENCE, LINES = 60.0, 12
#: Seconds between two looks at whether all is to stop.
LOOKED = 0.2
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


def sent(algorithms: Sequence[Any]) -> str:
    """Algorithms as text, for processes that can import what this one has. Raises TypeError for
    one's own class that they cannot."""
    for algorithm in algorithms:
        kinds = {type(each) for each in nested(algorithm)}
        if own := [kind for kind in kinds if kind.__module__ == "__main__"]:
            raise TypeError(
                f"algorithms: {algorithm!r} is tried in other processes, which cannot import"
                f" {own[0].__name__} from the script that is run: put the class in a module"
            )
        try:
            pickle.dumps(algorithm)
        except Exception as error:
            raise TypeError(
                f"algorithms: {algorithm!r} is tried in other processes, and cannot be sent to"
                f" them: {error}"
            ) from error
    return base64.b64encode(pickle.dumps(tuple(algorithms))).decode()


def received(text: str) -> Any:
    """The algorithms that another process has `sent`."""
    return pickle.loads(base64.b64decode(text))


def say_row(row: Row) -> None:
    """Print a row for the process that reads."""
    _say(ROW + json.dumps(asdict(row)))


def say_machine(facts: Mapping[str, Any]) -> None:
    """Print what this process runs on."""
    _say(MACHINE + json.dumps(facts, default=str))


def _say(line: str) -> None:
    """Print a line at once, whatever a library in C++ has begun or is about to write there."""
    sys.stdout.write(f"\n{line}\n")
    sys.stdout.flush()


def run_job(
    job: Job,
    add: Callable[[Row], object],
    machine: Callable[[dict[str, Any]], object],
    stop: threading.Event | None = None,
) -> None:
    """Run it, adding rows as they come: all of the first process, and faults of the others. A
    process that fails or does not end is a fault, too. Once `stop` is set, all of them are
    ended."""
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
        _listen(job, started, lines, add, machine, stop or threading.Event())
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
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")])),
            "GRADWIRE_SELFCHECK": "0",
            **environment,
        },
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
    stop: threading.Event,
) -> None:
    end = time.monotonic() + job.seconds + PATIENCE
    talking, rest = set(range(len(started))), {number: [""] for number in range(len(started))}
    last = "its start"
    while talking and not stop.is_set():
        try:
            number, line = lines.get(timeout=LOOKED)
        except queue.Empty:
            if time.monotonic() < end:
                continue
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
            row = Row(**_first_object(line[len(ROW) :]))
            last = row.check
            if number == 0:
                add(row)
            elif row.verdict == FAULT:
                add(Row(row.part, f"{row.check}, process {number}", FAULT, row.detail, row.seconds))
        elif line.startswith(MACHINE):
            machine({"part": job.part, "process": number, **_first_object(line[len(MACHINE) :])})
        elif line.strip():
            rest[number].append(line.rstrip())


def _first_object(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
    return found


def free_port() -> int:
    """A port on this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
