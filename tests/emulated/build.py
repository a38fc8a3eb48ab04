"""Builds the emulated accelerator's C++ with torch's own tool, once per checkout.

    module = shared_library()      # a path; half a minute the first time

It lies under build/, by torch's and Python's version, the flags and the sources. One process builds, whoever else asks waits for it; one
that is killed meanwhile leaves no lock behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import uuid
from pathlib import Path

import torch

from tests.compiler import require_compiler
from tests.launch import ROOT, environment

NAME = "emulated_device"
HERE = Path(__file__).parent
SOURCES = [HERE / "device.cpp", HERE / "streams.h"]
FLAGS = ["-O1", "-g0", "-w"]


def shared_library() -> Path:
    """The built module. Without a compiler the calling test is skipped, and says why; in CI it fails."""
    require_compiler("the emulated accelerator")
    key = hashlib.sha256()
    for part in (torch.__version__, platform.python_version(), *FLAGS, *(source.read_text() for source in SOURCES)):
        key.update(part.encode() + b"\0")
    folder = ROOT / "build" / "emulated" / key.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "locked").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it, however this process ends
        if not (folder / "done").exists():
            _build_elsewhere(folder)
            (folder / "done").touch()
    return folder / f"{NAME}.so"


def _build_elsewhere(folder: Path) -> None:
    """In a process of its own: torch's tool loads what it has built."""
    (folder / "lock").unlink(
        missing_ok=True
    )  # the tool's own, of a build that was killed: it would wait for it forever
    # ninja is installed beside the interpreter, which need not be on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    built = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=environment(uuid.uuid4().hex) | {"PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert built.returncode == 0, f"the emulated accelerator could not be built:\n{built.stdout[-6000:]}"


if __name__ == "__main__":
    from torch.utils import cpp_extension

    cpp_extension.load(NAME, [str(SOURCES[0])], extra_cflags=FLAGS, build_directory=sys.argv[1], verbose=True)
