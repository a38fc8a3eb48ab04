"""What a sharded optimizer goes together with: whole parameters, other hooks, clipping, loss scales, master weights."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.torch_backend import (
    PowerSGDState,
    ZeroOptimizer,
    allreduce_hook,
    bf16_compress_hook,
    hook_with_zero_step,
    powerSGD_hook,
)
from gradwire.torch_backend.exchange import Exchange
from tests.torch.ranks import Cases
from tests.torch.training import loss_on, relative, same_bits
from tests.torch.zero_training import FORMS, LOSS, OPTIMIZERS, Model, groups, plain_groups, run, sharded, wrapped

cases = Cases(__file__, ranks=3)
results = cases.fixture()

WHOLE = {f"{shard} {form}": (shard, form) for shard in ("parameter", "bucket") for form in FORMS}


@cases.each(WHOLE)
def whole_parameters(world, variant):
    shard, form = variant
    optimizer_class, defaults = OPTIMIZERS["adamw"]
    ddp = wrapped(world, Model())
    reference = run(world, ddp, optimizer_class(plain_groups(ddp.module), **defaults), steps=10)
    model, zero = sharded(world, form, optimizer_class, defaults, shard=shard)
    weights = run(world, model, zero, steps=10)
    return list(reference.values()), list(weights.values()), sorted(zero.rank_state_dict()["tensors"])


@pytest.mark.parametrize("variant", WHOLE)
def test_whole_parameters(results, variant):
    ranks = results(f"whole_parameters[{variant}]")
    owned = [name for _, _, names in ranks for name in names]
    assert sorted(owned) == sorted(n for n, p in Model().named_parameters() if p.requires_grad and p.numel())
    for reference, weights, _ in ranks:
        assert relative(dict(enumerate(weights)), dict(enumerate(reference))) < 1e-6
        assert same_bits(weights, ranks[0][1])


@cases.case
def muon(world):
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
    twin = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
    twin.load_state_dict(model.state_dict())
    ddp = wrapped(world, twin)
    reference = run(world, ddp, torch.optim.Muon(twin.parameters(), lr=0.01), steps=5)
    wrapper = wrapped(world, model)
    zero = ZeroOptimizer(
        model.named_parameters(), torch.optim.Muon, shard="parameter", process_group=world.group, lr=0.01
    )
    wrapper.register_comm_hook(world.group, hook_with_zero_step(allreduce_hook, wrapper, zero))
    return reference, run(world, wrapper, zero, steps=5)


def test_an_optimizer_that_needs_matrices(results):
    for reference, weights in results("muon"):
        assert relative(weights, reference) < 1e-5


INNER = {
    f"{name} {form}": (name, form)
    for name in ("powersgd", "bf16", "torch's fp16")
    for form in FORMS
    if form != "averaging"
}


@cases.each(INNER)
def inner_hooks(world, variant):
    name, form = variant

    def hook_and_state():
        if name == "powersgd":
            return powerSGD_hook, PowerSGDState(world.group, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
        if name == "bf16":
            return bf16_compress_hook, world.group
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        return fp16_compress_hook, world.group

    optimizer_class, defaults = OPTIMIZERS["adamw"]
    hook, state = hook_and_state()
    ddp = wrapped(world, Model())
    ddp.register_comm_hook(state, hook)
    reference = run(world, ddp, optimizer_class(plain_groups(ddp.module), **defaults), steps=8)
    hook, state = hook_and_state()
    model, zero = sharded(world, form, optimizer_class, defaults, hook=hook, state=state)
    weights = run(world, model, zero, steps=8)
    return reference, weights, getattr(state, "compression_stats", lambda: None)()


@pytest.mark.parametrize("variant", INNER)
def test_any_hook_may_average(results, variant):
    for reference, weights, compression in results(f"inner_hooks[{variant}]"):
        assert relative(weights, reference) < 1e-6
        assert compression is None or compression[0] > 1.3


SCALED = {
    f"{form}{' clipped' if clip else ''}": (form, clip) for form in ("plain", "overlapped") for clip in (None, 0.3)
}


@cases.each(SCALED)
def scaled(world, variant):
    """A loss scale; at step 5 the last rank's loss is infinite."""
    form, clip = variant

    def train(model, optimizer, scaler, clip_here):
        skipped = []
        for step in range(12):
            optimizer.zero_grad()
            loss = LOSS(model, world.rank, step)
            if step == 5 and world.rank == world.size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clip_here is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_here)
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            skipped.append(same_bits(before, [p.detach() for p in model.parameters()]))
        return [p.detach().clone() for p in model.parameters()], scaler.get_scale()

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    optimizer_class, defaults = OPTIMIZERS["adamw"]
    ddp = wrapped(world, Model())
    reference = train(ddp, optimizer_class(plain_groups(ddp.module), **defaults), scaler(), clip)
    mine = scaler()
    model = Model()
    wrapper = wrapped(world, model)
    zero = ZeroOptimizer(
        groups(model), optimizer_class, process_group=world.group, max_grad_norm=clip, bucket_cap_mb=0.0001, **defaults
    )
    if form == "overlapped":
        wrapper.register_comm_hook(world.group, hook_with_zero_step(allreduce_hook, wrapper, zero, grad_scaler=mine))
    got = train(wrapper, zero, mine, None)
    steps = {float(m["step"]) for m in zero.optimizer.state.values()}
    return reference, got, steps, zero.stats().skipped_steps


@pytest.mark.parametrize("variant", SCALED)
def test_a_step_with_an_inf_is_skipped_on_all_ranks(results, variant):
    ranks = results(f"scaled[{variant}]")
    for reference, (weights, scale), steps, skipped in ranks:
        assert relative(dict(enumerate(weights)), dict(enumerate(reference[0]))) < 3e-6
        assert scale == reference[1]
        assert same_bits(weights, ranks[0][1][0])
        assert steps <= {11.0}
        assert skipped == (1 if "overlapped" in variant else 0)


@cases.case
def master(world):
    """bfloat16 weights: float32 master shards against a float32 master copy kept by hand."""
    steps, lr = 30, 1e-3
    loss = loss_on(6, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 3)).to(torch.bfloat16)
    twin = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 3)).to(torch.bfloat16)
    twin.load_state_dict(model.state_dict())
    ddp = wrapped(world, twin)
    masters = [p.detach().float().requires_grad_() for p in twin.parameters()]
    adam = torch.optim.Adam(masters, lr=lr)
    for step in range(steps):
        ddp.zero_grad()
        loss(ddp, world.rank, step).backward()
        for m, p in zip(masters, twin.parameters(), strict=True):
            m.grad = p.grad.float()
        adam.step()
        with torch.no_grad():
            for m, p in zip(masters, twin.parameters(), strict=True):
                p.copy_(m)
    wrapper = wrapped(world, model)
    zero = ZeroOptimizer(
        model.named_parameters(), torch.optim.Adam, process_group=world.group, master_dtype=torch.float32, lr=lr
    )
    wrapper.register_comm_hook(world.group, allreduce_hook)
    for step in range(steps):
        zero.zero_grad()
        loss(wrapper, world.rank, step).backward()
        zero.step()
    dtypes = {x.dtype for m in zero.optimizer.state.values() for x in m.values()}
    return [p.detach() for p in twin.parameters()], [p.detach() for p in model.parameters()], dtypes


def test_master_shards(results):
    for reference, weights, dtypes in results("master"):
        assert dtypes == {torch.float32}
        assert all(w.dtype == torch.bfloat16 for w in weights)
        # bfloat16 has 8 bits: a weight that fell on the other side of a rounding boundary now and then
        assert relative(dict(enumerate(weights)), dict(enumerate(reference))) < 2e-3


class NeedsOldWeights(nn.Module):
    """The last weight's gradient is complete long before its value has been used for the last time."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.last = nn.ParameterList([torch.ones(6)])  # a module of its own: so it comes last, and its bucket first

    def forward(self, x):
        x = self.layers[0](x) * self.last[0].detach()
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x * self.last[0]


@cases.case
def needs_old_weights(world):
    errors = {}
    for form in ("overlapped", "interleaved"):
        model, _ = sharded(world, form, torch.optim.SGD, {"lr": 0.1}, model=NeedsOldWeights(), shard="parameter")
        errors[form] = ""
        try:
            for step in range(3):  # DDP makes its buckets after the first
                LOSS(model, world.rank, step).backward()
        except RuntimeError as error:
            errors[form] = str(error)
    return errors


def test_a_weight_that_is_needed_after_its_update_is_noticed(results):
    for errors in results("needs_old_weights"):
        assert errors["overlapped"] == ""
        assert "modified by an inplace operation" in errors["interleaved"]


@pytest.mark.parametrize(
    ("config", "device", "native"),
    [
        ("cuda:nccl", "cuda:1", True),
        ("cpu:gloo,cuda:nccl", "cuda:0", True),  # of `init_process_group()`, too, whose backend is called "undefined"
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:gloo", "cuda:0", False),
        ("cpu:gloo", "cpu", False),
    ],
)
def test_nccl_is_known_by_what_it_serves(alone, monkeypatch, config, device, native):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert Exchange(alone, torch.device(device)).native is native


if __name__ == "__main__":
    cases.main()
