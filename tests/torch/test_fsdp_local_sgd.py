"""Local SGD and DiLoCo between the replicas of a sharded model: each rank averages its own blocks, and the whole is what whole models do."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire import LocalSGD, PowerSGD, TwoLevel, diloco
from gradwire.torch_backend import compress_replicas, local_sgd
from gradwire.torch_backend.fsdp.layout import local_part
from tests.torch.compare import relative, said, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import local_parts, mesh_of, sharded_mlp

pytestmark = pytest.mark.slow

WIDTHS = (40, 37, 20)
LOSS = loss_on(40, spread=1)

cases = Cases(__file__, ranks=4)

#: What is done, with which options, and which optimizer.
SCHEDULES = {
    "averages": (LocalSGD(2), {}, torch.optim.SGD),
    "diloco": (diloco(2), {}, torch.optim.SGD),
    "in fragments": (diloco(4, fragments=2), {}, torch.optim.SGD),
    "gradients first": (diloco(2, start_step=2), {}, torch.optim.SGD),
    "moments averaged": (LocalSGD(2), {"moments": "average"}, torch.optim.AdamW),
    "moments dropped": (LocalSGD(2), {"moments": "reset"}, torch.optim.AdamW),
    # By the norm of the whole difference. Nothing is compressed.
    "clipped": (diloco(2, compressor=PowerSGD(rank=2, max_norm=0.01, min_compression_rate=1000)), {}, torch.optim.SGD),
}


def whole(model):
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in model.named_parameters()}


@cases.each(SCHEDULES)
def test_shards_together_do_what_the_whole_does(world, how):
    local, options, optimizer = how
    mesh = mesh_of(2, 2)
    group, replica = mesh.get_group("replicate"), mesh.get_local_rank("replicate")
    model, twin = sharded_mlp(WIDTHS, mesh["shard"]), mlp(*WIDTHS)
    if local.start_step:
        twin = DistributedDataParallel(twin, process_group=group, broadcast_buffers=False)
    found = []
    for each in (model, twin):
        lr = 1e-2 if optimizer is torch.optim.AdamW else 0.1
        stepping = optimizer(each.parameters(), lr=lr)
        handle = local_sgd(each, stepping, local, process_group=group, **options)
        before = whole(each)
        for step in range(5):
            stepping.zero_grad()
            # The batch of a replica is that of its shards.
            batches = [world.rank] if each is model else [2 * replica, 2 * replica + 1]
            (sum(LOSS(each, batch, step) for batch in batches) / len(batches)).backward()
            stepping.step()
        found.append({n.removeprefix("module."): p for n, p in whole(each).items()})
        assert relative(whole(each), before) > 1e-3
        assert handle.stats().steps == 5
    assert relative(*found) < 1e-5
    handle.synchronize()


@cases.each({"parameters alone": LocalSGD(3), "gradients first": diloco(3, start_step=1)})
def test_another_schedule_and_none_any_more(world, schedule):
    """In the midst of a period. Replicas then average gradients as they are, and may be compressed."""
    mesh = mesh_of(2, 2)
    group, model = mesh.get_group("replicate"), sharded_mlp(WIDTHS, mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = local_sgd(model, optimizer, schedule, process_group=group)

    def step(number):
        optimizer.zero_grad()
        LOSS(model, world.rank, number).backward()
        optimizer.step()
        everyone = world.everyones([local_parts(model), local_parts(model, gradients=True)])
        return same_bits(everyone[world.rank], everyone[(world.rank + 2) % 4])  # the other replica's block

    assert [step(number) for number in (0, 1)] == [schedule.start_step == 1, False]
    handle.reconfigure(diloco(2, start_step=4))
    assert [step(number) for number in (2, 3, 4)] == [True, True, False]
    assert "has replicas whose gradients" in said(local_sgd, model, None, LocalSGD(2), process_group=group)
    handle.unregister()
    assert all(step(number) for number in (5, 6))
    compressed = compress_replicas(model, PowerSGD(2), mesh["replicate"])
    assert all(step(number) for number in (7, 8))
    assert compressed.error_norm() > 0


@cases.case
def test_a_broken_shard_takes_its_replica_back_to_the_outer_parameters(world):
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd(model, optimizer, diloco(1), process_group=mesh.get_group("replicate"))
    LOSS(model, world.rank, 0).backward()
    optimizer.step()
    outer = local_parts(model)
    optimizer.zero_grad()
    LOSS(model, world.rank, 1).backward()
    if world.rank == 1:
        local_part(model[2].weight.grad)[0, 0] = torch.inf
    optimizer.step()
    assert same_bits(local_parts(model), outer)


@cases.each({"2x2": (2, 2), "4x1": (4, 1), "1x4": (1, 4)})
def test_outer_parameters_are_saved_and_cut_anew(world, shape):
    group = mesh_of(2, 2)
    schedule = diloco(2, compressor=TwoLevel(PowerSGD(rank=2, min_compression_rate=1), within=1))

    def made(mesh):
        model = sharded_mlp(WIDTHS, mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, local_sgd(model, optimizer, schedule, process_group=mesh.get_group("replicate"))

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            LOSS(model, world.rank, step).backward()
            optimizer.step()

    def remembered(handle, key):
        return {
            name: handle._target.layout.held[name].distributed(memory[key]).full_tensor()
            for name, memory in handle._memory.state.tensors.items()
        }

    model, optimizer, handle = made(group)
    train(model, optimizer, range(4))
    folder = world.folder / f"{shape}"
    dcp.save({"model": model.state_dict(), "local": handle}, checkpoint_id=folder)
    again, stepping, other = made(mesh_of(*shape))
    state = {"model": again.state_dict(), "local": other}
    dcp.load(state, checkpoint_id=folder)
    assert other.steps == 4
    for key in ("outer", "velocity"):
        assert same_bits(remembered(other, key), remembered(handle, key))
        assert all(x.abs().max() > 0 for x in remembered(other, key).values())
    train(again, stepping, range(4, 6))
    assert world.agree(whole(again))
    if shape == (2, 2):
        train(model, optimizer, range(4, 6))
        assert relative(whole(again), whole(model)) < 1e-5
        own = handle.rank_state_dict()
        handle.load_state_dict(own)
        with pytest.raises(
            ValueError, match=rf"shard={1 - world.rank % 2}, .* this is .*shard={world.rank % 2}, shards=2"
        ):
            handle.load_state_dict({**own, "shard": 1 - own["shard"]})


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(40, 32), nn.BatchNorm1d(32), nn.Linear(32, 20)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


@cases.case
def test_buffers_are_averaged_between_replicas(world):
    mesh = mesh_of(2, 2)
    model = Normed()
    fully_shard(model.first, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd(model, optimizer, LocalSGD(1), process_group=mesh.get_group("replicate"))
    LOSS(model, world.rank, 0).backward()
    own = world.everyones(model.norm.running_mean.clone())
    optimizer.step()
    expected = (own[world.rank % 2] + own[2 + world.rank % 2]) / 2
    assert relative(model.norm.running_mean, expected) < 1e-6
    assert relative(own[world.rank], expected) > 1e-3
