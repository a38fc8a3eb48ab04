"""Whatever gradwire puts on a model or an optimizer goes with them: a sweep of runs in one process needs the memory of one."""

import gc
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import LocalSGD, PowerSGD, diloco
from gradwire.torch_backend import (
    Averager,
    DataParallel,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    PowerSGDState,
    ZeroOptimizer,
    ZeroRedundancyOptimizer,
    allreduce_hook,
    bf16_compress_wrapper,
    compress_replicas,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    local_sgd,
    post_localSGD_hook,
    powerSGD_hook,
    register_comm_hook,
)
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import mesh_of, sharded_mlp
from tests.torch.training import fit, sgd

WIDTHS = (40, 36, 28)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=2)


def ddp_of(world):
    return DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, broadcast_buffers=False)


def hooked_by_torch(world, state, hook, optimizer=sgd):
    ddp = ddp_of(world)
    ddp.register_comm_hook(state, hook)
    return ddp, optimizer(ddp), state


def comm_hook(world):
    ddp = ddp_of(world)
    return ddp, sgd(ddp), register_comm_hook(ddp, PowerSGD(rank=2))


def unregistered(world):
    ddp, optimizer, handle = comm_hook(world)
    handle.unregister()
    return ddp, optimizer, handle


def local(model, schedule, **options):
    optimizer = sgd(model, momentum=0.9)
    return model, optimizer, local_sgd(model, optimizer, schedule, **options)


def local_on_shards(schedule):
    mesh = mesh_of(2, 1)
    return local(sharded_mlp(WIDTHS, mesh["shard"]), schedule, process_group=mesh.get_group("replicate"))


def replicas(world):
    mesh = mesh_of(2, 1)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    return model, sgd(model), compress_replicas(model, PowerSGD(rank=2), mesh["replicate"])


def averager(world):
    model = mlp(*WIDTHS)
    optimizer, handle = sgd(model), Averager(PowerSGD(rank=2), dict(model.named_parameters()), world.group)

    def average(optimizer, args, kwargs):
        handle({name: p.grad for name, p in model.named_parameters()})

    optimizer.register_step_pre_hook(average)
    return model, optimizer, handle


def own_wrapper(world):
    model = DataParallel(mlp(*WIDTHS), PowerSGD(rank=2), process_group=world.group)
    return model, sgd(model), model


def zero(world):
    ddp = ddp_of(world)
    return ddp, ZeroOptimizer(ddp.module.named_parameters(), torch.optim.Adam, lr=0.01, process_group=world.group), ddp


def zero_in_the_hook(world, make):
    ddp = ddp_of(world)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.Adam, process_group=world.group, overlap_with_ddp=True, lr=0.01
    )
    ddp.register_comm_hook(None, make(allreduce_hook, ddp, optimizer))
    return ddp, optimizer, ddp


def post_local(world, averager):
    state = PostLocalSGDState(world.group, world.group, 2)
    ddp, optimizer, state = hooked_by_torch(world, state, post_localSGD_hook)
    return ddp, PostLocalSGDOptimizer(optimizer, averager), state


DOORS = {
    "DDP alone": lambda world: (ddp := ddp_of(world), sgd(ddp), ddp),
    "register_comm_hook": comm_hook,
    "register_comm_hook and unregister": unregistered,
    "DataParallel": own_wrapper,
    "Averager": averager,
    "local_sgd on DDP": lambda world: local(ddp_of(world), LocalSGD(2, start_step=1)),
    "diloco on DDP": lambda world: local(ddp_of(world), diloco(2, compressor=PowerSGD(rank=2))),
    "local_sgd on a module": lambda world: local(mlp(*WIDTHS), diloco(2), process_group=world.group),
    "local_sgd on FSDP2": lambda world: local_on_shards(LocalSGD(2, start_step=1)),
    "diloco on FSDP2": lambda world: local_on_shards(diloco(2)),
    "compress_replicas": replicas,
    "ZeroOptimizer": zero,
    "powerSGD_hook": lambda world: hooked_by_torch(
        world, PowerSGDState(world.group, 2, start_powerSGD_iter=1), powerSGD_hook
    ),
    "bf16_compress_wrapper": lambda world: hooked_by_torch(
        world, PowerSGDState(world.group, 2, start_powerSGD_iter=1), bf16_compress_wrapper(powerSGD_hook)
    ),
    "PeriodicModelAverager": lambda world: post_local(world, PeriodicModelAverager(2, 2, world.group)),
    "HierarchicalModelAverager": lambda world: post_local(world, HierarchicalModelAverager({2: 2}, 2, world.group)),
    "hook_with_zero_step": lambda world: zero_in_the_hook(world, hook_with_zero_step),
    "hook_with_zero_step_interleaved": lambda world: zero_in_the_hook(world, hook_with_zero_step_interleaved),
}


@cases.each(DOORS)
def test_nothing_stays_when_it_is_dropped(world, door):
    for steps in (0, 3):
        model, optimizer, handle = door(world)
        fit(model, optimizer, world.rank, range(steps), LOSS)
        parts = {"model": model, "parameter": next(model.parameters()), "optimizer": optimizer, "handle": handle}
        left = {name: weakref.ref(part) for name, part in parts.items()}
        del model, optimizer, handle, parts
        gc.collect()
        assert [name for name, part in left.items() if part() is not None] == []
