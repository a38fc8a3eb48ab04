"""Local SGD under DDP, in four processes on Gloo: the parity table, what is sent, what is averaged, and what is refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, WireDtype, diloco
from gradwire.torch_backend import local_sgd
from tests.parity import local_sgd_cases as parity
from tests.torch.compare import flat, relative, said, same_bits, weights
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.ranks import Cases, World
from tests.torch.training import collective_payloads, fit, hooked, sgd

cases = Cases(__file__, ranks=4)

EVERYONE, PAIRS = (0, 1, 2, 3), ((0, 1), (2, 3))
LOSS = loss_on(6)


def quadratic() -> nn.Module:
    """The loss of the parity table."""

    def forward(self: nn.Module, curvature: float, target: dict[str, Tensor], noise: dict[str, Tensor]) -> Tensor:
        near = [0.5 * curvature * (p - target[n]).square().sum() for n, p in self.named_parameters()]
        return torch.stack([*near, *((noise[n] * p).sum() for n, p in self.named_parameters())]).sum()

    return Layers(forward, **{name: nn.Parameter(torch.from_numpy(x)) for name, x in parity.initial().items()})


def tensors(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {n: torch.as_tensor(x) for n, x in arrays.items()}


#: But for those of which others are the same and more.
TABLE = {n: c for n, c in parity.CASES.items() if n not in ("every_step", "period", "outer_sgd", "diloco")}


@cases.each(TABLE)
def table(world: World, local: LocalSGD) -> dict[str, Any]:
    module = quadratic()
    ddp, _ = hooked(module, None, world.group)
    optimizer = torch.optim.SGD(module.parameters(), lr=parity.RATE)
    handle = local_sgd(ddp, optimizer, local)
    trace: dict[str, Any] = {"parameters": [], "bytes": [], "collectives": []}
    for step in range(parity.STEPS):
        before = handle.stats()
        target, noise = tensors(parity.target(world.rank)), tensors(parity.noise(world.rank, step))
        optimizer.zero_grad()
        if local.weighted:
            handle.weight = parity.weight(world.rank, step)
        ddp(parity.CURVATURE[world.rank], target, noise).backward()
        optimizer.step()
        trace["parameters"].append(weights(module))
        trace["bytes"].append(handle.stats().bytes_sent - before.bytes_sent)
        trace["collectives"].append(handle.stats().collectives - before.collectives)
    return trace | {"memory": handle.rank_state_dict()["tensors"]}


@pytest.mark.parametrize("case", TABLE)
def test_equals_the_oracle(results, case):
    traces = results(f"table[{case}]")
    steps = [[trace["parameters"][step] for trace in traces] for step in range(parity.STEPS)]
    parity.assert_same(case, steps, [trace["memory"] for trace in traces])
    expected = parity.oracle(case)
    for trace in traces:
        for mine, theirs in ((trace["bytes"], expected.nbytes), (trace["collectives"], expected.collectives)):
            if parity.CASES[case].delayed:  # what is on its way has not arrived with the oracle
                assert sum(theirs) <= sum(mine) <= sum(theirs) + max(theirs) * parity.CASES[case].fragments
            else:
                assert mine == theirs


class Training:
    """A small model under local SGD: `run(steps)` returns what was sent in each, the ranks of the group and the number of elements."""

    def __init__(
        self,
        world: World,
        local: LocalSGD,
        *,
        model: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        lr: float = 0.1,
        backwards: int = 1,
        **options: Any,
    ) -> None:
        self.world = world
        self.model = model or mlp(6, 5, 3)
        self.ddp = DistributedDataParallel(self.model, process_group=world.group, broadcast_buffers=False)
        self.optimizer = optimizer(self.model.parameters(), lr=lr)
        self.handle = local_sgd(self.ddp, self.optimizer, local, **options)
        self.backwards = backwards

    def step(self, number: int) -> list[Any]:
        with collective_payloads() as sent:
            self.optimizer.zero_grad()
            for _ in range(self.backwards):
                LOSS(self.ddp, self.world.rank, number).backward()
            self.optimizer.step()
        return [(payload.ranks, payload.numel) for payload in sent]

    def run(self, steps: int) -> list[list[Any]]:
        return [self.step(number) for number in range(steps)]

    def alone(self, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What the rank would have become without the others."""
        twin = copy.deepcopy(self.model)
        optimizer = type(self.optimizer)(twin.parameters(), lr=self.optimizer.param_groups[0]["lr"])
        fit(twin, optimizer, self.world.rank, range(steps), LOSS)
        return twin, optimizer


SIZE = 6 * 5 + 5 + 5 * 3 + 3


@cases.case
def test_steps_of_the_optimizer_count_however_many_backward_passes_they_are_made_of(world: World) -> None:
    sent = Training(world, LocalSGD(100, start_step=3), backwards=2).run(8)
    assert sent == [[(EVERYONE, SIZE)] * 2] * 3 + [[]] * 5


@cases.case
def test_parameters_without_a_gradient_are_averaged(world: World) -> None:
    """DDP would give the parameter a gradient of zeros on all ranks, as long as one has used it; by itself a rank has none."""
    torch.manual_seed(0)
    model = Layers(
        lambda self, x, second: self.first(self.body(x)) + (self.second(self.body(x)) if second else 0),
        body=nn.Linear(6, 4),
        first=nn.Linear(4, 3),
        second=nn.Linear(4, 3),
    )
    optimizer = sgd(model)
    local_sgd(model, optimizer, LocalSGD(2), process_group=world.group)
    x = torch.randn(8, 6) * (world.rank + 1)
    before = model.second.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(x, world.rank == 1).square().mean().backward()
        optimizer.step()
    assert (model.second.weight.grad is None) is (world.rank != 1)
    assert not torch.equal(before, model.second.weight)
    assert world.agree(model.second.weight.detach())


@cases.each(["average", "keep"])
def test_statistics_are_averaged_or_kept(world: World, buffers: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    training = Training(world, LocalSGD(2), model=model, buffers=buffers)
    twin, _ = training.alone(2)
    training.run(2)
    for key in ("running_mean", "running_var"):
        own = world.everyones(getattr(twin[1], key))
        expected = torch.stack(own).mean(0) if buffers == "average" else own[world.rank]
        torch.testing.assert_close(getattr(model[1], key), expected)
    assert int(model[1].num_batches_tracked) == 2


ADAM = torch.optim.Adam


@cases.each({"keep": ("keep", SIZE, 5), "average": ("average", 3 * SIZE, 5), "reset": ("reset", SIZE, 2)})
def test_moments_are_kept_averaged_or_reset(world: World, variant: tuple[str, int, int]) -> None:
    what, size, steps = variant
    training = Training(world, LocalSGD(3), optimizer=ADAM, lr=0.01, moments=what)
    twin, alone = training.alone(3)
    assert training.run(3)[-1] == [(EVERYONE, size)]
    weight = training.model[0].weight
    found = dict(training.optimizer.state.get(weight, {}))
    assert bool(found) is (what != "reset")
    for key in {"exp_avg", "exp_avg_sq"} & found.keys():
        own = world.everyones(alone.state[twin[0].weight][key])
        torch.testing.assert_close(found[key], torch.stack(own).mean(0) if what == "average" else own[world.rank])
    training.step(3), training.step(4)  # it goes on
    assert float(training.optimizer.state[weight]["step"]) == steps


@cases.case
def test_ranks_without_moments_count_as_zeros(world: World) -> None:
    """Rank 2 has made no step of its own when moments are averaged for the first time."""
    training = Training(world, LocalSGD(1), optimizer=ADAM, lr=0.01, moments="average")
    LOSS(training.ddp, world.rank, 0).backward()
    if world.rank == 2:
        training.optimizer.zero_grad()
    training.optimizer.step()
    training.step(1)
    found = training.optimizer.state[training.model[0].weight]
    assert float(found["step"]) == (1 if world.rank == 2 else 2)
    assert torch.isfinite(found["exp_avg"]).all()
    assert world.agree(found["exp_avg"])


@cases.each({"plain": False, "unscaled by the user": True})
def test_a_step_that_one_rank_skips_counts_on_all(world: World, unscale: bool) -> None:
    """Rank 1 alone finds inf in step 1. A scaler then does not call `optimizer.step()`: the others must not wait for it."""
    training = Training(world, LocalSGD(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    twin, _ = training.alone(1 if world.rank == 1 else 2)
    expected = torch.stack(world.everyones(flat(twin))).mean(0)
    for step in range(4):
        training.optimizer.zero_grad()
        loss = LOSS(training.ddp, world.rank, step)
        if (world.rank, step) == (1, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        if step == 1:
            assert (
                relative(flat(training.model), expected) < 1e-6
            )  # of what each has done by itself, rank 1 one step less
    assert world.agree(weights(training.model))
    assert all(p.grad is not None for p in training.model.parameters())
    assert (training.handle.steps, scaler.get_scale()) == (4, 512 if world.rank == 1 else 1024)


LONG = diloco(3, lr=0.5, momentum=0.5, start_step=2, fragments=2, compressor=PowerSGD(1, min_compression_rate=1.0))


@cases.case
def test_a_resumed_run_is_the_uninterrupted_one(world: World) -> None:
    """Stopped in the middle of a period, on all ranks, and begun again from what each has saved."""
    whole = Training(world, LONG)
    whole.run(12)
    first = Training(world, LONG)
    first.run(7)
    saved = copy.deepcopy((first.model.state_dict(), first.optimizer.state_dict(), first.handle.rank_state_dict()))
    second = Training(world, LONG, model=mlp(6, 5, 3, seed=9))
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    second.handle.load_state_dict(saved[2])
    assert second.handle.steps == 7
    for step in range(7, 12):
        second.step(step)
    assert same_bits(second.model.state_dict(), whole.model.state_dict())
    assert same_bits(second.handle.rank_state_dict(), whole.handle.rank_state_dict())
    late = copy.deepcopy(saved[2]) | ({"step": 9} if world.rank == 3 else {})
    assert "ranks differ in step: rank 0 has 7, others {3: '9'}" in said(second.handle.load_state_dict, late)
    other = Training(world, diloco(3)).handle
    assert "the state is of LocalSGD(period=3" in said(other.load_state_dict, saved[2])
    assert (second.handle.steps, second.handle.stats().steps) == (12, 5)


@cases.case
def test_weights_may_be_loaded_until_the_first_step(world: World) -> None:
    """They are where the replicas part."""
    usual = Training(world, diloco(2), model=mlp(6, 5, 3, seed=7))
    late = Training(world, diloco(2))
    late.model.load_state_dict(usual.model.state_dict())
    usual.run(4)
    late.run(4)
    assert same_bits(flat(usual.model), flat(late.model))


@cases.case
def test_nodes_are_those_of_torchrun_or_ranks_on_one_host(world: World) -> None:
    schedule = LocalSGD({"node": 2, "all": 4}, subgroup="node", compressor=WireDtype(TwoLevel(AllReduce()), "bfloat16"))
    with mock.patch.dict(os.environ), mock.patch("socket.gethostname", return_value=f"host{world.rank % 2}"):
        del os.environ["LOCAL_WORLD_SIZE"]
        handle = Training(world, schedule).handle
        assert handle.local == schedule.on_nodes_of(((0, 2), (1, 3)))
        assert handle.local.subgroups(4) == handle.local.levels(4)[1].groups == ((0, 2), (1, 3))
        assert handle.local.compressor.algorithm.within == ((0, 2), (1, 3))
        handle.reconfigure(schedule)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        training = Training(world, LocalSGD({"node": 2, "all": 4}, subgroup="node"))
    assert repr(training.handle.local) == "LocalSGD(period={2: 2, 'all': 4}, subgroup=2)"
    own, everyone = (PAIRS[world.rank // 2], SIZE), (EVERYONE, SIZE)
    assert training.run(4) == [[own], [own, own], [own], [own, everyone]]


@cases.case
def test_a_module_without_ddp(world: World) -> None:
    model = mlp(6, 5, 3, seed=world.rank)
    optimizer = sgd(model)
    handle = local_sgd(model, None, LocalSGD(2), process_group=world.group)
    assert world.agree(flat(model))
    for step in range(3):
        fit(model, optimizer, world.rank, [step], LOSS)
        handle.step()
        assert handle.synchronized is world.agree(flat(model)) is (step == 1)
    before = world.everyones(flat(model))
    handle.synchronize()
    assert world.agree(flat(model))
    torch.testing.assert_close(flat(model), torch.stack(before).mean(0))


@cases.case
def test_the_layout_of_parameters_does_not_matter(world: World) -> None:
    """channels_last parameters stay so, and mean the same."""
    local = diloco(2, compressor=PowerSGD(1, min_compression_rate=1.0))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        data = torch.Generator().manual_seed(step + 10 * rank)
        return model(torch.randn(2, 3, 5, 5, generator=data)).square().mean()

    def run(layout: torch.memory_format) -> Tensor:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3).to(memory_format=layout)
        optimizer = sgd(model)
        ddp, _ = hooked(model, None, world.group)
        local_sgd(ddp, optimizer, local)
        fit(ddp, optimizer, world.rank, range(4), loss)
        assert model.weight.is_contiguous(memory_format=layout)
        return model.weight.detach().contiguous()

    found = run(torch.channels_last)
    torch.testing.assert_close(found, run(torch.contiguous_format))
    assert world.agree(found)
