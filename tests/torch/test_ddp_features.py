"""Everything that DDP can do to gradients: `AllReduce` by hook and `DataParallel` equal plain DDP
bit for bit, and PowerSGD equals the simulator; and what `DataParallel` can besides."""

import copy
import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, plan
from gradwire.torch_backend import DataParallel
from tests.torch.compare import gradients, relative, same_bits, weights
from tests.torch.models import Branches, Checkpointed, Layers, Loss, branching_loss, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import (
    Trace,
    collective_payloads,
    distance,
    fit,
    hooked,
    paralleled,
    sgd,
    train,
)

pytestmark = pytest.mark.usefixtures("alone")

cases = Cases(__file__, ranks=3)

ALGORITHM = PowerSGD(rank=2)


#: Two micro-batches a step, of which the first is accumulated: a branch may be taken in that one
#: only.
TAKEN = [
    *((("left", "right"), ("left", "right")), (("left", "right"), ("left", "right"))),
    *((("left",), ()), ((), ())),
    *(((), ("right",)), ((), ())),
    *(((), ()), ((), ())),
    *(((), ("left",)), (("right",), ("left", "right"))),
]


def any_rank_takes(step: int, parameter: str) -> bool:
    """In any of the micro-batches of a step."""
    branch = parameter.split(".")[0]
    return branch == "trunk" or any(
        branch in one for one in itertools.chain(*TAKEN[2 * step : 2 * step + 2])
    )


def odd():
    """Parameters without dimensions and without elements, a weight that comes twice, weights that
    lie in memory channel by channel and column by column."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 24, 3),
        nn.Tanh(),
        nn.Flatten(1),
        nn.Linear(96, 40),
    ).to(memory_format=torch.channels_last)
    parts = {
        "scale": torch.tensor(1.5),
        "shift": torch.tensor(-0.5),
        **{
            "nothing": torch.empty(0),
            "no_rows": torch.empty(0, 4),
            "no_columns": torch.empty(4, 0),
        },
        "weight": torch.randn(32, 40).t() / 6,
    }
    first, second = nn.Linear(40, 40), nn.Linear(40, 40)
    second.weight = first.weight
    assert not body[2].weight.is_contiguous()

    def forward(self, x):
        y = self.body(x.view(-1, 4, 4, 4).contiguous(memory_format=torch.channels_last))
        y = self.second(torch.tanh(self.first(torch.tanh(y)))) @ self.weight
        return (
            y * self.scale
            + self.shift
            + self.nothing.sum()
            + self.no_rows.sum()
            + self.no_columns.sum()
        )

    parameters = {name: nn.Parameter(x) for name, x in parts.items()}
    return Layers(forward, **parameters, body=body, first=first, second=second)


def mixed(third=torch.bfloat16):
    """Layers of three dtypes."""
    layers = mlp(40, 36, 32, 28, 24)
    layers = nn.ModuleList([layers[0], layers[2].double(), layers[4].to(third), layers[6]])

    def forward(self, x):
        return functools.reduce(
            lambda x, layer: torch.tanh(layer(x.to(layer.weight.dtype))), self.layers, x
        )

    return Layers(forward, layers=layers)


def of_two_dtypes():
    return mixed(torch.float32)


def model_of(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: mlp(40, 36, 32, 28).to(dtype)


@dataclass
class Scenario:
    """A model, what is done to it, and how near float64 its arithmetic comes, for how many steps.

    In the half precisions what error feedback carries on is itself rounded, and after some steps
    rounding is all that is compared. In a step four roundings, each by half an epsilon at most,
    follow one another (the input, P, Q, and what is given back): two epsilon.
    """

    model: Callable[[], nn.Module]
    loss: Loss = field(default_factory=lambda: loss_on(40))
    ddp: dict[str, Any] = field(default_factory=dict)
    cap: float = 0.006
    steps: int = 5
    micro_batches: int = 1
    tolerance: float = 1e-4
    compared: int | None = None
    compresses: bool = True
    used: Callable[[int, str], bool] | None = None
    exact: bool = True


HALF = {
    torch.bfloat16: 2 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 2 * torch.finfo(torch.float16).eps,
}
UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
SCENARIOS = {
    "find_unused_parameters and no_sync": Scenario(
        Branches,
        lambda model, rank, step: branching_loss(model, rank % 2, step, TAKEN),
        UNUSED,
        micro_batches=2,
        used=any_rank_takes,
    ),
    "no_sync and gradient_as_bucket_view": Scenario(
        model_of(torch.float32), loss_on(40, 6), VIEWS, micro_batches=4
    ),
    "one bucket": Scenario(model_of(torch.float32), cap=25),
    "a bucket each": Scenario(model_of(torch.float32), cap=1e-6),
    "float64": Scenario(model_of(torch.float64), loss_on(40, dtype=torch.float64), tolerance=1e-12),
    **{
        str(dtype).removeprefix("torch."): Scenario(
            model_of(dtype), loss_on(40, dtype=dtype, spread=1.0), tolerance=tolerance, compared=2
        )
        for dtype, tolerance in HALF.items()
    },
    "several dtypes": Scenario(
        mixed, loss_on(40, spread=1.0), tolerance=HALF[torch.bfloat16], compared=2
    ),
    "two dtypes and static_graph": Scenario(
        of_two_dtypes, loss_on(40, spread=1.0), {"static_graph": True}, exact=False
    ),
    "odd": Scenario(odd, loss_on(64), VIEWS, exact=False),
    "nothing to compress": Scenario(lambda: mlp(5, 4, 3), loss_on(5), compresses=False),
    "reentrant checkpoint and static_graph": Scenario(
        lambda: Checkpointed(reentrant=True), loss_on(64), {"static_graph": True}, exact=False
    ),
    "checkpoints of a layer that comes twice": Scenario(
        lambda: Checkpointed(reentrant=False, shared=True), loss_on(64)
    ),
}


def buckets_of_ddp(ddp, loss, rank):
    """What a communication hook is shown in the next step."""
    names = {p: n for n, p in ddp.module.named_parameters()}
    seen = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append([names[p] for p in bucket.parameters()])
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    loss(ddp, rank, 0).backward()
    return seen


#: Groups of a few buckets each, so that groups of one step have to be kept apart; or a bucket each,
#: as in DDP. What was sent is looked at of the last.
WRAPPED = {
    "plain": (hooked, None, 0),
    "DataParallel": (paralleled, AllReduce(), 0),
    "all-reduce": (hooked, AllReduce(), 0),
    "PowerSGD": (hooked, ALGORITHM, 1200),
}


@cases.each(SCENARIOS)
def test_all_reduce_equals_plain_ddp_and_power_sgd_the_simulator(world, scenario):
    """Of `DataParallel` the buckets and the keys of the state too."""
    traces, wrapped = {}, {}
    for how, (wrap, algorithm, message_bytes) in WRAPPED.items():
        options = {
            name: x for name, x in scenario.ddp.items() if how != "DataParallel" or name in UNUSED
        }
        options |= {"cap": scenario.cap, "message_bytes": message_bytes}
        wrapped[how], handle = wrap(scenario.model(), algorithm, world.group, **options)
        with collective_payloads() as sent:
            traces[how] = train(
                wrapped[how],
                scenario.loss,
                scenario.steps,
                micro_batches=scenario.micro_batches,
                local=how == "PowerSGD",
            )
        assert all(
            p.grad is None or p.grad.stride() == p.stride() for p in wrapped[how].parameters()
        )
    for how in ("all-reduce", "DataParallel"):
        pairs = zip(traces[how].given, traces["plain"].given, strict=True)
        if scenario.exact:
            assert all(same_bits(*pair) for pair in pairs)
            assert same_bits(wrapped[how].state_dict(), wrapped["plain"].state_dict())
        else:  # three numbers are added up in another order: in messages that are not DDP's
            assert max(relative(*pair) for pair in pairs) < 1e-5
        assert list(wrapped[how].state_dict()) == list(wrapped["plain"].state_dict())
    buckets = wrapped["DataParallel"].buckets()
    if scenario.model not in (
        mixed,
        of_two_dtypes,
    ):  # some are left over, which DDP orders by a hash
        assert buckets == buckets_of_ddp(wrapped["plain"], scenario.loss, world.rank)
    if scenario.cap != SCENARIOS["float64"].cap:
        assert len(buckets) == (1 if scenario.cap > 1 else len(list(wrapped["plain"].parameters())))
    trace, stats = traces["PowerSGD"], handle.stats()
    assert (
        distance(ALGORITHM, world.everyones(trace), scenario.compared, used=scenario.used)
        < scenario.tolerance
    )
    assert world.agree(trace.weights)
    assert all(w.isfinite().all() for w in trace.weights.values())
    assert (stats.steps, stats.skipped_steps) == (scenario.steps, 0)
    nbytes = sum(p.nbytes for p in sent)
    assert world.agree(nbytes)
    assert nbytes == stats.bytes_sent
    assert nbytes < stats.dense_bytes / 2 if scenario.compresses else nbytes == stats.dense_bytes
    if scenario.used is any_rank_takes:  # what no rank uses stays None
        assert {n.split(".")[0] for n, g in trace.given[3].items() if g is None} == {
            "left",
            "right",
        }


@cases.case
def test_join_with_uneven_inputs_equals_plain_ddp_and_the_simulator(world):
    """Rank 0 runs out of data after 3 steps, the others go on to 7."""
    traces = {}
    for how, algorithm in {"plain": None, "all-reduce": AllReduce(), "PowerSGD": ALGORITHM}.items():
        ddp, handle = hooked(mlp(40, 36, 32, 28), algorithm, world.group, message_bytes=0)
        with ddp.join():
            traces[how] = train(ddp, loss_on(40), 3 if world.rank == 0 else 7)
        traces[how].weights = weights(ddp.module)
    assert same_bits(traces["all-reduce"].weights, traces["plain"].weights)
    assert same_bits(traces["all-reduce"].given, traces["plain"].given)
    assert world.agree(traces["PowerSGD"].weights)
    assert handle.stats().steps == 7
    first, *others = world.everyones(traces["PowerSGD"])
    first.local += [{n: torch.zeros_like(g) for n, g in first.local[0].items()}] * 4
    first.given = others[0].given
    assert distance(ALGORITHM, [first, *others]) < 1e-5


@cases.case
def test_a_layer_frozen_after_wrapping_keeps_its_weights_and_memory_and_trains_again(world):
    """The second layer takes part in steps 0 to 2 and 6 to 8, and is frozen in between."""
    ddp, handle = hooked(mlp(40, 36, 32, 28), ALGORITHM, world.group, find_unused_parameters=True)
    whole, found = Trace(), []
    for steps in (range(3), range(3, 6), range(6, 9)):
        ddp.module[2].requires_grad_(steps.start != 3)
        trace = train(ddp, loss_on(40), steps)
        found.append((trace.weights, handle.rank_state_dict()["tensors"]["2.weight"]))
        ddp.module[2].zero_grad()
        whole.local += trace.local
        whole.given += trace.given
    (before, memory), (meanwhile, memory_then), (after, memory_after) = found
    assert same_bits(meanwhile["2.weight"], before["2.weight"])
    assert same_bits(memory_then, memory)
    assert not same_bits(meanwhile["0.weight"], before["0.weight"])
    assert not same_bits(after["2.weight"], before["2.weight"])
    assert not same_bits(memory_after, memory)
    assert world.agree(after)
    used = lambda step, n: n[0] != "2" or step not in (3, 4, 5)  # noqa: E731
    assert distance(ALGORITHM, world.everyones(whole), used=used) < 1e-4


@cases.case
def test_parameters_that_ddp_leaves_alone_have_no_memory_and_are_not_sent(world):
    """Those that it was told to, and those that were frozen before the model was wrapped."""
    model = mlp(40, 36, 32, 28)
    model[4].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    ddp, handle = hooked(model, ALGORITHM, world.group)
    trace = train(ddp, loss_on(40), 3)
    averaged = {
        n: tuple(p.shape)
        for n, p in model.named_parameters()
        if n in ("0.bias", "2.weight", "2.bias")
    }
    assert list(handle.rank_state_dict()["tensors"]) == ["2.weight"]
    assert handle.stats().bytes_sent == 3 * plan(averaged, ALGORITHM).wire_bytes
    assert same_bits(trace.given[0]["0.weight"], trace.local[0]["0.weight"])


def test_memory_in_bfloat16_goes_on_bit_for_bit(alone):
    runs = [
        hooked(mlp(48, 40, 32), PowerSGD(rank=2, state_dtype="bfloat16"), alone) for _ in range(2)
    ]
    (whole, handle), (resumed, other) = runs
    fit(whole, sgd(whole), 0, range(3), loss_on(48))
    resumed.module.load_state_dict(whole.module.state_dict())
    other.load_state_dict(handle.rank_state_dict())
    for ddp, _ in runs:
        fit(ddp, sgd(ddp), 0, range(3, 6), loss_on(48))
    assert same_bits(weights(resumed.module), weights(whole.module))
    states = [each.rank_state_dict()["tensors"] for _, each in runs]
    assert same_bits(*states)
    assert {x.dtype for memory in states[0].values() for x in memory.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("both_branches")
@pytest.mark.parametrize(
    "algorithm",
    [PowerSGD(2), PowerSGD(2, half_step=True), Quantize("int4"), TopK(4, per=64), Sign()],
    ids=repr,
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_memory_in_float32_loses_nothing_of_gradients_in_16_bits(alone, algorithm, dtype):
    ddp, handle = hooked(
        mlp(40, 36, 28).to(dtype), replace(algorithm, state_dtype="float32"), alone
    )
    trace = train(ddp, loss_on(40, dtype=dtype, spread=1.0), 30)
    given, local = (
        [each["0.weight"].double() for each in steps] for steps in (trace.given, trace.local)
    )
    error = handle.rank_state_dict()["tensors"]["0.weight"]["error"]
    assert error.dtype == torch.float32
    assert relative(sum(given) + error, sum(local)) < 1e-5


def test_a_state_is_a_copy_and_so_is_what_is_loaded(alone):
    (ddp, handle), (other, source) = (hooked(mlp(40, 36, 28), ALGORITHM, alone) for _ in range(2))
    train(other, loss_on(40), 3, local=False)
    state = source.rank_state_dict()
    before = copy.deepcopy(state)
    train(other, loss_on(40), 1, local=False)
    assert same_bits(state, before)
    assert not same_bits(state["tensors"], source.rank_state_dict()["tensors"])
    handle.load_state_dict(state)
    train(ddp, loss_on(40), 2, local=False)
    assert same_bits(state, before)
    assert handle.rank_state_dict()["step"] == 5


# `DataParallel` beyond DDP: any number of passes, and better errors.

WIDTHS = (64, 48, 40, 32, 32, 24)
LOSS = loss_on(64)


def net():
    return mlp(*WIDTHS)


def caps(cap):
    """DDP takes a cap that it is given for the first bucket too."""
    return {"bucket_cap_mb": cap, "first_bucket_mb": cap}


def wrap(world, model, *algorithm, cap=0.006, **options):
    return DataParallel(model, *algorithm, process_group=world.group, **caps(cap), **options)


def flat_gradients(model):
    """Zeros where there is none."""
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
            for p in model.parameters()
        ]
    )


def averaged(world, model):
    """The gradients of a model that nobody has wrapped, averaged over the ranks."""
    flat = flat_gradients(model)
    dist.all_reduce(flat, group=world.group)
    return flat / world.size


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Signs(AllReduce):
    """Not plain averaging, though it is made of it."""

    portable = False

    async def step(self, ops, gradients, state, step):
        return await super().step(ops, {n: g.sign() for n, g in gradients.items()}, state, step)


def test_an_algorithm_made_of_plain_averaging_is_not_taken_for_it():
    model, twin = DataParallel(net(), Signs()), net()
    for each in (model, twin):
        LOSS(each, 0, 0).backward()
    assert same_bits(
        gradients(model.module), {name: g.sign() for name, g in gradients(twin).items()}
    )


def shuffled(rank):
    """Uses its layers in an order of the rank's own."""
    order = torch.randperm(6, generator=torch.Generator().manual_seed(rank)).tolist()
    forward = lambda self, x: functools.reduce(lambda x, i: self.layers[i](x).tanh(), order, x)  # noqa: E731
    return Layers(forward, layers=nn.ModuleList(nn.Linear(16, 16) for _ in range(6))), order


@cases.case
def test_ranks_agree_on_rank_0s_order_of_arrival(world):
    twin, order = shuffled(world.rank)
    ours = wrap(world, copy.deepcopy(twin), cap=0.001)
    for step in range(4):
        x = draw(10 * step + world.rank, 8, 16)
        for model in (ours, twin):
            model.zero_grad()
            model(x).square().sum().backward()
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-5
    assert world.agree(ours.buckets())
    orders = world.everyones(order)
    assert len(set(map(tuple, orders))) > 1
    arrived = [f"layers.{i}" for i in reversed(orders[0])]
    assert list(dict.fromkeys(n.rsplit(".", 1)[0] for b in ours.buckets() for n in b)) == arrived


@cases.case
def test_parameters_and_buffers_are_rank_0s(world):
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4).requires_grad_(False))
    model.register_buffer("flags", torch.rand(5) > 0.5)
    model.register_buffer("spectrum", torch.randn(3, dtype=torch.complex64))
    model[1].running_mean.normal_()
    before = copy.deepcopy(model.state_dict())
    wrapped = wrap(world, model, cap=25)
    firsts = world.everyones(before)[0]
    assert same_bits(model.state_dict(), firsts)
    assert same_bits(before, firsts) is (world.rank == 0)
    # statistics that are loaded, on each rank its own
    model[1].running_mean.fill_(7.0 + world.rank)
    model[1].momentum = 0.0
    wrapped(torch.randn(6, 8)).sum().backward()
    assert float(model[1].running_mean[0]) == 7.0
    model[1].momentum = 0.1
    wrapped(torch.randn(6, 8)).sum().backward()
    trained = world.everyones(model[1].running_mean.clone())[0]
    assert same_bits(model[1].running_mean, trained) is (world.rank == 0)
    wrapped.eval()
    with torch.no_grad():
        wrapped(torch.randn(6, 8))
    # rank 0's again in the forward pass after a step
    assert same_bits(model[1].running_mean, trained)


class Opaque:
    def __init__(self, value):
        self.value = value


def either():
    """One layer, or the other, or none; in a container that cannot be looked into, if asked to."""

    def forward(self, x, which, put=lambda y: y):
        return put(x * 2 if which is None else self.layers[which](x))

    return Layers(forward, layers=nn.ModuleList([mlp(8, 8, 4, seed=0), mlp(8, 8, 4, seed=1)]))


class Step:
    """Losses, each of a forward pass of its own: of part of the data, or of one layer of
    `either`."""

    def __init__(self, model, rank, step):
        self.model, self.rank, self.step = model, rank, step
        self.x = draw(10 * step + rank, 6, 8).requires_grad_()

    def net(self, part=0):
        return LOSS(self.model, self.rank, 10 * self.step + part)

    def either(self, which):
        return self.model(self.x, which).square().sum()

    def again(self, which):
        return checkpoint(self.model, self.x, which, use_reentrant=False).square().sum()

    def hidden(self):
        return self.model(self.x, (self.step + self.rank) % 2, Opaque).value.square().sum()

    def slope(self):
        x = draw(self.rank, 4, 64).requires_grad_()
        return torch.autograd.grad(self.model(x).sum(), x, create_graph=True)[0].square().sum()


#: A model, options, and the losses of whose backward passes each is an average.
PASSES = {
    "two forward passes": (net, {}, lambda of: [of.net(0) + of.net(1)]),
    "one graph twice": (net, {}, lambda of: [of.net()] * 2),
    "two and two": (net, {}, lambda of: [of.net(0), of.net(1)]),
    "derivatives inside": (net, {}, lambda of: [of.net() + of.slope()]),
    "nothing on a rank": (
        either,
        UNUSED,
        lambda of: [of.either(None if of.step == of.rank else 0)],
    ),
    "hidden": (either, UNUSED, lambda of: [of.hidden()]),
    "both at once": (either, {}, lambda of: [of.either(0) + of.either(1)]),
    "both at once, looked for": (either, UNUSED, lambda of: [of.either(0) + of.either(1)]),
    "again in the middle": (either, {}, lambda of: [of.again(0) + of.either(1)]),
    "again in the middle, looked for": (either, UNUSED, lambda of: [of.again(0) + of.either(1)]),
}


@cases.each(PASSES)
def test_gradients_are_averages_whatever_passes_there_are(world, row):
    make, options, losses = row
    ours, twin = wrap(world, make(), cap=0.006 if make is net else 1e-6, **options), make()
    for step in range(3):
        for model in (ours, twin):
            model.zero_grad(set_to_none=step != 1)
            passes = losses(Step(model, world.rank, step))
            for loss in passes:
                loss.backward(retain_graph=len(passes) > 1)
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-5
    assert ours.handle.stats().steps == 3 * len(passes)


@cases.each(
    {"all": (net, Step.net, (0, 1, 2)), "left out by the last": (either, Step.either, (0, 0, 1))}
)
def test_what_was_accumulated_is_averaged(world, row):
    make, loss, parts = row
    ours, twin = wrap(world, make(), cap=1e-6, find_unused_parameters=make is either), make()
    for step in range(2):
        here, there = Step(ours, world.rank, step), Step(twin, world.rank, step)
        for model in (ours, twin):
            model.zero_grad(set_to_none=False)
        with ours.no_sync():
            with ours.no_sync():
                loss(here, parts[0]).backward()
            loss(here, parts[1]).backward()
        loss(here, parts[2]).backward()
        sum(loss(there, part) for part in parts).backward()
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-5
    assert ours.handle.stats().steps == 2


def halve(p):
    p.grad.mul_(0.5)


def replace_by_half(p):
    p.grad = p.grad * 0.5


def take_away(p):
    p.grad = None


@cases.each({f.__name__: f for f in (halve, replace_by_half, take_away)})
def test_gradients_leave_as_hooks_have_changed_them_whenever_registered(world, change):
    """Before the model is wrapped, between two steps, or never; as under DDP."""
    for before in (True, False):
        trained = []
        for make in (
            lambda m: wrap(world, m),
            partial(DistributedDataParallel, process_group=world.group),
        ):
            model = net()
            hooked = list(model.parameters())[1:]
            if before:
                for p in hooked:
                    p.register_post_accumulate_grad_hook(change)
            wrapped = make(model)
            fit(wrapped, sgd(model), world.rank, range(2), LOSS)
            if not before:
                for p in hooked:
                    p.register_post_accumulate_grad_hook(change)
            fit(wrapped, sgd(model), world.rank, range(2, 5), LOSS)
            trained.append(weights(model))
            assert world.agree(trained[-1])
        assert relative(*trained) < 1e-5


def beside():
    def forward(self, x):
        self.extra = self.side(x).sum()
        return self.body(x)

    return Layers(forward, body=nn.Linear(4, 4), side=nn.Linear(4, 4))


LOSSES = {
    "one of two": lambda model: model(torch.ones(1, 8), 0).sum(),
    "beside the outputs": lambda model: model(torch.ones(1, 4)).sum() + model.module.extra,
    "checkpoints": lambda model: model(torch.ones(2, 64)).sum(),
}
reentrant = partial(Checkpointed, reentrant=True)
#: A model, options, a loss whose backward pass is refused, what the message names; and options with
#: which it is not refused, or None: where nothing is sent.
REFUSED = [
    (either, {}, "one of two", ["'layers.1.0.weight'", "find_unused_parameters=True"], UNUSED),
    (beside, UNUSED, "beside the outputs", ["'side.", "outputs"], {}),
    (reentrant, UNUSED, "checkpoints", ["'layers.3.", "use_reentrant=False"], {}),
    (
        partial(reentrant, shared=True),
        {},
        "checkpoints",
        ["'layers.0.", "use_reentrant=False"],
        None,
    ),
]


@pytest.mark.parametrize(
    ("make", "options", "loss", "names", "instead"),
    REFUSED,
    ids=[row[2] + row[3][0] for row in REFUSED],
)
def test_what_a_backward_pass_refuses_is_named_and_leaves_nothing_behind(
    make, options, loss, names, instead
):
    loss = LOSSES[loss]
    model = DataParallel(make(), **options)
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            loss(model).backward()
        assert all(name in str(raised.value) for name in names)
        assert "'layers.0.0.weight'" not in str(raised.value)
        model.zero_grad()
    if instead is None:
        with model.no_sync():
            loss(model).backward()  # where nothing is sent it may
    else:
        model = DataParallel(make(), **instead)
        loss(model).backward()
        assert model.handle.stats().steps == 1


def test_a_graph_of_the_gradients_is_refused_by_name():
    model = DataParallel(net(), **caps(0.006))
    with pytest.raises(RuntimeError, match=r"'8\.(weight|bias)'.*create_graph"):
        LOSS(model, 0, 0).backward(create_graph=True)


@pytest.mark.parametrize("clear", [{"set_to_none": True}, {"set_to_none": False}, None], ids=str)
def test_gradients_are_views_of_the_buckets(clear):
    """And go on adding up where they are not cleared."""
    wrapped, twin, seen = DataParallel(net(), **caps(0.006)), net(), []
    for step in range(4):
        for model in (wrapped, twin):
            if clear is not None:
                model.zero_grad(**clear)
            LOSS(model, 0, step).backward()
        assert relative(flat_gradients(wrapped), flat_gradients(twin)) < 1e-5
        assert all(p.grad._base is not None for p in wrapped.parameters())
        seen.append({p.grad.untyped_storage().data_ptr() for p in wrapped.parameters()})
    assert list(map(len, seen)) == [1, *[len(wrapped.buckets())] * 3]
    assert seen[2] == seen[3]


class Sometimes(torch.autograd.Function):
    """A product whose backward pass ends with no gradient for the matrix where it is `off`, as
    compiled functions may."""

    @staticmethod
    def forward(ctx, x, w, off):
        ctx.off = off
        ctx.save_for_backward(x, w)
        return x.clone() if off else x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return (gradient, None, None) if ctx.off else (gradient @ w.T, x.T @ gradient, None)


class Ending(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(0.1 * torch.randn(16, 16)) for _ in range(2))
        self.off = False

    def forward(self, x):
        return Sometimes.apply(torch.tanh(x @ self.first), self.second, self.off)


@cases.each(
    [(by, unused) for by in ("hook", "DataParallel") for unused in (False, True)],
)
def test_a_gradient_that_autograd_leaves_undefined_is_averaged_as_under_ddp(world, variant):
    """On one rank, and on all."""
    by, unused = variant
    options = {"find_unused_parameters": unused, "process_group": world.group}

    def trained(make):
        model = Ending()
        wrapper, found = make(model), []
        optimizer = sgd(model)
        for step in range(4):
            model.off = step > 0 and (step == 3 or world.rank == 0)
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(10 * step + world.rank)
            wrapper(torch.randn(4, 16, generator=data)).sin().sum().backward()
            optimizer.step()
            found.append({n: p.grad for n, p in model.named_parameters()})
        return weights(model), found

    def ours(model):
        if by == "DataParallel":
            return DataParallel(model, **options)
        return hooked(model, AllReduce(), world.group, find_unused_parameters=unused)[0]

    expected, theirs = trained(lambda model: DistributedDataParallel(model, **options))
    found, given = trained(ours)
    assert world.agree(found)
    assert relative(found, expected) < 1e-6
    for a, b in zip(given, theirs, strict=True):
        assert [n for n in a if a[n] is None] == [n for n in b if b[n] is None]


@cases.case
def test_where_a_gradient_is_undefined_the_error_stays(world):
    model = Ending()
    ddp, handle = hooked(
        model, PowerSGD(1, min_compression_rate=1), world.group, find_unused_parameters=True
    )

    def step(off):
        model.off = off
        model.zero_grad()
        ddp(
            torch.randn(4, 16, generator=torch.Generator().manual_seed(world.rank))
        ).sum().backward()
        return handle.rank_state_dict()["tensors"]["second"]["error"].clone()

    before = step(off=False)
    assert before.norm() > 0
    for _ in range(2):
        assert torch.equal(step(off=True), before)
        assert model.second.grad is None


def test_unused_parameters_hold_up_nobody():
    ours, sent_before_the_end = DataParallel(either(), **UNUSED, **caps(1e-6)), []
    for which in (1, 0):  # the order of buckets is 1, 0
        x = torch.ones(6, 8, requires_grad=True)
        with collective_payloads() as sent:
            x.register_hook(lambda _: sent_before_the_end.append(len(sent)))
            ours(x, which).sum().backward()
        assert len(sent) == 8 + 1  # and who used what
    assert sent_before_the_end[0] <= 4 <= sent_before_the_end[1]


class Explosive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("bang")


FAILED = {
    "plain": (AllReduce(), True),
    "PowerSGD": (PowerSGD(rank=2), True),
    "by the module inside": (PowerSGD(rank=2), False),
}


@cases.each(FAILED)
def test_messages_of_a_pass_that_failed_do_no_harm(world, variant):
    """The last rank comes late to the pass that fails, so what the others have sent in it is still
    on its way when they repeat it. Forward passes may go by the wrapper."""
    algorithm, by_the_wrapper = variant
    models = [wrap(world, mlp(*WIDTHS), algorithm, message_bytes=0) for _ in range(2)]
    for model in models:
        run = model if by_the_wrapper else model.module
        for step in range(2):
            LOSS(run, world.rank, step).backward()
            model.zero_grad()
        if model is models[0]:
            # it fails when its gradients have come but for the first layer's
            first, *rest = model.module
            model.module.forward = lambda x, first=first, rest=rest: nn.Sequential(*rest)(
                Explosive.apply(first(x))
            )
            time.sleep(0.3 * (world.rank == world.size - 1))
            with pytest.raises(ArithmeticError, match="bang"):
                LOSS(run, world.rank, 2).backward()
            del model.module.forward
            model.zero_grad()
        LOSS(run, world.rank, 3).backward()
    assert same_bits(*(gradients(model) for model in models))
    assert models[0].handle.stats().steps == 3
