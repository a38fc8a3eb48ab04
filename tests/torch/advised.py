"""What messages of the torch backend tell to write that takes several ranks: done on four, in the
launch of `test_refusals_on_ranks.py`."""

import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import gradwire.torch_backend as gw
from gradwire import LocalSGD
from tests.torch.compare import same_bits, weights
from tests.torch.models import mlp
from tests.torch.refused import ALGORITHM, LOSS, Here, mesh, small
from tests.torch.sharded import shard
from tests.torch.training import fit, hooked, sgd


def sharded(**options):
    return shard(mlp(40, 36, 32, **options), mesh()["shard"])


def as_many_batches(world):
    """Of data that ranks cannot share evenly; or of as many as each has, with a plain optimizer."""
    samples = len(DistributedSampler(range(4 * world.size + 1), drop_last=True))
    ddp = DistributedDataParallel(small(), process_group=world.group)
    zero = gw.ZeroRedundancyOptimizer(
        ddp.module.parameters(), torch.optim.SGD, process_group=world.group, lr=0.1
    )
    fit(ddp, zero, world.rank, range(samples), LOSS)
    assert world.agree(weights(ddp))
    ddp, _ = hooked(small(), ALGORITHM, world.group)
    with Join([ddp]):
        fit(ddp, sgd(ddp), world.rank, range(2 + world.rank), LOSS)
    assert world.agree(weights(ddp))


def the_model_itself_last(world):
    for how in ("last", "frozen"):
        model = mlp(40, 36, 32)
        fully_shard(model[0], mesh=mesh()["shard"])
        if how == "last":
            fully_shard(model, mesh=mesh()["shard"])
        else:
            model[2].requires_grad_(False)
        fit_replicas(world, model)


def fit_replicas(world, model):
    handle = gw.compress_replicas(model, ALGORITHM, mesh()["replicate"])
    fit(model, sgd(model), world.rank, range(2), LOSS)
    mine = [p.detach().to_local() for p in model.parameters() if p.requires_grad]
    assert same_bits(*world.everyones(mine)[world.rank % 2 :: 2])
    return handle


def frozen_on_all_ranks(world):
    model = sharded()
    fit_replicas(world, model)
    model[0].requires_grad_(False)
    LOSS(model, world.rank, 2).backward()


def without_a_forward_pass_through_all(world):
    model = sharded()
    handle = gw.compress_replicas(model, ALGORITHM, mesh()["replicate"], unused=True)
    LOSS(model, world.rank, 0).backward()
    model.zero_grad()
    model[0](torch.ones(2, 40)).sum().backward()
    assert handle.stats().steps == 2


def micro_batches(world):
    model = sharded()
    handle = fit_replicas(world, model)
    for last in (False, True):
        model.set_requires_all_reduce(last)
        LOSS(model, world.rank, 3).backward()
    assert handle.stats().steps == 3


def the_outer_mesh(world):
    model = mlp(40, 36, 32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh()["shard"])
    fit_replicas(world, fully_shard(model, mesh=mesh()["shard"]))


def local_parts_of_replicas(world):
    model, group = sharded(), mesh().get_group("replicate")
    averager = gw.Averager(ALGORITHM, {n: p.to_local() for n, p in model.named_parameters()}, group)
    LOSS(model, world.rank, 0).backward()
    averager({n: p.grad.to_local() for n, p in model.named_parameters()})


def local_sgd_of_replicas(world):
    model = sharded()
    gw.local_sgd(model, sgd(model), LocalSGD(2), process_group=mesh().get_group("replicate"))
    fit(model, sgd(model), world.rank, range(2), LOSS)


def before_a_checkpoint(world):
    attempt = Here(world.rank, world.group).local_ddp(LocalSGD(2))
    ddp, optimizer, _ = attempt.args
    handle = attempt()
    fit(ddp, optimizer, world.rank, range(3), LOSS)
    handle.synchronize()
    handle.state_dict()
    assert world.agree(weights(ddp))
    fit(ddp, optimizer, world.rank, [3], LOSS)
    assert handle.synchronized
    handle.state_dict()


def whole_states(world):
    for options in ({}, {"consolidate": True}):
        ddp = DistributedDataParallel(small(), process_group=world.group)
        parameters = ddp.module.named_parameters()
        zero = gw.ZeroOptimizer(
            parameters, torch.optim.AdamW, process_group=world.group, lr=0.1, **options
        )
        fit(ddp, zero, world.rank, range(2), LOSS)
        if not options:
            zero.consolidate_state_dict(to=0)
        if options or world.rank == 0:
            assert len(zero.state_dict()["state"]) == len(list(ddp.parameters()))


ON_RANKS = {
    "Call fully_shard on the model itself last, for what its layers have left, or set requires_grad=False": the_model_itself_last,
    "Call synchronize() on every rank before you save parameters and state, or save where handle.synchronized is true": before_a_checkpoint,
    "Give all ranks as many batches (DistributedSampler(..., drop_last=True)), or leave the optimizer out and use a plain one with Join([ddp])": as_many_batches,
    "call it equally often in each step, or accumulate: model.set_requires_all_reduce(False) for all backward passes of a step but the last": micro_batches,
    "call optimizer.consolidate_state_dict(to=0) on every rank (Lightning does so by itself)": whole_states,
    "call state_dict() on every rank, as accelerate does": whole_states,
    "give its local part, p.grad.to_local()": local_parts_of_replicas,
    "give its local part, p.to_local(), and the group of the ranks that hold the same part": local_parts_of_replicas,
    "give process_group=mesh.get_group('replicate')": local_sgd_of_replicas,
    "give the outer one to compress_replicas:\n"
    '    mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard"))\n'
    "    for layer in model.layers:\n"
    '        fully_shard(layer, mesh=mesh["shard"])\n'
    '    fully_shard(model, mesh=mesh["shard"])\n'
    '    handle = compress_replicas(model, algorithm, mesh["replicate"])': the_outer_mesh,
    "pass may leave parameters out, say so: compress_replicas(..., unused=True)": without_a_forward_pass_through_all,
    "set requires_grad=False on all ranks": frozen_on_all_ranks,
}
