"""`DataParallel` beside `DistributedDataParallel`: the same gradients, buckets and checkpoints, and better errors."""

import copy
import functools
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire import AllReduce, PowerSGD, WireDtype, plan
from gradwire.torch_backend import DataParallel
from tests.torch.compare import gradients, relative, said, same_bits
from tests.torch.models import Checkpointed, Layers, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import collective_payloads, distance, hooked, train

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


ALGORITHMS = {
    "PowerSGD": PowerSGD(rank=2),
    "half step": PowerSGD(rank=2, half_step=True),
    "float16 on the wire": WireDtype(PowerSGD(rank=2), "float16"),
    "dense start": PowerSGD(rank=2, start_step=3),
}


@cases.each(ALGORITHMS)
def test_any_algorithm_runs_as_in_ddps_hook_and_in_the_simulator(world, algorithm):
    tolerance = 0.02 if isinstance(algorithm, WireDtype) else 1e-5
    ours = wrap(world, mlp(*WIDTHS), algorithm)
    with collective_payloads() as sent:
        trace = train(ours, LOSS, 8)
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group)
    theirs = train(ddp, LOSS, 8, local=False)
    assert len(ours.buckets()) > 2
    assert distance(algorithm, world.everyones(trace)) < tolerance
    assert world.agree(trace.weights)
    assert relative(trace.weights, theirs.weights) < tolerance
    states = ours.rank_compressor_state_dict(), handle.rank_state_dict()
    assert relative(*({n: m["error"] for n, m in s["tensors"].items()} for s in states)) < tolerance
    assert ours.error_norm() == pytest.approx(handle.error_norm(), rel=tolerance)
    # The statistics count what was sent, which is what was planned.
    stats, nbytes = ours.stats(), ours.stats().bytes_sent
    assert stats.steps == 8
    if not isinstance(algorithm, WireDtype):  # whose codes travel from rank to rank, and are not summed on their way
        assert (stats.collectives, nbytes) == (len(sent), sum(p.nbytes for p in sent))
    planned = plan({n: tuple(p.shape) for n, p in mlp(*WIDTHS).named_parameters()}, algorithm)
    compressed = sum(planned.steps[i % algorithm.cycle].nbytes for i in range(8 - algorithm.start_step))
    assert nbytes == algorithm.start_step * planned.dense_bytes + compressed


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
    assert len(sent) == 1 + 3 * len(ours.buckets())  # one bucket in the first step
    ours.zero_grad()
    twin = copy.deepcopy(ours.module)
    with collective_payloads() as sent, ours.no_sync():
        LOSS(ours, world.rank, 0).backward()
        with ours.no_sync():
            LOSS(ours, world.rank, 1).backward()
        LOSS(ours, world.rank, 2).backward()
    assert not sent
    for step in range(3):
        LOSS(twin, world.rank, step).backward()
    assert relative(gradients(ours.module), gradients(twin)) < 1e-6
    for model in (ours, theirs):
        model.zero_grad(set_to_none=False)
        LOSS(model, world.rank, 0).backward()
    assert same_bits(gradients(ours.module), gradients(theirs.module))


class Branches(nn.Module):
    """Uses some of its layers, and returns its result in `wrap(result)`."""

    def __init__(self, wrap):
        super().__init__()
        self.first = mlp(64, 32)
        self.branches = nn.ModuleList(mlp(32, 32, 24, seed=i) for i in range(4))
        self.wrap = wrap
        self.chosen = [0]

    def forward(self, x):
        h = self.first(x)
        return self.wrap(sum(self.branches[i](h) for i in self.chosen))


class Hidden:
    def __init__(self, value):
        self.value = value


WRAPS = {
    "tensor": (lambda y: y, lambda out: out),
    "nested": (lambda y: {"a": [(1, y)]}, lambda out: out["a"][0][1]),
    "opaque": (Hidden, lambda out: out.value),
}


def choice(rank, step):
    """Branch 3 is never used, 2 by rank 2 only, 0 or 1 by everybody in turn."""
    return [step % 2] + ([2] if rank == 2 and step != 3 else [])


@cases.each(
    {f"{wrap}, {AllReduce()}": (wrap, AllReduce()) for wrap in WRAPS}
    | {"tensor, PowerSGD": ("tensor", PowerSGD(rank=2))}
)
def test_parameters_may_stay_unused(world, variant):
    name, algorithm = variant
    dense, (put, get) = algorithm == AllReduce(), WRAPS[name]
    ours = wrap(world, Branches(put), algorithm, cap=0.002, find_unused_parameters=True)
    theirs, _ = hooked(
        Branches(WRAPS["tensor"][0]), None if dense else algorithm, world.group, cap=0.002, find_unused_parameters=True
    )

    def loss(model, rank, step):
        model.module.chosen = choice(rank, step)
        out = model(draw(100 * rank + step, 24, 64))
        return (get(out) if model is ours else out).square().mean()

    mine, right = (train(each, loss, 6, local=False) for each in (ours, theirs))
    assert world.agree(mine.weights)
    assert same_bits(mine.given, right.given) if dense else relative(mine.weights, right.weights) < 1e-5
    assert ours.stats().steps == 6
    for step, given in enumerate(mine.given):
        present = {n for n, g in given.items() if g is not None}
        assert present == {n for n, g in right.given[step].items() if g is not None}
        used = set().union(*(choice(r, step) for r in range(world.size)))
        assert {n.split(".")[1] for n in present if n.startswith("branches")} == {str(i) for i in used}


@cases.case
def test_a_rank_that_uses_no_parameter_at_all_still_takes_part(world):
    model, twin = Branches(lambda y: y), Branches(lambda y: y)
    ours = wrap(world, model, cap=0.002, find_unused_parameters=True)
    x = torch.ones(2, 64, requires_grad=True)
    twin(x).sum().backward()
    for idle, missing in ((0, 1 / 3), (1, 1 / 3), (None, 0)):
        model.zero_grad()
        model.forward = (lambda x: x * 2) if world.rank == idle else Branches.forward.__get__(model)
        ours(x).sum().backward()
        assert relative(model.first[0].weight.grad, twin.first[0].weight.grad) == pytest.approx(missing, abs=1e-6)


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
    wrapped(torch.randn(6, 8)).sum().backward()
    trained = world.everyones(model[1].running_mean.clone())[0]
    assert same_bits(model[1].running_mean, trained) is (world.rank == 0)
    wrapped.eval()
    with torch.no_grad():
        wrapped(torch.randn(6, 8))
    assert same_bits(model[1].running_mean, trained)  # rank 0's again in the forward pass after a step


@cases.each({"broadcast": True, "kept": False})
def test_the_first_forward_pass_brings_buffers_in_line(world, broadcast):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.0))
    wrapped = DataParallel(model, process_group=world.group, broadcast_buffers=broadcast)
    model[1].running_mean.fill_(7.0 + world.rank)  # statistics that are loaded, on each rank its own
    wrapped(torch.randn(6, 8)).sum().backward()
    assert float(model[1].running_mean[0]) == 7.0 + (0 if broadcast else world.rank)


#: By rank: the model and the algorithm. And what the error says on all ranks.
DIFFERENT = {
    "shape": (
        lambda r: (mlp(8, 8, 8 + (r == 2)), AllReduce()),
        r"ranks differ in parameters: .*{2: has parameter '2.weight' as \(9, 8\) float32 instead of \(8, 8\) float32, parameter '2.bias'",
    ),
    "dtype": (
        lambda r: (mlp(8, 8).to([torch.float32, torch.float64][r == 1]), AllReduce()),
        r"{1: has parameter '0.weight' as \(8, 8\) float64 instead of \(8, 8\) float32",
    ),
    "name": (
        lambda r: (nn.ModuleDict({"ab"[r == 1]: nn.Linear(2, 2)}), AllReduce()),
        r"{1: lacks parameter 'a.weight', parameter 'a.bias' and has besides parameter 'b.weight', parameter 'b.bias'}",
    ),
    "order": (
        lambda r: (Layers(**{n: nn.Linear(4, 4) for n in ("ab" if r < 2 else "ba")}), AllReduce()),
        "{2: has the same in another order",
    ),
    "frozen": (
        lambda r: (mlp(8, 8, 8, frozen=() if r else [2]), AllReduce()),
        r"1: has parameter '2.weight' as \(8, 8\) float32 instead of \(8, 8\) float32, frozen, .*, 2: has",
    ),
    "buffer": (
        lambda r: (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2 + (r == 1), affine=False)), AllReduce()),
        r"{1: has buffer '1.running_mean' as \(3,\) float32 instead of \(2,\) float32",
    ),
    "algorithm": (
        lambda r: (mlp(8, 8), PowerSGD(rank=1 + r)),
        r"ranks differ in algorithm: rank 0 has PowerSGD\(rank=1",
    ),
    "sparse": (
        lambda r: (nn.Sequential(nn.Embedding(4, 4, sparse=r == 1)), AllReduce()),
        "parameter '0.weight' has sparse gradients; build '0' with sparse=False",
    ),
}


@cases.each(DIFFERENT)
def test_ranks_that_differ_all_learn_in_what(world, variant):
    make, words = variant
    model, algorithm = make(world.rank)
    before = copy.deepcopy(model.state_dict())
    assert re.search(words, said(DataParallel, model, algorithm, process_group=world.group))
    assert same_bits(before, model.state_dict())


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
    assert ours.stats().steps == 7


@cases.each({"reentrant": (True, False), "not reentrant": (False, False), "not reentrant, shared": (False, True)})
def test_activation_checkpointing(world, variant):
    reentrant, shared = variant
    ours, plain = (wrap(world, Checkpointed(reentrant=r, shared=shared)) for r in (reentrant, None))
    assert same_bits(*(train(each, LOSS, 3, local=False).weights for each in (ours, plain)))
    assert ours.stats().steps == 3


def test_reentrant_checkpointing_hides_parameters_from_the_search_for_unused_ones():
    model = DataParallel(Checkpointed(reentrant=True), find_unused_parameters=True)
    loss = model(torch.randn(2, 64)).sum()
    with pytest.raises(RuntimeError, match=r"'layers\.3\.\w+' received a gradient(.|\n)*use_reentrant=False"):
        loss.backward()


@cases.case
def test_training_goes_on_from_a_checkpoint_of_either_wrapper(world):
    def make(kind):
        if kind == "ours":
            wrapped = wrap(world, mlp(*WIDTHS), PowerSGD(rank=2))
            return wrapped, wrapped.rank_compressor_state_dict, wrapped.load_compressor_state_dict
        ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(rank=2), world.group, cap=0.01)
        return ddp, handle.rank_state_dict, handle.load_state_dict

    whole = train(make("ours")[0], LOSS, 8, local=False).weights
    for first, second in (("ours", "ours"), ("DDP", "ours"), ("ours", "DDP")):
        before, save, _ = make(first)
        train(before, LOSS, range(4), local=False)
        after, _, load = make(second)
        after.load_state_dict(before.state_dict())
        load(save())
        assert relative(train(after, LOSS, range(4, 8), local=False).weights, whole) < 1e-5


@pytest.fixture
def wrapped(alone):
    return DataParallel(mlp(*WIDTHS), **caps(0.006))


def require_gradients_of_a_twin(wrapped, step):
    """The passes before have left nothing behind."""
    twin = copy.deepcopy(wrapped.module)
    twin.zero_grad()
    LOSS(twin, 0, step).backward()
    assert same_bits(gradients(wrapped.module), gradients(twin))


def storages(model):
    return {p.grad.untyped_storage().data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_of_the_buckets(wrapped, set_to_none):
    for step in range(3):
        wrapped.zero_grad(set_to_none=set_to_none)
        LOSS(wrapped, 0, step).backward()
        assert len(storages(wrapped)) == len(wrapped.buckets()) if step else 1
        for p in wrapped.parameters():
            assert p.grad._base is not None
    before = storages(wrapped)
    wrapped.zero_grad(set_to_none=set_to_none)
    LOSS(wrapped, 0, 0).backward()
    assert storages(wrapped) == before
    require_gradients_of_a_twin(wrapped, 0)


def test_gradients_that_are_not_cleared_go_on_adding_up(wrapped):
    twin = copy.deepcopy(wrapped.module)
    for step in range(3):
        for model in (wrapped, twin):
            LOSS(model, 0, step).backward()
    assert relative(flat_gradients(wrapped), flat_gradients(twin)) < 1e-6


def test_a_missing_gradient_is_named_at_the_end_of_the_pass():
    model = Branches(lambda y: y)
    ours = DataParallel(model)
    for _ in range(2):  # and again: nothing is left over from the failure
        words = r"'branches.1.0.weight', .* without a gradient .* find_unused_parameters=True"
        with pytest.raises(RuntimeError, match=words) as raised:
            ours(torch.ones(1, 64)).sum().backward()
        assert "branches.0" not in str(raised.value)
    model.chosen = [0, 1, 2, 3]
    model.zero_grad()
    ours(torch.ones(1, 64)).sum().backward()
    assert ours.stats().steps == 1


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
    assert ours.stats().steps == 2


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
    stats = ours.stats()
    assert (stats.collectives, stats.bytes_sent) == (len(everything), sum(p.nbytes for p in everything))


def test_a_model_whose_wrapper_is_gone_can_be_wrapped_again():
    model = mlp(*WIDTHS)
    for algorithm in (PowerSGD(rank=1), AllReduce()):
        wrapped = DataParallel(model, algorithm)
        with collective_payloads() as sent:
            LOSS(wrapped, 0, 0).backward()
        assert len(sent) == (2 if algorithm != AllReduce() else 1)
        del wrapped


def side_loss():
    def forward(self, x):
        self.extra = self.side(x).sum()
        return self.body(x)

    return Layers(forward, body=nn.Linear(4, 4), side=nn.Linear(4, 4))


def test_a_loss_beside_the_outputs_is_named():
    ours = DataParallel(side_loss(), find_unused_parameters=True)
    out = ours(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=r"'side\.(weight|bias)' received a gradient, but the outputs"):
        (out.sum() + ours.module.extra).backward()
    ours.zero_grad()
    plain = DataParallel(side_loss())  # without the search there is nothing to contradict
    out = plain(torch.ones(1, 4))
    (out.sum() + plain.module.extra).backward()
    assert plain.stats().steps == 1


def test_a_parameter_in_several_reentrant_checkpoints_is_named():
    ours = DataParallel(Checkpointed(reentrant=True, shared=True))
    words = r"'layers.0.(weight|bias)' received a second gradient .*use_reentrant=False"
    with pytest.raises(RuntimeError, match=words):
        ours(torch.ones(2, 64)).sum().backward()
    with ours.no_sync():
        ours(torch.ones(2, 64)).sum().backward()  # where nothing is sent it may


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


def test_after_a_backward_pass_that_failed_the_next_one_is_whole(wrapped):
    LOSS(wrapped, 0, 0).backward()
    wrapped.zero_grad()
    fail(wrapped, 1)
    LOSS(wrapped, 0, 2).backward()
    require_gradients_of_a_twin(wrapped, 2)
    assert wrapped.stats().steps == 2


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


def test_a_graph_of_the_gradients_is_refused_by_name(wrapped):
    with pytest.raises(RuntimeError, match=r"gradient of parameter '8\.(weight|bias)' has a graph of its own"):
        LOSS(wrapped, 0, 0).backward(create_graph=True)


def test_what_cannot_be_wrapped_is_refused():
    phase = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    hook = DistributedDataParallel(mlp(2, 2))
    assert "TypeError: module is a DistributedDataParallel" in said(DataParallel, hook)
    assert "TypeError: module is a builtin" in said(DataParallel, len)
    assert "ValueError: module has no parameter with requires_grad=True" in said(DataParallel, mlp(2, 2, frozen=[0]))
    assert "'0' has dtype complex64" in said(DataParallel, phase)
    assert "ValueError: bucket_cap_mb=-1 must be more" in said(DataParallel, mlp(2, 2), bucket_cap_mb=-1)
