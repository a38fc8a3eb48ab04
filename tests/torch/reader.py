"""What the reader of a page on torch has by then: `from tests.torch.reader import *` in a hidden
block of Python of the page, which runs on some ranks."""
# ruff: noqa: F401, F403

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import *
from gradwire.torch_backend import *
from tests.torch.compare import relative, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.training import sgd

dist.init_process_group("gloo")
rank = dist.get_rank()
model = mlp(300, 40, 28)
ddp = DistributedDataParallel(model)
optimizer = sgd(model)


def loss_of(module, step=0):
    return loss_on(300)(module, rank, step)


def train(module, optimizer, steps=1):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        optimizer.step()


def agree(model):
    """Whether all ranks have the same weights, to the last bit."""
    dist.all_gather_object(found := [None] * dist.get_world_size(), weights(model))
    return all(same_bits(each, found[0]) for each in found)
