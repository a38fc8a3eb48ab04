"""`DataParallel` beside `DistributedDataParallel`: the same gradients, buckets and checkpoints, and better errors."""

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
from tests.torch.models import TAKEN, Branches, Checkpointed, Layers, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import collective_payloads, hooked, train

pytestmark = pytest.mark.usefixtures("alone")

cases = Cases(__file__, ranks=3)

WIDTHS = (64, 48, 40, 32, 32, 24)
LOSS = loss_on(64)


class Conv(nn.Module):
    """With buffers, a frozen layer, a shared weight and a layer that comes first but is used last."""

    def __init__(self, memory_format=torch.contiguous_format):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(48, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.tied = nn.Linear(24, 24)
        self.tied.weight = nn.Parameter(torch.eye(24))
        self.again = self.tied
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 3, 3, padding=1))
        self.to(memory_format=memory_format)

    def forward(self, x):
        y = self.conv(x.view(-1, 1, 8, 8)).tanh().mean(2).flatten(1)
        y = self.out(torch.cat([y, y], 1))
        return self.again(self.tied(self.frozen(y)).tanh())


def mixed():
    """Parameters of two dtypes."""
    first, last = mlp(64, 48, 40), mlp(40, 24, 24, seed=1).double()
    return Layers(lambda self, x: self.last(self.first(x).double()).float(), first=first, last=last)


def caps(cap):
    """DDP takes a cap that it is given for the first bucket too."""
    return {"bucket_cap_mb": cap, "first_bucket_mb": cap}


def wrap(world, model, *algorithm, cap=0.006, **options):
    return DataParallel(model, *algorithm, process_group=world.group, **caps(cap), **options)


def flat_gradients(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


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


#: The model, bucket_cap_mb, the dtype, and how many buckets there are at least and at most.
DENSE = {
    "one bucket": (lambda: mlp(*WIDTHS), 25, torch.float32, (1, 1)),
    "some buckets": (lambda: mlp(*WIDTHS), 0.006, torch.float32, (2, 9)),
    "a bucket each": (lambda: mlp(*WIDTHS), 1e-6, torch.float32, (10, 10)),
    "convolutions": (Conv, 0.001, torch.float32, (3, 10)),
    "two dtypes": (mixed, 0.006, torch.float32, (3, 10)),
    "half precision": (lambda: mlp(*WIDTHS).bfloat16(), 0.002, torch.bfloat16, (3, 10)),
}


@cases.each(DENSE)
def test_gradients_buckets_and_states_are_those_of_ddp_bit_for_bit(world, variant):
    make, cap, dtype, (least, most) = variant
    loss = loss_on(64, dtype=dtype)
    ours, (theirs, _) = wrap(world, make(), cap=cap), hooked(make(), None, world.group, cap=cap)
    assert len(ours.buckets()) == (2 if make is mixed else 1)
    mine, right = (train(each, loss, 6, local=False) for each in (ours, theirs))
    assert same_bits(mine.given, right.given)
    assert relative(mine.given[0], mine.given[-1]) > 0.01
    assert same_bits(ours.state_dict(), theirs.state_dict())  # weights and buffers, under DDP's keys
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert world.agree(mine.weights)
    buckets, expected = ours.buckets(), buckets_of_ddp(theirs, loss, world.rank)
    assert least <= len(buckets) <= most
    if make is mixed:  # two are left over, which DDP orders by a hash
        buckets, expected = sorted(buckets), sorted(expected)
    assert buckets == expected
    if make is Conv:  # in the order of arrival: the first in the module is the last in the forward pass but two
        names = [n for bucket in buckets for n in bucket]
        assert names.index("tied.bias") < names.index("out.weight") < names.index("conv.0.weight")


@cases.case
def test_gradients_have_the_strides_of_their_parameters(world):
    ours = wrap(world, Conv(torch.channels_last), cap=0.001)
    theirs, _ = hooked(Conv(torch.channels_last), None, world.group, cap=0.001)
    assert relative(*(train(each, LOSS, 6, local=False).weights for each in (ours, theirs))) < 1e-6
    weight = ours.module.conv[2].weight
    assert not weight.is_contiguous()
    assert weight.stride() == weight.grad.stride()


class Signs(AllReduce):
    """Not plain averaging, though it is made of it."""

    async def step(self, ops, gradients, state, step):
        return await super().step(ops, {n: g.sign() for n, g in gradients.items()}, state, step)


@cases.case
def test_an_algorithm_made_of_plain_averaging_is_not_taken_for_it(world):
    both = wrap(world, mlp(*WIDTHS), Signs(), cap=25), hooked(mlp(*WIDTHS), Signs(), world.group, cap=25)[0]
    assert same_bits(*(train(each, LOSS, 2, local=False).given for each in both))


@cases.case
def test_under_no_sync_gradients_add_up_and_nothing_is_sent(world):
    ours, (theirs, _) = wrap(world, mlp(*WIDTHS)), hooked(mlp(*WIDTHS), None, world.group)
    with collective_payloads() as sent:
        mine = train(ours, LOSS, 4, micro_batches=3, local=False)
    assert same_bits(mine.given, train(theirs, LOSS, 4, micro_batches=3, local=False).given)
    assert len(sent) == 1 + 3 * len(ours.buckets())  # one bucket in the first step, and nothing under no_sync
    ours.zero_grad(), theirs.zero_grad()
    for model in (ours, theirs):
        with model.no_sync():
            LOSS(model, world.rank, 0).backward()
            with model.no_sync():
                LOSS(model, world.rank, 1).backward()
            LOSS(model, world.rank, 2).backward()
    assert same_bits(gradients(ours.module), gradients(theirs.module))
    assert not world.agree(gradients(ours.module))
    for model in (ours, theirs):
        model.zero_grad(set_to_none=False)
        LOSS(model, world.rank, 0).backward()
    assert same_bits(gradients(ours.module), gradients(theirs.module))


class Hidden:
    def __init__(self, value):
        self.value = value


WRAPS = {
    "nested": (lambda y: {"a": [(1, y)]}, lambda out: out["a"][0][1]),
    "opaque": (Hidden, lambda out: out.value),
}


@cases.each(WRAPS)
def test_parameters_may_stay_unused(world, variant):
    """Whatever container the outputs come in. (A tensor: test_composition.py.)"""
    put, get = variant
    inside = Layers(lambda self, x, taken: put(self.inner(x, taken)), inner=Branches())
    ours = wrap(world, inside, cap=0.002, find_unused_parameters=True)
    theirs, _ = hooked(
        Layers(lambda self, *x: self.inner(*x), inner=Branches()), None, world.group, cap=0.002, **UNUSED
    )

    def loss(model, rank, step):
        out = get if isinstance(model, DataParallel) else lambda y: y
        return loss_on(40)(lambda x: out(model(x, TAKEN[step][rank % 2])), rank, step)

    mine, right = (train(each, loss, 6, local=False) for each in (ours, theirs))
    assert world.agree(mine.weights)
    assert same_bits(mine.given, right.given)
    assert ours.handle.stats().steps == 6


@cases.case
def test_a_rank_that_uses_no_parameter_at_all_still_takes_part(world):
    model, twin = mlp(8, 8), mlp(8, 8)
    ours = wrap(world, model, **UNUSED)
    x = torch.ones(2, 8, requires_grad=True)
    twin(x).sum().backward()
    forward = model.forward
    for idle, missing in ((0, 1 / 3), (1, 1 / 3), (None, 0)):
        model.zero_grad()
        model.forward = (lambda x: x * 2) if world.rank == idle else forward
        ours(x).sum().backward()
        assert relative(gradients(model), gradients(twin)) == pytest.approx(missing, abs=1e-6)


def either():
    """One layer or the other."""
    layers = nn.ModuleList([mlp(8, 8, 4, seed=0), mlp(8, 8, 4, seed=1)])
    return Layers(lambda self, x, which: self.layers[which](x), layers=layers)


@cases.case
def test_what_a_parameter_has_accumulated_is_averaged_even_if_the_last_pass_leaves_it_out(world):
    ours, twin = wrap(world, either(), cap=1e-6, find_unused_parameters=True), either()
    for step in range(2):
        x = draw(10 * step + world.rank, 6, 8)
        for model in (ours, twin):
            model.zero_grad(set_to_none=False)
        with ours.no_sync():
            ours(x, 0).square().sum().backward()
        ours(x, 1).square().sum().backward()
        (twin(x, 0).square().sum() + twin(x, 1).square().sum()).backward()
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-6


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


@cases.case
def test_any_number_of_forward_and_backward_passes(world):
    ours, twin = wrap(world, mlp(*WIDTHS)), mlp(*WIDTHS)
    for name in ("first step", "two forward passes", "one graph twice", "two and two", "derivatives inside"):
        for model in (ours, twin):
            model.zero_grad(set_to_none=name != "two and two")
            loss = LOSS(model, world.rank, 0)
            if name == "first step":
                loss.backward()
            elif name == "two forward passes":
                (loss + LOSS(model, world.rank, 1)).backward()
            elif name == "one graph twice":
                loss.backward(retain_graph=True)
                loss.backward()
            elif name == "two and two":
                other = LOSS(model, world.rank, 1)
                loss.backward()
                other.backward()
            else:
                x = draw(world.rank, 4, 64).requires_grad_()
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                (loss + slope.square().sum()).backward()
        assert relative(flat_gradients(ours), averaged(world, twin)) < 1e-5, name
    assert ours.handle.stats().steps == 7


@cases.each({"reentrant": (True, False), "not reentrant": (False, False), "not reentrant, shared": (False, True)})
def test_activation_checkpointing(world, variant):
    reentrant, shared = variant
    ours, plain = (wrap(world, Checkpointed(reentrant=r, shared=shared)) for r in (reentrant, None))
    assert same_bits(*(train(each, LOSS, 3, local=False).weights for each in (ours, plain)))
    assert ours.handle.stats().steps == 3


def side_loss(model):
    """A part of the loss that is not among the outputs."""
    return model(torch.ones(1, 4)).sum() + model.module.extra


def beside():
    def forward(self, x):
        self.extra = self.side(x).sum()
        return self.body(x)

    return Layers(forward, body=nn.Linear(4, 4), side=nn.Linear(4, 4))


def one_of(model):
    return model(torch.ones(1, 8), 0).sum()


def checkpointed(model):
    return model(torch.ones(2, 64)).sum()


UNUSED = {"find_unused_parameters": True}
#: A model, options, a loss whose backward pass is refused, what the message names; and one that is not refused.
REFUSED = {
    "missing": (lambda: either(), {}, one_of, ["'layers.1.0.weight'", "find_unused_parameters=True"], UNUSED),
    "beside the outputs": (beside, UNUSED, side_loss, ["'side.", "outputs"], {}),
    "hidden by reentrant checkpoints": (
        partial(Checkpointed, reentrant=True),
        UNUSED,
        checkpointed,
        ["'layers.3.", "use_reentrant=False"],
        {},
    ),
    "in several reentrant checkpoints": (
        partial(Checkpointed, reentrant=True, shared=True),
        {},
        checkpointed,
        ["'layers.0.", "use_reentrant=False"],
        None,
    ),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_backward_pass_refuses_is_named_and_leaves_nothing_behind(row):
    make, options, loss, names, instead = row
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


def test_a_graph_of_the_gradients_is_refused_by_name(wrapped):
    with pytest.raises(RuntimeError, match=r"'8\.(weight|bias)'.*create_graph"):
        LOSS(wrapped, 0, 0).backward(create_graph=True)


@pytest.fixture
def wrapped(alone):
    return DataParallel(mlp(*WIDTHS), **caps(0.006))


def storages(model):
    return {p.grad.untyped_storage().data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("clear", [{"set_to_none": True}, {"set_to_none": False}, None], ids=str)
def test_gradients_are_views_of_the_buckets(wrapped, clear):
    """And go on adding up where they are not cleared."""
    twin, kept = copy.deepcopy(wrapped.module), set()
    for step in range(4):
        for model in (wrapped, twin):
            if clear is not None:
                model.zero_grad(**clear)
            LOSS(model, 0, step).backward()
        assert relative(flat_gradients(wrapped), flat_gradients(twin)) < 1e-6
        assert len(storages(wrapped)) == len(wrapped.buckets()) if step else 1
        assert all(p.grad._base is not None for p in wrapped.parameters())
        assert step < 3 or storages(wrapped) == kept
        kept = storages(wrapped)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_forward_passes_that_share_a_backward_pass(find_unused_parameters, again):
    """The first is run again in the middle of it, if asked to."""
    ours = DataParallel(either(), find_unused_parameters=find_unused_parameters, **caps(1e-6))
    twin = copy.deepcopy(ours.module)
    for step in range(2):
        x = draw(step, 6, 8)
        for model in (ours, twin):
            model.zero_grad()
            first = checkpoint(model, x, 0, use_reentrant=False) if again else model(x, 0)
            (first.square().sum() + model(x, 1).square().sum()).backward()
        assert same_bits([p.grad for p in ours.parameters()], [p.grad for p in twin.parameters()])
    assert ours.handle.stats().steps == 2


def test_unused_parameters_hold_up_nobody():
    ours = DataParallel(either(), find_unused_parameters=True, **caps(1e-6))
    sent_before_the_end, everything = [], []
    for which in (1, 0):  # the order of buckets is 1, 0
        x = torch.ones(6, 8, requires_grad=True)
        with collective_payloads() as sent:
            x.register_hook(lambda _: sent_before_the_end.append(len(sent)))
            ours(x, which).sum().backward()
        assert len(sent) == 8 + 1  # and who used what
        everything += sent
    assert sent_before_the_end[0] <= 4 <= sent_before_the_end[1]
    stats = ours.handle.stats()
    assert (stats.collectives, stats.bytes_sent) == (len(everything), sum(p.nbytes for p in everything))


def test_a_model_whose_wrapper_is_gone_can_be_wrapped_again():
    model = mlp(*WIDTHS)
    for algorithm in (PowerSGD(rank=1), AllReduce()):
        wrapped = DataParallel(model, algorithm)
        with collective_payloads() as sent:
            LOSS(wrapped, 0, 0).backward()
        assert len(sent) == (2 if algorithm != AllReduce() else 1)
        del wrapped


class Explosive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("bang")


def fail(wrapped, step, rank=0, late=0.0):
    """A pass that fails when its gradients have come but for the first layer's."""
    first, *rest = wrapped.module
    wrapped.module.forward = lambda x: nn.Sequential(*rest)(Explosive.apply(first(x)))
    time.sleep(late)
    with pytest.raises(ArithmeticError, match="bang"):
        LOSS(wrapped, rank, step).backward()
    del wrapped.module.forward
    wrapped.zero_grad()


@cases.each({"plain": AllReduce(), "PowerSGD": PowerSGD(rank=2)})
def test_messages_of_a_pass_that_failed_do_no_harm(world, algorithm):
    """The last rank comes late to the pass that fails, so what the others have sent in it is still on its way when they repeat it."""
    models = [wrap(world, mlp(*WIDTHS), algorithm, message_bytes=0) for _ in range(2)]
    for model in models:
        for step in range(2):
            LOSS(model, world.rank, step).backward()
            model.zero_grad()
        if model is models[0]:
            fail(model, 2, world.rank, late=0.3 * (world.rank == world.size - 1))
        LOSS(model, world.rank, 3).backward()
    assert same_bits(*(gradients(model) for model in models))
