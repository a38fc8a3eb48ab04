"""Every request on real ranks, against what the core says that it means: answers, bytes and messages, in groups and in all dtypes."""

from dataclasses import dataclass

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import Compressor, LocalSGD
from gradwire.core.requests import gather
from gradwire.torch_backend import Averager, DataParallel, local_sgd, register_comm_hook
from gradwire.torch_backend.drive import specs_of
from tests.torch.asked import ASKED, EVEN, RANKS, Answered, answered, require_right
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


@cases.each({name: name for name in ASKED})
def asked(world, name):
    return vars(answered(name, world.group, torch.device("cpu")))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ASKED)
def test_a_request_is_answered_as_the_core_says(results_of, name, ranks):
    require_right(name, [Answered(**own) for own in results_of(ranks)(f"asked[{name}]")])


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
