"""Builds the emulated accelerator's C++ with torch's own tool, once per checkout: half a minute the
first time.

It lies under build/, by torch's and Python's version, the flags and the sources. One process
builds, whoever else asks waits for it; one that is killed meanwhile leaves no lock behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from tests.compiler import require_compiler
from tests.launch import LIMIT, ROOT, environment

NAME = "emulated_device"
HERE = Path(__file__).parent
SOURCES = [HERE / "device.cpp", HERE / "streams.h"]
FLAGS = ["-O1", "-g0", "-w"]
#: In a process of its own: torch's tool loads what it has built.
BUILD = f"""
import sys
from torch.utils import cpp_extension
cpp_extension.load({NAME!r}, [{str(SOURCES[0])!r}], extra_cflags={FLAGS}, build_directory=sys.argv[1], verbose=True)
"""


def shared_library() -> Path:
    """The built module. Without a compiler the calling test is skipped, and says why; in CI it
    fails."""
    require_compiler("the emulated accelerator")
    key = hashlib.sha256()
    for part in (
        torch.__version__,
        platform.python_version(),
        *FLAGS,
        *(source.read_text() for source in SOURCES),
    ):
        key.update(part.encode() + b"\0")
    folder = ROOT / "build" / "emulated" / key.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "locked").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it, however this process ends
        if not (folder / "done").exists():
            # The tool's own lock, of a build that was killed: it would wait for it forever.
            (folder / "lock").unlink(missing_ok=True)
            # ninja is installed beside the interpreter, which need not be on the path.
            env = environment() | {
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            }
            command, to = (
                [sys.executable, "-c", BUILD, str(folder)],
                {"capture_output": True, "text": True},
            )
            built = subprocess.run(command, env=env, timeout=LIMIT, check=False, **to)
            said = (built.stdout + built.stderr)[-6000:]
            assert built.returncode == 0, f"the emulated accelerator could not be built:\n{said}"
            (folder / "done").touch()
    return folder / f"{NAME}.so"
