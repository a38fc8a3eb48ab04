"""Models of every kind under FSDP2, with replicas that are compressed: what is shared, small, left out, frozen, of half precision, or not alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from gradwire import AllReduce, PowerSGD
from gradwire.torch_backend import compress_replicas
from tests.torch.compare import relative, same_bits
from tests.torch.models import TAKEN, Branches, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import local_parts, mesh_of, shard, sharded_mlp, simulated, train_sharded

pytestmark = pytest.mark.slow

ALGORITHM = PowerSGD(rank=2, min_compression_rate=1)
#: Gradients with many directions, so that rounding does not decide which are sent.
LOSS = loss_on(40, spread=1)
#: Rows that two shards cannot share equally.
WIDTHS = (40, 37, 36, 2)

cases = Cases(__file__, ranks=4)


class Tied(nn.Module):
    """The last layer's weight is the embedding. FSDP wants both in one unit, here that of the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = nn.Embedding(24, 32), nn.Linear(32, 32), nn.Linear(32, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def tied(mesh):
    model = Tied()
    fully_shard(model.body, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def next_token(model, rank, step):
    tokens = torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


class Adapted(nn.Module):
    """A frozen layer with a low-rank update beside it."""

    def __init__(self, n, m, rank=4):
        super().__init__()
        self.base = nn.Linear(n, m).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(n, rank, bias=False), nn.Linear(rank, m, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapters(mesh):
    torch.manual_seed(0)
    return shard(nn.Sequential(Adapted(40, 32), nn.Tanh(), Adapted(32, 20)), mesh)


def branches(mesh):
    torch.manual_seed(0)
    return shard(Branches(), mesh)


def branches_loss(model, rank, step):
    """Each replica of two shards takes its own branches."""
    return LOSS(lambda x: model(x, TAKEN[step][rank // 2]), rank, step)


def used(step, name):
    return name.startswith("trunk") or any(name.startswith(branch) for taken in TAKEN[step] for branch in taken)


def layers(**options):
    return lambda mesh: sharded_mlp(WIDTHS, mesh, **options)


def offered(**options):
    """Under these policies of FSDP."""
    return Scenario(layers(**options), plain=True)


@dataclass
class Scenario:
    """A model on an axis of shards, trained for some steps, and what remembers something; `plain`: averages are compared with those of FSDP as well."""

    make: Callable[[Any], nn.Module]
    loss: Any = LOSS
    steps: int = 3
    algorithm: Any = ALGORITHM
    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] = (2, 2)
    tolerance: float = 1e-4
    used: Any = None
    remembers: tuple[str, ...] = ("0.weight", "2.weight")
    plain: bool = False


HALF = {
    "algorithm": PowerSGD(rank=2, state_dtype="float32", min_compression_rate=1),
    "loss": loss_on(40, dtype=torch.bfloat16, spread=1),
    "tolerance": 3e-2,
}
SCENARIOS = {
    "tied weights": Scenario(tied, next_token, 4, remembers=("body.weight", "embedding.weight")),
    "small matrices": Scenario(adapters, algorithm=PowerSGD(rank=8), remembers=()),
    "unused on some replicas": Scenario(
        branches,
        branches_loss,
        len(TAKEN),
        options={"unused": True, "message_bytes": 0},
        used=used,
        remembers=("left.weight", "right.weight", "trunk.0.weight", "trunk.2.weight"),
    ),
    "bfloat16 parameters": Scenario(layers(dtype=torch.bfloat16), **HALF),
    "resharded to fewer": Scenario(layers(reshard_after_forward=2), mesh=(1, 4)),
    "bfloat16 computes": offered(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "bfloat16 reduces": offered(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    "no resharding": offered(reshard_after_forward=False),
    "resharding": offered(reshard_after_forward=True),
    "offloaded": offered(offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


@cases.each(SCENARIOS)
def test_blocks_are_averaged_as_the_simulator_says(world, scenario):
    mesh = mesh_of(*scenario.mesh)
    model, twin = (scenario.make(mesh["shard"]) for _ in range(2))
    handle = compress_replicas(model, scenario.algorithm, mesh["replicate"], **scenario.options)
    trace = train_sharded(model, scenario.loss, range(scenario.steps), twin)
    assert simulated(world, scenario.algorithm, trace, scenario.mesh[1], used=scenario.used) < scenario.tolerance
    for step, given in enumerate(trace.given):  # what nobody has used keeps its gradient None
        assert set(given) == {n for n in trace.local[step] if scenario.used is None or scenario.used(step, n)}
    memory = handle.rank_state_dict()["tensors"]
    assert tuple(sorted(memory)) == scenario.remembers
    assert {x.dtype for kept in memory.values() for x in kept.values()} <= {torch.float32}
    assert {g.dtype for g in trace.given[0].values()} == {p.dtype for p in model.parameters() if p.requires_grad}
    assert handle.stats().steps == scenario.steps
    assert scenario.remembers or handle.stats().bytes_sent == handle.stats().dense_bytes
    if scenario.plain:
        ours, theirs = scenario.make(mesh["shard"]), scenario.make(mesh)
        compress_replicas(ours, AllReduce(), mesh["replicate"])
        pairs = zip(*(train_sharded(m, LOSS, range(2)).given for m in (ours, theirs)), strict=True)
        # FSDP averages over replicas in `reduce_dtype`; here that is done in the dtype of the parameters.
        near = 2e-2 if scenario is SCENARIOS["bfloat16 reduces"] else 1e-5
        assert all(relative(x, y) < near for x, y in pairs)


@cases.case
def test_a_parameter_without_a_gradient_is_an_error(world):
    mesh = mesh_of(2, 2)
    model = branches(mesh["shard"])
    compress_replicas(model, ALGORITHM, mesh["replicate"])
    with pytest.raises(RuntimeError, match=r"'right.weight', 'right.bias'.*unused=True.*requires_grad=False"):
        model(torch.ones(3, 40), ("left",)).sum().backward()


@cases.each({"discarded": True, "taken up": False})
def test_two_models_in_one_backward_pass(world, discarding):
    """A generator's step goes through the discriminator, whose gradients are dropped: its memory shall not take them up."""
    mesh = mesh_of(2, 2)
    g, d = sharded_mlp((8, 32, 40), mesh["shard"]), sharded_mlp((40, 32, 1), mesh["shard"])
    generator, discriminator = (compress_replicas(m, ALGORITHM, mesh["replicate"]) for m in (g, d))
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))
    d(g(noise).detach()).mean().backward()  # the discriminator's step
    before = discriminator.rank_state_dict()
    d.zero_grad()
    if discarding:
        with discriminator.discarded():
            (-d(g(noise)).mean()).backward()
    else:
        (-d(g(noise)).mean()).backward()
    assert same_bits(before, discriminator.rank_state_dict()) is discarding
    assert (generator.stats().steps, discriminator.stats().steps) == (1, 1 if discarding else 2)
    both = world.everyones(local_parts(g, gradients=True))
    assert same_bits(both[0], both[2])  # replicas of a shard
    assert same_bits(both[1], both[3])


@cases.case
def test_layers_that_are_frozen_keep_their_memory_until_they_are_thawed(world):
    """One in the middle; and all but the one that comes first in the backward pass."""
    mesh = mesh_of(2, 2)
    model, twin = (sharded_mlp(WIDTHS, mesh["shard"]) for _ in range(2))
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"], message_bytes=0)
    train_sharded(model, LOSS, range(2))
    for frozen, trained in ((slice(2, 3), ["0", "4"]), (slice(4), ["4"])):
        memory = handle.rank_state_dict()["tensors"]
        for each in (model, twin):
            each[frozen].requires_grad_(requires_grad=False)
        model.zero_grad()
        trace = train_sharded(model, LOSS, range(2, 4), twin)
        after = handle.rank_state_dict()["tensors"]
        assert [same_bits(memory[f"{n}.weight"], after[f"{n}.weight"]) for n in "02"] == [
            n not in trained for n in "02"
        ]
        assert all(sorted(given) == [f"{n}.{p}" for n in trained for p in ("bias", "weight")] for given in trace.given)
    assert simulated(world, ALGORITHM, trace, 2) < 1e-4  # of the last layer nothing is compressed
    model.requires_grad_(requires_grad=True)
    thawed = train_sharded(model, LOSS, range(4, 6))
    assert len(thawed.given[0]) == 6
    assert world.agree(thawed.weights)


@cases.case
def test_layers_that_are_thawed_later_are_averaged_once_they_are_known(world):
    mesh = mesh_of(2, 2)
    model = shard(mlp(*WIDTHS, frozen=[0]), mesh["shard"])
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"])
    train_sharded(model, LOSS, range(2))
    memory = handle.rank_state_dict()
    model[0].requires_grad_(requires_grad=True)
    with pytest.raises(RuntimeError, match=r"'0.weight', '0.bias'.*compress_replicas"):
        LOSS(model, world.rank, 2).backward()
    model.zero_grad()
    handle.unregister()
    again = compress_replicas(model, ALGORITHM, mesh["replicate"])
    assert "'0.weight' only here" in str(again.load_state_dict(memory, strict=False))
    assert world.agree(train_sharded(model, LOSS, range(2, 4)).weights)
    assert again.stats().steps == 4


@cases.case
def test_a_handle_gives_its_place_to_another(world):
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    first = compress_replicas(model, ALGORITHM, mesh["replicate"])
    train_sharded(model, LOSS, range(2))
    first.unregister()
    plain = world.everyones(train_sharded(model, LOSS, range(2, 3)).given)
    assert same_bits(plain[0], plain[2])  # without a handle replicas average gradients as they are
    second = compress_replicas(model, AllReduce(), mesh["replicate"])
    train_sharded(model, LOSS, range(3, 5))
    second.reconfigure(ALGORITHM)
    assert world.agree(train_sharded(model, LOSS, range(5, 6)).weights)
    assert repr(first).startswith("ReplicaHandle(unregistered; PowerSGD(rank=2")
    assert "; 2 steps, " in repr(first)
    assert repr(second).startswith("ReplicaHandle(PowerSGD(rank=2")
    assert second.stats().steps == 3
