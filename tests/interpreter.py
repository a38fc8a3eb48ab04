"""The process that is forked for each command of `tests.launch.interpreter`, whose program is
`called.py`. If that is killed, so is what was forked for it.

`sys.executable` is the same program there: whom torchrun or the demo starts is forked, too.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing.context
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])

import jax

from tests.frames import with_room
from tests.launch import PYTHON, take_device_branch

#: What scripts import anyway; `torch._dynamo` is what the first optimizer and the first DDP would.
PRELOAD = (
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.run",
    "gradwire.torch_backend",
    "pytest",
)
PRELOAD += ("gradwire.jax_backend", "flax.linen")
#: What JAX reads from the environment as it is imported.
OF_JAX = {"JAX_COMPILATION_CACHE_DIR": str, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float}


def serve(address: str, program: str) -> None:
    """Fork a process for each `called.py` that asks, until standard input ends."""
    events, listener = selectors.DefaultSelector(), socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # from now on it listens
    events.register(listener, selectors.EVENT_READ)
    events.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in events.select()[:1]:  # it may change what the others are
            if key.fileobj is listener:
                connection, _ = listener.accept()
                call, files = received(connection)
                if call and not (pid := os.fork()):
                    for other in [*events.get_map().values()]:
                        os.close(other.fd)
                    os.close(connection.detach())
                    become(call, files, program)
                for file in files:
                    os.close(file)
                if call:
                    ended = os.pidfd_open(pid)
                    events.register(ended, selectors.EVENT_READ, (pid, connection))
                    events.register(connection, selectors.EVENT_READ, pid)
                    answer(connection, pid)
            elif key.fileobj is sys.stdin:
                for other in events.get_map().values():
                    if isinstance(other.fileobj, socket.socket) and other.data:
                        end(other.data)
                return
            elif isinstance(key.fileobj, socket.socket):  # who asked is gone
                events.unregister(key.fileobj)
                end(key.data)
            else:
                pid, connection = key.data
                answer(connection, os.waitpid(pid, 0)[1])
                events.unregister(key.fileobj)
                os.close(key.fd)
                if connection in events.get_map():
                    events.unregister(connection)
                connection.close()


def end(pid: int) -> None:
    """With all that is in its session."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What is asked for, {} if who asks is gone before it is said, and the files."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 6)
    while not data.endswith(b"\n"):
        if not (more := connection.recv(1 << 16)):
            return {}, files
        data += more
    return json.loads(data), files


def answer(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # nobody waits for it any more
        connection.sendall(f"{number}\n".encode())


def become(call: dict[str, Any], files: list[int], program: str) -> NoReturn:
    """In the forked process: be the interpreter that was asked for, to its end."""
    code: Any = 1
    try:
        os.setsid()
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        for space in files[3:]:
            enter(space)
        for file in files:
            os.close(file)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.register(signal.SIGUSR1)
        os.chdir(call["folder"])
        os.environ.clear()
        os.environ.update(call["env"] | {PYTHON: program})
        if "RANK" not in os.environ:  # ranks may start what needs more of Python
            sys.executable = program
        # Ranks of its own are forked from it, and not by a server, which would import everything
        # again.
        multiprocessing.context._concrete_contexts["forkserver"] = multiprocessing.get_context(
            "fork"
        )
        sys.path[1:1] = [
            path
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path not in sys.path
        ]
        for name, kind in OF_JAX.items():
            if name in os.environ:
                jax.config.update(name.lower(), kind(os.environ[name]))
        with_branch = take_device_branch()
        with_room(run, call["arguments"])
        code = 0
        del with_branch
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with suppress(ValueError):  # closed
            file.flush()
    os._exit(code or 0 if isinstance(code, int | None) else 1)


def enter(space: int) -> None:
    """A namespace, unless this process is in it."""
    mine = {os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("mnt", "net", "uts")}
    if os.fstat(space).st_ino not in mine and ctypes.CDLL(None, use_errno=True).setns(space, 0):
        raise OSError(ctypes.get_errno(), "setns")


def run(arguments: list[str]) -> None:
    """Of a command line of Python as much as the tests use."""
    match [word for i, word in enumerate(arguments) if i or word != "-u"]:
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], ""
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec", dont_inherit=True), main.__dict__)
        case ["-m", module, *rest]:
            sys.argv, sys.path[0] = [module, *rest], os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest] if not script.startswith("-"):
            sys.argv, sys.path[0] = [script, *rest], str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
        case unknown:
            raise SystemExit(f"not among what {__file__} knows: {unknown}")


if __name__ == "__main__":
    if "COVERAGE_PROCESS_CONFIG" in os.environ:  # `make mutate` measures what is forked, too
        importlib.import_module("coverage").process_startup()
    gc.disable()  # frameworks are no garbage, and are not looked through, here and by every process
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    # For a figure in a log, Dynamo would empty the processor's caches after each graph: 30 ms.
    importlib.import_module("torch._dynamo.guards").profile_guard_manager = lambda *_: 0.0
    serve(*sys.argv[1:])
