"""Python for what tests start as commands, forked from a process that has imported torch and jax already.

    command = interpreter()      # the path of a program that is called as `python` is: script.py …, -m module …, -c code …

To import them takes some seconds of a core, and a small training less. `sys.executable` is the same program there: whom torchrun or the demo starts is forked,
too. The program is `called.py`; if it is killed, so is the process that was forked for it.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import multiprocessing.context
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jax

from tests.forked import start

CALLED = Path(__file__).with_name("called.py")
#: The program, for processes of a test that start commands themselves.
VARIABLE = "GRADWIRE_TEST_PYTHON"
#: What JAX reads from the environment as it is imported.
OF_JAX = {"JAX_COMPILATION_CACHE_DIR": str, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float}


@cache
def interpreter() -> str:
    """The path of the program. The process that is forked begins with the first call, and ends with the test process."""
    if VARIABLE in os.environ:
        return os.environ[VARIABLE]
    folder = Path(tempfile.mkdtemp(prefix="gradwire-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, program, log = folder / "server", folder / "python", folder / "log"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {CALLED} {address} "$@"\n')
    program.chmod(0o755)
    log.touch()
    server = start(Path(__file__), str(address), str(program), log=str(log))
    while not address.exists():
        assert server.is_alive(), log.read_text()
        time.sleep(0.02)
    return str(program)


def serve(address: str, program: str) -> None:
    """Fork a process for each `called.py` that asks, until this one is ended."""
    events, listener = selectors.DefaultSelector(), socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)  # from now on it listens
    events.register(listener, selectors.EVENT_READ)
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
            elif isinstance(key.fileobj, socket.socket):  # who asked is gone
                events.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
                with suppress(ProcessLookupError):
                    os.killpg(key.data, signal.SIGKILL)
            else:
                pid, connection = key.data
                answer(connection, os.waitpid(pid, 0)[1])
                events.unregister(key.fileobj)
                os.close(key.fd)
                if connection in events.get_map():
                    events.unregister(connection)
                connection.close()


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
        os.chdir(call["folder"])
        os.environ.clear()
        os.environ.update(call["env"])
        sys.executable = program
        # Ranks of its own are forked from it, and not by a server, which would import everything again.
        multiprocessing.current_process()._config["daemon"] = False
        multiprocessing.context._concrete_contexts["forkserver"] = multiprocessing.get_context("fork")
        sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
        for name, kind in OF_JAX.items():
            if name in os.environ:
                jax.config.update(name.lower(), kind(os.environ[name]))
        run(call["arguments"])
        code = 0
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
    serve(*sys.argv[1:])
