"""The process groups behind the groups that a request names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradwire.core.protocol.groups import Groups
from gradwire.torch_backend.engine.groups.gloo_exit import leave_in_peace
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.torch_internals import (
    in_this_order,
    libraries_of,
    named_apart,
    number_of_groups,
    store_of,
    timeout_of_library,
)

#: A group → those of its partitions that have been made.
_made: WeakKeyDictionary[dist.ProcessGroup, dict[Groups, dist.ProcessGroup]] = WeakKeyDictionary()


def given_or_default(
    group: dist.ProcessGroup | None, argument: str = "process_group"
) -> dist.ProcessGroup:
    """The group, or the default one in place of None. Raises ValueError, naming the argument, if
    there is none yet."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(f"{argument}=None needs torch.distributed.init_process_group first")
    return group


class ProcessGroups:
    """The group that this rank belongs to, of each partition of the ranks; of `whole`, replica i is
    rank i.

    To be made on all ranks of `whole`, with the same partitions in the same order: making a group
    communicates. New groups have the library and the timeout of `whole`. The same partition is made
    once, as long as there is `whole`: torch keeps groups, with their sockets and threads, until
    somebody destroys them, which nobody can where a handle is dropped on one rank.

    Raises:
        ValueError: groups are to be made within a part of the world, and `init_process_group` was
            given a `device_id`, or the members of one of them do not belong to equally many groups
            already.

    Attributes:
        in_one_process: all ranks are in this process, or imagined: what one has compiled all have.
    """

    in_one_process = False

    def __init__(self, whole: dist.ProcessGroup, partitions: Iterable[Groups | None] = ()) -> None:
        leave_in_peace()
        self.whole = whole
        self._own: dict[Groups, dist.ProcessGroup] = {}
        everybody = (tuple(range(dist.get_world_size(whole))),)
        made = _made.setdefault(whole, {})
        for groups in partitions:
            if groups is not None and groups not in self._own:
                if groups != everybody and groups not in made:
                    made[groups] = _make(whole, groups)
                self._own[groups] = whole if groups == everybody else made[groups]

    def also(self, partitions: Iterable[Groups]) -> ProcessGroups:
        """The same groups, and those of further partitions, of which only the new ones are made."""
        more = ProcessGroups(
            self.whole, [groups for groups in partitions if groups not in self._own]
        )
        more._own = self._own | more._own
        return more

    def anew(self) -> ProcessGroups:
        """Groups of the same members for messages that others do not wait behind."""
        everybody = (tuple(range(dist.get_world_size(self.whole))),)
        return ProcessGroups(_make(self.whole, everybody), self._own)

    def destroy(self) -> None:
        """Give them back to torch. To be called on all ranks."""
        _made.pop(self.whole, None)
        for group in {self.whole, *self._own.values()}:
            dist.destroy_process_group(group)

    def __getitem__(self, groups: Groups | None) -> dist.ProcessGroup:
        if groups is None:
            return self.whole
        if groups not in self._own:
            raise ValueError(
                f"no process group was made for groups {groups}; those made are {list(self._own)}"
            )
        return self._own[groups]

    @property
    def rank(self) -> int:
        """This rank's number among all of them."""
        return dist.get_rank(self.whole)

    def exchange(self, groups: Groups | None, device: torch.device) -> Exchange:
        """What hands parts of tensors on a device to the other ranks of this rank's group."""
        return Exchange(self[groups], device, numbers=self._numbers(groups))

    def _numbers(self, groups: Groups | None) -> list[int] | None:
        """The ranks of this rank's group in the order in which it was named, as numbers that torch
        has given them in it; None if that is the same."""
        if groups is None:
            return None
        ranks, named = (
            dist.get_process_group_ranks(self.whole),
            next(own for own in groups if self.rank in own),
        )
        numbers = [dist.get_group_rank(self[groups], ranks[member]) for member in named]
        return None if numbers == sorted(numbers) else numbers


def _make(whole: dist.ProcessGroup, groups: Groups) -> dist.ProcessGroup:
    """This rank's group of a partition, of which others make theirs meanwhile."""
    ranks = dist.get_process_group_ranks(whole)
    everybody = len(ranks) == dist.get_world_size()
    bound = dist.group.WORLD.bound_device_id if dist.group.WORLD is not None else None
    if not everybody and bound is not None:
        raise ValueError(
            "process_group is a part of the world, and init_process_group was given"
            f" device_id={bound}: torch would make the subgroups {groups} by splitting the"
            " communicator of all ranks, and wait for ever for those that are not here. Leave out"
            " device_id"
        )
    if everybody and _splits(whole):
        # One call for all of a partition, where `new_group` meets in the store once for each group
        # of it.
        split = dist.split_group(
            whole, [list(members) for members in groups], timeout=timeout_of(whole)
        )
        assert isinstance(split, dist.ProcessGroup)
        return split
    # In a part of the world, only the members can make a group.
    apart = nullcontext() if everybody else named_apart(_found_by_members(whole, groups))
    # As those of `whole`, unless that is of the default kind anyway (which may be one library for
    # each kind of device).
    backend = None if whole is dist.group.WORLD else dist.get_backend(whole)
    own: dist.ProcessGroup | None = None
    for members in groups:
        mine = dist.get_rank(whole) in members
        # Where all ranks are here, all of them make all groups, as torch wants it.
        if mine or everybody:
            own_ranks = [ranks[m] for m in members]
            with apart:
                made = dist.new_group(
                    own_ranks,
                    **in_this_order(own_ranks),
                    timeout=timeout_of(whole),
                    backend=backend,
                    use_local_synchronization=not everybody,
                )
        if mine:
            assert isinstance(made, dist.ProcessGroup)
            own = made
    assert own is not None
    return own


def _splits(whole: dist.ProcessGroup) -> bool:
    """Whether torch can divide the communicator of all ranks: that of one library which can, bound
    to a device, and so there already."""
    bound = dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None
    libraries = libraries_of(whole)
    return bound and len(libraries) == 1 and bool(libraries[0].supports_splitting)


def _found_by_members(whole: dist.ProcessGroup, groups: Groups) -> str:
    """A name for groups that not all ranks make, the same for their members, and given once.

    Before torch 2.14 members find each other by the number of groups that each belongs to: if one
    belongs to more, for logging or checkpoints, they wait for each other until time is up, and
    ValueError is raised."""
    store, rank = store_of(whole), dist.get_rank(whole)
    assert store is not None
    call = store.add(f"gradwire/calls/{rank}", 1)
    store.set(f"gradwire/groups/{call}/{rank}", str(number_of_groups()))
    counts = [
        int(store.get(f"gradwire/groups/{call}/{r}")) for r in range(dist.get_world_size(whole))
    ]
    for members in groups:
        if len({counts[m] for m in members}) > 1:
            raise ValueError(
                f"ranks {members} of process_group belong to {[counts[m] for m in members]} process"
                " groups, and torch needs equal numbers to make a group in a part of the world."
                " Make other groups (torch.distributed.new_group) afterwards"
            )
    return f"{whole.group_name}/{call}"


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """What the user has given this group; None, torch's default, where its library does not say."""
    found = map(timeout_of_library, libraries_of(group))
    return next((timeout for timeout in found if isinstance(timeout, timedelta)), None)


def node_size(whole: dist.ProcessGroup) -> int:
    """How many ranks torchrun has started on each machine.

    Raises:
        ValueError: torchrun has not said so, or `whole` is not all ranks, so that its numbers say
            nothing about machines.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or not int(local):
        raise ValueError(
            f"'node' needs the number of ranks on each machine, but LOCAL_WORLD_SIZE={local!r} in"
            " the environment: start with torchrun, set it, or give subgroup"
        )
    if dist.get_world_size(whole) != dist.get_world_size():
        raise ValueError(
            "'node' is known for the default process group only; give the subgroups as a partition"
            " such as ((0, 1), (2, 3))"
        )
    return int(local)
