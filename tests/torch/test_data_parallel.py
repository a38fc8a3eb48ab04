"""`DataParallel` beside `DistributedDataParallel`: the same buckets and checkpoints, and better errors. The same gradients: test_ddp_features.py."""

import copy
import functools
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire import AllReduce, PowerSGD
from gradwire.torch_backend import DataParallel
from tests.torch.compare import gradients, relative, same_bits
from tests.torch.models import Checkpointed, Layers, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import collective_payloads, hooked, train

pytestmark = pytest.mark.usefixtures("alone")

cases = Cases(__file__, ranks=3)

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
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in model.parameters()])


def averaged(world, model):
    """The gradients of a model that nobody has wrapped, averaged over the ranks."""
    flat = flat_gradients(model)
    dist.all_reduce(flat, group=world.group)
    return flat / world.size


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


#: bucket_cap_mb, the dtype, and how many buckets there are at least and at most.
DENSE = {
    "one bucket": (25, torch.float32, (1, 1)),
    "some buckets": (0.006, torch.float32, (2, 9)),
    "a bucket each": (1e-6, torch.float32, (10, 10)),
    "bfloat16": (0.002, torch.bfloat16, (3, 10)),
    "float16": (0.002, torch.float16, (3, 10)),
    "float64": (0.01, torch.float64, (3, 10)),
}


@cases.each(DENSE)
def test_gradients_buckets_and_states_are_those_of_ddp_bit_for_bit(world, variant):
    cap, dtype, (least, most) = variant
    loss = loss_on(64, dtype=dtype)
    ours = wrap(world, net().to(dtype), cap=cap)
    theirs, _ = hooked(net().to(dtype), None, world.group, cap=cap)
    by_hook, _ = hooked(net().to(dtype), AllReduce(), world.group, cap=cap, message_bytes=0)
    assert len(ours.buckets()) == 1
    mine, right, third = (train(each, loss, 6, local=False) for each in (ours, theirs, by_hook))
    assert same_bits(mine.given, right.given)
    assert same_bits(third.given, right.given)
    assert relative(mine.given[0], mine.given[-1]) > 0.01
    assert same_bits(ours.state_dict(), theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert world.agree(mine.weights)
    assert least <= len(ours.buckets()) <= most
    assert ours.buckets() == buckets_of_ddp(theirs, loss, world.rank)


class Signs(AllReduce):
    """Not plain averaging, though it is made of it."""

    async def step(self, ops, gradients, state, step):
        return await super().step(ops, {n: g.sign() for n, g in gradients.items()}, state, step)


def test_an_algorithm_made_of_plain_averaging_is_not_taken_for_it():
    model, twin = DataParallel(net(), Signs()), net()
    for each in (model, twin):
        LOSS(each, 0, 0).backward()
    assert same_bits(gradients(model.module), {name: g.sign() for name, g in gradients(twin).items()})


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
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-6
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
    model[1].running_mean.fill_(7.0 + world.rank)  # statistics that are loaded, on each rank its own
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
    assert same_bits(model[1].running_mean, trained)  # rank 0's again in the forward pass after a step


class Opaque:
    def __init__(self, value):
        self.value = value


def either():
    """One layer, or the other, or none; in a container that cannot be looked into, if asked to."""

    def forward(self, x, which, put=lambda y: y):
        return put(x * 2 if which is None else self.layers[which](x))

    return Layers(forward, layers=nn.ModuleList([mlp(8, 8, 4, seed=0), mlp(8, 8, 4, seed=1)]))


class Step:
    """Losses, each of a forward pass of its own: of part of the data, or of one layer of `either`."""

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


UNUSED = {"find_unused_parameters": True}
#: A model, options, and the losses of whose backward passes each is an average.
PASSES = {
    "two forward passes": (net, {}, lambda of: [of.net(0) + of.net(1)]),
    "one graph twice": (net, {}, lambda of: [of.net()] * 2),
    "two and two": (net, {}, lambda of: [of.net(0), of.net(1)]),
    "derivatives inside": (net, {}, lambda of: [of.net() + of.slope()]),
    "nothing on a rank": (either, UNUSED, lambda of: [of.either(None if of.step == of.rank else 0)]),
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
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-6
    assert ours.handle.stats().steps == 3 * len(passes)


@cases.each({"all": (net, Step.net, (0, 1, 2)), "left out by the last": (either, Step.either, (0, 0, 1))})
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
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-6
    assert ours.handle.stats().steps == 2


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
#: A model, options, a loss whose backward pass is refused, what the message names; and options with which it is not refused, or None: where nothing is sent.
REFUSED = [
    (either, {}, "one of two", ["'layers.1.0.weight'", "find_unused_parameters=True"], UNUSED),
    (beside, UNUSED, "beside the outputs", ["'side.", "outputs"], {}),
    (reentrant, UNUSED, "checkpoints", ["'layers.3.", "use_reentrant=False"], {}),
    (partial(reentrant, shared=True), {}, "checkpoints", ["'layers.0.", "use_reentrant=False"], None),
]


@pytest.mark.parametrize(
    ("make", "options", "loss", "names", "instead"), REFUSED, ids=[row[2] + row[3][0] for row in REFUSED]
)
def test_what_a_backward_pass_refuses_is_named_and_leaves_nothing_behind(make, options, loss, names, instead):
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
        assert relative(flat_gradients(wrapped), flat_gradients(twin)) < 1e-6
        assert all(p.grad._base is not None for p in wrapped.parameters())
        seen.append({p.grad.untyped_storage().data_ptr() for p in wrapped.parameters()})
    assert list(map(len, seen)) == [1, *[len(wrapped.buckets())] * 3]
    assert seen[2] == seen[3]


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


@cases.each({"plain": AllReduce(), "PowerSGD": PowerSGD(rank=2)})
def test_messages_of_a_pass_that_failed_do_no_harm(world, algorithm):
    """The last rank comes late to the pass that fails, so what the others have sent in it is still on its way when they repeat it."""
    models = [wrap(world, mlp(*WIDTHS), algorithm, message_bytes=0) for _ in range(2)]
    for model in models:
        for step in range(2):
            LOSS(model, world.rank, step).backward()
            model.zero_grad()
        if model is models[0]:
            first, *rest = model.module  # it fails when its gradients have come but for the first layer's
            model.module.forward = lambda x, first=first, rest=rest: nn.Sequential(*rest)(Explosive.apply(first(x)))
            time.sleep(0.3 * (world.rank == world.size - 1))
            with pytest.raises(ArithmeticError, match="bang"):
                LOSS(model, world.rank, 2).backward()
            del model.module.forward
            model.zero_grad()
        LOSS(model, world.rank, 3).backward()
    assert same_bits(*(gradients(model) for model in models))
