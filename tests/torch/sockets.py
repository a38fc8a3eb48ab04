"""Bytes that this process has sent to each other rank, as the kernel counts them at its sockets.
Linux."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from tests.torch.ranks import World

#: Where `struct tcp_info` of Linux has the bytes that were sent, again ones included, and those
#: that were sent again (since 4.19).
SENT, AGAIN = 200, 208


def connections() -> dict[tuple[Any, Any], int]:
    """Of each TCP connection of this process its two ends, and the bytes sent."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                ends = one.getsockname()[:2], one.getpeername()[:2]
        except OSError:  # it is closed, or not connected
            continue
        if len(info) >= AGAIN + 8:
            sent, again = (struct.unpack_from("Q", info, at)[0] for at in (SENT, AGAIN))
            found[ends] = sent - again
    return found


def peers(world: World) -> dict[tuple[Any, Any], int]:
    """Which rank is at the other end of each connection of this one.

    By both ends: a port whose listener is gone may be given to another process while connections to
    it live on.
    """
    everyones = world.everyones(list(connections()))
    where = {(far, near): rank for rank, pairs in enumerate(everyones) for near, far in pairs}
    return {pair: where[pair] for pair in connections() if pair in where}
