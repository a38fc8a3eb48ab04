"""Every request on real ranks, against what the core says that it means: answers, bytes and
messages, in groups and in all dtypes."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire import LocalSGD, TopK
from gradwire.core.protocol.halves import AllGather, ReduceScatter
from gradwire.torch_backend import Averager, HierarchicalModelAverager, local_sgd
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups import point_to_point, process_groups
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.torch_internals import libraries_of
from tests.torch.asked import ASKED, EVEN, RANKS, Answered, answered, require_right
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.everything import Everything
from tests.torch.models import TAKEN, Branches, branching_loss, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, distance, fit, hooked, paralleled, sgd, train

cases = Cases(__file__, ranks=RANKS)

WIDTHS = (40, 36, 32, 28)


@cases.each(ASKED.keys())
def test_a_request_is_answered_as_the_core_says(world, name):
    own = vars(answered(name, world.group, torch.device("cpu")))
    require_right(name, [Answered(**each) for each in world.everyones(own)])


@cases.each({"each other": True, "by collectives": False})
def test_members_are_counted_as_they_were_named_where_torch_sorts_them(world, direct):
    """As torch does before 2.12, on the CPU and on a device."""
    made = Exchange.__init__

    def on_a_device(self, *given, **named):
        made(self, *given, **named)
        self.direct, self.native = direct, not direct

    sorts = mock.patch.object(process_groups, "in_this_order", return_value={})
    with sorts, mock.patch.object(Exchange, "__init__", on_a_device):
        for name in (name for name in ASKED if "in a group" in name or "in groups" in name):
            own = vars(answered(name, world.group, torch.device("cpu")))
            require_right(name, [Answered(**each) for each in world.everyones(own)])


class Sends:
    """A process group that counts the bytes which this rank sends to others by itself."""

    def __init__(self, group):
        self.group, self.nbytes = group, 0

    def send(self, tensors, *args):
        self.nbytes += tensors[0].nbytes
        return self.group.send(tensors, *args)

    def __getattr__(self, name):
        return getattr(self.group, name)


@cases.each(
    {
        f"{owner} {dtype}": (owner, dtype)
        for owner in range(RANKS)
        for dtype in ("float32", "float16")
    }
)
def test_a_part_that_is_much_larger_than_the_others_is_sent_once_by_each_rank(world, variant):
    owner, dtype = variant
    counts = [7 if rank == (owner + 1) % RANKS else 0 for rank in range(RANKS)]
    counts[owner] = 3000
    collectives = Collectives(ProcessGroups(world.group), TorchOps(torch.device("cpu")))
    exchange = collectives.exchange(None)
    exchange.group = sends = Sends(exchange.group)
    draw = torch.Generator().manual_seed(world.rank)
    x = torch.randn(3007, generator=draw, dtype=torch.float64).to(getattr(torch, dtype))
    right = sum(x.double() for x in world.everyones(x.clone())) / RANKS
    # some slices, of which the last is shorter
    with mock.patch.object(point_to_point, "SLICE_BYTES", 1000):
        (part,) = collectives.perform(ReduceScatter((x,), (tuple(counts),))).wait()
        reduced, sends.nbytes = sends.nbytes, 0
        (whole,) = collectives.perform(AllGather((part,), (tuple(counts),), (None,))).wait()
    assert max(reduced, sends.nbytes) <= 1.05 * x.nbytes
    assert relative(whole.double(), right) < 30 * RANKS * torch.finfo(x.dtype).eps
    assert world.agree(whole)
    assert collectives.sent.nbytes == 2 * (-(-x.nbytes // 2))  # what the plan counts


# --- an algorithm that asks for everything, through every door ---


@cases.each(
    {
        "one group of buckets": (hooked, 1 << 30),
        "a group per bucket": (hooked, 0),
        "DataParallel": (paralleled, 0),
    }
)
def test_an_algorithm_may_ask_for_everything(world, variant):
    door, message_bytes = variant
    algorithm = Everything(EVEN)
    wrapped, handle = door(mlp(*WIDTHS), algorithm, world.group, message_bytes=message_bytes)
    trace = train(wrapped, loss_on(40), 4)
    assert world.agree(trace.given)
    assert distance(algorithm, world.everyones(trace)) < 1e-5
    assert len(wrapped.buckets()) > 1 if door is paralleled else buckets_of(wrapped) > 1
    if message_bytes:
        (planned,) = plan_of(wrapped.module).steps
        assert (handle.stats().collectives, handle.stats().bytes_sent) == (
            4 * planned.collectives,
            4 * planned.nbytes,
        )


def plan_of(model):
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return gradwire.plan(shapes, Everything(EVEN), world_size=RANKS)


@cases.case
def test_an_averager_answers_everything(world):
    algorithm, shapes = Everything(EVEN), {"w": (8, 6), "b": (7,)}
    averager = Averager(
        algorithm, {name: torch.zeros(shape) for name, shape in shapes.items()}, world.group
    )
    draw = torch.Generator().manual_seed(world.rank)
    own = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    everyones = world.everyones({name: g.double().numpy() for name, g in own.items()})
    right = gradwire.Simulator(algorithm, shapes, world.size).step(everyones)
    assert relative(averager(own), right) < 1e-5


@cases.case
def test_local_sgd_answers_everything(world):
    local = LocalSGD(period=2, compressor=Everything(EVEN))
    ddp, _ = hooked(mlp(*WIDTHS), None, world.group)
    optimizer = sgd(ddp)
    handle = local_sgd(ddp, optimizer, local)
    fit(ddp, optimizer, world.rank, range(4), loss_on(40))
    assert world.agree(weights(ddp))
    (planned,) = plan_of(ddp.module).steps
    assert (handle.stats().collectives, handle.stats().bytes_sent) == (
        2 * planned.collectives,
        2 * planned.nbytes,
    )


@cases.case
def test_what_no_rank_used_keeps_its_memory_whatever_is_sent_first(world):
    """Here something is gathered."""
    ddp, handle = hooked(
        Branches(), TopK(8, per=64), world.group, cap=25, find_unused_parameters=True
    )
    memories = []
    for step in range(len(TAKEN)):
        train(
            ddp,
            lambda model, rank, step: branching_loss(model, min(rank, 1), step),
            [step],
            local=False,
        )
        memories.append(handle.rank_state_dict()["tensors"])
    for step in range(1, len(TAKEN)):
        for branch in ("left", "right"):
            kept = same_bits(
                memories[step][f"{branch}.weight"], memories[step - 1][f"{branch}.weight"]
            )
            assert kept == all(branch not in taken for taken in TAKEN[step])


# --- subgroups: made, or refused, whatever groups there are already; no rank waits for one that
# does not come ---

TWO_AND_ONE = ((0, 1), (2,))
EACH_ALONE = ((0,), (1,))


def sum_of_ranks(world, group):
    """Over the members, so that the group is seen to work."""
    total = torch.tensor(float(world.rank))
    dist.all_reduce(total, group=group)
    return total.item()


def part_of(world):
    """Of ranks 0 and 1; None on the other."""
    part = dist.new_group([0, 1], timeout=timedelta(seconds=120))
    return None if world.rank == 2 else part


@cases.case
def test_subgroups_of_the_world_and_of_a_part_of_it(world):
    """With another group of one rank, made by all ranks as torch wants it: unequal numbers of
    groups in a part of the world are refused."""
    other, part = dist.new_group([0]), part_of(world)
    groups = ProcessGroups(world.group, [TWO_AND_ONE])
    if part:
        with pytest.raises(ValueError, match=r"belong to \[(\d+), (?!\1)\d+\] process groups"):
            ProcessGroups(part, [((1, 0),)])
        # of which each has as many groups as itself
        of_part = ProcessGroups(part, [EACH_ALONE, ((0, 1),)])
    if world.rank == 0:
        dist.destroy_process_group(other)
    assert sum_of_ranks(world, groups[TWO_AND_ONE]) == [1, 1, 2][world.rank]
    if part:
        assert sum_of_ranks(world, of_part[EACH_ALONE]) == world.rank
        assert of_part[((0, 1),)] is part  # all of it, which is there already


@cases.case
def test_subgroups_of_a_part_of_the_world_with_a_bound_device_are_refused(world):
    """torch would split the communicator of all ranks, and those outside do not take part."""
    if not (part := part_of(world)):
        return
    everybody = dist.group.WORLD
    # as `init_process_group(device_id=...)` sets it
    everybody.bound_device_id = torch.device("cuda", world.rank)
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
    (gloo,) = libraries_of(whole)
    timeout = gloo.options._timeout
    library = SimpleNamespace(supports_splitting=True, options=gloo.options)

    def split_group(parent, ranks, timeout):
        split.append((parent, ranks, timeout))
        everybody.bound_device_id = None
        try:
            made = [dist.new_group(members) for members in ranks]
        finally:
            everybody.bound_device_id = torch.device("cpu", 0)
        return next(
            group for group, members in zip(made, ranks, strict=True) if world.rank in members
        )

    everybody.bound_device_id = torch.device("cpu", 0)
    try:
        splits = mock.patch.object(process_groups, "libraries_of", return_value=[library])
        with mock.patch.object(dist, "split_group", split_group), splits:
            groups = ProcessGroups(whole, [TWO_AND_ONE, TWO_AND_ONE, ((0,), (1,), (2,))])
    finally:
        everybody.bound_device_id = None
    assert split == [(whole, [[0, 1], [2]], timeout), (whole, [[0], [1], [2]], timeout)]
    assert sum_of_ranks(world, groups[TWO_AND_ONE]) == [1, 1, 2][world.rank]


@cases.case
def test_subgroups_have_the_timeout_of_the_whole(world):
    whole = dist.new_group(timeout=timedelta(seconds=117))
    groups = ProcessGroups(whole, [TWO_AND_ONE])
    for group in (whole, groups[TWO_AND_ONE]):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=117)
