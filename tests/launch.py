"""Real processes for tests: started under torchrun, given a time limit, and gone afterwards whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ROOT", "end_all", "environment", "torchrun"]

ROOT = Path(__file__).parents[1]
#: In the environment of everything that one launch starts: how its processes are found again, orphans included.
MARK = "GRADWIRE_TEST_LAUNCH"


def torchrun(
    script: Path, ranks: int, *args: str, timeout: float = 120, env: Mapping[str, str] | None = None
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


def environment(mark: str) -> dict[str, str]:
    """For processes of a launch: one thread each, this repository's `tests` importable, and marked for `end_all`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def end_all(mark: str) -> None:
    """Kill every process whose environment holds this mark. torchrun puts its workers into sessions of their own: killing its process
    group would leave them behind."""
    needle = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + 10
    while (alive := _marked(needle)) and time.monotonic() < deadline:
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    if alive:
        raise RuntimeError(f"processes {alive} of a launch cannot be ended")


def _marked(needle: bytes) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # Empty once a process has ended and waits for its parent.
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return found
