"""Optimizers of torch as outer ones of local SGD, in four processes on Gloo: against ours, and against the very optimizer in a loop by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import optax  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist

from gradwire import AllReduce, LocalSGD, PowerSGD, WireDtype, diloco
from gradwire.torch_backend import local_sgd
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import mlp
from tests.torch.ranks import Cases, World
from tests.torch.sharded import mesh_of, sharded_mlp
from tests.torch.training import LocalRun

cases = Cases(__file__, ranks=4)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ADAMW = partial(torch.optim.AdamW, lr=0.05)


def run_of(world: World, local: LocalSGD, group: Any = None) -> LocalRun:
    return LocalRun(world, local, mlp(8, 7, 5).double(), process_group=group or world.group)


def sharded_run_of(world: World, local: LocalSGD) -> LocalRun:
    """Over two ranks each."""
    mesh = mesh_of(2, 2)
    model = sharded_mlp((8, 7, 5), mesh["shard"], torch.float64)
    return LocalRun(world, local, model, process_group=mesh.get_group("replicate"))


def parameters(run: LocalRun) -> dict[str, torch.Tensor]:
    return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in run.model.named_parameters()}


SCHEDULES: dict[str, dict[str, Any]] = {
    "one": {"period": 2},
    "streaming": {"period": 4, "fragments": 2, "overlap": 2, "compressor": PowerSGD(2, min_compression_rate=1)},
    "eager": {"period": 3, "eager": True},
    "hierarchy": {"period": {2: 1, "all": 3}, "start_step": 0, "state_dtype": "float64"},
    "sharded": {"period": 4, "fragments": 2, "overlap": 1},
}


@cases.each(SCHEDULES, slow=("eager", "hierarchy", "sharded"))
def test_sgd_of_torch_is_ours(world: World, options: dict[str, Any]) -> None:
    make = sharded_run_of if options is SCHEDULES["sharded"] else run_of
    ours, theirs = (make(world, diloco(outer=outer, **options)) for outer in (None, NESTEROV))
    for run in (ours, theirs):
        run.steps(0, 10)
    assert relative(parameters(theirs), parameters(ours)) < 1e-6
    assert "torch.optim.sgd.SGD(lr=0.7" in repr(theirs.handle.local)


@cases.each({"AdamW": ADAMW, "NAdam": partial(torch.optim.NAdam, lr=0.05), "Rprop": torch.optim.Rprop}, slow=("Rprop",))
def test_a_loop_by_hand_comes_to_the_same_and_goes_on_with_fewer_ranks(world: World, factory: Any) -> None:
    """One optimizer from beginning to end, which nobody saves; and between two outer steps two of four ranks are left."""
    run = run_of(world, diloco(2, outer=factory))
    outer = {n: torch.nn.Parameter(p) for n, p in weights(run.model).items()}
    by_hand = factory(list(outer.values()))

    def together(first: int, last: int, ranks: int) -> None:
        for step in range(first, last, 2):
            run.steps(step, step + 1)
            gradients = gradients_of(run, step + 1)
            before = {n: p - 0.1 * gradients[n] for n, p in weights(run.model).items()}
            everyones: list[Any] = [None] * ranks
            dist.all_gather_object(everyones, before, group=group)
            for n, x in outer.items():
                x.grad = sum(x.detach() - each[n] for each in everyones) / ranks
            by_hand.step()
            run.steps(step + 1, step + 2)
            assert relative(weights(run.model), {n: x.detach() for n, x in outer.items()}) < 1e-9

    group: Any = world.group
    together(0, 6, 4)
    saved = run.handle.state_dict()
    assert saved["algorithm"].count(f"{type(by_hand).__module__}.{type(by_hand).__qualname__}(")
    group = dist.new_group([0, 1])
    if world.rank < 2:
        before = weights(run.model)
        run = run_of(world, diloco(2, outer=factory), group)
        run.model.load_state_dict(before)
        run.handle.load_state_dict(saved)
        together(6, 10, 2)


def gradients_of(run: LocalRun, step: int) -> dict[str, torch.Tensor]:
    """Of the next step, which is not taken."""
    run.optimizer.zero_grad()
    run.loss(run.model, run.rank, step).backward()
    return {n: p.grad.clone() for n, p in run.model.named_parameters()}


@cases.each({"overlap": {"overlap": 2, "fragments": 2}, "eager": {"eager": True}})
def test_a_run_that_ends_goes_on_with_the_same_bits(world: World, options: dict[str, Any]) -> None:
    local = diloco(3, outer=ADAMW, compressor=WireDtype(AllReduce(), "int8"), **options)
    through, others = run_of(world, local), []
    for step in range(5):
        through.steps(step, step + 1)
        if step > 2:
            others.append(run_of(world, local))
            others[-1].model.load_state_dict(weights(through.model))
            others[-1].handle.load_state_dict(through.handle.rank_state_dict())
    through.steps(5, 8)
    for step, again in enumerate(others, 4):
        again.steps(step, 8)
        assert same_bits(again.seen(), through.seen())


@cases.case
def test_a_step_that_is_not_finite_is_not_remembered(world: World) -> None:
    run = run_of(world, diloco(2, outer=ADAMW))
    run.steps(0, 3)
    before = run.handle.rank_state_dict()["tensors"]
    if world.rank == 1:
        with torch.no_grad():
            next(run.model.parameters()).fill_(float("inf"))
    run.steps(3, 4)
    assert same_bits(run.handle.rank_state_dict()["tensors"], before)
    run.steps(4, 6)
    (kept, *_) = run.handle.rank_state_dict()["tensors"].values()
    assert kept["outer.step"] == 2


@cases.case
def test_what_is_no_outer_optimizer_is_refused_by_name(world: World) -> None:
    for factory, named in (
        (partial(optax.adamw, 0.1), "adamw"),
        (torch.optim.LBFGS, "LBFGS"),
        (lambda parameters: parameters, "list"),
        (partial(torch.optim.AdamW, lr=-1.0), "lr=-1.0"),
    ):
        refused = said(local_sgd, mlp(8, 7, 5), None, diloco(2, outer=factory), process_group=world.group)
        assert "outer=" in refused
        assert named in refused
    odd = ADAMW if world.rank else partial(torch.optim.AdamW, lr=0.06)
    assert "lr=0.06" in said(local_sgd, mlp(8, 7, 5), None, diloco(2, outer=odd), process_group=world.group)
    run = run_of(world, diloco(2, outer=ADAMW))
    run.steps(0, 2)
    other = run_of(world, diloco(2, outer=NESTEROV))
    with pytest.raises(ValueError, match="AdamW"):
        other.handle.load_state_dict(run.handle.state_dict())
