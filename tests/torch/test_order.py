"""Many buckets whose gradients come late, on every rank at other times: ranks stay in step and end with the same bits.

torch's `powerSGD_hook` launches collectives from callbacks; on Gloo it hangs or aborts here.
"""

import random
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD
from gradwire.torch_backend import DataParallel, PowerSGDState, powerSGD_hook, register_comm_hook
from gradwire.torch_backend.drive import MESSAGE_BYTES
from tests.torch.everything import Everything
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, flat, loss_on

cases = Cases(__file__, ranks=3)
results = cases.fixture()

LONGEST_DELAY = 1e-3

#: algorithm, bytes per group (None: torch's own names), steps
VARIANTS = {
    "a message per bucket": (PowerSGD(rank=2), 0, 100),
    "default groups": (PowerSGD(rank=2), MESSAGE_BYTES, 60),
    "half step": (PowerSGD(rank=2, half_step=True), 0, 50),
    "uncompressed": (AllReduce(), 0, 50),
    "everything that can be asked": (Everything(((2, 1, 0),)), 0, 20),
    "torch's names": (PowerSGD(rank=2), None, 50),
}


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        if random.random() < 0.5:
            time.sleep(LONGEST_DELAY * random.random())  # the ranks' generators are seeded differently
        return gradient


class LateLayer(nn.Module):
    """A layer whose gradient takes a random time to come."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(_Late.apply(x)))


@cases.each(VARIANTS)
def random_delays(world, variant):
    algorithm, message_bytes, steps = variant
    model = nn.Sequential(*(LateLayer(32) for _ in range(3)))
    before = flat(model)
    ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.004)
    if message_bytes is None:
        state = PowerSGDState(world.group, matrix_approximation_rank=2, start_powerSGD_iter=0)
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        register_comm_hook(ddp, algorithm, message_bytes=message_bytes)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    loss = loss_on(32, batch=4)
    for step in range(steps):
        optimizer.zero_grad()
        loss(ddp, world.rank, step).backward()
        optimizer.step()
    return {"before": before, "weights": flat(model), "buckets": buckets_of(ddp)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_delays_leave_all_ranks_with_the_same_bits(results, variant):
    ranks = results(f"random_delays[{variant}]")
    assert ranks[0]["buckets"] >= 3
    assert ranks[0]["weights"].isfinite().all()
    assert (ranks[0]["weights"] - ranks[0]["before"]).norm() > 0.1
    for other in ranks[1:]:
        assert other["weights"].equal(ranks[0]["weights"])


def through_ddp(model, group):
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.004)
    register_comm_hook(ddp, PowerSGD(rank=2), message_bytes=0)
    return ddp


def through_data_parallel(model, group):
    options = {"bucket_cap_mb": 0.004, "first_bucket_mb": 0.004, "message_bytes": 0}
    return DataParallel(model, PowerSGD(rank=2), process_group=group, **options)


WRAPPERS = {"DDP": through_ddp, "DataParallel": through_data_parallel}


@cases.each(WRAPPERS)
def sequence(world, wrap):
    """What happened in a step, in order: gradients of layers, from the last to the first, and all-reduces."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    seen = []
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: seen.append(i))
    wrapped = wrap(model, world.group)
    loss = loss_on(32, batch=4)
    for step in range(3):  # buckets are rebuilt after the first
        seen.clear()
        with watched(lambda: seen.append("all-reduce")):
            loss(wrapped, world.rank, step).backward()
    return seen


@contextmanager
def watched(note):
    original = dist.all_reduce

    def all_reduce(*args, **kwargs):
        note()
        return original(*args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_groups_are_sent_while_the_backward_pass_goes_on(results, wrapper):
    for seen in results(f"sequence[{wrapper}]"):
        assert [x for x in seen if x != "all-reduce"] == [3, 2, 1, 0]
        assert seen.count("all-reduce") == 2 * 4  # P and Q of four groups
        assert seen[: seen.index(0)].count("all-reduce") >= 2
        assert "all-reduce" in seen[: seen.index(1)]


if __name__ == "__main__":
    cases.main()
