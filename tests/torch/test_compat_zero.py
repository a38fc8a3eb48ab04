"""Torch's `ZeroRedundancyOptimizer` under its own name: the same training, states that either loads, and what is not the same said."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch_backend import (
    ZeroRedundancyOptimizer,
    allreduce_hook,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tests.torch.ranks import Cases
from tests.torch.training import loss_on, relative, same_bits

cases = Cases(__file__, ranks=3)
results = cases.fixture()

LOSS = loss_on(6)
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def wrapped(world):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3))
    return DistributedDataParallel(net, process_group=world.group)


def train(ddp, optimizer, world, steps, **arguments):
    for step in steps:
        optimizer.zero_grad()
        LOSS(ddp, world.rank, step).backward()
        optimizer.step(**arguments)


def weights(ddp):
    return {n: p.detach().clone() for n, p in ddp.module.named_parameters()}


def message(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@cases.case
def beside_torchs(world):
    """Both train; then each goes on from the other's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchsZero  # it warns when it is imported

    found = {}
    for name, make in (("torch", TorchsZero), ("gradwire", ZeroRedundancyOptimizer)):
        ddp = wrapped(world)
        optimizer = make(ddp.parameters(), torch.optim.AdamW, world.group, True, False, **OPTIONS)
        train(ddp, optimizer, world, range(10))
        found[name] = weights(ddp)
        optimizer.consolidate_state_dict(to=1)
        states = [optimizer.state_dict() if world.rank == 1 else None]
        dist.broadcast_object_list(states, src=dist.get_global_rank(world.group, 1), group=world.group)
        found[f"{name}'s state"] = copy.deepcopy(states[0])
        found[f"{name}'s shard"] = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
        found[f"{name} is"] = (optimizer.rank, optimizer.world_size, optimizer.process_group is world.group)
    for name, make in (("torch", TorchsZero), ("gradwire", ZeroRedundancyOptimizer)):
        ddp = wrapped(world)
        optimizer = make(ddp.parameters(), torch.optim.AdamW, world.group, **OPTIONS)
        other = found["torch's state" if name == "gradwire" else "gradwire's state"]
        optimizer.load_state_dict(copy.deepcopy(other))
        train(ddp, optimizer, world, range(10, 15))
        found[f"{name} after the other"] = weights(ddp)
    return found


def test_trains_as_torchs_and_takes_its_states(results):
    ranks = results("beside_torchs")
    for rank, found in enumerate(ranks):
        assert relative(found["gradwire"], found["torch"]) < 1e-6
        assert relative(found["gradwire after the other"], found["torch after the other"]) < 1e-6
        assert same_bits(found["gradwire"], ranks[0]["gradwire"])
        assert found["gradwire is"] == found["torch is"] == (rank, 3, True)
        mine, theirs = found["gradwire's state"], found["torch's state"]
        assert mine["state"].keys() == theirs["state"].keys()
        assert [group["params"] for group in mine["param_groups"]] == [
            group["params"] for group in theirs["param_groups"]
        ]
    for name in ("torch", "gradwire"):  # as well balanced: the 78 elements of the largest parameter are not halved
        assert sorted(found[f"{name}'s shard"] for found in ranks) == sorted(f["torch's shard"] for f in ranks)


@cases.case
def groups_later(world):
    """Half of the parameters, later the rest, under an LR that a scheduler has moved meanwhile."""
    found = {}
    for name in ("plain", "gradwire"):
        ddp = wrapped(world)
        first, later = list(ddp.module.named_parameters())[:2], list(ddp.module.named_parameters())[2:]
        if name == "plain":
            optimizer = torch.optim.AdamW(first, **OPTIONS)
        else:
            optimizer = ZeroRedundancyOptimizer(first, torch.optim.AdamW, world.group, **OPTIONS)
        train(ddp, optimizer, world, range(5))
        optimizer.param_groups[0]["lr"] = 0.02
        optimizer.add_param_group({"params": later, "lr": 0.005})
        train(ddp, optimizer, world, range(5, 12))
        found[name] = weights(ddp)
        found[f"{name}'s groups"] = [{k: v for k, v in g.items() if k == "lr"} for g in optimizer.param_groups]
    found["owned"] = list(optimizer.rank_state_dict()["tensors"])
    found["elements"] = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    found["sent"] = optimizer.stats().bytes_sent, optimizer.stats().dense_bytes
    twin = torch.optim.AdamW([{"params": first}, {"params": later}], **OPTIONS)
    twin.load_state_dict(optimizer.consolidated_state_dict(to=None))
    found["steps"] = [int(twin.state[p]["step"]) for _, p in (*first, *later)]
    before = weights(ddp)
    new = nn.Parameter(torch.zeros(2 + world.rank))
    muon = ZeroRedundancyOptimizer([ddp.module[0].weight], torch.optim.Muon, world.group, lr=0.01)
    found["refused"] = {
        "ranks": message(optimizer.add_param_group, {"params": [new]}),
        "twice": message(optimizer.add_param_group, {"params": first}),
        "optimizer": message(muon.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]}),
        "no group": message(optimizer.add_param_group, {"lr": 1.0}),
    }
    train(ddp, optimizer, world, range(12, 13))
    found["went on"] = not same_bits(before, weights(ddp)) and len(optimizer.param_groups) == 2
    return found


def test_groups_may_be_added_later(results):
    ranks = results("groups_later")
    for found in ranks:
        assert relative(found["gradwire"], found["plain"]) < 1e-6
        assert found["gradwire's groups"] == found["plain's groups"] == [{"lr": 0.02}, {"lr": 0.005}]
        assert found["steps"] == [12, 12, 7, 7, 7, 7]
        assert "ranks differ in parameters" in found["refused"]["ranks"]
        assert "'0.weight' is given twice" in found["refused"]["twice"]
        assert "2D parameters" in found["refused"]["optimizer"]
        assert "without 'params'" in found["refused"]["no group"]
        assert found["went on"]
        # Float32: 91 elements in twelve steps, 122 in seven. Parameters are sent, gradients are not.
        assert found["sent"] == (4 * (12 * 91 + 7 * 122) / 2, 4 * (12 * 91 + 7 * 122))
    names = [name for found in ranks for name in found["owned"]]
    assert sorted(names) == sorted(ranks[0]["plain"])
    # Weights of 78, 91 and 21 elements, biases of 13, 7 and 3. At first 78 and 13; then 91 go to the empty rank, 21, 7 and 3 to the second.
    assert sorted(found["elements"] for found in ranks) == [13 + 21 + 7 + 3, 78, 91]


@cases.case
def thawed(world):
    """A layer that is frozen at first, thawed, and added; and one that stays frozen, and is thawed without being added."""
    ddp = wrapped(world)
    layers = ddp.module
    layers[2].requires_grad_(False)
    optimizer = ZeroRedundancyOptimizer(list(layers.parameters()), torch.optim.AdamW, world.group, **OPTIONS)
    layers[2].requires_grad_(True)
    ddp = DistributedDataParallel(layers, process_group=world.group)
    train_message = message(train, ddp, optimizer, world, range(1))
    optimizer.add_param_group({"params": layers[2].parameters()})
    before = layers[2].weight.detach().clone()
    train(ddp, optimizer, world, range(1))
    return train_message, same_bits(before, layers[2].weight.detach())


def test_a_thawed_layer_may_be_added(results):
    for refused, unchanged in results("thawed"):
        assert "ValueError: parameter 'frozen.0' has a gradient" in refused
        assert not unchanged


class Scaled(torch.optim.SGD):
    """Its step takes an argument."""

    def step(self, closure=None, *, scale=1.0):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data -= scale * group["lr"] * p.grad


@cases.case
def called_otherwise(world):
    found = {}
    ddp = wrapped(world)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), functools.partial(Scaled, lr=7.0), world.group, lr=0.1)
    train(ddp, optimizer, world, range(4), scale=0.5)
    found["scaled"] = weights(ddp)
    ddp = wrapped(world)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    train(ddp, optimizer, world, range(4))
    found["half the rate"] = weights(ddp)
    parameters = list(wrapped(world).parameters())
    with_positional = functools.partial(torch.optim.SGD, 3)
    found["function"] = message(ZeroRedundancyOptimizer, parameters, lambda p: torch.optim.SGD(p, lr=1.0))
    found["positional"] = message(ZeroRedundancyOptimizer, parameters, with_positional)
    ddp = wrapped(world)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, world.group, lr=0.1)
    found["join"] = message(Join, [ddp, zero])
    return found


def test_arguments_of_step_and_partial_classes(results):
    for found in results("called_otherwise"):
        assert relative(found["scaled"], found["half the rate"]) < 1e-6
        assert found["function"].startswith("TypeError: optimizer_class=<function")
        assert "give them by name" in found["positional"]
        assert found["join"].startswith("NotImplementedError: Join")
        assert "drop_last=True" in found["join"]


HOOKS = {"at the end": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}


@cases.each(HOOKS)
def overlapped(world, make_hook):
    found = {}
    ddp = wrapped(world)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, world.group, overlap_with_ddp=True, **OPTIONS)
    LOSS(ddp, world.rank, 0).backward()
    found["no hook"] = message(zero.step)
    ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero, True))
    train(ddp, zero, world, range(10))
    found["overlapped"] = weights(ddp)
    found["arguments"] = message(zero.step, scale=2.0)
    found["group"] = message(zero.add_param_group, {"params": [nn.Parameter(torch.zeros(2))]})
    ddp = wrapped(world)
    train(ddp, torch.optim.AdamW(ddp.parameters(), **OPTIONS), world, range(10))
    found["plain"] = weights(ddp)
    return found


@pytest.mark.parametrize("form", HOOKS)
def test_overlapped_it_updates_from_the_first_iteration_on(results, form):
    for found in results(f"overlapped[{form}]"):
        assert relative(found["overlapped"], found["plain"]) < 1e-6
        assert "RuntimeError: overlap_with_ddp=True" in found["no hook"]
        assert "hook_with_zero_step(allreduce_hook, ddp, optimizer)" in found["no hook"]
        assert "step(scale)" in found["arguments"]
        assert "before hook_with_zero_step" in found["group"]


if __name__ == "__main__":
    cases.main()
