"""Processes that measure: the rows that the first of them prints, as they come, within a time
limit, and no process left behind."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Lines of a worker that are meant for whoever started it begin so.
ROW = "row: "


def tell(row: Any) -> None:
    """From a worker to whoever started it; None: that was all."""
    print(f"{ROW}{json.dumps(row)}", flush=True)


def told(
    command: Sequence[str], envs: Sequence[Mapping[str, str]], seconds: float
) -> Iterator[Any]:
    """What Python `tell`s that runs `command` in as many processes as there are environments; that
    is, the first of them. They end with this: what they do at exit, with communicators and graphs,
    nobody waits for.

    Raises:
        TimeoutError: they took longer. They have been ended.
        RuntimeError: one failed, with the end of what it said.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(i) for i in range(len(envs))]
        processes = [
            _started(
                command,
                os.environ | dict(env),
                subprocess.PIPE if i == 0 else subprocess.DEVNULL,
                path,
            )
            for i, (env, path) in enumerate(zip(envs, said, strict=True))
        ]
        try:
            for line in _lines(processes[0]):
                if line.startswith(ROW):
                    row = json.loads(line.removeprefix(ROW))
                    if row is None:
                        return
                    yield row
                for process, path in zip(processes, said, strict=True):
                    if process.poll():
                        raise RuntimeError(
                            f"it ended with {process.returncode}: {path.read_text()[-1500:]}"
                        )
                if time.monotonic() > end:
                    raise TimeoutError(f"not done after {seconds:.0f} s")
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def _started(
    command: Sequence[str], env: dict[str, str], out: int, said: Path
) -> subprocess.Popen[bytes]:
    """In a session of its own, with all that it starts."""
    with said.open("w") as err:
        words = [sys.executable, *command]
        return subprocess.Popen(
            words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """As they come, and an empty one now and then, until the process has ended."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=0.2):
                read = os.read(process.stdout.fileno(), 1 << 16)
                if not read:
                    break
                *lines, rest = (rest + read).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            yield ""
    process.wait()
    yield ""
