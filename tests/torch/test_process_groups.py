"""Subgroups are made, or refused, whatever groups there are already; no rank waits for one that does not come."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.torch_backend import HierarchicalModelAverager
from gradwire.torch_backend.process_groups import ProcessGroups
from tests.torch.ranks import Cases

cases = Cases(__file__, ranks=3)
results = cases.fixture()

TWO_AND_ONE = ((0, 1), (2,))
EACH_ALONE = ((0,), (1,))


def sum_of_ranks(world, group):
    """Over the members, so that the group is seen to work."""
    total = torch.tensor(float(world.rank))
    dist.all_reduce(total, group=group)
    return total.item()


@cases.case
def in_the_world_where_one_rank_has_another_group(world):
    other = dist.new_group([0])  # by all ranks, as torch wants it; only rank 0 belongs to it
    groups = ProcessGroups(world.group, [TWO_AND_ONE])
    if world.rank == 0:
        dist.destroy_process_group(other)
    return sum_of_ranks(world, groups[TWO_AND_ONE])


def test_another_group_of_one_rank_is_no_hindrance(results):
    assert results("in_the_world_where_one_rank_has_another_group") == [1, 1, 2]


@cases.case
def in_a_part_of_the_world(world):
    part = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if world.rank == 2:
        return None
    groups = ProcessGroups(part, [EACH_ALONE, ((0, 1),)])
    return sum_of_ranks(world, groups[EACH_ALONE]), sum_of_ranks(world, groups[((0, 1),)])


def test_a_part_of_the_world_makes_its_subgroups(results):
    assert results("in_a_part_of_the_world") == [(0, 1), (1, 1), None]


@cases.case
def in_a_part_of_the_world_where_one_rank_has_another_group(world):
    part = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    other = dist.new_group([0])
    if world.rank == 2:
        return None
    with pytest.raises(ValueError, match=r"belong to \[\d+, \d+\] process groups") as refused:
        ProcessGroups(part, [((0, 1),)])
    groups = ProcessGroups(part, [EACH_ALONE])  # of which each has as many groups as itself
    if world.rank == 0:
        dist.destroy_process_group(other)
    return str(refused.value), sum_of_ranks(world, groups[EACH_ALONE])


def test_unequal_numbers_of_groups_in_a_part_of_the_world_are_refused(results):
    first, second, _ = results("in_a_part_of_the_world_where_one_rank_has_another_group")
    assert first[0] == second[0]
    assert (first[1], second[1]) == (0, 1)


@cases.case
def in_a_part_of_the_world_with_a_bound_device(world):
    part = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    if world.rank == 2:
        return None
    everybody = dist.group.WORLD
    everybody.bound_device_id = torch.device("cuda", world.rank)  # as `init_process_group(device_id=...)` sets it
    try:
        with pytest.raises(ValueError, match=r"device_id=cuda:\d.*Leave out device_id") as refused:
            ProcessGroups(part, [EACH_ALONE])
        with pytest.raises(ValueError, match="device_id"):
            HierarchicalModelAverager({2: 1, 4: 2}, process_group=part)
    finally:
        everybody.bound_device_id = None
    return str(refused.value)


def test_subgroups_of_a_part_of_the_world_with_a_bound_device_are_refused(results):
    """torch would split the communicator of all ranks, and those outside do not take part."""
    assert all(results("in_a_part_of_the_world_with_a_bound_device")[:2])


@cases.case
def timeouts(world):
    whole = dist.new_group(timeout=timedelta(seconds=17))
    groups = ProcessGroups(whole, [TWO_AND_ONE])
    return [g._get_backend(torch.device("cpu")).options._timeout for g in (whole, groups[TWO_AND_ONE])]


def test_subgroups_have_the_timeout_of_the_whole(results):
    assert results("timeouts") == [[timedelta(seconds=17)] * 2] * 3


if __name__ == "__main__":
    cases.main()
