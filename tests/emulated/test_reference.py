"""What comes out on three ranks of the emulated accelerator is what NumPy and the core compute, not
only what gradwire computes elsewhere.

A third is no number of any dtype, so a mean that is rounded once too often is seen. The gradients
are also those that real models have and random numbers do not: of low rank, in a single row, zero,
and once not finite.
"""

import os
from contextlib import nullcontext
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, Spec
from gradwire.core.simulate import self_check
from gradwire.core.simulate.self_check import VARIABLE
from gradwire.torch_backend.setup.self_check import wrong_here
from tests.emulated.ways import native_collectives
from tests.examples.conftest import examples_importable
from tests.methods import METHODS
from tests.parity import cases as table
from tests.parity.given import GivenGradients
from tests.torch.asked import ASKED, Answered, answered, require_right
from tests.torch.defaults import other_defaults
from tests.torch.ranks import Cases

pytestmark = pytest.mark.slow

if "RANK" in os.environ:
    from tests.emulated.device import DEVICE, core, watched
    from tests.emulated.process_group import BACKEND

with examples_importable():
    from power_sgd_on_one_screen import power_sgd, side_by_side

RANKS = 3
#: Significant bits, the first of which is not stored.
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
BUCKETS = {"bucket_cap_mb": 1 / 1024}

cases = Cases(__file__, ranks=RANKS)


def hooked(model, algorithm, group):
    ddp = DistributedDataParallel(model, process_group=group, **BUCKETS)
    return ddp, gw.register_comm_hook(ddp, algorithm, message_bytes=0)


def wrapped(model, algorithm, group):
    options = BUCKETS | {"first_bucket_mb": 1 / 1024, "message_bytes": 0}
    parallel = gw.DataParallel(model, algorithm, process_group=group, **options)
    return parallel, parallel.handle


DOORS = {"DDP": hooked, "DataParallel": wrapped}


# --- a request, with the collectives of NCCL, and with those that a library without them has ----


EXCHANGES = [name for name in ASKED if name.startswith(("a gather", "an all-", "a reduce-"))]
VARIANTS = [*((name, "NCCL") for name in ASKED), *((name, "another") for name in EXCHANGES)]


@cases.each({f"{name}, {library}": (name, library) for name, library in VARIANTS})
def test_a_request_is_answered_as_the_core_says(world, variant):
    name, library = variant
    group = dist.new_group(backend=BACKEND)
    watched.clear()
    with native_collectives(BACKEND if library == "NCCL" else "nccl"):
        seen = answered(name, group, DEVICE)
    assert (watched.problems, core.messages_on_their_way()) == ([], 0)
    require_right(name, [Answered(**own) for own in world.everyones(vars(seen))])


# --- a mean -------------------------------------------------------------------------------------


def averaged(model, gradient, group):
    """By `Averager`."""
    means = {"w": gradient.clone(), "b": gradient.clone()}
    gw.Averager(AllReduce(), dict(model.named_parameters()), group)(means)
    return means.values()


def averaged_by_the_optimizer(model, gradient, group):
    """It takes gradients away from weights that are zero."""
    options = {"lr": 1.0, "process_group": group, "average_gradients": True, "shard": "parameter"}
    optimizer = gw.ZeroOptimizer(model.named_parameters(), torch.optim.SGD, **options)
    model({"w": gradient, "b": gradient}).backward()
    optimizer.step()
    return [-p.detach() for p in model.parameters()]


def averaged_parameters(model, gradient, group):
    """By `local_sgd`, after a step that leaves them as they are."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    gw.local_sgd(model, optimizer, LocalSGD(period=1), process_group=group)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(gradient)
    optimizer.step()
    return [p.detach() for p in model.parameters()]


def averaged_in_backward(door, model, gradient, group):
    parallel, _ = door(model, AllReduce(), group)
    parallel({"w": gradient, "b": gradient}).backward()
    return [p.grad for p in model.parameters()]


MEANS = {name: partial(averaged_in_backward, door) for name, door in DOORS.items()} | {
    "Averager": averaged,
    "ZeroOptimizer": averaged_by_the_optimizer,
    "ZeroOptimizer, all-to-all": averaged_by_the_optimizer,
    "local_sgd": averaged_parameters,
}


def one_addend(dtype, rank):
    """Of each element one rank alone has a gradient, so that nothing is rounded but the mean."""
    everyones = torch.randn(40, 25, generator=torch.Generator().manual_seed(0)).to(dtype)
    return everyones.where(
        torch.arange(1000).view(40, 25) % RANKS == rank, torch.zeros((), dtype=dtype)
    )


SHORT = {str(dtype).removeprefix("torch."): dtype for dtype in BITS}


@cases.each([f"{dtype}, {door}" for dtype in SHORT for door in MEANS])
def test_a_mean_is_rounded_once(world, name):
    """Also if tensors come to life on the device unless something else is said: a factor there is
    rounded itself."""
    short, door = name.split(", ", 1)
    dtype, group = SHORT[short], dist.new_group(backend=BACKEND)
    gradient, means = one_addend(dtype, world.rank).to(DEVICE), []
    for defaults in (nullcontext, partial(other_defaults, DEVICE)):
        zeros = {key: torch.zeros(40, 25, dtype=dtype) for key in ("w", "b")}
        model = GivenGradients(zeros).to(DEVICE)
        with (
            defaults(),
            native_collectives(BACKEND if door != "ZeroOptimizer, all-to-all" else "nccl"),
        ):
            means += MEANS[door](model, gradient, group)
    exact = sum(one_addend(dtype, rank).double() for rank in range(RANKS)).numpy() / RANKS
    last_bit = np.ldexp(1.0, np.frexp(exact)[1] - BITS[dtype])
    for mean in means:
        # A 1000th more: the third itself is a float32.
        off = np.abs((mean.cpu().double().numpy() - exact) / last_bit)
        assert off.max() <= (0.501 if dtype != torch.float32 else 1.0)


# --- PowerSGD -----------------------------------------------------------------------------------

SHAPES = {
    "w": (33, 17),
    "low": (21, 15),
    "row": (25, 11),
    "rows": (40, 7),
    "zero": (9, 13),
    "b": (31,),
}
STEPS = 7
#: A step in which the gradient of one rank is not finite.
INFINITE = 3


def gradients(step, rank):
    """float32, of a sum in which the replicas' common part has the rank that is kept."""
    rng, common = np.random.default_rng([step, rank]), np.random.default_rng(100)

    def low(name, rank, noise):
        n, m = SHAPES[name]
        return common.normal(size=(n, rank)) @ rng.normal(size=(rank, m)) + noise * rng.normal(
            size=(n, m)
        )

    found = {"w": low("w", 2, 0.05), "low": low("low", 1, 0.0), "b": rng.normal(size=31)}
    for name, used in (("row", [3]), ("rows", [0, 39])):  # fewer rows than the rank, or as many
        found[name] = np.zeros(SHAPES[name])
        found[name][used] = rng.normal(size=(len(used), SHAPES[name][1]))
    found["zero"] = np.zeros(SHAPES["zero"])
    found = {name: x.astype(np.float32) for name, x in found.items()}
    if (step, rank) == (INFINITE, RANKS - 1):
        found["w"][5, 5] = np.inf
    return found


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


@cases.each(DOORS)
def test_the_numbers_are_numpys(world, door):
    model = GivenGradients({name: torch.zeros(shape) for name, shape in SHAPES.items()}).to(DEVICE)
    parallel, handle = door(
        model, PowerSGD(2, min_compression_rate=1e-3), dist.new_group(backend=BACKEND)
    )
    began = {
        name: memory["q"].cpu().double().numpy()
        for name, memory in handle.state_dict()["tensors"].items()
    }
    for step, wanted in enumerate(on_one_screen(began)):
        given = {
            name: torch.from_numpy(x).to(DEVICE) for name, x in gradients(step, world.rank).items()
        }
        parallel(given).backward()
        for name, p in model.named_parameters():
            average = p.grad.cpu().double().numpy()
            if step == INFINITE and name != "b":
                assert np.isnan(average).all()
            elif step != INFINITE:
                np.testing.assert_allclose(
                    average, wanted[name], rtol=0, atol=1e-4, err_msg=f"step {step}, {name}"
                )
        model.zero_grad()


# --- the self-check, which looks here as on any accelerator -------------------------------------


@cases.each(["half_step", "top_k", "wire_int8"])
def test_known_answers_come_out(world, name):
    with mock.patch.dict(os.environ, {VARIABLE: "1"}), mock.patch.object(self_check, "_found", {}):
        assert (
            wrong_here(
                METHODS[name].algorithm,
                {each: Spec(shape) for each, shape in table.SHAPES.items()},
                2,
                DEVICE,
            )
            == ""
        )
        assert len(self_check._found) == 1
    assert watched.problems == []
