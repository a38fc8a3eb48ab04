"""A sharded optimizer does what the optimizer does, in as many bytes as one all-reduce, with 1/W of
the memory, and with what it goes together with: whole parameters, other hooks, clipping, loss
scales, master weights."""

import copy
import itertools
import math
import random
import time
from contextlib import contextmanager
from functools import cache
from unittest import mock

import ml_dtypes  # noqa: F401  (bfloat16 in NumPy)
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import Simulator, WireDtype, Zero, plan
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import Layers, loss_on
from tests.torch.ranks import Cases
from tests.torch.training import buckets_of, fit

pytestmark = pytest.mark.slow

cases = Cases(__file__, ranks=3)

LOSS = loss_on(6)
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
}
ADAMW, DEFAULTS = OPTIMIZERS["adamw"]
CAP = {"bucket_cap_mb": 0.0001}
#: The latter two step inside of DDP's hook.
FORMS = ("plain", "averaging", "overlapped", "interleaved")


class Model(nn.Module):
    """Odd sizes, a scalar, an empty parameter, a frozen one, one in another memory order, and a
    delay that differs between ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.out = nn.Linear(6, 13), nn.Linear(13, 7), nn.Linear(7, 3)
        self.conv = nn.Conv2d(1, 3, 2).to(memory_format=torch.channels_last)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        time.sleep(random.random() * 0.005 * (random.random() < 0.1))
        x = torch.tanh(self.first(x))
        image = self.conv(x[:, :12].reshape(-1, 1, 3, 4))[:, :, :, :2]
        x = torch.cat([x[:, :1], image.reshape(len(x), -1)], dim=1)
        return self.out(torch.tanh(self.second(x)) * self.scale) + self.empty.sum() + self.frozen


def groups(model):
    """Named, in two groups: no decay for vectors and scalars."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim <= 1], "weight_decay": 0.0},
    ]


def plain_groups(model):
    return [{**g, "params": [p for _, p in g["params"]]} for g in groups(model)]


def run(rank, model, optimizer, steps, loss=LOSS):
    """With a schedule that moves at every step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(step / 10)
    )
    for step in range(steps):
        fit(model, optimizer, rank, [step], loss)
        schedule.step()


def sharded(world, form, of, *, model=None, hook=gw.allreduce_hook, state=None, **options):
    """A model and its sharded optimizer in one of the forms."""
    model, (optimizer_class, defaults) = model or Model(), of
    options |= {"process_group": world.group, "average_gradients": form == "averaging"} | CAP
    zero = gw.ZeroOptimizer(groups(model), optimizer_class, **options, **defaults)
    if form == "averaging":
        return model, zero
    wrapper = DistributedDataParallel(model, process_group=world.group, **CAP)
    if form != "plain":
        step_hook = (
            gw.hook_with_zero_step if form == "overlapped" else gw.hook_with_zero_step_interleaved
        )
        hook = step_hook(hook, wrapper, zero, options.get("shard") == "bucket")
    wrapper.register_comm_hook(state or world.group, hook)
    return wrapper, zero


#: group → state, hook.
HOOKS = {
    "powersgd": lambda group: (
        gw.PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=0.5),
        gw.powerSGD_hook,
    ),
    "bf16": lambda group: (group, gw.bf16_compress_hook),
    "torch's fp16": lambda group: (group, default_hooks.fp16_compress_hook),
}


@cache
def plainly(optimizer, hook):
    """The weights after DDP, with one of the `HOOKS`, and the plain optimizer: many cases compare
    with them."""
    model, (optimizer_class, defaults) = Model(), OPTIMIZERS[optimizer]
    ddp = DistributedDataParallel(model, **CAP)
    if hook:
        ddp.register_comm_hook(*HOOKS[hook](None))
    run(dist.get_rank(), ddp, optimizer_class(plain_groups(model), **defaults), 10)
    assert buckets_of(ddp) > 3
    return weights(model)


#: Optimizer, form, hook, whose, and the dtype on the wire. SGD's and AdamW's state by element, in
#: every form, tests/parity holds against float64.
RUNS = {
    f"{shard} {form}": ("adamw", form, None, shard, None)
    for shard in ("parameter", "bucket")
    for form in FORMS
}
RUNS |= {
    f"{hook} {form}": ("adamw", form, hook, "element", None) for hook in HOOKS for form in FORMS[2:]
}
RUNS |= {
    "in codes": ("sgd", FORMS[3], None, "element", "int8"),
    "adagrad": ("adagrad", FORMS[3], None, "element", None),
}


@cases.each(RUNS)
def test_equals_ddp_with_the_plain_optimizer(world, variant):
    optimizer, form, hook, shard, wire_dtype = variant
    state, function = HOOKS[hook](world.group) if hook else (None, gw.allreduce_hook)
    reference, model = plainly(optimizer, hook), Model()
    assert relative(reference, weights(model)) > 0.05
    options = {"hook": function, "state": state, "shard": shard, "wire_dtype": wire_dtype}
    wrapper, zero = sharded(world, form, OPTIMIZERS[optimizer], model=model, **options)
    run(world.rank, wrapper, zero, 10)
    assert world.agree(weights(model))
    least, most = (1e-4, 0.02) if wire_dtype else (0, 1e-6)
    assert least <= relative(weights(model), reference) < most
    assert hook != "powersgd" or state.compression_stats()[0] > 1.3
    owned = itertools.chain(*world.everyones(list(zero.rank_state_dict()["tensors"])))
    trained = [n for n, p in Model().named_parameters() if p.requires_grad and p.numel()]
    assert shard == "element" or sorted(owned) == sorted(trained)


@contextmanager
def sent_to_others():
    """A list of one number, the bytes that this rank has sent."""
    messages, chain, sent = Exchange._messages, Exchange._chain, [0]

    def counting(self, given, received):
        sent[0] += sum(x.nbytes for x in given.values())
        return messages(self, given, received)

    def handing_on(self, vector, first, change=None):
        sent[0] += vector.nbytes if (self.rank - first) % self.size < self.size - 1 else 0
        return chain(self, vector, first, change)

    with (
        mock.patch.object(Exchange, "_messages", counting),
        mock.patch.object(Exchange, "_chain", handing_on),
    ):
        yield sent


WIRE = {"int8": "element", "e3m0": "parameter", "bfloat16": "element"}
CODED = {"w": (40, 120), "b": (7,), "v": (120, 3)}


@cases.each({dtype: (dtype, shard) for dtype, shard in WIRE.items()})
def test_gradients_travel_in_codes(world, variant):
    """From zero, a step of gradient descent is the average: the simulator's, in the bytes of the
    plan, which are those that leave this rank."""
    dtype, shard = variant
    given = [
        {n: np.random.default_rng([r, *n.encode()]).normal(size=s) for n, s in CODED.items()}
        for r in range(3)
    ]
    model = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(shape)) for name, shape in CODED.items()}
    )
    options = {
        "process_group": world.group,
        "average_gradients": True,
        "wire_dtype": dtype,
        "shard": shard,
    }
    zero = gw.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, **options, lr=1.0)
    for name, p in model.items():
        p.grad = torch.tensor(given[world.rank][name], dtype=torch.float32)
    with sent_to_others() as to_others:
        zero.step()
    assert world.agree(weights(model))
    algorithm, shapes = (
        WireDtype(Zero(zero.shards), dtype),
        {n: CODED[n] for n in reversed(dict(model.named_parameters()))},
    )
    simulator = Simulator(
        algorithm, shapes, 3, dtype="float32", optimizer=lambda replica, pieces: pieces
    )
    right = simulator.step([{n: g[n] for n in shapes} for g in given])
    assert relative({n: -p.detach() for n, p in model.items()}, right) < 1e-6
    plain = {n: np.mean([np.float32(g[n]) for g in given], axis=0) for n in CODED}
    assert relative(right, plain) > 1e-3
    planned = plan(shapes, algorithm).wire_bytes
    assert (
        zero.stats().bytes_sent
        == simulator.traffic.nbytes
        == planned
        < (0.5 + 0.26) * zero.stats().dense_bytes
    )
    assert sum(world.everyones(to_others[0])) == pytest.approx(2 * 2 * planned, rel=1e-3)
    assert shard != "element" or to_others[0] == pytest.approx(2 * 2 / 3 * planned, rel=1e-3)


#: Form, norm, and the dtype that gradients travel in.
SCALED = {
    "plain clipped": ("plain", 0.3, None),
    "overlapped clipped": ("overlapped", 0.3, None),
    "overlapped, in codes": ("overlapped", None, "int8"),
}


@cases.each(SCALED)
def test_a_step_with_an_inf_is_skipped_on_all_ranks(world, variant):
    """A loss scale; at step 5 the last rank's loss is infinite."""
    form, clip, wire_dtype = variant

    def train(model, optimizer, scaler, clip_here):
        wrapper = DistributedDataParallel(model, process_group=world.group, **CAP)
        if clip_here is None and form == "overlapped":
            hook = gw.hook_with_zero_step(gw.allreduce_hook, wrapper, optimizer, grad_scaler=scaler)
            wrapper.register_comm_hook(world.group, hook)
        for step in range(12):
            optimizer.zero_grad()
            loss = LOSS(wrapper, world.rank, step)
            bad = (step, world.rank) == (5, world.size - 1)
            scaler.scale(loss * float("inf") if bad else loss).backward()
            if clip_here:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip_here)
            scaler.step(optimizer)
            scaler.update()
        return weights(model), scaler.get_scale()

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    twin, model = Model(), Model()
    reference, scale = train(twin, ADAMW(plain_groups(twin), **DEFAULTS), scaler(), clip or 0)
    options = {"process_group": world.group, "max_grad_norm": clip, "wire_dtype": wire_dtype} | CAP
    zero = gw.ZeroOptimizer(groups(model), ADAMW, **options, **DEFAULTS)
    found, own_scale = train(model, zero, scaler(), None)
    assert relative(found, reference) < (0.02 if wire_dtype else 3e-6)
    assert own_scale == scale
    assert world.agree(found)
    assert {float(m["step"]) for m in zero.optimizer.state.values()} <= {11.0}
    assert zero.stats().skipped_steps == (1 if form == "overlapped" else 0)


class Fails(torch.optim.AdamW):
    fails = False

    def step(self, closure=None):
        if Fails.fails:
            raise MemoryError("of the optimizer")
        return super().step(closure)


@cases.each(["overlapped", "interleaved"])
def test_an_optimizer_that_raises_in_the_hook_ends_its_pass_alone(world, form):
    """And not with an assertion of DDP's in the next one."""
    for hook in (gw.allreduce_hook, gw.bf16_compress_hook):
        wrapper, zero = sharded(world, form, (Fails, DEFAULTS), hook=hook)
        run(world.rank, wrapper, zero, 2)
        before, Fails.fails = weights(wrapper.module), True
        with pytest.raises(MemoryError, match="of the optimizer"):
            LOSS(wrapper, world.rank, 2).backward()
        Fails.fails = False
        zero.zero_grad()
        assert same_bits(weights(wrapper.module), before)
        run(world.rank, wrapper, zero, 2)
        assert not same_bits(weights(wrapper.module), before)
        assert world.agree(weights(wrapper.module))


@cases.case
def test_a_layer_that_is_frozen_later_stays_as_it_is(world):
    """Where this optimizer averages, also against its momentum and weight decay."""
    model, zero = sharded(world, "averaging", OPTIMIZERS["adamw"])
    run(world.rank, model, zero, 2)
    zero.zero_grad()
    model.second.requires_grad_(False)
    before, others = weights(model.second), weights(model.first)
    run(world.rank, model, zero, 2)
    assert same_bits(weights(model.second), before)
    assert not same_bits(weights(model.first), others)
    assert world.agree(weights(model))


@cases.case
def test_master_shards(world):
    """bfloat16 weights: float32 master shards against a float32 master copy kept by hand."""
    loss = loss_on(6, dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 3)).to(torch.bfloat16)
    twin = copy.deepcopy(model)
    ddp, wrapper = (
        DistributedDataParallel(each, process_group=world.group) for each in (twin, model)
    )
    masters = [p.detach().float().requires_grad_() for p in twin.parameters()]
    adam = torch.optim.Adam(masters, lr=1e-3)
    for step in range(12):
        ddp.zero_grad()
        loss(ddp, world.rank, step).backward()
        for m, p in zip(masters, twin.parameters(), strict=True):
            m.grad = p.grad.float()
        adam.step()
        with torch.no_grad():
            for m, p in zip(masters, twin.parameters(), strict=True):
                p.copy_(m)
    options = {"process_group": world.group, "master_dtype": torch.float32, "lr": 1e-3}
    zero = gw.ZeroOptimizer(model.named_parameters(), torch.optim.Adam, **options)
    wrapper.register_comm_hook(world.group, gw.allreduce_hook)
    fit(wrapper, zero, world.rank, range(12), loss)
    assert {x.dtype for m in zero.optimizer.state.values() for x in m.values()} == {torch.float32}
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    # bfloat16 has 8 bits: a weight that fell on the other side of a rounding boundary now and then
    assert relative(weights(model), weights(twin)) < 2e-3


def needs_old_weights():
    """The last weight's gradient is complete long before its value has been used for the last
    time."""

    def forward(self, x):
        x = self.layers[0](x) * self.last[0].detach()
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x * self.last[0]

    # a module of its own: so it comes last, and its bucket first
    last = nn.ParameterList([torch.ones(6)])
    return Layers(forward, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(5)), last=last)


@cases.each(FORMS[2:])
def test_a_weight_that_is_needed_after_its_update_is_noticed(world, form):
    options = {"model": needs_old_weights(), "shard": "parameter"}
    model, _ = sharded(world, form, (torch.optim.SGD, {"lr": 0.1}), **options)
    heard = said(
        lambda: [LOSS(model, world.rank, step).backward() for step in range(3)]
    )  # DDP makes its buckets after the first
    assert ("modified by an inplace" in heard) == (form == "interleaved")
    assert not heard or form == "interleaved"


@pytest.mark.parametrize(
    ("config", "device", "native"),
    [
        ("cuda:nccl", "cuda:1", True),
        # of `init_process_group()`, too, whose backend is called "undefined"
        ("cpu:gloo,cuda:nccl", "cuda:0", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:gloo", "cuda:0", False),
        ("cpu:gloo", "cpu", False),
    ],
)
def test_nccl_is_known_by_what_it_serves(alone, monkeypatch, config, device, native):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert Exchange(alone, torch.device(device)).native is native
