"""Hosts on one machine: network namespaces joined by a bridge, each link shaped to a rate. Linux,
as root.

    with Lab(hosts=2, rate="100mbit") as lab:
        outputs = lab.run(lambda host: [sys.executable, "worker.py", str(host)])
        sent = lab.sent_bytes()

Every host has an address, an interface `eth0`, and a name that resolves to its address, so programs
behave as on two machines. Rates are kept by the kernel's token bucket (`tc … tbf`) in both
directions of every link. There is no added latency. All of it is gone afterwards, also after an
exception or ctrl-C.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

INTERFACE = "eth0"
#: Bytes that may leave at once at full speed; about what a real interface takes in one go.
BURST = {"mbit": "128kb", "gbit": "512kb"}
PORT = 29400
#: Every Linux has it. Where the default is BBR, a step would be as fast as what was sent before it
#: lets TCP believe.
CONGESTION_CONTROL = "reno"
TCP = "/proc/sys/net/ipv4"

#: Run in a host: a name of its own that resolves to its address, seen by nobody else.
NAMED = """
hostname "$1"; hosts=$(mktemp); printf '127.0.0.1 localhost\\n%s %s\\n' "$2" "$1" > "$hosts"
mount --bind "$hosts" /etc/hosts; rm -f "$hosts"; shift 2; exec "$@"
"""


def obstacle() -> str:
    """Why there can be no lab here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here; install iproute2 and util-linux"
    return ""


def do(*command: str) -> None:
    """Run a command. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Lab:
    """Some hosts, up while the context lasts.

    Args:
        hosts: how many.
        rate: of each link, as `tc` has it ("100mbit", "1gbit"); None: as fast as the kernel copies.
    """

    def __init__(self, hosts: int, rate: str | None) -> None:
        self.hosts = hosts
        self.rate = rate
        self._id = f"gw{os.getpid() % 100_000}"
        self._net = f"10.{os.getpid() % 200 + 20}.0"
        self._processes: list[subprocess.Popen[str]] = []

    def address(self, host: int) -> str:
        return f"{self._net}.{host + 1}"

    def _namespace(self, host: int) -> str:
        return f"{self._id}h{host}"

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._tear_down()
            raise
        self._before = signal.signal(signal.SIGTERM, _as_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tear_down()
        signal.signal(signal.SIGTERM, self._before)

    def _build(self) -> None:
        switch, bridge = f"{self._id}s", f"{self._id}b"
        do("ip", "netns", "add", switch)
        do("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
        do("ip", "-n", switch, "link", "set", bridge, "up")
        for host in range(self.hosts):
            space, near, far = self._namespace(host), f"{self._id}n{host}", f"{self._id}f{host}"
            do("ip", "netns", "add", space)
            do(
                "ip",
                "link",
                "add",
                near,
                "netns",
                space,
                "type",
                "veth",
                "peer",
                "name",
                far,
                "netns",
                switch,
            )
            do("ip", "-n", space, "link", "set", near, "name", INTERFACE)
            do("ip", "-n", space, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            do("ip", "-n", space, "link", "set", INTERFACE, "up")
            do("ip", "-n", space, "link", "set", "lo", "up")
            do(
                "ip",
                "netns",
                "exec",
                space,
                "sh",
                "-c",
                f"echo {CONGESTION_CONTROL} > {TCP}/tcp_congestion_control",
            )
            do("ip", "-n", switch, "link", "set", far, "master", bridge, "up")
        self.shape(self.rate)

    def shape(self, rate: str | None) -> None:
        """Give all links another rate, from now on."""
        for host in range(self.hosts):
            for where, interface in (
                (self._namespace(host), INTERFACE),
                (f"{self._id}s", f"{self._id}f{host}"),
            ):
                tc = ["ip", "netns", "exec", where, "tc", "qdisc"]
                if rate is not None:
                    burst = BURST[rate[-4:]]
                    do(
                        *tc,
                        "replace",
                        "dev",
                        interface,
                        *("root", "tbf", "rate", rate, "burst", burst),
                        "latency",
                        "100ms",
                    )
                elif self.rate is not None:
                    do(*tc, "del", "dev", interface, "root")
        self.rate = rate

    def _tear_down(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for space in [*map(self._namespace, range(self.hosts)), f"{self._id}s"]:
            inside = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True
            ).stdout.split()
            for pid in inside:
                os.kill(int(pid), signal.SIGKILL)
            # its interfaces go with it
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def run(self, command: Callable[[int], Sequence[str]], *, timeout: float = 600) -> list[str]:
        """Run `command(host)` on every host at once; the environment has MASTER_ADDR, MASTER_PORT,
        and what Gloo asks.

        Returns:
            What each printed.

        Raises:
            RuntimeError: one of them failed; the end of what it said.
        """
        env = dict(os.environ) | {
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        with tempfile.TemporaryDirectory() as folder:
            files = [
                (Path(folder) / f"{host}.out", Path(folder) / f"{host}.err")
                for host in range(self.hosts)
            ]
            self._processes = [
                subprocess.Popen(
                    [
                        *(
                            "ip",
                            "netns",
                            "exec",
                            self._namespace(host),
                            "unshare",
                            "-u",
                            "-m",
                            "sh",
                            "-c",
                            NAMED,
                            "sh",
                        ),
                        *(f"{self._id}-{host}", self.address(host)),
                        *command(host),
                    ],
                    env=env,
                    stdout=out.open("w"),
                    stderr=err.open("w"),
                    text=True,
                    start_new_session=True,
                )
                for host, (out, err) in enumerate(files)
            ]
            for host, process in enumerate(self._processes):
                if process.wait(timeout):
                    raise RuntimeError(f"host {host}: {files[host][1].read_text()[-3000:]}")
            return [out.read_text() for out, _ in files]


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt
