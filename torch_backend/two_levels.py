"""Two levels of ranks: who shares a machine, and the memory of which each rank of a node has a part, as one checkpoint.

A checkpoint of all ranks is that of the algorithm between as many replicas as there are nodes, with each block of a tensor that was cut under a name of
its own (`gradwire.torch_backend.pieces`). It can go on with other nodes, other ranks in a node, and without levels.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import State, parts_of
from gradwire.core.algorithms.two_level import TwoLevelOnReplica, without_levels
from gradwire.core.checkpoint import COMMON, StateMismatch, require_finite, require_kind
from gradwire.core.kernels.abstract import AbstractOps
from gradwire.core.programs import Groups
from gradwire.torch_backend.objects import gathered_by, gathered_by_all
from gradwire.torch_backend.pieces import Piece, parameter_of, recut
from gradwire.torch_backend.process_groups import ProcessGroups
from gradwire.torch_backend.state import gathered, load, to_tensors

T = TypeVar("T")


def on_nodes(algorithm: T, group: dist.ProcessGroup, device: torch.device | None = None) -> T:
    """An algorithm with "node" in it replaced by who shares a machine; itself if it says nothing of nodes. To be called on all ranks.

    Raises:
        ValueError: machines have different numbers of ranks.
    """
    if not getattr(algorithm, "mentions_nodes", False):
        return algorithm
    on: T = algorithm.on_nodes_of(nodes_of(group, device))  # type: ignore[attr-defined]
    return on


def nodes_of(group: dist.ProcessGroup, device: torch.device | None = None) -> int | Groups:
    """How many ranks there are on each machine, as torchrun says it in LOCAL_WORLD_SIZE; or the ranks of each, found out from the names of the hosts, for
    which ranks communicate. Raises ValueError if machines have different numbers of them."""
    local, ranks = os.environ.get("LOCAL_WORLD_SIZE", ""), dist.get_world_size(group)
    if local.isdigit() and int(local) and ranks == dist.get_world_size():
        if ranks % int(local):
            raise ValueError(
                f"within='node', but LOCAL_WORLD_SIZE={local} ranks on each machine do not make {ranks}; start equally many on each"
            )
        return int(local)
    hosts = gathered_by_all(socket.gethostname(), group, device)
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    if len({len(members) for members in nodes.values()}) > 1:
        sizes = {host: len(members) for host, members in nodes.items()}
        raise ValueError(
            f"within='node', but machines have different numbers of ranks: {sizes}; start equally many on each"
        )
    return tuple(tuple(members) for members in nodes.values())


def gathered_over_nodes(
    state: Mapping[str, Any],
    parts: TwoLevelOnReplica,
    per_replica: Collection[str],
    groups: ProcessGroups,
    device: torch.device,
    errors: str,
    to: int | None,
) -> dict[str, Any] | None:
    """The portable form of the memory of all ranks, on rank `to` or on all: see `gradwire.torch_backend.state.gathered`."""
    node, place = (None, None) if to is None else _where(parts, to)
    owned = _owned(parts)
    mine = {
        name: {k: x for k, x in memory.items() if k in owned.get(name, ())} for name, memory in state["tensors"].items()
    }
    mine = {name: memory for name, memory in mine.items() if name in owned}
    between = gathered({**state, "tensors": mine}, per_replica, groups[parts.peers], device, errors, node)
    if between is None:  # another node receives
        return None
    names = {name: block_name(parts, name) for name in mine}
    part = {s: {names[name]: memory for name, memory in between[s].items()} for s in ("tensors", "local")}
    everyone = gathered_by(place, part, groups[parts.groups], device)
    if everyone is None:
        return None
    whole: dict[str, Any] = {**between, "tensors": {}, "local": {}}
    for name, memory in state["tensors"].items():  # what all ranks have
        if common := {k: x.to("cpu", copy=True) for k, x in memory.items() if k not in owned.get(name, ())}:
            whole["tensors"][name] = common
    for each in everyone:
        for section, memories in each.items():
            for name, memory in memories.items():
                whole[section].setdefault(name, {}).update(memory)
    return whole


def load_part(
    state: Mapping[str, Any],
    algorithm: Any,
    current: State[Tensor],
    group: dist.ProcessGroup,
    *,
    strict: bool,
    kind: str = "compressor",
) -> tuple[State[Tensor], StateMismatch]:
    """`gradwire.torch_backend.state.load`, of which this rank takes what it owns if memory of the `algorithm`, as this rank runs it, is divided."""
    parts: TwoLevelOnReplica | None = parts_of(algorithm)
    if parts is None or "local" not in state:  # all there is, or what one rank had for itself
        return load(state, repr(algorithm), current, group, strict=strict, kind=kind)
    require_kind(state, kind, COMMON)
    state = to_tensors(state)
    require_finite(state)  # before it is cut, so that no rank takes what another refuses
    pieces = {}
    for name in current.tensors:
        block = parts.division.block(name, parts.place or 0)
        if block is not None and not block.whole:
            pieces[name] = Piece(0, block.start, block.stop, block.rows)
    found, owned = recut(state, pieces, current), _owned(parts)
    for section in ("tensors", "local"):  # without what others own
        found[section] = {
            name: memory if name in owned or name not in current.tensors else _of_keys(memory, current.tensors[name])
            for name, memory in found[section].items()
            if name in current.tensors or parameter_of(name)[0] not in parts.division.by_name
        }
    row = _where(parts, group.rank())[0], len(parts.groups)
    return load(found, repr(without_levels(algorithm)), current, group, strict=strict, kind=kind, row=row)


def _of_keys(memory: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: x for key, x in memory.items() if key in keys}


def block_name(parts: TwoLevelOnReplica, name: str) -> str:
    """What this rank's block of a parameter is called in a state of all ranks."""
    block = parts.division.block(name, parts.place or 0)
    assert block is not None
    return name if block.whole else Piece(0, block.start, block.stop, block.rows).name(name)


def _owned(parts: TwoLevelOnReplica) -> dict[str, frozenset[str]]:
    """The names of the memories that this rank has a part of."""
    state = parts.init(AbstractOps(), {})
    return {name: frozenset(memory) for name, memory in state.tensors.items()}


def _where(parts: TwoLevelOnReplica, rank: int) -> tuple[int, int]:
    """The node of a rank, and its place there."""
    return next((node, members.index(rank)) for node, members in enumerate(parts.groups) if rank in members)
