"""Torch's `ZeroRedundancyOptimizer` under its own name: the same training, states that either
loads, and what is not the same said."""

import copy
import functools
import itertools

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import loss_on
from tests.torch.ranks import Cases
from tests.torch.training import fit, sgd

cases = Cases(__file__, ranks=3)

LOSS = loss_on(6)
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


class OfMatrices(torch.optim.SGD):
    """Refuses vectors, as Muon does."""

    def add_param_group(self, group):
        if any(p.ndim != 2 for p in group["params"]):
            raise ValueError("takes 2D parameters")
        super().add_param_group(group)


def wrapped(world):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3))
    return DistributedDataParallel(net, process_group=world.group)


def train(ddp, optimizer, world, steps):
    fit(ddp, optimizer, world.rank, steps, LOSS)
    return weights(ddp.module)


def zero(ddp, world, optimizer_class=torch.optim.AdamW, **options):
    return gw.ZeroRedundancyOptimizer(
        ddp.parameters(), optimizer_class, world.group, **OPTIONS | options
    )


@cases.case
def test_trains_as_torchs_and_takes_its_states(world):
    """Both train; then each goes on from the other's state."""
    # it warns when it is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZero

    def both(states=(None, None), steps=range(10)):
        """The weights, the states, and how many elements a rank has, of torch's and of
        gradwire's."""
        found = []
        for make, state in zip((TorchsZero, gw.ZeroRedundancyOptimizer), states, strict=True):
            ddp = wrapped(world)
            optimizer = make(
                ddp.parameters(), torch.optim.AdamW, world.group, True, False, **OPTIONS
            )
            if state is not None:
                optimizer.load_state_dict(copy.deepcopy(state))
            trained = train(ddp, optimizer, world, steps)
            assert (optimizer.rank, optimizer.world_size) == (world.rank, 3)
            assert optimizer.process_group is world.group
            optimizer.consolidate_state_dict(to=1)
            state = world.everyones(optimizer.state_dict() if world.rank == 1 else None)[1]
            shard = sum(
                p.numel() for group in optimizer.optim.param_groups for p in group["params"]
            )
            found.append((trained, state, sorted(world.everyones(shard))))
        return zip(*found, strict=True)

    (theirs, mine), states, shards = both()
    assert relative(mine, theirs) < 1e-5
    assert world.agree(mine)
    assert states[1]["state"].keys() == states[0]["state"].keys()
    assert [g["params"] for g in states[1]["param_groups"]] == [
        g["params"] for g in states[0]["param_groups"]
    ]
    # as well balanced: the 78 elements of the largest parameter are not halved
    assert shards[1] == shards[0]
    (theirs, mine), *_ = both(states[::-1], range(10, 15))
    assert relative(mine, theirs) < 1e-5


@cases.case
def test_groups_may_be_added_later(world):
    """Half of the parameters, later the rest, under an LR that a scheduler has moved meanwhile."""
    found = []
    for name in ("plain", "gradwire"):
        ddp = wrapped(world)
        first, later = (
            list(ddp.module.named_parameters())[:2],
            list(ddp.module.named_parameters())[2:],
        )
        if name == "plain":
            optimizer = torch.optim.AdamW(first, **OPTIONS)
        else:
            optimizer = gw.ZeroRedundancyOptimizer(first, torch.optim.AdamW, world.group, **OPTIONS)
        train(ddp, optimizer, world, range(5))
        optimizer.param_groups[0]["lr"] = 0.02
        optimizer.add_param_group({"params": later, "lr": 0.005})
        found.append(train(ddp, optimizer, world, range(5, 12)))
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.005]
    assert relative(*found) < 1e-5
    names = sorted(itertools.chain(*world.everyones(list(optimizer.rank_state_dict()["tensors"]))))
    assert names == sorted(found[0])
    # Weights of 78, 91 and 21 elements, biases of 13, 7 and 3. At first 78 and 13; then 91 go to
    # the empty rank, 21, 7 and 3 to the second.
    elements = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    assert sorted(world.everyones(elements)) == [13 + 21 + 7 + 3, 78, 91]
    # Float32: 91 elements in twelve steps, 122 in seven. Parameters are sent, gradients are not.
    dense = 4 * (12 * 91 + 7 * 122)
    assert (optimizer.stats().bytes_sent, optimizer.stats().dense_bytes) == (dense / 2, dense)
    twin = torch.optim.AdamW([{"params": first}, {"params": later}], **OPTIONS)
    twin.load_state_dict(optimizer.consolidated_state_dict(to=None))
    assert [int(twin.state[p]["step"]) for _, p in (*first, *later)] == [12, 12, 7, 7, 7, 7]
    new = nn.Parameter(torch.zeros(2 + world.rank))
    matrices = gw.ZeroRedundancyOptimizer([ddp.module[0].weight], OfMatrices, world.group, lr=0.01)
    assert "ranks differ in parameters" in said(optimizer.add_param_group, {"params": [new]})
    assert "'0.weight' is given twice" in said(optimizer.add_param_group, {"params": first})
    assert "2D parameters" in said(
        matrices.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]}
    )
    assert "without 'params'" in said(optimizer.add_param_group, {"lr": 1.0})
    assert not same_bits(found[1], train(ddp, optimizer, world, range(12, 13)))  # it goes on
    assert len(optimizer.param_groups) == 2


@cases.case
def test_a_thawed_layer_may_be_added(world):
    """One that is frozen at first, thawed, and added; and before, thawed without being added."""
    ddp = wrapped(world)
    layers = ddp.module
    layers[2].requires_grad_(False)
    optimizer = gw.ZeroRedundancyOptimizer(
        list(layers.parameters()), torch.optim.AdamW, world.group, **OPTIONS
    )
    layers[2].requires_grad_(True)
    ddp = DistributedDataParallel(layers, process_group=world.group)
    assert "ValueError: parameter 'frozen.0' has a gradient" in said(
        train, ddp, optimizer, world, range(1)
    )
    optimizer.add_param_group({"params": layers[2].parameters()})
    before = layers[2].weight.detach().clone()
    train(ddp, optimizer, world, range(1))
    assert not same_bits(before, layers[2].weight.detach())


class Scaled(torch.optim.SGD):
    """Its step takes an argument."""

    def step(self, closure=None, *, scale=1.0):
        for p in self.param_groups[0]["params"]:
            p.data -= scale * self.param_groups[0]["lr"] * p.grad


@cases.case
def test_arguments_of_step_and_partial_classes(world):
    ddp, twin = wrapped(world), wrapped(world)
    optimizer = zero(ddp, world, functools.partial(Scaled, lr=7.0), lr=0.1)
    optimizer.step = functools.partial(optimizer.step, scale=0.5)
    half = sgd(twin, lr=0.05)
    assert (
        relative(train(ddp, optimizer, world, range(4)), train(twin, half, world, range(4))) < 1e-6
    )
    words = said(zero, ddp, world, lambda p: torch.optim.SGD(p, lr=1.0))
    assert words.startswith("TypeError: optimizer_class=<function")
    assert "give them by name" in said(zero, ddp, world, functools.partial(torch.optim.SGD, 3))
    words = said(Join, [ddp, zero(ddp, world, torch.optim.SGD)])
    assert words.startswith("NotImplementedError: Join")
    assert "drop_last=True" in words


@cases.each(
    {"at the end": gw.hook_with_zero_step, "interleaved": gw.hook_with_zero_step_interleaved}
)
def test_overlapped_it_updates_from_the_first_iteration_on(world, make_hook):
    ddp, twin = wrapped(world), wrapped(world)
    optimizer = zero(ddp, world, overlap_with_ddp=True)
    LOSS(ddp, world.rank, 0).backward()
    words = said(optimizer.step)
    assert "RuntimeError: overlap_with_ddp=True" in words
    assert "hook_with_zero_step(allreduce_hook, ddp, optimizer)" in words
    ddp.register_comm_hook(None, make_hook(gw.allreduce_hook, ddp, optimizer, True))
    plain = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    assert (
        relative(train(ddp, optimizer, world, range(10)), train(twin, plain, world, range(10)))
        < 1e-5
    )
    assert "step(scale)" in said(optimizer.step, scale=2.0)
    words = said(optimizer.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})
    assert "before hook_with_zero_step" in words
