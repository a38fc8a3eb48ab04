"""Every way to train with gradwire, by name: a function of the world and the model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, Auto, LocalSGD, PowerSGD, WireDtype, diloco
from tests.torch.training import sgd

#: What is stepped: the module that is called, its optimizer, and whatever has to stay alive.
Form = tuple[nn.Module, torch.optim.Optimizer, Any]


def wrapped(world, model, **options):
    return DistributedDataParallel(model, process_group=world.group, **options)


def algorithm(world, model, which) -> Form:
    ddp = wrapped(world, model)
    return ddp, sgd(model), gw.register_comm_hook(ddp, which)


def power_sgd(world, model, hook) -> Form:
    ddp, state = wrapped(world, model), gw.PowerSGDState(world.group, 2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, hook)
    return ddp, sgd(model), state


def stateless(world, model, hook) -> Form:
    ddp = wrapped(world, model)
    ddp.register_comm_hook(world.group, hook)
    return ddp, sgd(model), None


def post_local(world, model, make=gw.PeriodicModelAverager, period: Any = 2) -> Form:
    ddp, state = (
        wrapped(world, model),
        gw.PostLocalSGDState(world.group, dist.new_subgroups(1)[0], 2),
    )
    ddp.register_comm_hook(state, gw.post_localSGD_hook)
    averager = make(period, warmup_steps=2, process_group=world.group)
    return ddp, gw.PostLocalSGDOptimizer(sgd(model), averager), state


def zero_hook(world, model, make) -> Form:
    ddp, zero, _ = zero_optimizer(world, model, average=False)
    ddp.register_comm_hook(world.group, make(gw.allreduce_hook, ddp, zero))
    return ddp, zero, None


def zero_optimizer(world, model, average) -> Form:
    """Behind DDP, or averaging gradients itself."""
    options = {
        "process_group": world.group,
        "average_gradients": average,
        "lr": 0.1,
        "momentum": 0.9,
    }
    zero = gw.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, **options)
    return model if average else wrapped(world, model), zero, None


def data_parallel(world, model, which) -> Form:
    module = gw.DataParallel(model, which, process_group=world.group)
    return module, sgd(model), module.handle


def local(world, model, which) -> Form:
    ddp, optimizer = wrapped(world, model), sgd(model)
    return ddp, optimizer, gw.local_sgd(ddp, optimizer, which)


def averager(world, model, which) -> Form:
    """Without DDP: called before each step."""
    average, optimizer = gw.Averager(which, dict(model.named_parameters()), world.group), sgd(model)

    def before(*_: Any) -> None:
        average({name: p.grad for name, p in model.named_parameters()})

    optimizer.register_step_pre_hook(before)
    return model, optimizer, average


#: Of each kind one: what differs in numbers alone is left out.
FORMS: dict[str, Callable[..., Form]] = {
    "PowerSGD": partial(algorithm, which=PowerSGD(2)),
    "Auto": partial(algorithm, which=Auto(loss="5%")),
    "WireDtype, half-step, late": partial(
        algorithm, which=WireDtype(PowerSGD(2, half_step=True, start_step=1), "bfloat16")
    ),
    "powerSGD_hook": partial(power_sgd, hook=gw.powerSGD_hook),
    "bf16_compress_wrapper": partial(power_sgd, hook=gw.bf16_compress_wrapper(gw.powerSGD_hook)),
    "bf16_compress_hook": partial(stateless, hook=gw.bf16_compress_hook),
    "fp16_compress_wrapper of torch's": partial(
        stateless, hook=gw.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "post_localSGD_hook": post_local,
    "hook_with_zero_step": partial(zero_hook, make=gw.hook_with_zero_step),
    "hook_with_zero_step_interleaved": partial(zero_hook, make=gw.hook_with_zero_step_interleaved),
    "ZeroOptimizer": partial(zero_optimizer, average=False),
    "ZeroOptimizer, averaging": partial(zero_optimizer, average=True),
    "DataParallel": partial(data_parallel, which=AllReduce()),
    "DataParallel, PowerSGD": partial(data_parallel, which=PowerSGD(2)),
    "Averager": partial(averager, which=PowerSGD(2)),
    "local_sgd": partial(local, which=LocalSGD(2, start_step=1)),
    "diloco": partial(local, which=diloco(2, compressor=PowerSGD(2))),
}
