"""Weights in torch, in four processes on Gloo: against the simulator, and against runs without the
absent rank."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.dry import on_a_device
from gradwire import (
    AllReduce,
    LocalSGD,
    NobodyCounts,
    PowerSGD,
    Quantize,
    Sign,
    Simulator,
    TopK,
    TwoLevel,
    Weighted,
    WireDtype,
    diloco,
)
from gradwire.core.algorithm import Algorithm
from gradwire.torch_backend import Averager, local_sgd, register_comm_hook
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.compare import same_bits
from tests.torch.defaults import other_defaults
from tests.torch.models import Branches, Layers
from tests.torch.ranks import Cases, World
from tests.torch.training import hooked

cases = Cases(__file__, ranks=4)

SHAPES = {"w": (24, 16), "x": (130,), "b": (7,)}
WEIGHTS = [512.0, 0.0, 100.0, 7.5]
STEPS = 3
ABSENT = 1
ALGORITHMS = {
    "dense": AllReduce(),
    "start_step": PowerSGD(2, half_step=True, start_step=1),
    "top_k_bits": TopK(8, per=64, bits=2),
    "sign": Sign(),
    "codes": WireDtype(AllReduce(), "int8"),
    "int4": Quantize("int4", block=8),
    "levels": TwoLevel(PowerSGD(2), 2),
}
#: That are run as on a device, too.
UNSEEN = {name: ALGORITHMS[name] for name in ("dense", "sign", "codes")} | {
    "power_sgd": PowerSGD(2)
}


def given(rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    drawn = {
        n: np.random.default_rng([rank, step, *n.encode()]).normal(size=s)
        for n, s in SHAPES.items()
    }
    return {n: x.astype(np.float32) for n, x in drawn.items()}


def tensors(arrays: dict[str, Any], factor: float = 1.0) -> dict[str, Tensor]:
    return {n: torch.from_numpy(x) * factor for n, x in arrays.items()}


@cases.each(ALGORITHMS)
def test_an_absent_rank_changes_nothing(world: World, algorithm: Algorithm) -> None:
    """What it has is NaN. The others do the same once more without it."""
    like = {n: torch.zeros(s) for n, s in SHAPES.items()}
    averager = Averager(Weighted(algorithm), like, world.group)
    others = torch.distributed.new_group([r for r in range(world.size) if r != ABSENT])
    # Of whose parts it owns one, and does not remember how it has rounded it.
    owned = algorithm in (ALGORITHMS["int4"], ALGORITHMS["levels"])
    alone = None if world.rank == ABSENT or owned else Averager(Weighted(algorithm), like, others)
    for each in filter(None, (averager, alone)):
        each.weight = WEIGHTS[world.rank]
    simulator = Simulator(algorithm, SHAPES, 4, dtype="float32")
    for step in range(STEPS):
        mine = given(world.rank, step)
        found = averager(tensors(mine, float("nan") if world.rank == ABSENT else 1.0))
        assert world.agree(found)
        if world.rank == 0:
            expected = simulator.step([given(r, step) for r in range(4)], weights=WEIGHTS)
            for n in SHAPES:
                np.testing.assert_allclose(found[n], expected[n], rtol=5e-4, atol=5e-4)
        for n, x in alone(tensors(mine)).items() if alone else ():
            np.testing.assert_allclose(found[n], x, rtol=0, atol=1e-5)
    assert averager.local_error_norm() == 0 or world.rank != ABSENT or owned


@cases.each({"bfloat16": torch.bfloat16, "float16": torch.float16})
def test_16_bits_are_summed_in_32_and_rounded_once(world: World, dtype: torch.dtype) -> None:
    """To the bit, by every door; what the absent rank has is NaN."""
    everyones = [tensors(given(r, 0)) for r in range(world.size)]
    rounded = [{n: x.to(dtype) for n, x in each.items()} for each in everyones]
    counting = [r for r in range(world.size) if WEIGHTS[r]]
    total = torch.tensor(WEIGHTS).sum()
    expected = {
        n: (sum(WEIGHTS[r] * rounded[r][n].float() for r in counting) / total).to(dtype)
        for n in SHAPES
    }
    mine = {
        n: x * (float("nan") if world.rank == ABSENT else 1.0)
        for n, x in rounded[world.rank].items()
    }
    averager = Averager(Weighted(AllReduce()), mine, world.group)
    averager.weight = WEIGHTS[world.rank]
    model = Layers(**{n: nn.Parameter(torch.zeros(s, dtype=dtype)) for n, s in SHAPES.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = local_sgd(model, optimizer, LocalSGD(1, weighted=True), process_group=world.group)
    handle.weight = WEIGHTS[world.rank]
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(mine[n])
    optimizer.step()
    assert same_bits(dict(averager({n: x.clone() for n, x in mine.items()})), expected)
    assert same_bits({n: p.detach() for n, p in model.named_parameters()}, expected)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(rounded[world.rank][n])
    handle.synchronize()
    everyone = {n: x.double() for n, x in expected.items()}
    assert all(
        torch.allclose(p.double(), everyone[n], rtol=2**-7) for n, p in model.named_parameters()
    )


@cases.case
def test_nobody_counts(world: World) -> None:
    """All ranks hear of it, DDP has finished its backward pass, and the next one goes on from the
    memory as it was."""
    model = nn.Linear(48, 32, bias=False)
    ddp = DistributedDataParallel(model, process_group=world.group)
    handle = register_comm_hook(ddp, Weighted(PowerSGD(2)))
    for weights in ([1, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]):
        handle.weight = weights[world.rank]
        before = handle.rank_state_dict()
        model.zero_grad()
        loss = ddp(torch.ones(2, 48) * (world.rank + 1)).sum()
        if any(weights):
            loss.backward()
            expected = 2 * np.average([1, 2, 3, 4], weights=weights)
            assert torch.allclose(
                model.weight.grad, torch.full((32, 48), float(expected)), rtol=1e-4
            )
            continue
        with pytest.raises(NobodyCounts):
            loss.backward()
        after = handle.rank_state_dict()
        assert after["step"] == before["step"]
        assert same_bits(after["tensors"], before["tensors"])
    assert handle.stats().steps == 2


@cases.case
def test_uneven_inputs_under_join(world: World) -> None:
    """A rank that has come to its end weighs 0, so that the others average among themselves."""
    model = nn.Linear(4, 1, bias=False)
    ddp = DistributedDataParallel(model, process_group=world.group)
    handle = register_comm_hook(ddp, Weighted(AllReduce()))
    batches = 1 + world.rank
    found = []
    with ddp.join():
        for _ in range(batches):
            model.zero_grad()
            handle.weight = 1
            ddp(torch.ones(1, 4) * (world.rank + 1)).sum().backward()
            found.append(float(model.weight.grad[0, 0]))
        handle.weight = 0
    assert found == [2.5, 3.0, 3.5, 4.0][:batches]


@cases.case
def test_unused_parameters_and_weights_share_a_message(world: World) -> None:
    sent = []
    for algorithm in (PowerSGD(2), Weighted(PowerSGD(2))):
        ddp, handle = hooked(Branches(), algorithm, world.group, find_unused_parameters=True)
        ddp(torch.ones(2, 40), ("left",)).sum().backward()
        assert not handle.rank_state_dict()["tensors"]["right.weight"]["error"].any()
        sent.append(handle.stats().collectives)
    assert sent[0] == sent[1]


@cases.case
def test_weights_do_not_part_states(world: World) -> None:
    """What was saved without weights goes on with them, and the other way round; a step is measured
    against the weighted mean."""
    like = {n: torch.zeros(s) for n, s in SHAPES.items()}
    methods = PowerSGD(2), Weighted(PowerSGD(2)), Weighted(AllReduce())
    plain, weighted, exact = (Averager(method, like, world.group) for method in methods)
    plain(tensors(given(world.rank, 0)))
    weighted.load_state_dict(plain.gathered_state_dict("all", to=None))
    plain.load_state_dict(weighted.rank_state_dict())
    assert same_bits(weighted.rank_state_dict()["tensors"], plain.rank_state_dict()["tensors"])
    exact.weight = WEIGHTS[world.rank]
    with exact.measured() as found:
        exact(tensors(given(world.rank, 0), float("nan") if world.rank == ABSENT else 1.0))
    assert found.relative_error is not None
    assert found.relative_error < 1e-6


@cases.each(UNSEEN)
def test_where_the_host_does_not_look(world: World, algorithm: Algorithm) -> None:
    """As on a device, where the host must not look at numbers."""
    with on_a_device(), mock.patch.object(TorchOps, "truth", return_value=None):
        averager = Averager(
            Weighted(algorithm), {n: torch.zeros(s) for n, s in SHAPES.items()}, world.group
        )
        averager.weight = WEIGHTS[world.rank]
        mine = tensors(given(world.rank, 0), float("nan") if world.rank == ABSENT else 1.0)
        first = {n: x.clone() for n, x in averager(mine).items()}
        before = averager.rank_state_dict()["tensors"]
        averager.weight = 0
        nobody = averager(tensors(given(world.rank, 1)))
    assert same_bits(before, averager.rank_state_dict()["tensors"])
    assert world.agree(first)
    expected = Simulator(algorithm, SHAPES, 4, dtype="float32").step(
        [given(r, 0) for r in range(4)], weights=WEIGHTS
    )
    for n in SHAPES:
        np.testing.assert_allclose(first[n], expected[n], rtol=2e-5, atol=2e-5)
        assert nobody[n].isnan().all()


@cases.case
def test_a_count_is_kept_as_it_is_whatever_dtype_numbers_have_by_default(world: World) -> None:
    """bfloat16 has no number between 1000 and 1004."""
    with other_defaults("meta"):
        averager = Averager(
            Weighted(AllReduce()),
            {"w": torch.zeros(4, dtype=torch.float32, device="cpu")},
            world.group,
        )
        averager.weight = 1003
    assert averager.weight == 1003


@cases.case
def test_refusals(world: World) -> None:
    like = {"w": torch.zeros(4)}
    for wrong in (-1, float("nan"), float("inf"), True, "2", None):
        with pytest.raises((TypeError, ValueError), match="weight"):
            Averager(Weighted(AllReduce()), like, world.group).weight = wrong
    with pytest.raises(ValueError, match="Weighted"):
        Averager(AllReduce(), like, world.group).weight = 2
    with pytest.raises(ValueError, match="algorithm"):  # not all of them
        Averager(Weighted(AllReduce()) if world.rank else AllReduce(), like, world.group)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = local_sgd(model, optimizer, LocalSGD(2), process_group=world.group)
    with pytest.raises(ValueError, match="weighted=True"):
        handle.weight = 2
    handle.reconfigure(diloco(2, weighted=True))
    with pytest.raises(ValueError, match="weight"):
        handle.weight = -2
