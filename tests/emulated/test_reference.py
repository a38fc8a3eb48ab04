"""What comes out on three ranks of the emulated accelerator is what NumPy computes, not only what gradwire computes elsewhere.

A third is no number of any dtype, so a mean that is rounded once too often is seen. The gradients are also those that real models have and random
numbers do not: of low rank, in a single row, zero, and once not finite.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, PowerSGD
from tests.emulated.build import shared_library
from tests.emulated.ways import native_collectives
from tests.examples.conftest import examples_importable
from tests.parity.given import GivenGradients
from tests.torch.ranks import Cases

with examples_importable():
    from power_sgd_on_one_screen import power_sgd, side_by_side

RANKS = 3
#: Significant bits, the first of which is not stored.
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}

cases = Cases(__file__, ranks=RANKS)


@pytest.fixture(scope="module", autouse=True)
def _built():
    shared_library()


def hooked(model, algorithm, group, **options):
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1 / 1024)
    return ddp, gw.register_comm_hook(ddp, algorithm, message_bytes=0, **options)


def wrapped(model, algorithm, group, **options):
    parallel = gw.DataParallel(
        model,
        algorithm,
        process_group=group,
        bucket_cap_mb=1 / 1024,
        first_bucket_mb=1 / 1024,
        message_bytes=0,
        **options,
    )
    return parallel, parallel.handle


DOORS = {"DDP": hooked, "DataParallel": wrapped}


def sharded(model, group):
    """The gradients of an optimizer with sharded state: it takes them away from weights that are zero."""
    optimizer = gw.ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        lr=1.0,
        process_group=group,
        average_gradients=True,
        shard="parameter",
    )
    return optimizer.step


# --- a mean ----------------------------------------------------------------------------------------------------------------------


def one_addend(dtype, rank):
    """Of each element one rank alone has a gradient, so that nothing is rounded but the mean."""
    everyones = torch.randn(40, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    return everyones.where(torch.arange(1000).view(40, 25) % RANKS == rank, torch.zeros((), dtype=dtype))


SHORT = {str(dtype).removeprefix("torch."): dtype for dtype in BITS}
MEANS = [f"{dtype}, {door}" for dtype in SHORT for door in (*DOORS, "ZeroOptimizer", "ZeroOptimizer, all-to-all")]


@cases.each(MEANS)
def short_mean(world, name):
    from tests.emulated.device import DEVICE
    from tests.emulated.process_group import BACKEND

    dtype, door = SHORT[name.split(", ")[0]], name.split(", ", 1)[1]
    group = dist.new_group(backend=BACKEND)
    model = GivenGradients({"w": torch.zeros(40, 25, dtype=dtype), "b": torch.zeros(40, 25, dtype=dtype)}).to(DEVICE)
    gradient = one_addend(dtype, world.rank).to(DEVICE)
    with native_collectives(BACKEND if door != "ZeroOptimizer, all-to-all" else "nccl"):
        if door in DOORS:
            parallel, _ = DOORS[door](model, AllReduce(), group)
            parallel({"w": gradient, "b": gradient}).backward()
            return [p.grad.cpu().double() for p in model.parameters()]
        step = sharded(model, group)
        model({"w": gradient, "b": gradient}).backward()
        step()
    return [-p.detach().cpu().double() for p in model.parameters()]


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_rounded_once(results, name):
    dtype = SHORT[name.split(", ")[0]]
    exact = sum(one_addend(dtype, rank).double() for rank in range(RANKS)).numpy() / RANKS
    last_bit = np.ldexp(1.0, np.frexp(exact)[1] - BITS[dtype])
    for means in results(f"short_mean[{name}]"):
        for mean in means:
            # A 1000th more: the third itself is a float32.
            assert np.abs((mean.numpy() - exact) / last_bit).max() <= (0.501 if dtype != torch.float32 else 1.0)


# --- PowerSGD --------------------------------------------------------------------------------------------------------------------

SHAPES = {"w": (33, 17), "low": (21, 15), "row": (25, 11), "rows": (40, 7), "zero": (9, 13), "b": (31,)}
STEPS = 7
#: A step in which the gradient of one rank is not finite.
INFINITE = 3


def gradients(step, rank):
    """float64, of a sum in which the replicas' common part has the rank that is kept."""
    rng, common = np.random.default_rng([step, rank]), np.random.default_rng(100)

    def low(name, rank, noise):
        n, m = SHAPES[name]
        return common.normal(size=(n, rank)) @ rng.normal(size=(rank, m)) + noise * rng.normal(size=(n, m))

    found = {"w": low("w", 2, 0.05), "low": low("low", 1, 0.0), "b": rng.normal(size=31)}
    for name, used in (("row", [3]), ("rows", [0, 39])):  # fewer rows than the rank, or as many
        found[name] = np.zeros(SHAPES[name])
        found[name][used] = rng.normal(size=(len(used), SHAPES[name][1]))
    found["zero"] = np.zeros(SHAPES["zero"])
    found = {name: x.astype(np.float32) for name, x in found.items()}
    if (step, rank) == (INFINITE, RANKS - 1):
        found["w"][5, 5] = np.inf
    return found


@cases.each(DOORS)
def as_in_numpy(world, door):
    from tests.emulated.device import DEVICE
    from tests.emulated.process_group import BACKEND

    group = dist.new_group(backend=BACKEND)
    model = GivenGradients({name: torch.zeros(shape) for name, shape in SHAPES.items()}).to(DEVICE)
    parallel, handle = door(model, PowerSGD(2, min_compression_rate=1e-3), group)
    began = {name: memory["q"].cpu().double().numpy() for name, memory in handle.state_dict()["tensors"].items()}
    averages = []
    for step in range(STEPS):
        given = {name: torch.from_numpy(x).to(DEVICE) for name, x in gradients(step, world.rank).items()}
        parallel(given).backward()
        averages.append({name: p.grad.cpu().double().numpy() for name, p in model.named_parameters()})
        model.zero_grad()
    return began, averages


def on_one_screen(began):
    """The averages of the steps that are finite."""
    seen = [{} for _ in range(STEPS)]

    def train(replica, all_reduce_mean):
        qs = {name: q.mT.copy() for name, q in began.items()}
        errors = {name: np.zeros(SHAPES[name]) for name in qs}
        for step in range(STEPS):
            if step != INFINITE:
                given = {name: x.astype(np.float64) for name, x in gradients(step, replica).items()}
                seen[step] = power_sgd(given, errors, qs, all_reduce_mean)

    side_by_side(RANKS, train)
    return seen


@pytest.mark.parametrize("door", DOORS)
def test_the_numbers_are_numpys(results, door):
    everyones = results(f"as_in_numpy[{door}]")
    expected = on_one_screen(everyones[0][0])
    for _, averages in everyones:
        for step, (average, wanted) in enumerate(zip(averages, expected, strict=True)):
            for name in SHAPES:
                if step == INFINITE and name != "b":
                    assert np.isnan(average[name]).all()
                elif step != INFINITE:
                    np.testing.assert_allclose(
                        average[name], wanted[name], rtol=0, atol=2e-5, err_msg=f"step {step}, {name}"
                    )
