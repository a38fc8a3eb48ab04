"""The front doors of torch, on one rank: what they are given is a model of their own each time."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import LocalSGD, PowerSGD
from gradwire.torch_backend.integrations.compression import Compression
from tests.fuzz.engine import Target
from tests.torch.models import mlp

ALGORITHM = PowerSGD(1)


def model() -> nn.Module:
    return mlp(16, 16, 8)


def wrapped() -> Any:
    return DistributedDataParallel(model())


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(16, 16), "b": torch.zeros(16)}


@functools.cache
def mesh() -> Any:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))


def sharded() -> Any:
    return fully_shard(model(), mesh=mesh()["shard"])


def backward(module: Any) -> None:
    module(torch.ones(4, 16)).sum().backward()


def hooked(**options: Any) -> Any:
    """The model with its hook, which is tried out with a backward pass."""
    ddp = wrapped()
    return ddp, gw.register_comm_hook(ddp, **options)


def used(made: Any) -> None:
    ddp, handle = made
    backward(ddp)
    handle.state_dict()


def averaged(made: Any) -> None:
    made({name: torch.ones_like(x) for name, x in tensors().items()})


def locally(**options: Any) -> Any:
    module = model()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(module.parameters(), lr=0.1)
    gw.local_sgd(module, optimizer, **options)
    return module, optimizer


def stepped(made: Any) -> None:
    module, optimizer = made
    for _ in range(2):
        backward(module)
        optimizer.step()


def zero(**options: Any) -> Any:
    module = model()
    optimizer = gw.ZeroOptimizer(module.named_parameters(), lr=0.1, **options)
    return module, optimizer


def options_of(function: Any, *left_out: str) -> list[str]:
    """The arguments of a door that is called inside another function."""
    return Target(function, left_out=left_out).options


TARGETS = {
    "register_comm_hook": Target(
        hooked, {"algorithm": ALGORITHM}, used, tries=options_of(gw.register_comm_hook, "ddp")
    ),
    "register_comm_hook of": Target(gw.register_comm_hook, {"algorithm": ALGORITHM}, tries=["ddp"]),
    "DataParallel": Target(gw.DataParallel, lambda: {"module": model(), "algorithm": ALGORITHM}, backward),
    "Averager": Target(gw.Averager, lambda: {"algorithm": ALGORITHM, "tensors": tensors()}, averaged),
    "local_sgd": Target(
        locally, {"local": LocalSGD(2)}, stepped, tries=options_of(gw.local_sgd, "module", "optimizer")
    ),
    "local_sgd of": Target(
        gw.local_sgd,
        lambda: {"module": model(), "optimizer": None, "local": LocalSGD(2)},
        tries=["module", "optimizer"],
    ),
    "ZeroOptimizer": Target(
        zero, {"optimizer_class": torch.optim.AdamW}, stepped, tries=options_of(gw.ZeroOptimizer, "params")
    ),
    "ZeroOptimizer of": Target(gw.ZeroOptimizer, {"optimizer_class": torch.optim.AdamW}, tries=["params"]),
    "compress_replicas": Target(
        gw.compress_replicas, lambda: {"model": sharded(), "algorithm": ALGORITHM, "mesh": mesh()["replicate"]}
    ),
    "Compression": Target(Compression, {"algorithm": ALGORITHM}),
}
