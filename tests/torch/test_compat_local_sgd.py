"""torch's names for local SGD: what torch's own do where they work, and where they do not."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager

import gradwire.torch_backend as gw
from tests.torch.compare import flat, said, same_bits
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases, World
from tests.torch.training import collective_payloads, fit, hooked, sgd

# two are enough: that groups are the right ones is tested where they are made
cases = Cases(__file__, ranks=2)

LOSS = loss_on(6)
EVERYONE = (0, 1)
PERIODIC, HIERARCHICAL = "PeriodicModelAverager", "HierarchicalModelAverager"
#: An averager, its options, and the steps after which both replicas are one.
MAKE = {
    "periodic": (averagers, PERIODIC, {"period": 3, "warmup_steps": 2}, [2, 5, 8, 11]),
    "from the first step": (averagers, PERIODIC, {"period": 4}, [0, 4, 8, 12]),
    "hierarchical": (
        hierarchical_model_averager,
        HIERARCHICAL,
        {"period_group_size_dict": {2: 1, 6: 2}, "warmup_steps": 3},
        [6, 12],
    ),
}


def trained(world: World, wrapper: Any, averager: Any, steps: int = 14) -> list[Tensor]:
    model = mlp(6, 5, 3)
    optimizer = wrapper(sgd(model), averager)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    trace = []
    for step in range(steps):
        fit(model, optimizer, world.rank, [step], LOSS)
        schedule.step()
        trace.append(flat(model).clone())
    return trace


@cases.each(MAKE)
def test_parameters_are_averaged_when_and_with_whom_torch_does(
    world: World, variant: tuple[Any, ...]
) -> None:
    # Its package warns when it is imported, which pytest takes for an error.
    from torch.distributed.optim import PostLocalSGDOptimizer as TorchOptimizer

    module, name, options, equal = variant
    expected = trained(
        world, TorchOptimizer, getattr(module, name)(**options, process_group=world.group)
    )
    found = trained(
        world, gw.PostLocalSGDOptimizer, getattr(gw, name)(**options, process_group=world.group)
    )
    for step, (a, b) in enumerate(zip(expected, found, strict=True)):
        torch.testing.assert_close(b, a, msg=f"step {step}")
    assert [step for step, weights in enumerate(found) if world.agree(weights)] == equal


@cases.case
def test_gradients_are_global_and_then_the_subgroups(world: World) -> None:
    """With the subgroup given, found, or left out."""
    alone, _ = dist.new_subgroups(1, group=world.group)
    weights = {}
    for name, subgroup, locally in (
        ("given", alone, True),
        ("found", None, True),
        ("left out", None, False),
    ):
        ddp, _ = hooked(mlp(6, 5, 3), None, world.group)
        with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "1"}):
            state = gw.PostLocalSGDState(
                world.group, subgroup, 2, post_local_gradient_allreduce=locally
            )
            ddp.register_comm_hook(state, gw.post_localSGD_hook)
            for step in range(4):
                with collective_payloads() as sent:
                    fit(ddp, sgd(ddp), world.rank, [step], LOSS)
                afterwards = [(world.rank,)] if locally else []
                assert [payload.ranks for payload in sent] == (
                    [EVERYONE] if step < 2 else afterwards
                )
        assert state.iter == 4
        weights[name] = flat(ddp).clone()
    assert same_bits(weights["given"], weights["found"])
    assert not world.agree(weights["given"])


@cases.case
def test_parameters_without_a_gradient_are_averaged(world: World) -> None:
    """torch's leaves out what has no gradient now, and fails if nothing has one."""
    model = torch.nn.ParameterList([torch.full((n,), float(world.rank)) for n in (2, 3)])
    model.append(torch.nn.Parameter(torch.full((1,), float(world.rank)), requires_grad=False))
    averager = gw.PeriodicModelAverager(period=2, process_group=world.group)
    averager.average_parameters(model.parameters())
    assert [p.tolist() for p in model] == [[0.5] * 2, [0.5] * 3, [world.rank]]
    assert averager.step == 1


#: By the averager's warm-up: how what is raised, or warned of, begins.
WARM_UPS = {
    1: ("", "warmup_steps=1 of Periodic"),
    2: ("", ""),
    3: ("ValueError: warmup_steps=3 of Periodic", ""),
}


@cases.each(list(WARM_UPS))
def test_warm_ups_that_disagree_are_found(world: World, warmup_steps: int) -> None:
    """A hook and an averager on the same parameters."""
    refused, warned = WARM_UPS[warmup_steps]
    ddp, _ = hooked(mlp(6, 5, 3), None, world.group)
    state = gw.PostLocalSGDState(world.group, None, 2, post_local_gradient_allreduce=False)
    ddp.register_comm_hook(state, gw.post_localSGD_hook)
    averager = gw.PeriodicModelAverager(
        period=2, warmup_steps=warmup_steps, process_group=world.group
    )
    LOSS(ddp, world.rank, 0).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heard = said(averager.average_parameters, ddp.parameters())
    assert heard.startswith(refused)
    assert bool(refused) is bool(heard)
    assert [warned in str(w.message) for w in caught] == [True] * bool(warned)
    assert all(
        "start_localSGD_iter=2" in words
        for words in (heard, *(str(w.message) for w in caught))
        if words
    )


@cases.case
def test_a_step_that_one_rank_skips_counts_on_all(world: World) -> None:
    """Rank 1 alone finds inf in step 1, in which parameters are averaged: torch's would wait for it
    for ever."""
    model = mlp(6, 5, 3)
    averager = gw.PeriodicModelAverager(period=1 + 1, warmup_steps=1, process_group=world.group)
    optimizer = gw.PostLocalSGDOptimizer(sgd(model), averager)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    own = []
    for step in range(2):
        optimizer.zero_grad()
        skipped = (world.rank, step) == (1, 1)
        loss = LOSS(model, world.rank, step) * (float("inf") if skipped else 1.0)
        scaler.scale(loss).backward()
        own = flat(model).clone()
        if not skipped:
            own -= (
                0.1 * torch.cat([p.grad.flatten() for p in model.parameters()]) / scaler.get_scale()
            )
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(flat(model), torch.stack(world.everyones(own)).mean(0))
    assert scaler.get_scale() == (128 if world.rank else 256)


@cases.case
def test_the_optimizer_resumes_and_is_one(world: World) -> None:
    def make() -> tuple[torch.nn.Module, gw.PostLocalSGDOptimizer]:
        model = mlp(6, 5, 3)
        averager = gw.PeriodicModelAverager(period=3, process_group=world.group)
        return model, gw.PostLocalSGDOptimizer(sgd(model, momentum=0.9), averager)

    (model, first), (resumed, second) = make(), make()
    fit(model, first, world.rank, range(4), LOSS)
    saved = copy.deepcopy((model.state_dict(), first.state_dict()))
    fit(model, first, world.rank, range(4, 8), LOSS)
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    fit(resumed, second, world.rank, range(4, 8), LOSS)
    assert same_bits(flat(model), flat(resumed))
    assert second.step(lambda: 0.5) == 0.5  # a closure's loss
    assert saved[1].pop("step") == 4
    words = "^Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.$"
    with pytest.warns(UserWarning, match=words):
        second.load_state_dict(saved[1])
    assert second.averager.step == 0
    assert repr(second).startswith("SGD (")
    assert isinstance(second, torch.optim.Optimizer)


#: An averager, its arguments, and what the ValueError names.
REFUSED = [
    (gw.PeriodicModelAverager, (0,), "period=0"),
    (gw.PeriodicModelAverager, (2, -1), "warmup_steps=-1"),
    (gw.HierarchicalModelAverager, ({},), "period_group_size_dict"),
    (gw.HierarchicalModelAverager, ({2: 1},), "the last size in period_group_size_dict is 1"),
    (gw.HierarchicalModelAverager, ({4: 1, 2: 2},), "period_group_size_dict={4: 1, 2: 2}"),
    (gw.HierarchicalModelAverager, ({2: 0, 4: 2},), "groups of 0"),
    (gw.HierarchicalModelAverager, ({0: 1, 4: 2},), "has period 0"),
]


@cases.case
def test_what_cannot_work_is_refused_by_name(world: World) -> None:
    for averager, arguments, named in REFUSED:
        heard = said(averager, *arguments, process_group=world.group)
        assert heard.startswith("ValueError")
        assert named in heard
    for averager, argument in (
        (gw.PeriodicModelAverager, 1),
        (gw.HierarchicalModelAverager, {1: 2}),
    ):
        with pytest.warns(UserWarning, match="Use DDP alone"):
            averager(argument, process_group=world.group)


def test_the_hooks_state_is_saved_without_its_groups(caplog):
    state = gw.PostLocalSGDState(None, None, 3)
    state.iter = 5
    state.subgroup = object()  # type: ignore[assignment]
    copied = pickle.loads(pickle.dumps(state))
    assert (copied.iter, copied.start_localSGD_iter, copied.post_local_gradient_allreduce) == (
        5,
        3,
        True,
    )
    assert copied.process_group is copied.subgroup is None
    assert isinstance(copied, post_localSGD_hook.PostLocalSGDState)  # Lightning asks for that
    assert "Process groups cannot be saved" in caplog.text
