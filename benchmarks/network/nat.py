"""Two sites and a lighthouse, one site behind NAT, with and without WireGuard, in network
namespaces: which settings let sites reach each other. Linux, as root, with `iptables`, `wg` and
`wireguard-go` (Debian's packages iptables, wireguard-tools, wireguard-go).

    .venv/bin/python benchmarks/network/nat.py

Nothing outside the namespaces is changed. The table is in docs/tutorials/two-sites.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import do

#: Addresses in the network that all see, that of the router, behind which the first site has its
#: own, and those in WireGuard.
PUBLIC = {"lighthouse": "203.0.113.1", "site1": "203.0.113.2", "router": "203.0.113.3"}
BEHIND, GATEWAY = "192.168.7.2", "192.168.7.1"
PRIVATE = {"lighthouse": "10.77.0.1", "site0": "10.77.0.2", "site1": "10.77.0.3"}
OWN = {"site0": BEHIND, "site1": PUBLIC["site1"]}
#: What is tried: whether there is WireGuard, whether the router forwards all ports, to what a
#: site's name resolves, and Gloo's interface.
TRIED = {
    "the sites' own addresses": (False, False, OWN, ""),
    "the router's address, which forwards all ports": (
        False,
        True,
        OWN | {"site0": PUBLIC["router"]},
        "eth0",
    ),
    "WireGuard's addresses": (True, False, PRIVATE, ""),
    "WireGuard's addresses, GLOO_SOCKET_IFNAME=wg0": (True, False, PRIVATE, "wg0"),
    "the sites' own addresses, GLOO_SOCKET_IFNAME=wg0": (True, False, OWN, "wg0"),
}
NAMED = 'hostname "$NAME"; printf "$HOSTS" > "$FILE"; mount --bind "$FILE" /etc/hosts; exec "$@"'


def space(name: str) -> str:
    return f"gwnat{os.getpid()}{name}"


def inside(name: str, command: str) -> None:
    do("ip", "netns", "exec", space(name), *command.split())


@contextmanager
def network(folder: Path, *, vpn: bool, forwarded: bool) -> Iterator[None]:
    """A switch, the lighthouse's host, a site, and a router with the other site behind it."""
    spaces = ["switch", "lighthouse", "site1", "router", "site0"]
    try:
        for name in spaces:
            do("ip", "netns", "add", space(name))
            inside(name, "ip link set lo up")
        inside("switch", "ip link add bridge type bridge")
        inside("switch", "ip link set bridge up")
        for name, address in PUBLIC.items():
            join(name, "eth0", address, "switch", name)
            inside("switch", f"ip link set {name} master bridge up")
        join("site0", "eth0", BEHIND, "router", "eth1")
        inside("router", f"ip addr add {GATEWAY}/24 dev eth1")
        inside("router", "ip link set eth1 up")
        inside("site0", f"ip route add default via {GATEWAY}")
        inside("router", "sysctl -qw net.ipv4.ip_forward=1")
        inside("router", "iptables -t nat -A POSTROUTING -o eth0 -j MASQUERADE")
        if forwarded:
            inside(
                "router",
                f"iptables -t nat -A PREROUTING -i eth0 -p tcp -j DNAT --to-destination {BEHIND}",
            )
        if vpn:
            wireguard(folder)
        yield
    finally:
        for name in reversed(spaces):
            listed = subprocess.run(
                ["ip", "netns", "pids", space(name)], capture_output=True, text=True, check=False
            )
            for pid in listed.stdout.split():
                os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", space(name)], capture_output=True, check=False)


def join(name: str, interface: str, address: str, other: str, far: str) -> None:
    """A cable between two of them, and an address at its first end."""
    do(
        "ip",
        "link",
        "add",
        interface,
        "netns",
        space(name),
        "type",
        "veth",
        "peer",
        "name",
        far,
        "netns",
        space(other),
    )
    inside(name, f"ip addr add {address}/24 dev {interface}")
    inside(name, f"ip link set {interface} up")


def wireguard(folder: Path) -> None:
    """The lighthouse's host, which all can reach, is the middle: sites call it, and it hands on
    what is for another site."""
    public, hub = {}, "lighthouse"
    for name in PRIVATE:
        (folder / name).write_text(key := run("wg", "genkey"))
        public[name] = run("wg", "pubkey", given=key)
    device = {
        name: f"wg{os.getpid() % 100_000}{name[-1]}" for name in PRIVATE
    }  # a name of its own, by which `wg` finds it
    for name, address in PRIVATE.items():
        inside(name, f"wireguard-go {device[name]}")
        inside(name, f"wg set {device[name]} listen-port 51820 private-key {folder / name}")
        if name != hub:
            inside(hub, f"wg set {device[hub]} peer {public[name]} allowed-ips {address}/32")
            to_hub = f"peer {public[hub]} endpoint {PUBLIC[hub]}:51820 allowed-ips 10.77.0.0/24 persistent-keepalive 25"
            inside(name, f"wg set {device[name]} {to_hub}")
    for name, address in PRIVATE.items():
        inside(name, f"ip link set {device[name]} name wg0")
        inside(name, f"ip addr add {address}/24 dev wg0")
        inside(name, "ip link set wg0 up mtu 1420")
    inside(hub, "sysctl -qw net.ipv4.ip_forward=1")


def run(*command: str, given: str = "") -> str:
    return subprocess.run(
        command, input=given, capture_output=True, text=True, check=True
    ).stdout.strip()


def start(
    name: str, names: dict[str, str], folder: Path, env: dict[str, str], *command: str
) -> subprocess.Popen[str]:
    """A command on a host that has a name of its own and knows those of all."""
    hosts = "127.0.0.1 localhost\\n" + "".join(
        f"{address} {other}\\n" for other, address in names.items()
    )
    given = {
        "NAME": name,
        "HOSTS": hosts,
        "FILE": str(folder / f"{name}.hosts"),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            space(name),
            "unshare",
            "-u",
            "-m",
            "sh",
            "-c",
            NAMED,
            "sh",
            *command,
        ],
        env=os.environ | given | env,
        stdout=subprocess.PIPE,
        stderr=(folder / f"{name}.errors").open("w"),
        text=True,
    )


def trial(what: str, folder: Path) -> str:
    """What becomes of two sites that are to average three times."""
    vpn, forwarded, names, interface = TRIED[what]
    env = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    with network(folder, vpn=vpn, forwarded=forwarded):
        names = {"lighthouse": (PRIVATE if vpn else PUBLIC)["lighthouse"], **names}
        binary = str(Path(sys.executable).parent / "torchft_lighthouse")
        start(
            "lighthouse", names, folder, {}, binary, "--bind", "[::]:29500", "--min_replicas", "2"
        )
        time.sleep(1)
        worker = [
            sys.executable,
            str(Path(__file__).parent / "worker_elastic.py"),
            "http://lighthouse:29500",
        ]
        sites = [
            start(name, names | ({} if vpn else {name: OWN[name]}), folder, env, *worker)
            for name in OWN
        ]
        said = [site.communicate(timeout=200)[0].strip() for site in sites]
    return said[0] if len(set(said)) == 1 else " / ".join(said)


def main() -> None:
    missing = [
        tool
        for tool in ("ip", "iptables", "wg", "wireguard-go", "unshare")
        if shutil.which(tool) is None
    ]
    if missing or os.geteuid():
        raise SystemExit(f"this needs root, and {', '.join(missing) or 'no tool more'}")
    for what in sys.argv[1:] or TRIED:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{what}: {trial(what, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
