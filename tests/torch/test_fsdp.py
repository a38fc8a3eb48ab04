"""Replicas of a model that FSDP2 has sharded: models of every kind, the loops that people write,
and what is one in all shards."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from gradwire import AllReduce, CompressionWarning, PowerSGD, State, plan
from gradwire.core.protocol import local_norm, mean, step_is_finite, sum_scalar
from gradwire.torch_backend import compress_replicas
from gradwire.torch_backend.fsdp import units
from gradwire.torch_backend.torch_internals import torch_is
from tests.torch.compare import relative, same_bits
from tests.torch.models import TAKEN, Branches, Checkpointed, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.sharded import (
    follow,
    local_parts,
    mesh_of,
    shard,
    sharded_mlp,
    simulated,
    train_sharded,
)

#: Rows that two shards cannot share equally.
WIDTHS = (40, 37, 36, 2)
ALGORITHM = PowerSGD(rank=2, min_compression_rate=1)
HALF_STEPS = PowerSGD(rank=2, min_compression_rate=1, half_step=True)
#: Gradients with many directions, so that rounding does not decide which are sent.
LOSS = loss_on(40, spread=1)

cases = Cases(__file__, ranks=4)


def require_same_gradients(ours, theirs):
    assert relative(local_parts(ours, gradients=True), local_parts(theirs, gradients=True)) < 1e-5


def accumulated(model, rank, switch=None, parts=3):
    """One step of several micro-batches."""
    for part in range(parts):
        if switch is not None:
            getattr(model, switch)(part == parts - 1)
        (LOSS(model, rank, part) / parts).backward()


class Tied(nn.Module):
    """The last layer's weight is the embedding. FSDP wants both in one unit, here that of the
    model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body, self.head = (
            nn.Embedding(24, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 24, bias=False),
        )
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


def branches(mesh):
    torch.manual_seed(0)
    return shard(Branches(), mesh)


def branches_loss(model, rank, step):
    """Each replica of two shards takes its own branches."""
    return LOSS(lambda x: model(x, TAKEN[step][rank // 2]), rank, step)


def used(step, name):
    return name.startswith("trunk") or any(
        name.startswith(branch) for taken in TAKEN[step] for branch in taken
    )


class Crossed(nn.Module):
    """Two layers side by side, of which the one that is called last comes first in the backward
    pass; and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.trunk = mlp(40, 32)
        self.left, self.right, self.twice = (nn.Linear(32, 32) for _ in range(3))
        self.left_first = True

    def forward(self, x):
        x = self.trunk(x)
        layers = [self.left, self.right] if self.left_first else [self.right, self.left]
        first, second = (torch.tanh(layer(x)) for layer in layers)
        return torch.tanh(self.twice(torch.tanh(self.twice(first + second))))


def again(*, reentrant):
    """Activations are computed again in backward."""
    return lambda mesh: shard(Checkpointed(reentrant=reentrant, width=40), mesh)


def in_other_orders(model, rank):
    """Units come in another order on each replica, and prefetching does not follow it."""
    model.left_first = rank < 2
    model.trunk[0].set_modules_to_backward_prefetch([model.left, model.right])


def replaced(model, _):
    """Other parameters take the place of those that there are."""
    before = dict(model.named_parameters())
    model.load_state_dict({n: p.detach().clone() for n, p in before.items()}, assign=True)
    assert all(p is not before[n] for n, p in model.named_parameters())


def layers(widths=WIDTHS, **options):
    """Of one row, of the last layer the second shard has nothing."""
    return lambda mesh: sharded_mlp(widths, mesh, **options)


def offered(**options):
    """Under these policies of FSDP."""
    return Scenario(layers(**options), plain=True)


@dataclass
class Scenario:
    """A model on an axis of shards, prepared after its replicas are compressed, trained for some
    steps, and what remembers something; `plain`: averages are compared with those of FSDP as
    well."""

    make: Callable[[Any], nn.Module]
    loss: Any = LOSS
    steps: int = 3
    algorithm: Any = ALGORITHM
    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, int] = (2, 2)
    tolerance: float = 1e-3
    used: Any = None
    remembers: tuple[str, ...] = ("0.weight", "2.weight")
    plain: bool = False
    collectives: Any = None
    prepare: Any = lambda model, rank: None


OF_LAYERS = ("head.weight", *(f"layers.{i}.weight" for i in range(4)))
HALF = {
    "algorithm": PowerSGD(rank=2, state_dtype="float32", min_compression_rate=1),
    "loss": loss_on(40, dtype=torch.bfloat16, spread=1),
    "tolerance": 3e-2,
}
SCENARIOS = {
    "one message": Scenario(layers((40, 37, 36, 1)), steps=5, collectives=lambda rank: 5 * 2),
    # Two of the three units are compressed, in two messages each. The first pass does not know in
    # which order units come, and is one message round.
    "unit by unit": Scenario(
        layers((40, 37, 36, 1)),
        steps=5,
        options={"message_bytes": 0},
        collectives=lambda rank: 2 + 4 * (2 + 2 + (rank % 2 == 0)),
    ),
    "other orders": Scenario(
        lambda mesh: shard(Crossed(), mesh),
        steps=5,
        options={"message_bytes": 0},
        prepare=in_other_orders,
        remembers=tuple(f"{name}.weight" for name in ("left", "right", "trunk.0", "twice")),
        collectives=lambda rank: 2 + 4 * 8,
    ),
    "replaced": Scenario(layers(), prepare=replaced),
    "compiled": Scenario(layers(), prepare=lambda model, rank: model.compile(backend="eager")),
    "computed again": Scenario(again(reentrant=False), remembers=OF_LAYERS),
    "computed again, reentrant": Scenario(again(reentrant=True), remembers=OF_LAYERS),
    "of four, by unit": Scenario(layers(), mesh=(1, 4), options={"message_bytes": 0}),
    "four replicas, by unit": Scenario(layers(), mesh=(4, 1), options={"message_bytes": 0}),
    "tied weights": Scenario(tied, next_token, 4, remembers=("body.weight", "embedding.weight")),
    "small matrices": Scenario(layers(), algorithm=PowerSGD(rank=64), remembers=()),
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
    "offloaded": offered(offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


@cases.each(
    SCENARIOS, slow=SCENARIOS.keys() - {"one message", "unit by unit", "other orders", "replaced"}
)
def test_blocks_are_averaged_as_the_simulator_says(world, scenario):
    mesh = mesh_of(*scenario.mesh)
    model, twin = (scenario.make(mesh["shard"]) for _ in range(2))
    handle = compress_replicas(model, scenario.algorithm, mesh["replicate"], **scenario.options)
    for each in (model, twin):
        scenario.prepare(each, world.rank)
    trace = train_sharded(model, scenario.loss, range(scenario.steps), twin)
    assert (
        simulated(world, scenario.algorithm, trace, scenario.mesh[1], used=scenario.used)
        < scenario.tolerance
    )
    for step, given in enumerate(trace.given):  # what nobody has used keeps its gradient None
        assert set(given) == {
            n for n in trace.local[step] if scenario.used is None or scenario.used(step, n)
        }
    memory = handle.rank_state_dict()["tensors"]
    assert tuple(sorted(memory)) == scenario.remembers
    assert {x.dtype for kept in memory.values() for x in kept.values()} <= {torch.float32}
    assert {g.dtype for g in trace.given[0].values()} == {
        p.dtype for p in model.parameters() if p.requires_grad
    }
    stats = handle.stats()
    assert stats.steps == scenario.steps
    assert scenario.remembers or stats.bytes_sent == stats.dense_bytes
    assert relative(trace.given[0], trace.local[0]) > 1e-3 or scenario.mesh[0] == 1
    assert world.agree(trace.weights)
    if scenario.algorithm == ALGORITHM and scenario.used is None:
        shapes = {n: tuple(x.shape) for n, x in local_parts(model).items()}
        wire_bytes = plan(shapes, ALGORITHM, world_size=scenario.mesh[0]).wire_bytes
        assert stats.bytes_sent == scenario.steps * wire_bytes < stats.dense_bytes
        assert handle.local_error_norm() > 0
    assert scenario.collectives is None or stats.collectives == scenario.collectives(world.rank)
    if scenario.plain:
        ours, theirs = scenario.make(mesh["shard"]), scenario.make(mesh)
        compress_replicas(ours, AllReduce(), mesh["replicate"])
        pairs = zip(*(train_sharded(m, LOSS, range(2)).given for m in (ours, theirs)), strict=True)
        # FSDP averages over replicas in `reduce_dtype`; here that is done in the dtype of the
        # parameters.
        near = 2e-2 if scenario is SCENARIOS["bfloat16 reduces"] else 1e-5
        assert all(relative(x, y) < near for x, y in pairs)


@cases.each(
    ["set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward", "whole"]
)
def test_of_micro_batches_the_last_one_sends(world, switch):
    """Modules may hold the whole parameters between the passes of a step."""
    mesh = mesh_of(2, 2)
    ours, theirs = sharded_mlp(WIDTHS, mesh["shard"]), sharded_mlp(WIDTHS, mesh)
    handle = compress_replicas(ours, AllReduce(), mesh["replicate"], message_bytes=0)
    for _ in range(2):
        for model in (ours, theirs):
            model.zero_grad()
            model.set_reshard_after_backward(switch != "whole")
            accumulated(
                model, world.rank, "set_requires_all_reduce" if switch == "whole" else switch
            )
            for module in (model, *model) if switch == "whole" else ():
                if isinstance(module, nn.Linear) or module is model:
                    module.reshard()
    require_same_gradients(ours, theirs)
    stats = handle.stats()
    assert stats.steps == 2
    assert stats.bytes_sent == stats.dense_bytes


@cases.case
def test_half_a_model_cannot_accumulate(world):
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    compress_replicas(model, AllReduce(), mesh["replicate"])
    model.set_requires_all_reduce(False, recurse=False)
    model[0].set_requires_all_reduce(False, recurse=False)
    with pytest.raises(RuntimeError, match=r"module '0'.*call it on the model itself"):
        LOSS(model, world.rank, 0).backward()


@cases.case
def test_torch_that_reduces_in_the_dtype_of_parameters_is_warned_of(world):
    """From torch 2.15 on; here as if it were."""
    mesh, bfloat16 = mesh_of(2, 2), torch.bfloat16
    for policy, wide in (
        (MixedPrecisionPolicy(param_dtype=bfloat16), True),
        (MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=bfloat16), False),
        (MixedPrecisionPolicy(), False),
    ):
        model = sharded_mlp(WIDTHS, mesh["shard"], mp_policy=policy)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            patch.setattr(units, "REDUCES_IN_OWN_DTYPE", True)
            compress_replicas(model, AllReduce(), mesh["replicate"])
        warned = [
            "reduce_dtype=None" in str(w.message) for w in seen if w.category is CompressionWarning
        ]
        assert warned == [True] * wide


class Chunked(nn.Module):
    """Whose last layer is called outside, on parts of what comes out, as large vocabularies are."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        fully_shard(self.body, mesh=mesh)
        fully_shard([self.norm, self.head], mesh=mesh)
        fully_shard(self, mesh=mesh)

    def forward(self, x, whole=False):
        x = self.norm(torch.tanh(self.body(x)))
        return self.head(x) if whole else x

    def loss(self, rank, step, chunks):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        if not chunks:
            return self(x, whole=True).square().mean()
        return sum(self.head(part).square().mean() for part in self(x).chunk(chunks))


@cases.case
def test_a_unit_whose_gradients_come_in_parts_waits_for_all_of_them(world):
    """FSDP reduces the last unit once for each part, since torch 2.13."""
    mesh = mesh_of(2, 2)
    ours, theirs, late = Chunked(mesh["shard"]), Chunked(mesh), Chunked(mesh["shard"])
    for model in (ours, late):
        compress_replicas(model, AllReduce(), mesh["replicate"], message_bytes=0)
    for step, chunks in enumerate((2, 2, 4)):
        for model in (ours, theirs):
            model.zero_grad()
            model.loss(world.rank, step, chunks).backward()
        require_same_gradients(ours, theirs)
    late.loss(world.rank, 0, 0).backward()
    if torch_is("2.13"):
        with pytest.raises(RuntimeError, match=r"module 'norm'.*call it equally often"):
            late.loss(world.rank, 1, 2).backward()
    else:
        for model in (late, theirs):
            model.zero_grad()
            model.loss(world.rank, 1, 2).backward()
        require_same_gradients(late, theirs)


#: Steps before the pass that fails, and whether forward passes go by a method of another name.
FAILED = {"by the model": (2, False), "by a method": (2, True), "by a method, first": (0, True)}


@cases.each(FAILED)
def test_after_a_failed_pass_training_goes_on(world, variant):
    steps, by_method = variant
    mesh = mesh_of(2, 2)
    model, twin = (sharded_mlp(WIDTHS, mesh["shard"]) for _ in range(2))
    handles = [
        compress_replicas(m, ALGORITHM, mesh["replicate"], message_bytes=0) for m in (model, twin)
    ]
    for m in (model, twin):
        m.run = m.forward
        register_fsdp_forward_method(m, "run")

    def loss(m, rank, step):
        return LOSS(m.run if by_method else m, rank, step)

    for m in (model, twin):
        train_sharded(m, loss, range(steps))

    def fail(_):
        raise ArithmeticError("on purpose")

    def interrupted(_, _inputs, output):
        output.register_hook(fail)  # by then the last layer has been handed over

    hook = model[2].register_forward_hook(interrupted)
    with pytest.raises(ArithmeticError):
        loss(model, world.rank, steps).backward()
    hook.remove()
    if not torch_is("2.13"):
        assert not hasattr(model, "reset_iter_state")  # without which FSDP itself does not go on
        return
    model.reset_iter_state()
    weights = [train_sharded(m, loss, range(steps, steps + 2)).weights for m in (model, twin)]
    assert relative(*weights) < 1e-5
    assert [h.stats().steps for h in handles] == [steps + 2] * 2


# --- one model, in shards ---


@cases.case
def test_a_gradient_is_clipped_by_the_norm_of_all_its_shards(world):
    mesh = mesh_of(2, 2)
    # so that nothing is compressed
    algorithm = PowerSGD(rank=2, max_norm=0.05, min_compression_rate=1000)
    model, twin = (sharded_mlp(WIDTHS, mesh["shard"]) for _ in range(2))
    with pytest.warns(CompressionWarning, match="compresses nothing"):
        compress_replicas(model, algorithm, mesh["replicate"])
    trace = train_sharded(model, LOSS, range(1), twin)
    norm = (
        torch.stack([p.grad.full_tensor().square().sum() for p in twin.parameters()]).sum().sqrt()
    )
    assert norm > 0.05
    replicas = world.everyones({n: g * (0.05 / norm) for n, g in trace.local[0].items()})[
        world.rank % 2 :: 2
    ]
    assert (
        relative(trace.given[0], {n: (replicas[0][n] + replicas[1][n]) / 2 for n in replicas[0]})
        < 1e-5
    )


@cases.case
def test_a_loss_scale_is_followed_and_a_step_that_overflows_is_skipped_everywhere(world):
    mesh = mesh_of(2, 2)
    found = []
    for scaled in (False, True):
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0, growth_interval=2)
        model = sharded_mlp(WIDTHS, mesh["shard"])
        handle = compress_replicas(model, HALF_STEPS, mesh["replicate"], grad_scaler=scaler)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            if step == 3 and not scaled:
                continue
            before, memory = local_parts(model), handle.rank_state_dict()
            optimizer.zero_grad()
            loss = LOSS(model, world.rank, step)
            # the first row of the first layer overflows on one rank, and is in the first shard
            if step == 3:
                row = torch.zeros(37)
                row[0] = torch.inf if world.rank == 2 else 1.0
                loss = loss + (model[0](torch.ones(3, 40)) * row).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            if step == 3:
                assert not local_parts(model, gradients=True)["2.weight"].isfinite().any()
                assert same_bits(local_parts(model), before)
                assert same_bits(handle.rank_state_dict() | {"step": 3}, memory)
            scaler.update()
        found.append(local_parts(model))
    assert scaler.get_scale() != 1024.0
    assert handle.stats().skipped_steps == 1
    assert relative(*found) < 1e-4


@dataclass(frozen=True)
class Own:
    """Averages, and asks for something of the whole model."""

    per_replica = frozenset()
    start_step = 0
    cycle = 1

    def init(self, ops, specs):
        return State()


@dataclass(frozen=True)
class NormOfLarge(Own):
    """Of the first shard's blocks, which have a row more."""

    late: bool = False

    async def step(self, ops, gradients, state, step):
        averages = {name: await mean(g) for name, g in gradients.items()}
        if self.late:
            await step_is_finite()
        if large := {name: g for name, g in gradients.items() if g.shape[0] == 8}:
            norm = await local_norm(ops, large)
            averages = {name: ops.cast(norm, ops.dtype_of(g)) + 0 * g for name, g in large.items()}
        if not self.late:
            await step_is_finite()
        return averages, state


@cases.case
def test_shards_may_differ_in_what_they_ask_of_the_whole_model(world):
    mesh = mesh_of(2, 2)
    model, twin, late = (shard(nn.Linear(16, 15, bias=False), mesh["shard"]) for _ in range(3))
    follow(twin, model)
    compress_replicas(model, NormOfLarge(), mesh["replicate"])
    for each in (model, twin):
        each(torch.ones(3, 16)).square().sum().backward()
    if world.rank % 2 == 0:
        mine = twin.weight.grad.to_local().norm()
        torch.testing.assert_close(model.weight.grad.to_local(), mine.expand(8, 16))
    compress_replicas(late, NormOfLarge(late=True), mesh["replicate"])
    asks = pytest.raises(RuntimeError, match="local_norm first")
    with nullcontext() if world.rank % 2 else asks:
        late(torch.ones(3, 16)).square().sum().backward()


@dataclass(frozen=True)
class Sums(Own):
    async def step(self, ops, gradients, state, step):
        total = await sum_scalar(ops.norm_of_all(tuple(gradients.values())))
        averages = {n: await mean(g) * ops.cast(total, g.dtype) for n, g in gradients.items()}
        return averages, state


@cases.case
def test_a_sum_over_the_whole_model_is_refused(world):
    mesh = mesh_of(2, 2)
    model = sharded_mlp(WIDTHS, mesh["shard"])
    with pytest.raises(ValueError, match=r"Sums.*sum_scalar"):
        compress_replicas(model, Sums(), mesh["replicate"])
    handle = compress_replicas(model, ALGORITHM, mesh["replicate"])
    with pytest.raises(ValueError, match=r"Sums.*sum_scalar"):
        handle.reconfigure(Sums())
    assert handle.algorithm == ALGORITHM


# --- what is left out, frozen, or not alone ---


@cases.case(slow=True)
def test_a_parameter_without_a_gradient_is_an_error(world):
    mesh = mesh_of(2, 2)
    model = branches(mesh["shard"])
    compress_replicas(model, ALGORITHM, mesh["replicate"])
    with pytest.raises(
        RuntimeError, match=r"'right.weight', 'right.bias'.*unused=True.*requires_grad=False"
    ):
        model(torch.ones(3, 40), ("left",)).sum().backward()


class Skipped(nn.Module):
    """A layer that may be left out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(40, 40)

    def forward(self, x, *, skip=False):
        return 2 * x if skip else self.layer(x)


@cases.case
def test_a_derivative_with_respect_to_inputs_is_no_step(world):
    """A backward pass is one, where it finds no trained parameter too."""
    mesh = mesh_of(2, 2)
    model = shard(Skipped(), mesh["shard"])
    handle = compress_replicas(model, AllReduce(), mesh["replicate"], unused=True)
    x = torch.ones(3, 40, requires_grad=True)
    for step in range(2):
        model.zero_grad()
        model(x, skip=world.rank // 2 == step).sum().backward()
        averages = local_parts(model, gradients=True)
        assert set(averages) == {"layer.weight", "layer.bias"}
        torch.autograd.grad(model(x).sum(), x)
        assert same_bits(local_parts(model, gradients=True), averages)
    assert handle.stats().steps == 2


class Pair(nn.Module):
    """Two layers of one unit, of which the second may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(40, 40, bias=False) for _ in range(2))
        self.whole = True

    def forward(self, x):
        return self.first(x) + (self.second(x) if self.whole else 0)


@cases.case
def test_a_part_of_a_unit_without_a_gradient_is_an_error(world):
    """Also where the unit is handed over before the end of the pass."""
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = nn.Sequential(*(fully_shard(Pair(), mesh=mesh["shard"]) for _ in range(3)))
    fully_shard(model, mesh=mesh["shard"])
    handle = compress_replicas(model, AllReduce(), mesh["replicate"], message_bytes=0)
    LOSS(model, world.rank, 0).backward()
    model.zero_grad()
    model[1].whole = False
    with pytest.raises(RuntimeError, match=r"'1.second.weight' have no gradient.*unused=True"):
        LOSS(model, world.rank, 1).backward()
    assert handle.stats().steps == 1


def assigned(model, mesh):
    replaced(model, 0)
    model.requires_grad_(requires_grad=True)


def added(model, mesh):
    model.append(fully_shard(nn.Linear(2, 2), mesh=mesh))


def another(model, mesh):
    model[2] = fully_shard(nn.Linear(37, 37), mesh=mesh)


def removed(model, mesh):
    model[2] = nn.Identity()


CHANGED = {
    "assigned": (assigned, False, r"'0.weight', '0.bias' have gradients that nobody averages"),
    "added": (added, False, r"'5.weight', '5.bias' have gradients that nobody averages"),
    "another": (another, True, r"'2.weight', '2.bias' have gradients that nobody averages"),
    "removed": (removed, False, r"'2.weight', '2.bias' have no gradient.*in model no more"),
}


@cases.each(CHANGED)
def test_parameters_that_are_not_those_averaged_are_an_error(world, variant):
    change, unused, message = variant
    mesh = mesh_of(2, 2)
    model = shard(mlp(40, 37, 37, 2, frozen=[0]), mesh["shard"])
    handle = compress_replicas(model, AllReduce(), mesh["replicate"], unused=unused)
    LOSS(model, world.rank, 0).backward()
    model.zero_grad()
    change(model, mesh["shard"])
    with pytest.raises(RuntimeError, match=rf"{message}.*handle.unregister\(\)"):
        LOSS(model, world.rank, 1).backward()
    model.zero_grad()
    handle.unregister()
    compress_replicas(model, AllReduce(), mesh["replicate"])
    averages = world.everyones(train_sharded(model, LOSS, range(2, 3)).given)
    assert same_bits(averages[0], averages[2])


@cases.case(slow=True)
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
        assert all(
            sorted(given) == [f"{n}.{p}" for n in trained for p in ("bias", "weight")]
            for given in trace.given
        )
    assert simulated(world, ALGORITHM, trace, 2) < 1e-4  # of the last layer nothing is compressed
    model.requires_grad_(requires_grad=True)
    thawed = train_sharded(model, LOSS, range(4, 6))
    assert len(thawed.given[0]) == 6
    assert world.agree(thawed.weights)


@cases.case(slow=True)
def test_layers_that_are_thawed_later_need_another_handle(world):
    """The first gives its place. After the last replicas average gradients as they are."""
    mesh = mesh_of(2, 2)
    model = shard(mlp(*WIDTHS, frozen=[0]), mesh["shard"])
    first = compress_replicas(model, ALGORITHM, mesh["replicate"])
    train_sharded(model, LOSS, range(2))
    memory = first.rank_state_dict()
    model[0].requires_grad_(requires_grad=True)
    with pytest.raises(RuntimeError, match=r"'0.weight', '0.bias'.*compress_replicas"):
        LOSS(model, world.rank, 2).backward()
    model.zero_grad()
    first.unregister()
    second = compress_replicas(model, ALGORITHM, mesh["replicate"])
    assert "'0.weight' only here" in str(second.load_state_dict(memory, strict=False))
    assert world.agree(train_sharded(model, LOSS, range(3, 5)).weights)
    memory = second.rank_state_dict()
    with second.discarded():
        LOSS(model, world.rank, 5).backward()
    assert same_bits(second.rank_state_dict(), memory)
    second.reconfigure(AllReduce())
    assert world.agree(train_sharded(model, LOSS, range(5, 6)).weights)
    assert (first.stats().steps, second.stats().steps) == (2, 5)
    second.unregister()
    plain = world.everyones(train_sharded(model, LOSS, range(6, 7)).given)
    assert same_bits(plain[0], plain[2])


#: Whether they are thawed before `unregister`, and whether tensors are replaced after it.
THAWED = {"before": (True, False), "after": (False, False), "after, assigned": (False, True)}


@cases.each(THAWED, slow=["after"])
def test_without_a_handle_layers_that_are_thawed_are_averaged_too(world, variant):
    """Thawed before `unregister`, or after it; then one more, which is no unit of the first."""
    before, assign = variant
    mesh = mesh_of(2, 2)
    ours, theirs = (shard(mlp(*WIDTHS, frozen=[0, 2]), axes) for axes in (mesh["shard"], mesh))
    handle = compress_replicas(ours, ALGORITHM, mesh["replicate"])
    LOSS(ours, world.rank, 0).backward()
    if not before:
        handle.unregister()
    for model in (ours, theirs) if assign else ():
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        replaced(model, world.rank)
        for name, p in model.named_parameters():
            p.requires_grad_(name in trained)
    for layer in (2, 0):
        for model in (ours, theirs):
            model[layer].requires_grad_(requires_grad=True)
        if before and layer == 2:
            handle.unregister()
        for step in range(2):
            for model in (ours, theirs):
                model.zero_grad()
                LOSS(model, world.rank, step).backward()
            require_same_gradients(ours, theirs)
            assert len(local_parts(ours, gradients=True)) == 6 - layer
