"""The process groups behind `Mean.groups`."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch.distributed as dist

from gradwire.core.collectives import Groups

__all__ = ["ProcessGroups", "node_size"]


class ProcessGroups:
    """For each partition of the ranks, the group that this rank belongs to.

    To be made on all ranks of `whole`, with the same partitions in the same order: making a group communicates among its members.

    Args:
        whole: the group of all replicas; replica i is its rank i.
        partitions: those that requests may name. The same one twice is made once.
    """

    def __init__(self, whole: dist.ProcessGroup, partitions: Iterable[Groups | None] = ()) -> None:
        self.whole = whole
        self._own: dict[Groups, dist.ProcessGroup] = {}
        for groups in partitions:
            if groups is None or groups in self._own:
                continue
            # As those of `whole`, unless that is of the default kind anyway (which may be one backend for each kind of device).
            backend = None if whole is dist.group.WORLD else dist.get_backend(whole)
            ranks = dist.get_process_group_ranks(whole)
            everybody = len(ranks) == dist.get_world_size()
            for members in groups:
                own = dist.get_rank(whole) in members
                # In a part of the world only the members take part; torch then names the group after the number of groups that this rank
                # belongs to, which has to be the same for all members. Where all ranks are here, all of them make all groups.
                if own or everybody:
                    made = dist.new_group(
                        [ranks[m] for m in sorted(members)], backend=backend, use_local_synchronization=not everybody
                    )
                if own:
                    assert isinstance(made, dist.ProcessGroup)
                    self._own[groups] = made

    def __getitem__(self, groups: Groups | None) -> dist.ProcessGroup:
        if groups is None:
            return self.whole
        if groups not in self._own:
            raise ValueError(f"no process group was made for groups {groups}; those made are {list(self._own)}")
        return self._own[groups]


def node_size(whole: dist.ProcessGroup) -> int:
    """How many ranks torchrun has started on each machine.

    Raises:
        ValueError: torchrun has not said so, or `whole` is not all ranks, so that its numbers say nothing about machines.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or not int(local):
        raise ValueError(
            f"'node' needs the number of ranks on each machine, but LOCAL_WORLD_SIZE={local!r} in the environment: start with torchrun, "
            "set it, or give the number instead of 'node'"
        )
    if dist.get_world_size(whole) != dist.get_world_size():
        raise ValueError(
            "'node' is known for the default process group only; give the subgroups as a partition such as ((0, 1), (2, 3))"
        )
    return int(local)
