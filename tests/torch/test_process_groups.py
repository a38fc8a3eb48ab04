"""Subgroups are made, or refused, whatever groups there are already; no rank waits for one that does not come."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gradwire.torch_backend import HierarchicalModelAverager
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from tests.torch.compare import said
from tests.torch.ranks import Cases

cases = Cases(__file__, ranks=3)

TWO_AND_ONE = ((0, 1), (2,))
EACH_ALONE = ((0,), (1,))


def sum_of_ranks(world, group):
    """Over the members, so that the group is seen to work."""
    total = torch.tensor(float(world.rank))
    dist.all_reduce(total, group=group)
    return total.item()


def part_of(world):
    """Of ranks 0 and 1; None on the other."""
    part = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    return None if world.rank == 2 else part


@cases.case
def test_another_group_of_one_rank_is_no_hindrance(world):
    other = dist.new_group([0])  # by all ranks, as torch wants it; only rank 0 belongs to it
    groups = ProcessGroups(world.group, [TWO_AND_ONE])
    if world.rank == 0:
        dist.destroy_process_group(other)
    assert sum_of_ranks(world, groups[TWO_AND_ONE]) == [1, 1, 2][world.rank]


@cases.case
def test_a_part_of_the_world_makes_its_subgroups(world):
    if part := part_of(world):
        groups = ProcessGroups(part, [EACH_ALONE, ((0, 1),)])
        assert sum_of_ranks(world, groups[EACH_ALONE]) == world.rank
        assert groups[((0, 1),)] is part  # all of it, which is there already


@cases.case
def test_unequal_numbers_of_groups_in_a_part_of_the_world_are_refused(world):
    part = part_of(world)
    other = dist.new_group([0])
    if not part:
        return
    with pytest.raises(ValueError, match=r"belong to \[(\d+), (?!\1)\d+\] process groups"):
        ProcessGroups(part, [((1, 0),)])
    groups = ProcessGroups(part, [EACH_ALONE])  # of which each has as many groups as itself
    if world.rank == 0:
        dist.destroy_process_group(other)
    assert sum_of_ranks(world, groups[EACH_ALONE]) == world.rank


@cases.case
def test_subgroups_of_a_part_of_the_world_with_a_bound_device_are_refused(world):
    """torch would split the communicator of all ranks, and those outside do not take part."""
    if not (part := part_of(world)):
        return
    everybody = dist.group.WORLD
    everybody.bound_device_id = torch.device("cuda", world.rank)  # as `init_process_group(device_id=...)` sets it
    try:
        with pytest.raises(ValueError, match=r"device_id=cuda:\d.*Leave out device_id"):
            ProcessGroups(part, [EACH_ALONE])
        assert "device_id" in said(HierarchicalModelAverager, {2: 1, 4: 2}, process_group=part)
    finally:
        everybody.bound_device_id = None


@cases.case
def test_a_partition_of_a_bound_communicator_is_one_split(world):
    """As of NCCL's. What torch makes of the call takes such a device."""
    whole, everybody, split = dist.new_group(backend="cpu:gloo"), dist.group.WORLD, []

    def split_group(parent, ranks, timeout):
        split.append((parent, ranks, timeout))
        everybody.bound_device_id = None
        try:
            made = [dist.new_group(members) for members in ranks]
        finally:
            everybody.bound_device_id = torch.device("cpu", 0)
        return next(group for group, members in zip(made, ranks, strict=True) if world.rank in members)

    everybody.bound_device_id = torch.device("cpu", 0)
    try:
        with mock.patch.object(dist, "split_group", split_group):
            groups = ProcessGroups(whole, [TWO_AND_ONE, TWO_AND_ONE, ((0,), (1,), (2,))])
    finally:
        everybody.bound_device_id = None
    timeout = whole._get_backend(torch.device("cpu")).options._timeout
    assert split == [(whole, [[0, 1], [2]], timeout), (whole, [[0], [1], [2]], timeout)]
    assert sum_of_ranks(world, groups[TWO_AND_ONE]) == [1, 1, 2][world.rank]


@cases.case
def test_subgroups_have_the_timeout_of_the_whole(world):
    whole = dist.new_group(timeout=timedelta(seconds=17))
    groups = ProcessGroups(whole, [TWO_AND_ONE])
    for group in (whole, groups[TWO_AND_ONE]):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=17)
