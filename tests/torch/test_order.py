"""Many buckets whose gradients come late, on every rank at other times: ranks stay in step and end with the same bits.

torch's `powerSGD_hook` launches collectives from callbacks; on Gloo it hangs or aborts here.
"""

import random
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD
from gradwire.torch_backend import PowerSGDState, powerSGD_hook, register_comm_hook
from gradwire.torch_backend.drive import GROUP_BYTES
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, flat, loss_on

cases = Cases(__file__, ranks=3)
results = cases.fixture()

LONGEST_DELAY = 1e-3

#: algorithm, bytes per group (None: torch's own names), steps
VARIANTS = {
    "a message per bucket": (PowerSGD(rank=2), 0, 500),
    "default groups": (PowerSGD(rank=2), GROUP_BYTES, 60),
    "half step": (PowerSGD(rank=2, half_step=True), 0, 50),
    "uncompressed": (AllReduce(), 0, 50),
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
    algorithm, group_bytes, steps = variant
    model = nn.Sequential(*(LateLayer(32) for _ in range(3)))
    before = flat(model)
    ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.004)
    if group_bytes is None:
        state = PowerSGDState(world.group, matrix_approximation_rank=2, start_powerSGD_iter=0)
        ddp.register_comm_hook(state, powerSGD_hook)
    else:
        register_comm_hook(ddp, algorithm, group_bytes=group_bytes)
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


if __name__ == "__main__":
    cases.main()
