"""torch's names for local SGD: what torch's own do where they work, and where they do not."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch_backend import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from tests.torch.ranks import Cases, World
from tests.torch.training import flat, loss_on, mlp, same_bits

cases = Cases(__file__, ranks=2)  # two are enough: that groups are the right ones is tested where they are made
results = cases.fixture()

HIERARCHY = {2: 1, 6: 2}
MAKE = {
    "periodic": (averagers.PeriodicModelAverager, PeriodicModelAverager, {"period": 3, "warmup_steps": 2}),
    "from the first step": (averagers.PeriodicModelAverager, PeriodicModelAverager, {"period": 4}),
    "hierarchical": (
        hierarchical_model_averager.HierarchicalModelAverager,
        HierarchicalModelAverager,
        {"period_group_size_dict": HIERARCHY, "warmup_steps": 3},
    ),
}


def trained(world: World, wrapper: Any, averager: Any, steps: int = 14) -> list[Tensor]:
    model = mlp(6, 5, 3)
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    loss = loss_on(6)
    trace = []
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, world.rank, step).backward()
        optimizer.step()
        schedule.step()
        trace.append(flat(model).clone())
    return trace


@cases.each(MAKE)
def averaging(world: World, variant: tuple[Any, Any, dict[str, Any]]) -> Any:
    # Its package warns when it is imported, which pytest takes for an error.
    from torch.distributed.optim import PostLocalSGDOptimizer as TorchOptimizer

    theirs, ours, options = variant
    return (
        trained(world, TorchOptimizer, theirs(**options, process_group=world.group)),
        trained(world, PostLocalSGDOptimizer, ours(**options, process_group=world.group)),
    )


@pytest.mark.parametrize("variant", MAKE)
def test_parameters_are_averaged_when_and_with_whom_torch_does(results, variant):
    outcome = results(f"averaging[{variant}]")
    for theirs, ours in outcome:
        for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            torch.testing.assert_close(b, a, msg=f"step {step}")
    (_, first), (_, second) = outcome
    together = [step for step in range(14) if same_bits(first[step], second[step])]
    assert (
        together == {"periodic": [2, 5, 8, 11], "from the first step": [0, 4, 8, 12], "hierarchical": [6, 12]}[variant]
    )


@cases.case
def hook(world: World) -> Any:
    """Which groups average gradients, step by step; with the subgroup given, found, or left out."""
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    alone, _ = dist.new_subgroups(1, group=world.group)
    seen: list[tuple[int, ...]] = []
    real = dist.all_reduce

    def recording(tensor: Tensor, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        seen.append(tuple(dist.get_process_group_ranks(group)))
        return real(tensor, *args, group=group, **kwargs)

    outcome: dict[str, Any] = {}
    for name, subgroup, locally in (("given", alone, True), ("found", None, True), ("left out", None, False)):
        ddp = DistributedDataParallel(mlp(6, 5, 3), process_group=world.group)
        state = PostLocalSGDState(world.group, subgroup, 2, post_local_gradient_allreduce=locally)
        ddp.register_comm_hook(state, post_localSGD_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        sent = []
        dist.all_reduce = recording
        for step in range(4):
            seen.clear()
            optimizer.zero_grad()
            loss_on(6)(ddp, world.rank, step).backward()
            optimizer.step()
            sent.append(list(seen))
        dist.all_reduce = real
        outcome[name] = sent, state.iter, flat(ddp).clone()
    os.environ["LOCAL_WORLD_SIZE"] = before
    return outcome


def test_gradients_are_global_and_then_the_subgroups(results):
    outcome = results("hook")
    for rank, mine in enumerate(outcome):
        for name in ("given", "found", "left out"):
            sent, steps, _ = mine[name]
            assert sent == [[(0, 1)]] * 2 + [[] if name == "left out" else [(rank,)]] * 2
            assert steps == 4
        assert same_bits(mine["given"][2], mine["found"][2])
    assert not same_bits(outcome[0]["given"][2], outcome[1]["given"][2])


@cases.case
def without_gradient(world: World) -> Any:
    """torch's leaves out what has no gradient now, and fails if nothing has one."""
    model = torch.nn.ParameterList([torch.full((2,), float(world.rank)), torch.full((3,), float(world.rank))])
    model.append(torch.nn.Parameter(torch.full((1,), float(world.rank)), requires_grad=False))
    averager = PeriodicModelAverager(period=2, process_group=world.group)
    averager.average_parameters(model.parameters())
    return [p.detach().clone() for p in model], averager.step


def test_parameters_without_a_gradient_are_averaged(results):
    for rank, (parameters, step) in enumerate(results("without_gradient")):
        assert [p.tolist() for p in parameters] == [[0.5] * 2, [0.5] * 3, [rank]]
        assert step == 1


@cases.case
def warm_ups(world: World) -> Any:
    """A hook and an averager on the same parameters."""
    outcome = {}
    for warmup_steps in (1, 2, 3):
        ddp = DistributedDataParallel(mlp(6, 5, 3), process_group=world.group)
        state = PostLocalSGDState(world.group, None, 2, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=warmup_steps, process_group=world.group)
        loss_on(6)(ddp, world.rank, 0).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                averager.average_parameters(ddp.parameters())
                said = ""
            except ValueError as error:
                said = str(error)
        outcome[warmup_steps] = said, [str(w.message) for w in caught]
    return outcome


def test_warm_ups_that_disagree_are_found(results):
    for said in results("warm_ups"):
        assert said[2] == ("", [])
        assert "warmup_steps=3 of PeriodicModelAverager and start_localSGD_iter=2 of PostLocalSGDState" in said[3][0]
        assert "from step 2 to 3 nothing would keep the replicas together" in said[3][0]
        assert said[1][0] == ""
        assert "until step 2 parameters that are equal anyway are averaged" in said[1][1][0]


@cases.case
def scaler(world: World) -> Any:
    """Rank 1 alone finds inf in step 1, in which parameters are averaged: torch's would wait for it for ever."""
    model = mlp(6, 5, 3)
    averager = PeriodicModelAverager(period=1 + 1, warmup_steps=1, process_group=world.group)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    own = []
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_on(6)(model, world.rank, step) * (float("inf") if (world.rank, step) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        twin = copy.deepcopy(model)
        if (world.rank, step) != (1, 1):
            with torch.no_grad():
                for p, q in zip(twin.parameters(), model.parameters(), strict=True):
                    p -= 0.1 * q.grad / scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        own.append(flat(twin))
    return flat(model), own, scaler.get_scale()


def test_a_step_that_one_rank_skips_counts_on_all(results):
    outcome = results("scaler")
    expected = torch.stack([own[1] for _, own, _ in outcome]).mean(0)
    for weights, _, _ in outcome:
        torch.testing.assert_close(weights, expected)
    assert [scale for *_, scale in outcome] == [256, 128]


@cases.case
def optimizer(world: World) -> Any:
    def make() -> tuple[torch.nn.Module, PostLocalSGDOptimizer]:
        model = mlp(6, 5, 3)
        averager = PeriodicModelAverager(period=3, process_group=world.group)
        return model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averager)

    def steps(model: torch.nn.Module, optimizer: PostLocalSGDOptimizer, numbers: range) -> None:
        for step in numbers:

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_on(6)(model, world.rank, step)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() > 0

    model, first = make()
    steps(model, first, range(4))
    saved = copy.deepcopy((model.state_dict(), first.state_dict()))
    steps(model, first, range(4, 8))
    resumed, second = make()
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    steps(resumed, second, range(4, 8))
    second.param_groups[0]["lr"] = 0.0
    before = flat(resumed).clone()
    steps(resumed, second, range(8, 9))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.load_state_dict({k: v for k, v in saved[1].items() if k != "step"})
    return {
        "equal": same_bits(flat(model), before),
        "learning rate is heard": same_bits(before, flat(resumed)),
        "step": saved[1]["step"],
        "warned": [str(w.message) for w in caught],
        "then": second.averager.step,
        "shown": repr(second),
        "is one": isinstance(second, torch.optim.Optimizer),
    }


def test_the_optimizer_resumes_and_is_one(results):
    for said in results("optimizer"):
        assert said["equal"]
        assert said["learning rate is heard"]
        assert said["step"] == 4
        assert said["warned"] == [
            "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0."
        ]
        assert said["then"] == 0
        assert said["shown"].startswith("SGD (")
        assert said["is one"]


@cases.case
def refusals(world: World) -> Any:
    tries: dict[str, Any] = {
        "period": lambda: PeriodicModelAverager(0, process_group=world.group),
        "warm-up": lambda: PeriodicModelAverager(2, -1, process_group=world.group),
        "empty": lambda: HierarchicalModelAverager({}, process_group=world.group),
        "not all": lambda: HierarchicalModelAverager({2: 1}, process_group=world.group),
        "order": lambda: HierarchicalModelAverager({4: 1, 2: 2}, process_group=world.group),
        "divisor": lambda: HierarchicalModelAverager({2: 0, 4: 2}, process_group=world.group),
        "zero": lambda: HierarchicalModelAverager({0: 1, 4: 2}, process_group=world.group),
    }
    said = {}
    for name, function in tries.items():
        try:
            function()
        except ValueError as error:
            said[name] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PeriodicModelAverager(1, process_group=world.group)
        HierarchicalModelAverager({1: 2}, process_group=world.group)
    return said | {"warnings": [str(w.message) for w in caught]}


def test_what_cannot_work_is_refused_by_name(results):
    said = results("refusals")[0]
    assert said["period"] == "period=0 must be at least 1"
    assert said["warm-up"] == "warmup_steps=-1 must not be negative"
    assert "must not be empty" in said["empty"]
    assert "the last size in period_group_size_dict is 1, but process_group has 2 ranks" in said["not all"]
    assert "periods and sizes must ascend together" in said["order"]
    assert said["divisor"] == "2 ranks cannot be divided into groups of 0; use a divisor"
    assert "has period 0; it must be at least 1" in said["zero"]
    assert ["Use DDP alone" in w for w in said["warnings"]] == [True, True]


def test_the_hooks_state_is_saved_without_its_groups(caplog):
    state = PostLocalSGDState(None, None, 3)
    state.iter = 5
    state.subgroup = object()  # type: ignore[assignment]
    copied = pickle.loads(pickle.dumps(state))
    assert (copied.iter, copied.start_localSGD_iter, copied.post_local_gradient_allreduce) == (5, 3, True)
    assert copied.process_group is copied.subgroup is None
    assert "Process groups cannot be saved" in caplog.text


if __name__ == "__main__":
    cases.main()
