"""Many buckets whose gradients come late, on every rank at other times: ranks stay in step and end with the same bits.

torch's `powerSGD_hook` launches collectives from callbacks; on Gloo it hangs or aborts here.
"""

import random
import time
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from gradwire import AllReduce, PowerSGD
from gradwire.torch_backend import DataParallel, PowerSGDState, powerSGD_hook
from gradwire.torch_backend.drive import MESSAGE_BYTES
from tests.torch.compare import flat
from tests.torch.everything import Everything
from tests.torch.models import loss_on
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, fit, hooked

cases = Cases(__file__, ranks=3)

LOSS = loss_on(32, batch=4)
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
def test_random_delays_leave_all_ranks_with_the_same_bits(world, variant):
    algorithm, message_bytes, steps = variant
    model = nn.Sequential(*(LateLayer(32) for _ in range(3)))
    before = flat(model)
    torchs = message_bytes is None
    ddp, _ = hooked(model, None if torchs else algorithm, world.group, cap=0.004, message_bytes=message_bytes)
    if torchs:
        ddp.register_comm_hook(PowerSGDState(world.group, 2, start_powerSGD_iter=0), powerSGD_hook)
    fit(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), world.rank, range(steps), LOSS)
    assert buckets_of(ddp) >= 3
    assert flat(model).isfinite().all()
    assert (flat(model) - before).norm() > 0.1
    assert world.agree(flat(model))


def through_ddp(model, group):
    return hooked(model, PowerSGD(rank=2), group, cap=0.004, message_bytes=0)[0]


def through_data_parallel(model, group):
    options = {"bucket_cap_mb": 0.004, "first_bucket_mb": 0.004, "message_bytes": 0}
    return DataParallel(model, PowerSGD(rank=2), process_group=group, **options)


@cases.each({"DDP": through_ddp, "DataParallel": through_data_parallel})
def test_groups_are_sent_while_the_backward_pass_goes_on(world, wrap):
    """What happens in a step, in order: gradients of layers, from the last to the first, and all-reduces."""
    model, real = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), dist.all_reduce
    seen = []
    for i, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, i=i: seen.append(i))
    wrapped = wrap(model, world.group)
    for step in range(3):  # buckets are rebuilt after the first
        seen.clear()
        with mock.patch.object(dist, "all_reduce", lambda *a, **o: seen.append("all-reduce") or real(*a, **o)):
            LOSS(wrapped, world.rank, step).backward()
    assert [x for x in seen if x != "all-reduce"] == [3, 2, 1, 0]
    assert seen.count("all-reduce") == 2 * 4  # P and Q of four groups
    assert seen[: seen.index(0)].count("all-reduce") >= 2
    assert "all-reduce" in seen[: seen.index(1)]
