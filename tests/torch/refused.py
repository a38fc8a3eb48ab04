"""How refusals are tested: a row is what is done and what the message must name, the argument, the
parameter, what serves instead.

What is done is prepared by a function of `Here`, which returns the call that is refused.
"""

import copy
import functools
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, PowerSGD
from tests.torch.compare import same_bits
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.sharded import mesh_of
from tests.torch.training import sgd

WIDTHS = (40, 36, 36, 28)
LOSS = loss_on(40)
ALGORITHM = PowerSGD(rank=2)


@functools.cache
def mesh():
    return mesh_of(2, 2)


@dataclass
class Here:
    """Where something is tried. What is watched, modules and results of functions, must be after
    the refusal what it was before."""

    rank: int = 0
    group: Any = None
    watched: list[Any] = field(default_factory=list)

    @property
    def odd(self) -> bool:
        """Whether this is the rank that asks for something else."""
        return self.rank == 1

    def watch(self, x):
        self.watched.append(x)
        return x

    def seen(self):
        return [
            _of_module(x) if isinstance(x, nn.Module) else copy.deepcopy(x()) for x in self.watched
        ]

    def ddp(self, model=None, **options):
        return self.watch(
            DistributedDataParallel(model or small(), process_group=self.group, **options)
        )

    def hook(self, model, algorithm, **options):
        ddp = self.ddp(
            model, **{name: options.pop(name) for name in {"init_sync"} & options.keys()}
        )
        return partial(gw.register_comm_hook, ddp, algorithm, **options)

    def parallel(self, model, algorithm=ALGORITHM, **options):
        return partial(
            gw.DataParallel, self.watch(model), algorithm, process_group=self.group, **options
        )

    def averager(self, tensors, algorithm=ALGORITHM):
        return partial(gw.Averager, algorithm, tensors, self.group)

    def local(self, local, model=None, optimizer=None):
        """Of a module without DDP."""
        model = self.watch(model or small())
        return partial(gw.local_sgd, model, optimizer, local, process_group=self.group)

    def local_ddp(self, local, model=None, optimizer=sgd, **options):
        """`optimizer` is a function of the model."""
        ddp = self.ddp(model)
        return partial(gw.local_sgd, ddp, optimizer and optimizer(ddp), local, **options)

    def zero(self, model=None, optimizer=torch.optim.AdamW, **options):
        return partial(
            gw.ZeroOptimizer, (model or small()).named_parameters(), optimizer, **options
        )

    def replicas(self, model, algorithm=ALGORITHM, axis=None):
        return partial(
            gw.compress_replicas, self.watch(model), algorithm, axis or mesh()["replicate"]
        )


def _of_module(module):
    values = [
        x
        for x in (*module.parameters(), *module.buffers())
        if not (nn.parameter.is_lazy(x) or x.is_meta)
    ]
    local = [x.to_local() if isinstance(x, DTensor) else x for x in values]
    hooks = [dict(x._post_accumulate_grad_hooks or {}) for x in module.parameters()]
    return [[x.detach().clone() for x in local], hooks, list(getattr(module, "_comm_hooks", ()))]


def refuse(here, error, does, *names):
    attempt = does(here)
    before = here.seen()
    with pytest.raises(error) as raised:
        attempt()
    message = str(raised.value)
    assert all(name in message for name in names), message
    assert same_bits(here.seen(), before)
    return message


def rows(tables):
    """By what they name."""
    found = {}
    for error, table in tables.items():
        for does, *names in table:
            name = f"{error.__name__}, {', '.join(names)}"
            while name in found:
                name += "'"
            found[name] = (error, does, *names)
    return found


# Models, algorithms and optimizers that do not fit.


def small(**options):
    return mlp(*WIDTHS, **options)


def words(*, sparse=True):
    inner = nn.ModuleDict({"words": nn.Embedding(50, 32, sparse=sparse)})
    return Layers(
        lambda self, x: self.out(self.inner["words"](x)), inner=inner, out=nn.Linear(32, 32)
    )


def embedding(*, sparse=True):
    return nn.Embedding(4, 3, sparse=sparse)


def with_phase():
    return Layers(
        inner=nn.Linear(40, 36), phase=nn.Parameter(torch.zeros(36, dtype=torch.complex64))
    )


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def on_meta():
    with torch.device("meta"):
        return small()


def normed(width=5):
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(width, affine=False))


def named(names):
    return Layers(**{n: nn.Linear(4, 4) for n in names})


def stepping(model=None, module=2):
    """An optimizer steps in the backward pass."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = model or small()
    _apply_optimizer_in_backward(torch.optim.SGD, model[module].parameters(), {"lr": 0.1})
    return model


def asking(what):
    """Plain averaging that asks for something else as well."""

    async def step(self, ops, gradients, state, step):
        await what(ops, gradients)
        return gradients, state

    return type("Asking", (AllReduce,), {"step": step})()
