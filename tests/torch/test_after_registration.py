"""The world after registration: what was seen then changes, and whoever holds the training follows, refuses by name, or warns."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD
from tests.torch.compare import relative, weights
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.ranks import Cases, World
from tests.torch.training import sgd

cases = Cases(__file__, ranks=2)

SKIP = "skip_all_reduce_unused_params"
#: Whether this torch has it.
SKIPS = SKIP in inspect.signature(DistributedDataParallel).parameters
#: By step, which of three parts of a model take part: DDP leaves out the buckets of the others, the first, the last, both of them.
TAKEN = ("abc", "abc", "ab", "bc", "b", "ac", "abc")


def parts() -> nn.Module:
    def forward(self: Any, x: Tensor, taken: str) -> Tensor:
        for name in taken:
            x = x + getattr(self, name)(x)
        return x

    return Layers(forward, **{name: mlp(24, 20, 24, seed=i) for i, name in enumerate("abc")})


def registered(world: World, how: str, **options: Any) -> tuple[nn.Module, Any]:
    """A DDP whose gradients are averaged in this way, and what counts its steps."""
    ddp = DistributedDataParallel(
        parts(),
        process_group=world.group,
        bucket_cap_mb=0.002,
        find_unused_parameters=True,
        broadcast_buffers=False,
        **options,
    )
    if how in ("AllReduce", "PowerSGD"):
        handle = gw.register_comm_hook(ddp, PowerSGD(rank=2) if how == "PowerSGD" else AllReduce())
        return ddp, lambda: handle.stats().steps
    if how == "powerSGD_hook":
        names = ddp.module.named_parameters()
        state: Any = gw.PowerSGDState(world.group, 2, start_powerSGD_iter=0, named_parameters=names)
        ddp.register_comm_hook(state, gw.powerSGD_hook)
        return ddp, lambda: state.iter
    if how == "post_localSGD_hook":
        state = gw.PostLocalSGDState(world.group, world.group, 100)
        ddp.register_comm_hook(state, gw.post_localSGD_hook)
        return ddp, lambda: state.iter
    handle = gw.local_sgd(ddp, None, LocalSGD(2, start_step=100), process_group=world.group)
    return ddp, lambda: handle.stats().collectives


@cases.each(["AllReduce", "PowerSGD", "powerSGD_hook", "post_localSGD_hook", "local_sgd"])
def test_buckets_that_ddp_leaves_out_end_a_step_all_the_same(world: World, how: str) -> None:
    if not SKIPS:
        return
    trained, counted = [], []
    for skips in (True, False):
        ddp, count = registered(world, how, **({SKIP: True} if skips else {}))
        optimizer, steps = sgd(ddp), []
        for step, taken in enumerate(TAKEN):
            optimizer.zero_grad()
            loss_on(24)(lambda x: ddp(x, taken), world.rank, step).backward()  # noqa: B023
            optimizer.step()
            steps.append(count())
        trained.append(weights(ddp.module))
        counted.append(steps)
        assert world.agree(trained[-1])
    if (
        how != "powerSGD_hook"
    ):  # which takes an unused parameter to have a gradient of zeros, and a compression error to be sent
        assert relative(trained[0], trained[1]) < 1e-4
    if how != "local_sgd":
        assert counted[0] == counted[1] == list(range(1, len(TAKEN) + 1))


@cases.case
def test_torchs_state_names_a_first_step_that_buckets_were_left_out_of(world: World) -> None:
    if not SKIPS:
        return
    ddp, _ = registered(world, "powerSGD_hook", **{SKIP: True})
    for taken in ("ab", "bc", "b"):
        with pytest.raises(RuntimeError, match="left buckets out of the first step"):
            ddp(torch.ones(2, 24), taken).sum().backward()
    for taken in ("abc", "b"):
        ddp(torch.ones(2, 24), taken).sum().backward()
