"""Whatever gradwire puts on a model or an optimizer goes with them: a sweep of runs in one process
needs the memory of one. What a program has set for tensors of its own changes nothing. And a script
may end right after its last step, with or without `destroy_process_group`."""

import os
import subprocess
import sys
import uuid
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from gradwire import LocalSGD, PowerSGD, diloco
from gradwire.torch_backend import HierarchicalModelAverager, compress_replicas, local_sgd
from tests.launch import LIMIT, end_all, environment
from tests.torch import leaving
from tests.torch.compare import alive, same_bits
from tests.torch.defaults import other_defaults
from tests.torch.doors import FORMS, algorithm, post_local
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, sharded_mlp
from tests.torch.training import fit, sgd

WIDTHS = (40, 36, 28)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=2)


def unregistered(world, model):
    ddp, optimizer, handle = algorithm(world, model, PowerSGD(rank=2))
    handle.unregister()
    return ddp, optimizer, handle


def local(model, schedule, group):
    optimizer = sgd(model, momentum=0.9)
    return model, optimizer, local_sgd(model, optimizer, schedule, process_group=group)


def of_shards(world, model, schedule=None):
    """Of a sharded model, with local SGD or compressed."""
    mesh = mesh_of(2, 1)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    if schedule is not None:
        return local(model, schedule, mesh.get_group("replicate"))
    return model, sgd(model), compress_replicas(model, PowerSGD(rank=2), mesh["replicate"])


DOORS = FORMS | {
    "register_comm_hook and unregister": unregistered,
    "local_sgd on a module": lambda world, model: local(model, diloco(2), world.group),
    "local_sgd on FSDP2": partial(of_shards, schedule=LocalSGD(2, start_step=1)),
    "diloco on FSDP2": partial(of_shards, schedule=diloco(2)),
    "compress_replicas": of_shards,
    "HierarchicalModelAverager": partial(post_local, make=HierarchicalModelAverager, period={2: 2}),
}


@cases.each(DOORS)
def test_nothing_stays_when_it_is_dropped(world, door):
    for steps in (0, 3):
        model, optimizer, handle = door(world, mlp(*WIDTHS))
        handle = model if handle is None else handle
        fit(model, optimizer, world.rank, range(steps), LOSS)
        parts = {
            "model": model,
            "parameter": next(model.parameters()),
            "optimizer": optimizer,
            "handle": handle,
        }
        left = {name: weakref.ref(part) for name, part in parts.items()}
        del model, optimizer, handle, parts
        assert alive(left) == []


@cases.each([name for name in DOORS if DOORS[name] is not of_shards and "FSDP2" not in name])
def test_a_default_device_and_a_default_dtype_change_nothing(world, name):
    """They are not those of the model, and a tensor made there is no number."""
    data = torch.Generator().manual_seed(world.rank)
    batches, ends = [torch.randn(8, WIDTHS[0], generator=data) for _ in range(4)], []
    for defaults in (nullcontext, partial(other_defaults, "meta")):
        net = mlp(*WIDTHS)
        with defaults():
            model, optimizer, _kept = DOORS[name](world, net)
            for x in batches:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        ends.append([getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()])
    assert same_bits(*ends)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the ranks are forked")
def test_leaving_at_once(tmp_path):
    mark, command = uuid.uuid4().hex, [sys.executable, leaving.__file__, str(tmp_path)]
    try:
        done = subprocess.run(
            command,
            env=environment(mark),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    finally:
        end_all(mark)
    assert done.returncode == 0, done.stderr[-4000:]
