"""A lighthouse, and replicas that are forked, killed, stopped and slowed down. Nothing is left
behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.launch import Process, start

REPLICA = Path(__file__).with_name("replica.py")
#: A process of its own: the lighthouse, and a store in which the replicas of native groups meet. It
#: says where they are, and ends after so many seconds. A replica that is alive is waited for, as
#: long as a slow one takes; one that says nothing for two seconds is not.
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
    """Of so many replicas, each of which takes a step in `pace` seconds and ends by itself after so
    many `seconds`. `native`: by torch's own groups that can be given other members, which meet in
    one store (torch 2.15)."""

    def __init__(
        self,
        folder: Path,
        what: str,
        seed: int,
        replicas: int,
        seconds: int,
        pace: float,
        native: bool = False,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.training, self.pace, self.stop = (
            folder,
            (seed, what, seconds),
            pace,
            folder / "stop",
        )
        self.stop.touch()
        self.alive: dict[str, Process] = {}
        #: (from when, until when, what happened, to whom)
        self.events: list[tuple[float, float, str, list[str]]] = []
        self.codes: dict[str, int] = {}
        self._count = 0
        command = [sys.executable, "-c", SERVER, str(seconds)]
        with (folder / "lighthouse").open("w") as log:
            self._server = Process(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert self._server.stdout
        self._lighthouse, port = self._server.stdout.readline().split()
        self._store = port if native else ""
        for _ in range(replicas):
            self.add()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.alive.values(), self._server):
            process.kill()
            process.communicate()

    def note(self, what: str, *names: str, begin: float | None = None) -> None:
        """What has happened just now, or since `begin`."""
        now = time.time()
        self.events.append((now if begin is None else begin, now, what, [*names]))

    def add(self, slower: float = 1.0) -> str:
        """Start a replica, so many times slower than others."""
        name, self._count, begin = f"replica{self._count}", self._count + 1, time.time()
        place = (self.stop, self._lighthouse, self.pace * slower, self._store)
        self.alive[name] = start(REPLICA, name, *self.training, *place, log=str(self.folder / name))
        self.note("add" if slower == 1 else "add a slow one", name, begin=begin)
        return name

    def kill(self, *names: str) -> None:
        """At once."""
        begin = time.time()
        for name in names:
            self._signal(name, signal.SIGKILL)
        for name in names:
            self.alive.pop(name).wait()
        self.note("kill" if len(names) == 1 else "kill two at once", *names, begin=begin)

    def kill_in_flight(self, name: str) -> None:
        """When a message of it is on its way."""
        begin = time.time()
        self._signal(name, signal.SIGUSR1)
        self.alive.pop(name).wait(30)
        self.note("kill in flight", name, begin=begin)

    def freeze(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT so much later."""
        begin = time.time()
        self._signal(name, signal.SIGSTOP)
        self.note("freeze", name, begin=begin)
        time.sleep(seconds)
        begin = time.time()
        self._signal(name, signal.SIGCONT)
        self.note("thaw", name, begin=begin)

    def _signal(self, name: str, number: int) -> None:
        """To the replica itself, which is there when it has written."""
        self._wait(lambda: any(self.lines(name)), 60, f"line of {name}")
        os.kill(next(self.lines(name))["pid"], number)

    def rounds(self) -> int:
        """How many have counted so far."""
        return max((line["round"] for line in self.lines() if line["event"] == "vote"), default=0)

    def wait_for(self, rounds: int, limit: float) -> None:
        """Raise AssertionError if so many rounds are not reached in time."""
        self._wait(lambda: self.rounds() >= rounds, limit, f"{rounds} rounds")

    def wait_until(self, name: str, limit: float) -> None:
        """Raise AssertionError if this replica has not taken part in a round in time."""
        self._wait(
            lambda: any(line.get("taken") for line in self.lines(name)), limit, f"round of {name}"
        )

    def _wait(self, condition: Callable[[], bool], limit: float, what: str) -> None:
        end = time.time() + limit
        while not condition():
            assert time.time() < end, (
                f"{self.rounds()} rounds after {limit} s, and no {what}: something hangs"
            )
            time.sleep(0.1)

    def finish(self, rounds: int, limit: float) -> None:
        """Let all end after this round, or at once if it is over. Raises AssertionError if one does
        not."""
        self.stop.write_text(str(rounds))
        self._wait(
            lambda: all(process.poll() is not None for process in self.alive.values()),
            limit,
            "end of all",
        )
        self.codes |= {name: process.wait() for name, process in self.alive.items()}
        self.alive.clear()

    def lines(self, name: str = "*") -> Iterator[dict[str, Any]]:
        """What replicas have written, in the order of time."""
        return iter(written(self.folder.glob("replica*" if name == "*" else name)))


def written(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of JSON in these files, in the order of time."""
    found = []
    for file in files:
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # cut off, or a warning
                found.append(json.loads(line))
    return sorted(found, key=lambda line: line["time"])
