"""`DataParallel` beside `DistributedDataParallel`: the same gradients, buckets and checkpoints, and better errors."""

import copy
import re
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradwire import AllReduce, PowerSGD, WireDtype, plan
from gradwire.torch_backend import DataParallel, register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.training import Checkpointed, collective_payloads, loss_on, mlp, oracle, relative, same_bits, train

cases = Cases(__file__, ranks=3)
results = cases.fixture()

WIDTHS = (64, 48, 40, 32, 32, 24)
LOSS = loss_on(64)
ALL_REDUCE = AllReduce()
RANKS = 3


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


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self):
        super().__init__()
        self.first = mlp(64, 48, 40)
        self.last = mlp(40, 24, 24, seed=1).double()

    def forward(self, x):
        return self.last(self.first(x).double()).float()


#: The model, bucket_cap_mb.
DENSE = {
    "one bucket": (lambda: mlp(*WIDTHS), 25),
    "some buckets": (lambda: mlp(*WIDTHS), 0.006),
    "a bucket each": (lambda: mlp(*WIDTHS), 1e-6),
    "convolutions": (Conv, 0.001),
    "two dtypes": (Mixed, 0.006),
    "half precision": (lambda: mlp(*WIDTHS).bfloat16(), 0.002),
}


def caps(cap):
    """DDP takes a cap that it is given for the first bucket too."""
    return {"bucket_cap_mb": cap, "first_bucket_mb": cap}


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


def loss_in(dtype):
    return loss_on(64, dtype=dtype)


@cases.each(DENSE)
def dense(world, variant):
    make, cap = variant
    loss = loss_in(
        torch.bfloat16 if make().state_dict().get("0.weight", torch.ones(1)).dtype == torch.bfloat16 else torch.float32
    )
    ours = DataParallel(make(), process_group=world.group, **caps(cap))
    theirs = DistributedDataParallel(make(), process_group=world.group, bucket_cap_mb=cap)
    first = ours.buckets()
    traces = [train(each, loss, 6, local=False) for each in (ours, theirs)]
    return {
        "given": [same_bits(a, b) for a, b in zip(traces[0].given, traces[1].given, strict=True)],
        "moved": relative(traces[0].given[0], traces[0].given[-1]),
        "state": same_bits(ours.state_dict(), theirs.state_dict()),
        "keys": list(ours.state_dict()) == list(theirs.state_dict()),
        "weights": traces[0].weights,
        "first": first,
        "buckets": ours.buckets(),
        "ddp": buckets_of_ddp(theirs, loss, world.rank),
    }


@pytest.mark.parametrize("variant", DENSE)
def test_dense_gradients_are_those_of_ddp_bit_for_bit(results, variant):
    for rank in results(f"dense[{variant}]"):
        assert rank["given"] == [True] * 6
        assert rank["moved"] > 0.01
        assert rank["state"]  # weights and buffers, under DDP's keys
        assert rank["keys"]
        assert same_bits(rank["weights"], results(f"dense[{variant}]")[0]["weights"])


@pytest.mark.parametrize("variant", DENSE)
def test_buckets_are_those_of_ddp(results, variant):
    for rank in results(f"dense[{variant}]"):
        if variant == "two dtypes":  # two are left over, which DDP orders by a hash
            assert sorted(rank["buckets"]) == sorted(rank["ddp"])
        else:
            assert rank["buckets"] == rank["ddp"]
        assert len(rank["first"]) == (2 if variant == "two dtypes" else 1)


def test_the_variants_have_different_buckets(results):
    counts = {v: len(results(f"dense[{v}]")[0]["buckets"]) for v in DENSE}
    assert counts["one bucket"] == 1 < counts["some buckets"] < counts["a bucket each"] == 10
    assert min(counts[v] for v in ("convolutions", "two dtypes", "half precision")) > 2


def test_buckets_follow_the_order_of_arrival(results):
    names = [n for bucket in results("dense[convolutions]")[0]["buckets"] for n in bucket]
    assert names.index("out.weight") < names.index(
        "conv.0.weight"
    )  # the first in the module, the last in the forward pass but two
    assert names.index("tied.bias") < names.index("out.weight")


@cases.case
def channels_last(world):
    make = lambda: Conv(torch.channels_last)  # noqa: E731
    ours = DataParallel(make(), process_group=world.group, **caps(0.001))
    theirs = DistributedDataParallel(make(), process_group=world.group, bucket_cap_mb=0.001)
    traces = [train(each, LOSS, 6, local=False) for each in (ours, theirs)]
    weight = ours.module.conv[2].weight
    return [t.weights for t in traces], weight.is_contiguous(), weight.stride() == weight.grad.stride()


def test_gradients_have_the_strides_of_their_parameters(results):
    for (ours, theirs), contiguous, same_strides in results("channels_last"):
        assert not contiguous
        assert same_strides
        assert relative(ours, theirs) < 1e-6


ALGORITHMS = {
    "PowerSGD": PowerSGD(rank=2),
    "half step": PowerSGD(rank=2, half_step=True),
    "float16 on the wire": WireDtype(PowerSGD(rank=2), "float16"),
    "dense start": PowerSGD(rank=2, start_step=3),
}


@cases.each(ALGORITHMS)
def algorithms(world, algorithm):
    ours = DataParallel(mlp(*WIDTHS), algorithm, process_group=world.group, **caps(0.006))
    with collective_payloads() as sent:
        trace = train(ours, LOSS, 8)
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
    handle = register_comm_hook(ddp, algorithm)
    theirs = train(ddp, LOSS, 8, local=False)
    return {
        "trace": trace,
        "buckets": len(ours.buckets()),
        "sent": sent,
        "stats": ours.stats(),
        "as DDP's hook": relative(trace.weights, theirs.weights),
        "memory": relative(
            {n: m["error"] for n, m in ours.rank_compressor_state_dict()["tensors"].items()},
            {n: m["error"] for n, m in handle.rank_state_dict()["tensors"].items()},
        ),
        "error_norm": (ours.error_norm(), handle.error_norm()),
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_any_algorithm_runs_as_in_ddps_hook_and_in_the_simulator(results, name):
    ranks = results(f"algorithms[{name}]")
    tolerance = 0.02 if name.startswith("float16") else 1e-5
    expected = oracle(ALGORITHMS[name], [r["trace"] for r in ranks])
    for rank in ranks:
        assert rank["buckets"] > 2
        for given, right in zip(rank["trace"].given, expected, strict=True):
            assert relative(given, right) < tolerance
        assert rank["as DDP's hook"] < tolerance
        assert rank["memory"] < tolerance
        assert rank["error_norm"][0] == pytest.approx(rank["error_norm"][1], rel=tolerance)
        assert same_bits(rank["trace"].weights, ranks[0]["trace"].weights)


class Signs(AllReduce):
    """Not plain averaging, though it is made of it."""

    async def step(self, ops, gradients, state, step):
        return await super().step(ops, {n: g.sign() for n, g in gradients.items()}, state, step)


@cases.case
def made_of_plain_averaging(world):
    ours = DataParallel(mlp(*WIDTHS), Signs(), process_group=world.group)
    theirs = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    register_comm_hook(theirs, Signs())
    return same_bits(*(train(each, LOSS, 2, local=False).given for each in (ours, theirs)))


def test_an_algorithm_made_of_plain_averaging_is_not_taken_for_it(results):
    assert results("made_of_plain_averaging") == [True] * RANKS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_statistics_count_what_was_sent(results, name):
    shapes = {n: tuple(p.shape) for n, p in mlp(*WIDTHS).named_parameters()}
    algorithm = ALGORITHMS[name]
    planned = plan(shapes, algorithm)
    for rank in results(f"algorithms[{name}]"):
        stats, sent = rank["stats"], rank["sent"]
        assert (stats.steps, stats.collectives, stats.bytes_sent) == (8, len(sent), sum(p.nbytes for p in sent))
        compressed = sum(planned.steps[i % algorithm.cycle].nbytes for i in range(8 - algorithm.start_step))
        assert stats.bytes_sent == algorithm.start_step * planned.dense_bytes + compressed


@cases.case
def accumulation(world):
    ours = DataParallel(mlp(*WIDTHS), process_group=world.group, **caps(0.006))
    theirs = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
    with collective_payloads() as sent:
        mine = train(ours, LOSS, 4, micro_batches=3, local=False)
    other = train(theirs, LOSS, 4, micro_batches=3, local=False)
    ours.zero_grad()
    with collective_payloads() as silent, ours.no_sync():
        LOSS(ours, world.rank, 0).backward()
        with ours.no_sync():
            LOSS(ours, world.rank, 1).backward()
        LOSS(ours, world.rank, 2).backward()
    local = {n: p.grad.clone() for n, p in ours.module.named_parameters()}
    twin = copy.deepcopy(ours.module)
    twin.zero_grad()
    for step in range(3):
        LOSS(twin, world.rank, step).backward()
    not_none = []
    for model in (ours, theirs):
        model.zero_grad(set_to_none=False)
        LOSS(model, world.rank, 0).backward()
        not_none.append({n: p.grad.clone() for n, p in model.module.named_parameters()})
    return {
        "bits": same_bits(mine.given, other.given) and same_bits(*not_none),
        "buckets": len(ours.buckets()),
        "sent": len(sent),
        "silent": len(silent),
        "local": relative(local, {n: p.grad for n, p in twin.named_parameters()}),
    }


def test_under_no_sync_gradients_add_up_and_nothing_is_sent(results):
    for rank in results("accumulation"):
        assert rank["bits"]
        assert rank["sent"] == 1 + 3 * rank["buckets"]  # one bucket in the first step
        assert rank["silent"] == 0
        assert rank["local"] < 1e-6


@dataclass
class Outputs:
    main: object
    more: object


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
    "dataclass": (lambda y: [Outputs(None, {"y": y})], lambda out: out[0].more["y"]),
    "opaque": (Hidden, lambda out: out.value),
}


def choice(rank, step):
    """Branch 3 is never used, 2 by rank 2 only, 0 or 1 by everybody in turn."""
    return [step % 2] + ([2] if rank == 2 and step != 3 else [])


@cases.each(
    {
        f"{wrap}, {a}": (wrap, algorithm)
        for wrap in WRAPS
        for a, algorithm in {"dense": AllReduce(), "PowerSGD": PowerSGD(rank=2)}.items()
    }
)
def unused(world, variant):
    wrap, algorithm = variant
    models = [Branches(WRAPS[wrap][0]), Branches(WRAPS["tensor"][0])]
    ours = DataParallel(models[0], algorithm, process_group=world.group, find_unused_parameters=True, **caps(0.002))
    theirs = DistributedDataParallel(
        models[1], process_group=world.group, find_unused_parameters=True, bucket_cap_mb=0.002
    )
    register_comm_hook(theirs, algorithm) if algorithm != AllReduce() else None
    read = {ours: WRAPS[wrap][1], theirs: WRAPS["tensor"][1]}

    def loss(model, rank, step):
        model.module.chosen = choice(rank, step)
        x = torch.randn(24, 64, generator=torch.Generator().manual_seed(100 * rank + step))
        return read[model](model(x)).square().mean()

    traces = []
    for each in (ours, theirs):
        trace = train(each, loss, 6, local=False)
        traces.append(trace)
    return {
        "bits": same_bits(
            [sorted(g.items()) for g in map(_present, traces[0].given)],
            [sorted(g.items()) for g in map(_present, traces[1].given)],
        ),
        "distance": relative(traces[0].weights, traces[1].weights),
        "present": [sorted(_present(g)) for g in traces[0].given],
        "present in DDP": [sorted(_present(g)) for g in traces[1].given],
        "weights": traces[0].weights,
        "steps": ours.stats().steps,
    }


def _present(gradients):
    return {n: g for n, g in gradients.items() if g is not None}


@pytest.mark.parametrize("algorithm", ["dense", "PowerSGD"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_parameters_may_stay_unused(results, wrap, algorithm):
    ranks = results(f"unused[{wrap}, {algorithm}]")
    for rank in ranks:
        assert same_bits(rank["weights"], ranks[0]["weights"])
        assert rank["present"] == rank["present in DDP"]
        assert rank["bits"] if algorithm == "dense" else rank["distance"] < 1e-5
        assert rank["steps"] == 6
        for step, present in enumerate(rank["present"]):
            used = set().union(*(choice(r, step) for r in range(RANKS)))
            assert {n.split(".")[1] for n in present if n.startswith("branches")} == {str(i) for i in used}


@cases.case
def one_rank_uses_nothing(world):
    model = Branches(lambda y: y)
    ours = DataParallel(model, process_group=world.group, find_unused_parameters=True, **caps(0.002))
    x = torch.ones(2, 64, requires_grad=True)
    steps = []
    for idle in (0, 1, None):
        model.zero_grad()
        model.forward = (lambda x: x * 2) if world.rank == idle else Branches.forward.__get__(model)
        ours(x).sum().backward()
        steps.append(model.first[0].weight.grad.clone())
    twin = Branches(lambda y: y)
    twin(x).sum().backward()
    return [relative(s, twin.first[0].weight.grad) for s in steps]


def test_a_rank_that_uses_no_parameter_at_all_still_takes_part(results):
    for rank in results("one_rank_uses_nothing"):
        assert rank[:2] == pytest.approx([1 / 3, 1 / 3], abs=1e-6)  # two thirds of the gradient
        assert rank[2] < 1e-6


class Either(nn.Module):
    """One layer or the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([mlp(8, 8, 4, seed=0), mlp(8, 8, 4, seed=1)])

    def forward(self, x, which):
        return self.layers[which](x)


@cases.case
def accumulated_and_then_unused(world):
    ours = DataParallel(Either(), process_group=world.group, find_unused_parameters=True, **caps(1e-6))
    twin = Either()
    distances = []
    for step in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + world.rank))
        ours.zero_grad(set_to_none=False)
        twin.zero_grad(set_to_none=False)
        with ours.no_sync():
            ours(x, 0).square().sum().backward()
        ours(x, 1).square().sum().backward()
        (twin(x, 0).square().sum() + twin(x, 1).square().sum()).backward()
        for mine, local in zip(ours.parameters(), twin.parameters(), strict=True):
            average = local.grad.clone()
            dist.all_reduce(average, group=world.group)
            distances.append(relative(mine.grad, average / world.size))
    return distances


def test_what_a_parameter_has_accumulated_is_averaged_even_if_the_last_pass_leaves_it_out(results):
    for distances in results("accumulated_and_then_unused"):
        assert max(distances) < 1e-6


class Shuffled(nn.Module):
    """Uses its layers in an order of the rank's own."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.order = torch.randperm(6, generator=torch.Generator().manual_seed(rank)).tolist()

    def forward(self, x):
        for i in self.order:
            x = self.layers[i](x).tanh()
        return x


@cases.case
def any_order(world):
    ours = DataParallel(Shuffled(world.rank), process_group=world.group, **caps(0.001))
    twin = Shuffled(world.rank)
    worst = 0.0
    for step in range(4):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + world.rank))
        for model in (ours, twin):
            model.zero_grad()
            model(x).square().sum().backward()
        mine = torch.cat([p.grad.view(-1) for p in ours.parameters()])
        total = torch.cat([p.grad.view(-1) for p in twin.parameters()])
        dist.all_reduce(total, group=world.group)
        worst = max(worst, relative(mine, total / world.size))
    return {"order": ours.module.order, "buckets": ours.buckets(), "worst": worst}


def test_ranks_agree_on_rank_0s_order_of_arrival(results):
    ranks = results("any_order")
    assert len({tuple(r["order"]) for r in ranks}) > 1
    arrived = [f"layers.{i}" for i in reversed(ranks[0]["order"])]
    for rank in ranks:
        assert rank["worst"] < 1e-6
        assert rank["buckets"] == ranks[0]["buckets"]
        assert list(dict.fromkeys(n.rsplit(".", 1)[0] for b in rank["buckets"] for n in b)) == arrived


@cases.case
def begins_with_rank_0s_numbers(world):
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4).requires_grad_(False))
    model.register_buffer("flags", torch.rand(5) > 0.5)
    model.register_buffer("spectrum", torch.randn(3, dtype=torch.complex64))
    model[1].running_mean.normal_()
    before = copy.deepcopy(model.state_dict())
    wrapped = DataParallel(model, process_group=world.group)
    start = copy.deepcopy(model.state_dict())
    wrapped(torch.randn(6, 8)).sum().backward()
    trained = model[1].running_mean.clone()
    wrapped.eval()
    with torch.no_grad():
        wrapped(torch.randn(6, 8))
    return before, start, trained, model[1].running_mean.clone()


def test_parameters_and_buffers_are_rank_0s(results):
    ranks = results("begins_with_rank_0s_numbers")
    first = ranks[0]
    for before, start, trained, evaluated in ranks:
        assert same_bits(start, first[0])
        if before is not first[0]:
            assert not same_bits(before, first[0])
            assert not same_bits(trained, first[2])
        assert same_bits(evaluated, first[2])  # buffers are rank 0's again in the forward pass after a step


@cases.each({"broadcast": True, "kept": False})
def buffers_that_are_set_after_wrapping(world, broadcast):
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=0.0))
    wrapped = DataParallel(model, process_group=world.group, broadcast_buffers=broadcast)
    model[1].running_mean.fill_(7.0 + world.rank)  # statistics that are loaded, on each rank its own
    wrapped(torch.randn(6, 8)).sum().backward()
    return float(model[1].running_mean[0])


@pytest.mark.parametrize("broadcast", [True, False])
def test_the_first_forward_pass_brings_buffers_in_line(results, broadcast):
    found = results(f"buffers_that_are_set_after_wrapping[{'broadcast' if broadcast else 'kept'}]")
    assert found == [7.0 if broadcast else 7.0 + rank for rank in range(len(found))]


def frozen_second():
    model = mlp(8, 8, 8)
    model[2].weight.requires_grad_(False)
    return model


class Reordered(nn.Module):
    def __init__(self, *names):
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4))


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
        lambda r: (Reordered(*("ab" if r < 2 else "ba")), AllReduce()),
        "{2: has the same in another order",
    ),
    "frozen": (
        lambda r: (mlp(8, 8, 8) if r else frozen_second(), AllReduce()),
        r"1: has parameter '2.weight' as \(8, 8\) float32 instead of \(8, 8\) float32, frozen, 2: has",
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


@cases.each({name: make for name, (make, _) in DIFFERENT.items()})
def different(world, make):
    model, algorithm = make(world.rank)
    before = copy.deepcopy(model.state_dict())
    try:
        DataParallel(model, algorithm, process_group=world.group)
    except ValueError as error:
        return str(error), same_bits(before, model.state_dict())
    return "", True


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_all_learn_in_what(results, name):
    for error, unchanged in results(f"different[{name}]"):
        assert re.search(DIFFERENT[name][1], error)
        assert unchanged


@cases.case
def several_passes(world):
    """Forward passes and backward passes in other numbers than one and one."""
    ours = DataParallel(mlp(*WIDTHS), process_group=world.group, **caps(0.006))
    twin = mlp(*WIDTHS)

    def average():
        flat = torch.cat([p.grad.view(-1) for p in twin.parameters()])
        dist.all_reduce(flat, group=world.group)
        return flat / world.size

    def distance():
        return relative(torch.cat([p.grad.view(-1) for p in ours.parameters()]), average())

    seen = {}
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
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(world.rank), requires_grad=True)
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                (loss + slope.square().sum()).backward()
        seen[name] = distance()
    return seen, ours.stats().steps


def test_any_number_of_forward_and_backward_passes(results):
    for seen, steps in results("several_passes"):
        assert max(seen.values()) < 1e-5, seen
        assert steps == 7


@cases.each({"reentrant": (True, False), "not reentrant": (False, False), "not reentrant, shared": (False, True)})
def checkpointing(world, variant):
    reentrant, shared = variant
    make = lambda r: DataParallel(Checkpointed(reentrant=r, shared=shared), process_group=world.group, **caps(0.006))  # noqa: E731
    ours, plain = make(reentrant), make(None)
    traces = [train(each, LOSS, 3, local=False) for each in (ours, plain)]
    return same_bits(traces[0].weights, traces[1].weights), ours.stats().steps


@pytest.mark.parametrize("variant", ["reentrant", "not reentrant", "not reentrant, shared"])
def test_activation_checkpointing(results, variant):
    assert results(f"checkpointing[{variant}]") == [(True, 3)] * RANKS


@pytest.mark.usefixtures("alone")
def test_reentrant_checkpointing_hides_parameters_from_the_search_for_unused_ones():
    model = DataParallel(Checkpointed(reentrant=True), find_unused_parameters=True)
    loss = model(torch.randn(2, 64)).sum()
    with pytest.raises(RuntimeError, match=r"'layers\.3\.\w+' received a gradient(.|\n)*use_reentrant=False"):
        loss.backward()


@cases.case
def resumed(world):
    """Compressor memory moves between DDP's hook and DataParallel."""
    algorithm = PowerSGD(rank=2)

    def make(kind):
        model = mlp(*WIDTHS)
        if kind == "ours":
            wrapped = DataParallel(model, algorithm, process_group=world.group, **caps(0.006))
            return wrapped, wrapped.rank_compressor_state_dict, wrapped.load_compressor_state_dict
        ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=0.01)
        handle = register_comm_hook(ddp, algorithm)
        return ddp, handle.rank_state_dict, handle.load_state_dict

    whole = train(make("ours")[0], LOSS, 8, local=False).weights
    distances = []
    for first, second in (("ours", "ours"), ("DDP", "ours"), ("ours", "DDP")):
        before, save, _ = make(first)
        train(before, LOSS, range(4), local=False)
        after, _, load = make(second)
        after.load_state_dict(before.state_dict())
        load(save())
        distances.append(relative(train(after, LOSS, range(4, 8), local=False).weights, whole))
    return distances


def test_training_goes_on_from_a_checkpoint_of_either_wrapper(results):
    for distances in results("resumed"):
        assert max(distances) < 1e-5


@pytest.fixture
def wrapped(alone):
    return DataParallel(mlp(*WIDTHS), bucket_cap_mb=0.006, first_bucket_mb=0.006)


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
    twin = copy.deepcopy(wrapped.module)
    twin.zero_grad()
    LOSS(twin, 0, 0).backward()
    assert same_bits([p.grad for p in wrapped.parameters()], [p.grad for p in twin.parameters()])


def test_gradients_that_are_not_cleared_go_on_adding_up(wrapped):
    twin = copy.deepcopy(wrapped.module)
    for step in range(3):
        for model in (wrapped, twin):
            LOSS(model, 0, step).backward()
    assert (
        relative(
            torch.cat([p.grad.view(-1) for p in wrapped.parameters()]),
            torch.cat([p.grad.view(-1) for p in twin.parameters()]),
        )
        < 1e-6
    )


@pytest.mark.usefixtures("alone")
def test_a_missing_gradient_is_named_at_the_end_of_the_pass():
    model = Branches(lambda y: y)
    ours = DataParallel(model)
    for _ in range(2):  # and again: nothing is left over from the failure
        with pytest.raises(
            RuntimeError, match=r"'branches.1.0.weight', .* without a gradient .* find_unused_parameters=True"
        ) as raised:
            ours(torch.ones(1, 64)).sum().backward()
        assert "branches.0" not in str(raised.value)
    model.chosen = [0, 1, 2, 3]
    model.zero_grad()
    ours(torch.ones(1, 64)).sum().backward()
    assert ours.stats().steps == 1


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_forward_passes_that_share_a_backward_pass(find_unused_parameters, again):
    """The first is run again in the middle of it, if asked to."""
    ours = DataParallel(Either(), find_unused_parameters=find_unused_parameters, **caps(1e-6))
    twin = copy.deepcopy(ours.module)
    for step in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        for model in (ours, twin):
            model.zero_grad()
            first = checkpoint(model, x, 0, use_reentrant=False) if again else model(x, 0)
            (first.square().sum() + model(x, 1).square().sum()).backward()
        assert same_bits([p.grad for p in ours.parameters()], [p.grad for p in twin.parameters()])
    assert ours.stats().steps == 2


@pytest.mark.usefixtures("alone")
def test_unused_parameters_hold_up_nobody():
    ours = DataParallel(Either(), find_unused_parameters=True, **caps(1e-6))
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


@pytest.mark.usefixtures("alone")
def test_a_model_whose_wrapper_is_gone_can_be_wrapped_again():
    model = mlp(*WIDTHS)
    for algorithm in (PowerSGD(rank=1), AllReduce()):
        wrapped = DataParallel(model, algorithm)
        with collective_payloads() as sent:
            LOSS(wrapped, 0, 0).backward()
        assert len(sent) == (2 if algorithm != AllReduce() else 1)
        del wrapped


class SideLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.side = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.extra = self.side(x).sum()
        return self.body(x)


@pytest.mark.usefixtures("alone")
def test_a_loss_beside_the_outputs_is_named():
    ours = DataParallel(SideLoss(), find_unused_parameters=True)
    out = ours(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=r"'side\.(weight|bias)' received a gradient, but the outputs"):
        (out.sum() + ours.module.extra).backward()
    ours.zero_grad()
    plain = DataParallel(SideLoss())  # without the search there is nothing to contradict
    out = plain(torch.ones(1, 4))
    (out.sum() + plain.module.extra).backward()
    assert plain.stats().steps == 1


@pytest.mark.usefixtures("alone")
def test_a_parameter_in_several_reentrant_checkpoints_is_named():
    ours = DataParallel(Checkpointed(reentrant=True, shared=True))
    with pytest.raises(
        RuntimeError, match=r"'layers.0.(weight|bias)' received a second gradient .*use_reentrant=False"
    ):
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


def test_after_a_backward_pass_that_failed_the_next_one_is_whole(wrapped):
    LOSS(wrapped, 0, 0).backward()
    wrapped.zero_grad()
    first, *rest = wrapped.module
    wrapped.module.forward = lambda x: nn.Sequential(*rest)(Explosive.apply(first(x)))
    with pytest.raises(ArithmeticError, match="bang"):
        LOSS(wrapped, 0, 1).backward()
    del wrapped.module.forward
    wrapped.zero_grad()
    LOSS(wrapped, 0, 2).backward()
    twin = copy.deepcopy(wrapped.module)
    twin.zero_grad()
    LOSS(twin, 0, 2).backward()
    assert same_bits([p.grad for p in wrapped.parameters()], [p.grad for p in twin.parameters()])
    assert wrapped.stats().steps == 2


@cases.each({"plain": ALL_REDUCE, "PowerSGD": PowerSGD(rank=2)})
def after_a_failure_that_all_ranks_catch(world, algorithm):
    """The last rank comes late to the pass that fails, so what the others have sent in it is still on its way when they repeat it."""
    models = [
        DataParallel(
            mlp(*WIDTHS),
            algorithm,
            process_group=world.group,
            bucket_cap_mb=0.006,
            first_bucket_mb=0.006,
            message_bytes=0,
        )
        for _ in range(2)
    ]
    gradients = []
    for model in models:
        for step in range(2):
            LOSS(model, world.rank, step).backward()
            model.zero_grad()
        if model is models[0]:
            layers = list(model.module)
            model.module.forward = lambda x, layers=layers: nn.Sequential(*layers[1:])(Explosive.apply(layers[0](x)))
            if world.rank == world.size - 1:
                time.sleep(1)
            with pytest.raises(ArithmeticError, match="bang"):
                LOSS(model, world.rank, 2).backward()
            del model.module.forward
            model.zero_grad()
        LOSS(model, world.rank, 3).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    return gradients


@pytest.mark.parametrize("algorithm", ["plain", "PowerSGD"])
def test_messages_of_a_pass_that_failed_do_no_harm(results, algorithm):
    for failed, never_failed in results(f"after_a_failure_that_all_ranks_catch[{algorithm}]"):
        assert same_bits(failed, never_failed)


def test_a_graph_of_the_gradients_is_refused_by_name(wrapped):
    with pytest.raises(RuntimeError, match=r"gradient of parameter '8\.(weight|bias)' has a graph of its own"):
        LOSS(wrapped, 0, 0).backward(create_graph=True)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_wrapped_is_refused():
    for module, kind in ((DistributedDataParallel(mlp(2, 2)), "DistributedDataParallel"), (len, "builtin")):
        with pytest.raises(TypeError, match=f"module is a {kind}"):
            DataParallel(module)
    with pytest.raises(ValueError, match="no parameter with requires_grad=True"):
        DataParallel(mlp(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="'0' has dtype complex64"):
        DataParallel(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))]))
    with pytest.raises(ValueError, match="bucket_cap_mb=-1 must be more"):
        DataParallel(mlp(2, 2), bucket_cap_mb=-1)


def test_without_a_process_group_the_error_says_what_to_call():
    with pytest.raises(ValueError, match="init_process_group first"):
        DataParallel(mlp(2, 2))


@pytest.mark.usefixtures("alone")
def test_state_dict_keys_are_ddps():
    ours, theirs = DataParallel(Conv()), DistributedDataParallel(Conv())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert "module.conv.1.running_mean" in ours.state_dict()
    ours.load_state_dict(theirs.state_dict())


if __name__ == "__main__":
    cases.main()
