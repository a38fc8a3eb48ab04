"""Local SGD under DDP, in four processes on Gloo: the parity table, what is sent, what is averaged, and what is refused."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import LocalSGD, PowerSGD, diloco
from gradwire.torch_backend import DataParallel, local_sgd, register_comm_hook
from tests.parity import local_sgd_cases as parity
from tests.torch.ranks import Cases, World
from tests.torch.training import flat, loss_on, mlp, relative, same_bits

cases = Cases(__file__, ranks=4)
results = cases.fixture()

EVERYONE, PAIRS = (0, 1, 2, 3), ((0, 1), (2, 3))


class Quadratic(nn.Module):
    """The loss of the parity table."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in parity.initial().items():
            self.register_parameter(name, nn.Parameter(torch.from_numpy(value)))

    def forward(self, curvature: float, target: dict[str, Tensor], noise: dict[str, Tensor]) -> Tensor:
        losses = [
            0.5 * curvature * (p - target[n]).square().sum() + (noise[n] * p).sum() for n, p in self.named_parameters()
        ]
        return torch.stack(losses).sum()


def tensors(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {n: torch.as_tensor(x) for n, x in arrays.items()}


@cases.each(parity.CASES)
def table(world: World, local: LocalSGD) -> dict[str, Any]:
    module = Quadratic()
    ddp = DistributedDataParallel(module, process_group=world.group)
    optimizer = torch.optim.SGD(module.parameters(), lr=parity.RATE)
    handle = local_sgd(ddp, optimizer, local)
    trace: dict[str, Any] = {"parameters": [], "bytes": [], "collectives": []}
    for step in range(parity.STEPS):
        before = handle.stats()
        target, noise = tensors(parity.target(world.rank)), tensors(parity.noise(world.rank, step))
        optimizer.zero_grad()
        ddp(parity.CURVATURE[world.rank], target, noise).backward()
        optimizer.step()
        trace["parameters"].append({n: p.detach().clone() for n, p in module.named_parameters()})
        trace["bytes"].append(handle.stats().bytes_sent - before.bytes_sent)
        trace["collectives"].append(handle.stats().collectives - before.collectives)
    return trace | {"memory": handle.rank_state_dict()["tensors"]}


@pytest.mark.parametrize("case", parity.CASES)
def test_equals_the_oracle(results, case):
    traces = results(f"table[{case}]")
    steps = [[trace["parameters"][step] for trace in traces] for step in range(parity.STEPS)]
    parity.assert_same(case, steps, [trace["memory"] for trace in traces])
    expected = parity.oracle(case)
    for trace in traces:
        assert trace["bytes"] == expected.nbytes
        assert trace["collectives"] == expected.collectives


@contextmanager
def recorded_messages(world: World) -> Iterator[list[tuple[tuple[int, ...], int]]]:
    """All that is given to `all_reduce` meanwhile: the ranks of the group, the number of elements."""
    real = dist.all_reduce
    seen: list[tuple[tuple[int, ...], int]] = []

    def recording(tensor: Tensor, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        seen.append((tuple(dist.get_process_group_ranks(group)), tensor.numel()))
        return real(tensor, *args, group=group, **kwargs)

    dist.all_reduce = recording
    try:
        yield seen
    finally:
        dist.all_reduce = real


class Training:
    """A small model under local SGD: `step()` does one step and returns what was sent in it."""

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
        self.loss = loss_on(6)
        self.backwards = backwards

    def step(self, number: int) -> list[Any]:
        with recorded_messages(self.world) as sent:
            self.optimizer.zero_grad()
            for _ in range(self.backwards):
                self.loss(self.ddp, self.world.rank, number).backward()
            self.optimizer.step()
        return sent

    def run(self, steps: int) -> list[list[Any]]:
        return [self.step(number) for number in range(steps)]


SIZE = 6 * 5 + 5 + 5 * 3 + 3


@cases.case
def hierarchy(world: World) -> Any:
    return Training(world, LocalSGD({2: 2, 4: 4})).run(9)


def test_a_hierarchy_sends_exactly_these_messages(results):
    for rank, sent in enumerate(results("hierarchy")):
        pair, everyone = [(PAIRS[rank // 2], SIZE)], [(EVERYONE, SIZE)]
        assert sent == [[], pair, [], everyone, [], pair, [], everyone, []]


@cases.each({"alone": (None, 1), "pairs": (2, 1), "two backward passes": (None, 2)})
def switch(world: World, variant: tuple[int | None, int]) -> Any:
    subgroup, backwards = variant
    return Training(world, LocalSGD(100, start_step=3, subgroup=subgroup), backwards=backwards).run(8)


@pytest.mark.parametrize("variant", ["alone", "pairs", "two backward passes"])
def test_gradients_become_local_at_the_start_step_once_on_all_ranks(results, variant):
    """It is the optimizer's steps that count, however many backward passes they are made of."""
    times = 2 if variant == "two backward passes" else 1
    for rank, sent in enumerate(results(f"switch[{variant}]")):
        afterwards = [(PAIRS[rank // 2], SIZE)] if variant == "pairs" else []
        assert sent == [[(EVERYONE, SIZE)] * times] * 3 + [afterwards] * 5


@cases.case
def every_step(world: World) -> Any:
    local = Training(world, LocalSGD(1))
    synchronous = DistributedDataParallel(mlp(6, 5, 3), process_group=world.group)
    optimizer = torch.optim.SGD(synchronous.parameters(), lr=0.1)
    for step in range(20):
        local.step(step)
        optimizer.zero_grad()
        local.loss(synchronous, world.rank, step).backward()
        optimizer.step()
    return flat(local.model), flat(synchronous)


def test_averaging_after_every_step_is_synchronous_sgd(results):
    for mine, expected in results("every_step"):
        assert relative(mine, expected) < 1e-6


class TwoHeads(nn.Module):
    """The second head is used by some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, second: bool) -> Tensor:
        hidden = self.body(x)
        y: Tensor = self.first(hidden) + (self.second(hidden) if second else 0)
        return y


@cases.case
def without_gradient(world: World) -> Any:
    """DDP would give the parameter a gradient of zeros on all ranks, as long as one has used it; by itself a rank has none."""
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local_sgd(model, optimizer, LocalSGD(2), process_group=world.group)
    x = torch.randn(8, 6) * (world.rank + 1)
    before = model.second.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        model(x, second=world.rank == 1).square().mean().backward()
        optimizer.step()
    return model.second.weight.grad is None, before, model.second.weight.detach().clone()


def test_parameters_without_a_gradient_are_averaged(results):
    outcome = results("without_gradient")
    assert [no_gradient for no_gradient, _, _ in outcome] == [True, False, True, True]
    for _, before, after in outcome:
        assert not torch.equal(before, after)
        assert same_bits(after, outcome[0][2])


@cases.each({"average": "average", "keep": "keep"})
def batch_norm(world: World, buffers: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    twin = copy.deepcopy(model)
    training = Training(world, LocalSGD(2), model=model, buffers=buffers)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(2):
        training.step(step)
        alone.zero_grad()
        training.loss(twin, world.rank, step).backward()
        alone.step()
    return dict(model[1].named_buffers()), dict(twin[1].named_buffers())


def test_statistics_are_averaged_or_kept(results):
    for choice in ("average", "keep"):
        outcome = results(f"batch_norm[{choice}]")
        for key in ("running_mean", "running_var"):
            own = torch.stack([alone[key] for _, alone in outcome])
            for rank, (mine, _) in enumerate(outcome):
                torch.testing.assert_close(mine[key], own.mean(0) if choice == "average" else own[rank])
        assert [int(mine["num_batches_tracked"]) for mine, _ in outcome] == [2] * 4


ADAM = torch.optim.Adam


@cases.each({what: what for what in ("keep", "average", "reset")})
def moments(world: World, what: str) -> Any:
    training = Training(world, LocalSGD(3), optimizer=ADAM, lr=0.01, moments=what)
    twin = copy.deepcopy(training.model)
    alone = ADAM(twin.parameters(), lr=0.01)
    for step in range(3):
        sent = training.step(step)
        alone.zero_grad()
        training.loss(twin, world.rank, step).backward()
        alone.step()
    weight = training.model[0].weight
    kept = copy.deepcopy(dict(training.optimizer.state.get(weight, {})))
    training.step(3), training.step(4)  # it goes on
    return kept, dict(alone.state[twin[0].weight]), sent, float(training.optimizer.state[weight]["step"])


def test_moments_are_kept_averaged_or_reset(results):
    own = [alone for _, alone, _, _ in results("moments[keep]")]
    mean = {key: torch.stack([o[key] for o in own]).mean(0) for key in ("exp_avg", "exp_avg_sq")}
    for what, size in (("keep", SIZE), ("average", 3 * SIZE), ("reset", SIZE)):
        for rank, (mine, _, sent, _) in enumerate(results(f"moments[{what}]")):
            assert sent == [(EVERYONE, size)]
            if what == "reset":
                continue
            for key in mean:
                torch.testing.assert_close(mine[key], mean[key] if what == "average" else own[rank][key])
    assert all(not mine for mine, *_ in results("moments[reset]"))
    for what, steps in (("keep", 5), ("average", 5), ("reset", 2)):
        assert [count for *_, count in results(f"moments[{what}]")] == [steps] * 4


@cases.case
def late_moments(world: World) -> Any:
    """Rank 2 has made no step of its own when moments are averaged for the first time."""
    training = Training(world, LocalSGD(1), optimizer=ADAM, lr=0.01, moments="average")
    training.optimizer.zero_grad()
    training.loss(training.ddp, world.rank, 0).backward()
    if world.rank == 2:
        training.optimizer.zero_grad()
    training.optimizer.step()
    training.step(1)
    return {k: v.clone() for k, v in training.optimizer.state[training.model[0].weight].items()}


def test_ranks_without_moments_count_as_zeros(results):
    outcome = results("late_moments")
    assert [float(mine["step"]) for mine in outcome] == [2, 2, 1, 2]
    assert all(torch.isfinite(mine["exp_avg"]).all() for mine in outcome)
    assert all(same_bits(mine["exp_avg"], outcome[0]["exp_avg"]) for mine in outcome)


@cases.each({"plain": False, "unscaled by the user": True})
def scaler(world: World, unscale: bool) -> Any:
    """Rank 1 alone finds inf in step 1. A scaler then does not call `optimizer.step()`: the others must not wait for it."""
    training = Training(world, LocalSGD(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    twin = copy.deepcopy(training.model)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)
    trace = []
    for step in range(4):
        training.optimizer.zero_grad()
        loss = training.loss(training.ddp, world.rank, step)
        if (world.rank, step) == (1, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        trace.append(flat(training.model).clone())
        has_gradients = all(p.grad is not None for p in training.model.parameters())
        if step < 2 and (world.rank, step) != (1, 1):
            alone.zero_grad()
            training.loss(twin, world.rank, step).backward()
            alone.step()
    return trace, flat(twin), scaler.get_scale(), has_gradients, training.handle.steps


@pytest.mark.parametrize("variant", ["plain", "unscaled by the user"])
def test_a_step_that_one_rank_skips_counts_on_all(results, variant):
    outcome = results(f"scaler[{variant}]")
    expected = torch.stack([alone for _, alone, *_ in outcome]).mean(0)
    for trace, _, _, has_gradients, steps in outcome:
        assert relative(trace[1], expected) < 1e-6  # the average of what each has done by itself, rank 1 one step less
        assert has_gradients
        assert steps == 4
    assert [scale for _, _, scale, _, _ in outcome] == [1024, 512, 1024, 1024]
    assert all(same_bits(trace[3], outcome[0][0][3]) for trace, *_ in outcome)


def attempt(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@cases.case
def disagreements(world: World) -> Any:
    odd = world.rank == 2
    model = mlp(6, 5, 3)
    ddp = DistributedDataParallel(model, process_group=world.group)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    usual: dict[str, Any] = {"optimizer": sgd, "local": LocalSGD(4, start_step=2)}
    different: dict[str, dict[str, Any]] = {
        "period": {"local": LocalSGD(5, start_step=2)},
        "start": {"local": LocalSGD(4, start_step=3)},
        "outer": {"local": diloco(4, start_step=2)},
        "buffers": {"buffers": "keep"},
        "moments": {"moments": "reset"},
        "optimizer": {"optimizer": torch.optim.AdamW(model.parameters())},
        "subgroup": {"local": LocalSGD(4, start_step=2, subgroup=2)},
        "impossible": {"local": LocalSGD(4, start_step=2, subgroup=3)},
    }
    said = {
        name: attempt(lambda change=change: local_sgd(ddp, **(usual | change if odd else usual)))
        for name, change in different.items()
    }
    said["in the end"] = attempt(lambda: local_sgd(ddp, **usual))
    return said


def test_ranks_that_ask_for_different_things_hear_so_and_nothing_hangs(results):
    for rank, said in enumerate(results("disagreements")):
        assert (
            "ranks differ in local: rank 0 has LocalSGD(period=4, start_step=2), others {2: 'LocalSGD(period=5"
            in said["period"]
        )
        assert "others {2: 'LocalSGD(period=4, start_step=3)'}" in said["start"]
        assert "OuterSGD(lr=0.7" in said["outer"]
        assert "ranks differ in buffers: rank 0 has average, others {2: 'keep'}" in said["buffers"]
        assert "ranks differ in moments: rank 0 has keep, others {2: 'reset'}" in said["moments"]
        assert "ranks differ in optimizer: rank 0 has SGD, others {2: 'AdamW'}" in said["optimizer"]
        assert "ranks differ in local" in said["subgroup"]
        cause = "subgroup has groups of 3, but 4 replicas cannot be divided so; use a divisor of 4"
        assert said["impossible"] == f"ValueError: {'' if rank == 2 else 'rank 2 cannot take part: '}{cause}"
        assert said["in the end"] == "nothing"


LONG = diloco(3, lr=0.5, momentum=0.5, start_step=2, fragments=2, compressor=PowerSGD(1, min_compression_rate=1.0))


@cases.case
def resuming(world: World) -> Any:
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
    late = copy.deepcopy(saved[2]) | ({"step": 9} if world.rank == 3 else {})
    other = Training(world, diloco(3))
    return {
        "uninterrupted": (whole.model.state_dict(), whole.handle.rank_state_dict()),
        "resumed": (second.model.state_dict(), second.handle.rank_state_dict()),
        "steps": attempt(lambda: second.handle.load_state_dict(late)),
        "another": attempt(lambda: other.handle.load_state_dict(saved[2])),
        "unchanged": second.handle.steps,
        "stats": second.handle.stats().steps,
    }


def test_a_resumed_run_is_the_uninterrupted_one(results):
    for outcome in results("resuming"):
        assert same_bits(outcome["resumed"], outcome["uninterrupted"])
        assert "ranks differ in step: rank 0 has 7, others {3: '9'}" in outcome["steps"]
        assert "the state is of LocalSGD(period=3" in outcome["another"]
        assert outcome["unchanged"] == 12
        assert outcome["stats"] == 5


@cases.case
def loaded_late(world: World) -> Any:
    """Weights that are loaded between registration and the first step are where the replicas part."""
    weights = mlp(6, 5, 3, seed=7).state_dict()
    usual = Training(world, diloco(2), model=mlp(6, 5, 3, seed=7))
    late = Training(world, diloco(2))
    late.model.load_state_dict(weights)
    usual.run(4)
    late.run(4)
    return flat(usual.model), flat(late.model)


def test_weights_may_be_loaded_until_the_first_step(results):
    for usual, late in results("loaded_late"):
        assert same_bits(usual, late)


@cases.case
def nodes(world: World) -> Any:
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        training = Training(world, LocalSGD({"node": 2, "all": 4}, subgroup="node"))
        del os.environ["LOCAL_WORLD_SIZE"]
        without = attempt(lambda: Training(world, LocalSGD(2, subgroup="node")))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
    return repr(training.handle.local), training.run(4), without


def test_nodes_are_found_in_the_environment_of_torchrun(results):
    for rank, (local, sent, without) in enumerate(results("nodes")):
        assert local == "LocalSGD(period={2: 2, 'all': 4}, subgroup=2)"
        own, everyone = (PAIRS[rank // 2], SIZE), (EVERYONE, SIZE)
        assert sent == [[own], [own, own], [own], [own, everyone]]
        assert "LOCAL_WORLD_SIZE='' in the environment: start with torchrun" in without


@cases.case
def plain_module(world: World) -> Any:
    model = mlp(6, 5, 3, seed=world.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = local_sgd(model, None, LocalSGD(2), process_group=world.group)
    start = flat(model).clone()
    loss = loss_on(6)
    trace = []
    for step in range(3):
        optimizer.zero_grad()
        loss(model, world.rank, step).backward()
        optimizer.step()
        handle.step()
        trace.append((flat(model).clone(), handle.synchronized))
    before = flat(model).clone()
    handle.synchronize()
    return start, trace, before, flat(model).clone()


def test_a_module_without_ddp(results):
    outcome = results("plain_module")
    for start, trace, _, end in outcome:
        assert same_bits(start, outcome[0][0])
        assert [known for _, known in trace] == [False, True, False]
        assert same_bits(trace[1][0], outcome[0][1][1][0])
        assert same_bits(end, outcome[0][3])
        torch.testing.assert_close(end, torch.stack([before for _, _, before, _ in outcome]).mean(0))
    assert not same_bits(outcome[0][1][0][0], outcome[1][1][0][0])


@cases.case
def layouts(world: World) -> Any:
    """channels_last parameters stay so, and mean the same."""

    def run(layout: torch.memory_format, local: LocalSGD) -> tuple[Tensor, bool]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3).to(memory_format=layout)
        ddp = DistributedDataParallel(model, process_group=world.group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local_sgd(ddp, optimizer, local)
        for step in range(4):
            data = torch.Generator().manual_seed(step + 10 * world.rank)
            optimizer.zero_grad()
            ddp(torch.randn(2, 3, 5, 5, generator=data)).square().mean().backward()
            optimizer.step()
        return model.weight.detach().contiguous(), model.weight.is_contiguous(memory_format=layout)

    compressed = diloco(2, compressor=PowerSGD(1, min_compression_rate=1.0))
    return [(run(torch.contiguous_format, x), run(torch.channels_last, x)) for x in (LocalSGD(2), compressed)]


def test_the_layout_of_parameters_does_not_matter(results):
    outcome = results("layouts")
    for mine in outcome:
        for (usual, _), (weights, kept) in mine:
            assert kept
            torch.testing.assert_close(weights, usual)
    for kind in range(2):
        assert all(same_bits(mine[kind][1][0], outcome[0][kind][1][0]) for mine in outcome)


@cases.case
def refusals(world: World) -> Any:
    def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, process_group=world.group, **options)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    normalized = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    model, other = mlp(6, 5, 3), mlp(6, 5, 3)
    hooked = ddp(mlp(6, 5, 3))
    register_comm_hook(hooked, PowerSGD(1))
    plain: dict[str, Any] = {"process_group": world.group}
    ddp_model = ddp(model)
    tries = {
        "no module": lambda: local_sgd(sgd(model), None, LocalSGD(2)),
        "own wrapper": lambda: local_sgd(DataParallel(mlp(6, 5, 3), process_group=world.group), None, LocalSGD(2)),
        "no schedule": lambda: local_sgd(ddp_model, sgd(model), PowerSGD(1)),
        "broadcasts": lambda: local_sgd(ddp(normalized), sgd(normalized), LocalSGD(2)),
        "hooked": lambda: local_sgd(hooked, sgd(hooked), LocalSGD(2)),
        "gradients": lambda: local_sgd(model, sgd(model), LocalSGD(2, start_step=3), **plain),
        "foreign": lambda: local_sgd(ddp_model, sgd(other), LocalSGD(2)),
        "buffers": lambda: local_sgd(ddp_model, sgd(model), LocalSGD(2), buffers="drop"),
        "moments": lambda: local_sgd(ddp_model, None, LocalSGD(2), moments="average"),
        "adagrad": lambda: local_sgd(ddp_model, torch.optim.Adagrad(model.parameters()), LocalSGD(2), moments="reset"),
        "fragments": lambda: local_sgd(ddp_model, sgd(model), LocalSGD(9, fragments=5)),
        "frozen": lambda: local_sgd(nn.Linear(2, 2).requires_grad_(False), None, LocalSGD(2), **plain),
        "groups": lambda: local_sgd(ddp_model, sgd(model), LocalSGD({2: 2})),
        "as a hook": lambda: register_comm_hook(ddp_model, LocalSGD(2)),
    }
    said = {name: attempt(function) for name, function in tries.items()}
    training = Training(world, LocalSGD(2))

    def uneven() -> None:
        with training.ddp.join():
            training.step(0)

    return said | {"join": attempt(uneven)}


REFUSED = {
    "no module": "TypeError: module is a SGD; give a DistributedDataParallel",
    "own wrapper": "TypeError: module is a DataParallel; give",
    "no schedule": "TypeError: local is a PowerSGD; give LocalSGD(...)",
    "broadcasts": "broadcast_buffers=False): local SGD averages them",
    "hooked": "has a communication hook already",
    "gradients": "a plain module has nobody to do it; wrap it in DistributedDataParallel first",
    "foreign": "that are not in module, and nobody would average them",
    "buffers": "buffers='drop' is not one of 'average', 'keep'",
    "moments": "moments='average' needs the optimizer",
    "adagrad": "moments='reset' drops what Adagrad makes only when it is built",
    "fragments": "fragments=5 of 4 parameters",
    "frozen": "nothing to average",
    "groups": "averages groups of 2 at most, so the 4 replicas would drift apart",
    "as a hook": "LocalSGD(period=2) averages parameters, after steps of the optimizer; give both to",
    "join": "RuntimeError: local SGD needs the same number of steps on all ranks",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_is_refused_by_name(results, what):
    for said in results("refusals"):
        assert REFUSED[what] in said[what]


if __name__ == "__main__":
    cases.main()
