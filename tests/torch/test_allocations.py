"""What a step allocates: in the long run nothing that is as large as a gradient."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, Quantize, WireDtype
from gradwire.torch_backend import register_comm_hook

#: Larger than what is computed a few rows at a time.
WIDTH = 1024


@pytest.mark.parametrize(
    "algorithm",
    [
        WireDtype(AllReduce(), "int8"),
        WireDtype(AllReduce(), "bfloat16"),
        WireDtype(AllReduce(), "int8", stochastic=True),
        Quantize("int4"),
        Quantize("int8", stochastic=True),
        PowerSGD(4),
    ],
    ids=repr,
)
def test_a_step_allocates_nothing_as_large_as_a_gradient(alone, algorithm):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    register_comm_hook(ddp, algorithm)
    x = torch.randn(2, WIDTH)

    def step():
        ddp.zero_grad(set_to_none=False)
        ddp(x).sum().backward()

    for _ in range(3):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # profilers have some of their own
        with torch.profiler.profile(profile_memory=True) as profile:
            step()
    large = [e.name for e in profile.events() if e.self_cpu_memory_usage > 2 * WIDTH**2]
    assert set(large) == {"aten::mm"}  # autograd's, which proves that large ones are seen
