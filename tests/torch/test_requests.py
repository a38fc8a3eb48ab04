"""Every request on real ranks, against what the core says that it means: answers, bytes and messages, in groups and in all dtypes."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import Compressor, LocalSGD
from gradwire.core.requests import AllGather, AllToAll, Gather, Reduce, ReduceScatter, ReplicaIndex, WorldSize, gather
from gradwire.torch_backend import Averager, DataParallel, local_sgd, register_comm_hook
from gradwire.torch_backend.collectives import Collectives
from gradwire.torch_backend.drive import specs_of
from gradwire.torch_backend.kernels import TorchOps
from gradwire.torch_backend.process_groups import ProcessGroups
from tests.torch.everything import Everything
from tests.torch.ranks import Cases
from tests.torch.training import (
    TAKEN,
    Branches,
    branching_loss,
    buckets_of,
    loss_on,
    mlp,
    oracle,
    relative,
    same_bits,
    train,
)

cases = Cases(__file__, ranks=3)
results_of = cases.fixture_by_ranks()

OPS = TorchOps(torch.device("cpu"))
#: By number of ranks: groups of any size, and groups of one size, in an order that is not that of the ranks.
UNEVEN = {2: ((1,), (0,)), 3: ((2, 0), (1,))}
EVEN = {2: ((1, 0),), 3: ((2, 0, 1),)}
EACH = {2: ((1,), (0,)), 3: ((2,), (0,), (1,))}
RANKS = (2, 3)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32)
SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)


def tensors(rank, size, dtypes, rows=False):
    """Some tensors of each dtype, one of them empty, one a scalar or a vector, one in another order in memory; other numbers on each rank."""
    draw = torch.Generator().manual_seed(rank)
    shapes = [(size, 3), (size,), (size, 0, 2), (size, 2, 4)] if rows else [(3, 5), (), (0, 4), (2, 1, 4)]
    made = []
    for dtype in dtypes:
        for shape in shapes:
            x = torch.randn(shape[::-1], generator=draw) * 40
            x = x.to(torch.int32).to(dtype) if dtype in INTEGERS else x.to(dtype)
            made.append(x.permute(list(range(len(shape)))[::-1]))
    return tuple(made)


def parts(rank, counts, dtypes, whole):
    draw = torch.Generator().manual_seed(rank)
    return tuple(
        torch.randn(sum(n) if whole else n[rank], generator=draw).to(dtype)
        for n, dtype in zip(counts, dtypes, strict=True)
    )


def counts_of(size):
    return (tuple(range(size)), (2,) * size, (0,) * size, (5, *[0] * (size - 1)))


def reduce(op, dtypes, groups=None):
    def make(rank, size):
        arrays = tensors(rank, size, dtypes)
        return Reduce(arrays, (False,) * len(arrays), False, groups and groups[size], op=op)

    return make


def gather_(dtypes, groups=None):
    return lambda rank, size: Gather(tensors(rank, size, dtypes), False, groups and groups[size])


def all_to_all_(dtypes, groups=None):
    def make(rank, size):
        members = len(groups[size][0]) if groups else size
        return AllToAll(tensors(rank, members, dtypes, rows=True), groups and groups[size])

    return make


def reduce_scatter_(groups=None):
    def make(rank, size):
        members = len(groups[size][0]) if groups else size
        counts = counts_of(members)
        return ReduceScatter(parts(rank, counts, FLOATS[:2] * 2, whole=True), counts, groups and groups[size])

    return make


def all_gather_(groups=None):
    def make(rank, size):
        members = next(m for m in groups[size] if rank in m) if groups else range(size)
        counts = counts_of(len(members))
        own = parts(list(members).index(rank), counts, FLOATS, whole=False)
        return AllGather(
            own, counts, (None, torch.zeros(2 * len(members), dtype=FLOATS[1]), None, None), groups and groups[size]
        )

    return make


ASKED = {
    "means": reduce("mean", FLOATS[:2]),
    "means in groups": reduce("mean", FLOATS[:2], UNEVEN),
    "sums": reduce("sum", (*INTEGERS, *FLOATS[:2])),
    "sums in groups": reduce("sum", INTEGERS, UNEVEN),
    "maxima": reduce("max", (*INTEGERS, *FLOATS)),
    "maxima in groups": reduce("max", (torch.int8, torch.float32), UNEVEN),
    "a gather": gather_((*FLOATS, *INTEGERS, *SMALL)),
    "a gather in groups": gather_((torch.float32, *SMALL), EVEN),
    "a gather alone": gather_((torch.float32,), EACH),
    "an all-to-all": all_to_all_((*FLOATS, *INTEGERS, *SMALL)),
    "an all-to-all in groups": all_to_all_((torch.float16, torch.int8), EVEN),
    "an all-to-all alone": all_to_all_((torch.float16,), EACH),
    "a reduce-scatter": reduce_scatter_(),
    "a reduce-scatter in groups": reduce_scatter_(EVEN),
    "an all-gather": all_gather_(),
    "an all-gather in groups": all_gather_(EVEN),
    "the number of ranks": lambda rank, size: WorldSize(),
    "the number in a group": lambda rank, size: WorldSize(EVEN[size]),
    "the rank": lambda rank, size: ReplicaIndex(),
    "the rank in a group": lambda rank, size: ReplicaIndex(UNEVEN[size]),
}


@cases.each(ASKED)
def asked(world, make):
    request = make(world.rank, world.size)
    before = [x.clone() for x in getattr(request, "arrays", ())]
    collectives = Collectives(ProcessGroups(world.group, [request.groups]), OPS)
    planned = request.payloads(OPS, world.size)
    answer = collectives.perform(request)
    answers = answer if isinstance(answer, tuple) else answer.wait()
    donated = isinstance(request, (ReduceScatter, AllGather))
    untouched = donated or all(same_bits(x, y) for x, y in zip(request.arrays, before, strict=True)) if before else True
    return answers, [collectives.sent.collectives, collectives.sent.nbytes], planned, untouched


def expected(make, size):
    """In NumPy, which lacks some dtypes: those are exchanged as bytes, and compared in float32 where a maximum is taken."""
    requests = [make(rank, size) for rank in range(size)]

    def to_numpy(x):
        return x.float().numpy() if x.dtype is torch.bfloat16 else x.numpy()

    for r in requests:
        if hasattr(r, "arrays"):
            exchanged = isinstance(r, (Gather, AllToAll))
            r.arrays = tuple(as_numpy_bytes(x) if exchanged else to_numpy(x) for x in r.arrays)
        if hasattr(r, "out"):
            r.out = (None,) * len(r.arrays)

    class World:
        finite = True

        def give(self, donated):
            pass

    return type(requests[0]).simulate(requests, World())


def as_numpy_bytes(x):
    return (
        x.contiguous().unsqueeze(-1).view(torch.uint8).numpy()
        if x.numel()
        else x.new_empty((*x.shape, x.itemsize), dtype=torch.uint8).numpy()
    )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ASKED)
def test_a_request_is_answered_as_the_core_says(results_of, name, ranks):
    seen, right = results_of(ranks)(f"asked[{name}]"), expected(ASKED[name], ranks)
    for rank, ((own, *_), answers) in enumerate(zip(seen, right, strict=True)):
        dtypes = [getattr(x, "dtype", None) for x in getattr(ASKED[name](rank, ranks), "arrays", ())]
        for i, (x, y) in enumerate(zip(own, answers, strict=True)):
            if isinstance(x, int):
                assert (type(x), x) == (int, y)
                continue
            assert x.dtype == dtypes[i]
            if ("gather" in name and "all-gather" not in name) or "all-to-all" in name:
                np.testing.assert_array_equal(as_numpy_bytes(x), y)
            elif "max" in name or dtypes[i] in INTEGERS or "all-gather" in name:
                np.testing.assert_array_equal(x.float() if x.dtype is torch.bfloat16 else x, y)
            else:
                np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ASKED)
def test_what_is_sent_is_what_the_request_says(results_of, name, ranks):
    for _, sent, planned, untouched in results_of(ranks)(f"asked[{name}]"):
        assert sent == [len(planned), sum(planned)]
        assert untouched


# --- an algorithm that asks for everything, through every door --------------------------------------------------------------------


def hook(model, group, algorithm, **options):
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.006)
    handle = register_comm_hook(ddp, algorithm, **options)
    return ddp, handle


def data_parallel(model, group, algorithm, **options):
    wrapped = DataParallel(model, algorithm, process_group=group, bucket_cap_mb=0.006, first_bucket_mb=0.006, **options)
    return wrapped, wrapped


DOORS = {
    "one group of buckets": (hook, {"message_bytes": 1 << 30}),
    "a group per bucket": (hook, {"message_bytes": 0}),
    "DataParallel": (data_parallel, {"message_bytes": 0}),
}
WIDTHS = (40, 36, 32, 28)


@cases.each(DOORS)
def everything(world, variant):
    door, options = variant
    algorithm = Everything(EVEN[world.size])
    ddp, handle = door(mlp(*WIDTHS), world.group, algorithm, **options)
    trace = train(ddp, loss_on(40), 4)
    return {"trace": trace, "stats": handle.stats(), "buckets": buckets_of(ddp) if door is hook else 0}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("door", DOORS)
def test_an_algorithm_may_ask_for_everything(results_of, door, ranks):
    seen = results_of(ranks)(f"everything[{door}]")
    algorithm = Everything(EVEN[ranks])
    for rank in seen:
        assert same_bits(rank["trace"].given, seen[0]["trace"].given)
        assert rank["buckets"] != 1
    for given, right in zip(seen[0]["trace"].given, oracle(algorithm, [r["trace"] for r in seen]), strict=True):
        assert relative(given, right) < 1e-5
    if door == "one group of buckets":
        shapes = {name: tuple(p.shape) for name, p in mlp(*WIDTHS).named_parameters()}
        (planned,) = gradwire.plan(shapes, algorithm, world_size=ranks).steps
        stats = seen[0]["stats"]
        assert (stats.collectives, stats.bytes_sent) == (4 * planned.collectives, 4 * planned.nbytes)


@cases.case
def averaged_without_a_model(world):
    algorithm = Everything(EVEN[world.size])
    averager = Averager(algorithm, {"w": torch.zeros(8, 6), "b": torch.zeros(7)}, world.group)
    draw = torch.Generator().manual_seed(world.rank)
    gradients = {"w": torch.randn(8, 6, generator=draw), "b": torch.randn(7, generator=draw)}
    own = {name: g.clone() for name, g in gradients.items()}
    return own, averager(gradients)


@pytest.mark.parametrize("ranks", RANKS)
def test_an_averager_answers_everything(results_of, ranks):
    seen = results_of(ranks)("averaged_without_a_model")
    simulator = gradwire.Simulator(Everything(EVEN[ranks]), {"w": (8, 6), "b": (7,)}, ranks)
    right = simulator.step([{name: g.double().numpy() for name, g in own.items()} for own, _ in seen])
    for _, averages in seen:
        assert relative(averages, right) < 1e-5


@cases.case
def parameters_averaged(world):
    local = LocalSGD(period=2, compressor=Everything(EVEN[world.size]))
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = local_sgd(ddp, optimizer, local)
    for step in range(4):
        optimizer.zero_grad()
        loss_on(40)(ddp, world.rank, step).backward()
        optimizer.step()
    specs = specs_of(dict(ddp.module.named_parameters()))
    return {n: p.detach().clone() for n, p in ddp.module.named_parameters()}, handle.stats(), specs


@pytest.mark.parametrize("ranks", RANKS)
def test_local_sgd_answers_everything(results_of, ranks):
    seen = results_of(ranks)("parameters_averaged")
    weights, stats, specs = seen[0]
    for others, _, _ in seen[1:]:
        assert same_bits(others, weights)
    (planned,) = gradwire.plan(
        {name: spec.shape for name, spec in specs.items()}, Everything(EVEN[ranks]), world_size=ranks
    ).steps
    assert (stats.collectives, stats.bytes_sent) == (2 * planned.collectives, 2 * planned.nbytes)


# --- what arrives is watched, and what is unused is told ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Gathered(Compressor):
    """Values that are gathered, and remembered."""

    error_feedback: bool = False

    def memory(self, ops, name, spec):
        return {"last": ops.zeros(spec.shape, spec.dtype)} if len(spec.shape) > 1 else None

    async def compress(self, ops, name, x, memory, context):
        (everything,) = await gather(x)
        average = everything[0]
        for r in range(1, everything.shape[0]):
            average = ops.add(average, everything[r])
        average = average * (1.0 / everything.shape[0])
        return x, average, {"last": average}


@cases.case
def a_nan_by_a_gather(world):
    averager = Averager(Gathered(), {"w": torch.zeros(8, 6)}, world.group)
    averager({"w": torch.ones(8, 6)})
    before = averager.rank_state_dict()["tensors"]
    average = averager({"w": torch.full((8, 6), float("nan") if world.rank == 1 else 1.0)})
    return average["w"], averager.stats().skipped_steps, same_bits(averager.rank_state_dict()["tensors"], before)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_nan_that_comes_by_a_gather_leaves_no_trace(results_of, ranks):
    for average, skipped, unchanged in results_of(ranks)("a_nan_by_a_gather"):
        assert average.isnan().all()
        assert (skipped, unchanged) == (1, True)


@cases.case
def unused_beside_a_gather(world):
    ddp, handle = hook(Branches(), world.group, Gathered(), message_bytes=1 << 30)
    del ddp
    ddp = DistributedDataParallel(Branches(), process_group=world.group, find_unused_parameters=True)
    handle = register_comm_hook(ddp, Gathered())
    memories = []
    for step in range(len(TAKEN)):
        train(ddp, lambda model, rank, step: branching_loss(model, min(rank, 1), step), [step], local=False)
        memories.append(handle.rank_state_dict()["tensors"])
    return memories, handle.stats()


@pytest.mark.parametrize("ranks", RANKS)
def test_what_no_rank_used_keeps_its_memory_whatever_is_sent_first(results_of, ranks):
    seen = results_of(ranks)("unused_beside_a_gather")
    for memories, _ in seen:
        assert same_bits(memories, seen[0][0])
        for step in range(1, len(TAKEN)):
            for branch in ("left", "right"):
                kept = same_bits(memories[step][f"{branch}.weight"], memories[step - 1][f"{branch}.weight"])
                assert kept == all(branch not in taken for taken in TAKEN[step])


if __name__ == "__main__":
    cases.main()
