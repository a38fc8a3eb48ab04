"""A lighthouse, and replicas that are forked, killed, stopped and slowed down. Nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.chaos.replica import run

#: A process of its own: the lighthouse, and a store in which the replicas of native groups meet. It says where they are, and ends after so many seconds.
#: A replica that is alive is waited for, as long as a slow one takes; one that says nothing for two seconds is not.
SERVER = """
import sys, time
import torch.distributed as dist
from torchft.coordination import LighthouseServer
times = {"join_timeout_ms": 20_000, "heartbeat_timeout_ms": 2_000, "quorum_tick_ms": 20}
lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, **times)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(lighthouse.address(), store.port, flush=True)
time.sleep(float(sys.argv[1]))
"""


class Arena:
    """To be used in a process without threads that has imported what replicas need.

    Args:
        folder: for logs.
        what, seed: of the training.
        replicas: how many begin.
        seconds: after which any process ends by itself.
        pace: seconds between two steps of a replica.
        native: by torch's own groups that can be given other members, which meet in one store (torch 2.15).
    """

    def __init__(
        self, folder: Path, what: str, seed: int, replicas: int, seconds: int, pace: float, native: bool = False
    ) -> None:
        self.folder, self.what, self.seed, self.seconds, self.pace = folder, what, seed, seconds, pace
        folder.mkdir(parents=True)
        self.stop = folder / "stop"
        self.stop.touch()
        self.alive: dict[str, int] = {}
        #: (time, what happened, to whom)
        self.events: list[tuple[float, str, list[str]]] = []
        self.codes: dict[str, int] = {}
        self._count = 0
        command = [sys.executable, "-c", SERVER, str(seconds)]
        with (folder / "lighthouse").open("w") as log:
            self._server = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert self._server.stdout
        self._lighthouse, port = self._server.stdout.readline().split()
        self._store = int(port) if native else None
        for _ in range(replicas):
            self.add()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._server.kill()
        self._server.communicate()

    def note(self, what: str, names: list[str]) -> None:
        self.events.append((time.time(), what, names))

    def add(self, slower: float = 1.0) -> str:
        """Start a replica, so many times slower than others."""
        name, self._count = f"replica{self._count}", self._count + 1
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(self.seconds)  # ends the process, whatever it does
                for number, path in ((1, self.folder / name), (2, self.folder / f"errors of {name}")):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                run(name, self.seed, self.what, self.stop, self._lighthouse, self.pace * slower, self._store)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(1)
        self.alive[name] = pid
        self.note("add" if slower == 1 else "add a slow one", [name])
        return name

    def kill(self, names: list[str]) -> None:
        """At once."""
        for name in names:
            os.kill(self.alive[name], signal.SIGKILL)
        for name in names:
            os.waitpid(self.alive.pop(name), 0)
        self.note("kill" if len(names) == 1 else "kill two at once", names)

    def kill_in_flight(self, name: str, limit: float = 30.0) -> None:
        """When a message of it is on its way."""
        os.kill(self.alive[name], signal.SIGUSR1)
        end = time.time() + limit
        while time.time() < end and os.waitpid(self.alive[name], os.WNOHANG) == (0, 0):
            time.sleep(0.02)
        del self.alive[name]
        self.note("kill in flight", [name])

    def freeze(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so much later."""
        os.kill(self.alive[name], signal.SIGSTOP)
        self.note("freeze", [name])
        time.sleep(seconds)
        os.kill(self.alive[name], signal.SIGCONT)
        self.note("thaw", [name])

    def rounds(self) -> int:
        """How many have counted so far."""
        return max((line["round"] for line in self.lines() if line["event"] == "vote"), default=0)

    def wait_for(self, rounds: int, limit: float) -> None:
        """Raise AssertionError if so many rounds are not reached in time."""
        self._wait(lambda: self.rounds() >= rounds, limit, f"{rounds} rounds")

    def wait_until(self, name: str, limit: float) -> None:
        """Raise AssertionError if this replica has not taken part in a round in time."""
        self._wait(lambda: any(line.get("taken") for line in self.lines(name)), limit, f"a round of {name}")

    def _wait(self, condition: Callable[[], bool], limit: float, what: str) -> None:
        end = time.time() + limit
        while not condition():
            assert time.time() < end, f"{self.rounds()} rounds after {limit} s, and no {what}: something hangs"
            time.sleep(0.1)

    def finish(self, rounds: int, limit: float) -> None:
        """Let all end after this round, or at once if it is over. Raises AssertionError if one does not."""
        self.stop.write_text(str(rounds))
        end = time.time() + limit
        while self.alive:
            for name, pid in list(self.alive.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[name] = os.waitstatus_to_exitcode(status)
                    del self.alive[name]
            assert time.time() < end, f"{sorted(self.alive)} have not ended within {limit} s"
            time.sleep(0.05)

    def lines(self, name: str = "*") -> Iterator[dict[str, Any]]:
        """What replicas have written, in the order of time."""
        found = []
        for path in self.folder.glob("replica*" if name == "*" else name):
            for line in path.read_text().splitlines():
                with suppress(ValueError):  # cut off, or a warning
                    found.append(json.loads(line))
        return iter(sorted(found, key=lambda line: line["time"]))
