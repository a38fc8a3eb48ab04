"""Two hosts joined by a link with a latency, which kernels without `netem` do not have: a program
copies frames from one to the other, late."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from lab import INTERFACE, Lab, do, obstacle

SOURCE = Path(__file__).parents[1] / "network" / "delay_line.c"


def delay_obstacle() -> str:
    """Why there can be no such link here; "" if there can."""
    if why_not := obstacle():
        return why_not
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return "" if shutil.which("cc") else "there is no C compiler, cc"


class DelayedLab(Lab):
    """Two hosts.

    Args:
        microseconds: from one to the other.
        mbit: of the link in each direction; 0: no limit.
    """

    def __init__(self, microseconds: float, mbit: float) -> None:
        super().__init__(2, None)
        self._delay = microseconds, mbit
        self._folder = tempfile.TemporaryDirectory()
        self._relay: subprocess.Popen[str] | None = None

    def _build(self) -> None:
        program = Path(self._folder.name) / "delay_line"
        do("cc", "-O2", "-pthread", str(SOURCE), "-o", str(program))
        taps = [f"{self._id}t{host}" for host in range(2)]
        delay, mbit = self._delay
        self._relay = subprocess.Popen(
            [str(program), *taps, f"{delay:.0f}", f"{mbit:g}"],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != "ready":
            raise RuntimeError("the delay line has not begun; see its message above")
        for host, tap in enumerate(taps):
            space = self._namespace(host)
            do("ip", "netns", "add", space)
            do("ip", "link", "set", tap, "netns", space)
            do(
                "ip",
                "-n",
                space,
                "link",
                "set",
                tap,
                "name",
                INTERFACE,
                "mtu",
                "9000",
                "txqueuelen",
                "10000",
            )
            do("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            do("ip", "-n", space, "link", "set", INTERFACE, "up")
            do("ip", "-n", space, "link", "set", "lo", "up")

    def _tear_down(self) -> None:
        super()._tear_down()
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        self._folder.cleanup()
