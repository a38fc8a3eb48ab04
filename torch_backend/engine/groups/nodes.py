"""Two levels of ranks: who shares a machine, and the inter-node groups."""

from __future__ import annotations

import os
import socket
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.protocol.groups import Groups, as_number
from gradwire.torch_backend.engine.groups.gathered_objects import gathered_by_all

T = TypeVar("T")


def on_nodes(algorithm: T, group: dist.ProcessGroup, device: torch.device | None = None) -> T:
    """An algorithm with "node" in it replaced by who shares a machine; itself if it says nothing of
    nodes. To be called on all ranks.

    Raises:
        ValueError: machines have different numbers of ranks.
    """
    if not getattr(algorithm, "mentions_nodes", False):
        return algorithm
    on: T = algorithm.on_nodes_of(nodes_of(group, device))  # type: ignore[attr-defined]
    return on


def nodes_of(group: dist.ProcessGroup, device: torch.device | None = None) -> int | Groups:
    """How many ranks there are on each machine, as torchrun says it in LOCAL_WORLD_SIZE, or the
    names of the hosts, for which ranks communicate; or the ranks of each, where those of a machine
    do not follow each other. Raises ValueError if machines have different numbers of them."""
    local, ranks = os.environ.get("LOCAL_WORLD_SIZE", ""), dist.get_world_size(group)
    if local.isdigit() and int(local) and ranks == dist.get_world_size():
        if ranks % int(local):
            raise ValueError(
                f"'node', but LOCAL_WORLD_SIZE={local} ranks on each machine do not make {ranks};"
                " start equally many on each"
            )
        return int(local)
    hosts = gathered_by_all(socket.gethostname(), group, device)
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    if len({len(members) for members in nodes.values()}) > 1:
        sizes = {host: len(members) for host, members in nodes.items()}
        raise ValueError(
            f"'node', but machines have different numbers of ranks: {sizes}; start equally many on"
            " each"
        )
    return as_number(tuple(tuple(members) for members in nodes.values()))


def inter_node_groups(
    algorithm: Any, group: dist.ProcessGroup
) -> tuple[Groups | None, tuple[int, ...]]:
    """The inter-node groups, and that of this rank. None, and all ranks: nodes are single ranks, or
    there is one level."""
    levels = levels_of(algorithm)
    if levels is None or len(levels.near(group.size())[0]) == 1:
        return None, tuple(range(group.size()))
    groups = levels.inter_node(group.size())
    return groups, next(members for members in groups if group.rank() in members)
