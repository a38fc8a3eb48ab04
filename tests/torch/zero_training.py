"""Training with sharded optimizers: what the tests of `ZeroOptimizer` have in common.

Two parameter groups, one without weight decay; an LR schedule; sizes that no world size divides; random delays in the forward pass.
"""

import math
import random
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from tests.torch.models import loss_on

STEPS = 50
LOSS = loss_on(6)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.003, "momentum": 0.5}),
}
FORMS = ("plain", "averaging", "overlapped", "interleaved")


class Model(nn.Module):
    """Odd sizes, a scalar, an empty parameter, a frozen one, one in another memory order, and a delay that differs between ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 13)
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.second = nn.Linear(13, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        if random.random() < 0.1:
            time.sleep(random.random() * 0.005)
        x = torch.tanh(self.first(x))
        image = x[:, :12].reshape(-1, 1, 3, 4)
        x = torch.cat([x[:, :1], self.conv(image)[:, :, :, :2].reshape(len(x), -1)], dim=1)
        return self.out(torch.tanh(self.second(x)) * self.scale) + self.empty.sum() + self.frozen


def groups(model):
    """Named, in two groups: no decay for vectors and scalars."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def wrapped(world, model, **options):
    return DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.0001, **options)


def run(world, model, optimizer, steps=STEPS, loss=LOSS):
    """The weights after training, with a schedule that moves at every step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(step / 10))
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, world.rank, step).backward()
        optimizer.step()
        schedule.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def sharded(
    world, form, optimizer_class, defaults, *, hook=gw.allreduce_hook, state=None, model=None, ddp=None, **options
):
    """A model and its sharded optimizer in one of the forms."""
    model = model or Model()
    if form == "averaging":
        zero = gw.ZeroOptimizer(
            groups(model), optimizer_class, process_group=world.group, average_gradients=True, bucket_cap_mb=0.0001,
            **options, **defaults,
        )  # fmt: skip
        return model, zero
    wrapper = wrapped(world, model, **(ddp or {}))
    zero = gw.ZeroOptimizer(
        groups(model), optimizer_class, process_group=world.group, bucket_cap_mb=0.0001, **options, **defaults
    )
    if form == "plain":
        wrapper.register_comm_hook(state or world.group, hook)
    else:
        step_hook = gw.hook_with_zero_step if form == "overlapped" else gw.hook_with_zero_step_interleaved
        wrapper.register_comm_hook(
            state or world.group, step_hook(hook, wrapper, zero, options.get("shard") == "bucket")
        )
    return wrapper, zero


def plain_groups(model):
    return [{**g, "params": [p for _, p in g["params"]]} for g in groups(model)]
