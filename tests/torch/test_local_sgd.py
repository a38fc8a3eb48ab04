"""Local SGD under DDP, in four processes on Gloo: the parity table, what is sent, what is averaged,
and what is refused."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import optax  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, WireDtype, diloco
from gradwire.torch_backend import local_sgd
from tests.parity import local_sgd_cases as parity
from tests.torch.compare import flat, relative, said, same_bits, weights
from tests.torch.models import Branches, Layers, loss_on, mlp
from tests.torch.ranks import PATIENCE, Cases, World
from tests.torch.sharded import mesh_of, shard, sharded_mlp
from tests.torch.training import LocalRun, collective_payloads, fit, hooked, sgd

cases = Cases(__file__, ranks=4)

EVERYONE, PAIRS = (0, 1, 2, 3), ((0, 1), (2, 3))
LOSS = loss_on(6)
ADAMW = partial(torch.optim.AdamW, lr=0.05)


def quadratic() -> nn.Module:
    """The loss of the parity table."""

    def forward(
        self: nn.Module, curvature: float, target: dict[str, Tensor], noise: dict[str, Tensor]
    ) -> Tensor:
        near = [
            0.5 * curvature * (p - target[n]).square().sum() for n, p in self.named_parameters()
        ]
        return torch.stack(
            [*near, *((noise[n] * p).sum() for n, p in self.named_parameters())]
        ).sum()

    return Layers(
        forward, **{name: nn.Parameter(torch.from_numpy(x)) for name, x in parity.initial().items()}
    )


def tensors(arrays: dict[str, Any]) -> dict[str, Tensor]:
    return {n: torch.as_tensor(x) for n, x in arrays.items()}


#: But for those of which others are the same and more.
TABLE = {
    n: c
    for n, c in parity.CASES.items()
    if n not in ("every_step", "period", "outer_sgd", "diloco")
}


@cases.each(
    TABLE, slow=("partition", "diloco_hierarchical", "overlap_hierarchical", "weighted_eager")
)
def test_equals_the_oracle(world: World, local: LocalSGD) -> None:
    module = quadratic()
    ddp, _ = hooked(module, None, world.group)
    optimizer = torch.optim.SGD(module.parameters(), lr=parity.RATE)
    handle = local_sgd(ddp, optimizer, local)
    parameters, sent, synchronized = [], [(0, 0)], []
    for step in range(parity.STEPS):
        target, noise = tensors(parity.target(world.rank)), tensors(parity.noise(world.rank, step))
        optimizer.zero_grad()
        if local.weighted:
            handle.weight = parity.weight(world.rank, step)
        ddp(parity.CURVATURE[world.rank], target, noise).backward()
        optimizer.step()
        parameters.append(weights(module))
        sent.append((handle.stats().bytes_sent, handle.stats().collectives))
        synchronized.append(handle.synchronized)
    (case,) = (name for name, row in parity.CASES.items() if row is local)
    if case == "one_node":
        assert synchronized == [step % 2 == 1 for step in range(parity.STEPS)]
        assert all(world.agree(x) for x in parameters[1::2])
    traces = world.everyones(
        (parameters, handle.rank_state_dict()["tensors"], np.diff(sent, axis=0).T)
    )
    if world.rank:
        return  # one oracle for all
    parameters, memory, counts = zip(*traces, strict=True)
    parity.assert_same(case, list(zip(*parameters, strict=True)), list(memory))
    expected = parity.oracle(case)
    for counted in counts:
        for mine, theirs in zip(counted, (expected.nbytes, expected.collectives), strict=True):
            if local.delayed:  # what is on its way has not arrived with the oracle
                assert sum(theirs) <= sum(mine) <= sum(theirs) + max(theirs) * local.fragments
            else:
                assert list(mine) == theirs


class Training:
    """A small model under local SGD: `run(steps)` returns what was sent in each, the ranks of the
    group and the number of elements."""

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
        self.ddp = DistributedDataParallel(
            self.model, process_group=world.group, broadcast_buffers=False
        )
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
def test_steps_of_the_optimizer_count_however_many_backward_passes_they_are_made_of(
    world: World,
) -> None:
    sent = Training(world, LocalSGD(100, start_step=3), backwards=2).run(8)
    assert sent == [[(EVERYONE, SIZE)] * 2] * 3 + [[]] * 5


@cases.case
def test_parameters_without_a_gradient_are_averaged(world: World) -> None:
    """DDP would give the parameter a gradient of zeros on all ranks, as long as one has used it; by
    itself a rank has none."""
    model = Branches()
    optimizer = sgd(model)
    local_sgd(model, optimizer, LocalSGD(2), process_group=world.group)
    taken = ("left", "right") if world.rank == 1 else ("left",)
    before = model.right.weight.detach().clone()
    fit(Layers(lambda self, x: model(x, taken)), optimizer, world.rank, range(2), loss_on(40))
    assert (model.right.weight.grad is None) is (world.rank != 1)
    assert not torch.equal(before, model.right.weight)
    assert world.agree(model.right.weight.detach())


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


@cases.case
def test_statistics_that_one_rank_has_broken_are_those_of_the_others(world: World) -> None:
    """Of each buffer by itself; where all have broken it, nothing is known of it."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    training = Training(world, LocalSGD(2), model=model)
    twin, _ = training.alone(2)
    own = {key: world.everyones(getattr(twin[1], key)) for key in ("running_mean", "running_var")}
    LOSS(training.ddp, world.rank, 0).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    LOSS(training.ddp, world.rank, 1).backward()
    if world.rank == 2:
        model[1].running_mean[3] = float("nan")
    model[1].running_var[0] = float("inf")
    training.optimizer.step()
    others = [x for rank, x in enumerate(own["running_mean"]) if rank != 2]
    torch.testing.assert_close(model[1].running_mean, torch.stack(others).mean(0))
    torch.testing.assert_close(model[1].running_var[1:], own["running_var"][world.rank][1:])


ADAM = torch.optim.Adam


# with moments a number for each of the four tensors: whether they are finite
MOMENTS = {
    "keep": ("keep", SIZE, 5),
    "average": ("average", 3 * SIZE + 4, 5),
    "reset": ("reset", SIZE, 2),
}


@cases.each(MOMENTS)
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
        torch.testing.assert_close(
            found[key], torch.stack(own).mean(0) if what == "average" else own[world.rank]
        )
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
    """Rank 1 alone finds inf in step 1. A scaler then does not call `optimizer.step()`: the others
    must not wait for it."""
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
            # Of what each has done by itself, rank 1 one step less.
            assert relative(flat(training.model), expected) < 1e-5
    assert world.agree(weights(training.model))
    assert all(p.grad is not None for p in training.model.parameters())
    assert (training.handle.steps, scaler.get_scale()) == (4, 512 if world.rank == 1 else 1024)


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
def test_weights_that_are_not_the_same_on_all_ranks_are_averaged_first(world: World) -> None:
    training = Training(world, diloco(2))
    theirs = mlp(6, 5, 3, seed=world.rank + 1)
    training.model.load_state_dict(theirs.state_dict())
    everyones = world.everyones(weights(theirs))
    training.step(0)
    for name, x in training.handle.outer_parameters().items():
        expected = torch.stack([each[name] for each in everyones]).mean(0)
        torch.testing.assert_close(x, expected)


@cases.case
def test_a_step_within_a_step_counts_once(world: World) -> None:
    """torch calls the hooks of a class's own step and of that of its base, once there has been an
    optimizer of each; also after a step that has raised."""

    class Own(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError
            return super().step(closure)

    model = mlp(6, 5, 3)
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Own(model.parameters(), lr=0.1)
    handle = local_sgd(model, optimizer, LocalSGD(3), process_group=world.group)
    for step in range(3):
        optimizer.fails = step == 1
        fit_one = partial(fit, model, optimizer, world.rank, [step], LOSS)
        if optimizer.fails:
            with pytest.raises(MemoryError):
                fit_one()
        else:
            fit_one()
    assert handle.steps == 2
    assert not handle.synchronized
    with pytest.raises(RuntimeError, match=r"each step of the Own .*; leave handle.step\(\) out"):
        handle.step()
    assert handle.steps == 2


@cases.case
def test_nodes_are_those_of_torchrun_or_ranks_on_one_host(world: World) -> None:
    schedule = LocalSGD(
        {"node": 2, "all": 4},
        subgroup="node",
        compressor=WireDtype(TwoLevel(AllReduce()), "bfloat16"),
    )
    with (
        mock.patch.dict(os.environ),
        mock.patch("socket.gethostname", return_value=f"host{world.rank % 2}"),
    ):
        del os.environ["LOCAL_WORLD_SIZE"]
        handle = Training(world, schedule).handle
        assert handle.local == schedule.on_nodes_of(((0, 2), (1, 3)))
        handle.reconfigure(schedule)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        training = Training(world, LocalSGD({"node": 2, "all": 4}, subgroup="node"))
    own, everyone = (PAIRS[world.rank // 2], SIZE), (EVERYONE, SIZE)
    assert training.run(4) == [[own], [own, own], [own], [own, everyone]]


@cases.case
def test_a_module_without_ddp(world: World) -> None:
    model = mlp(6, 5, 3, seed=world.rank, frozen=[2])
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
    model[2].requires_grad_(True)
    fit(model, optimizer, world.rank, [3], LOSS)
    with pytest.raises(RuntimeError, match=r"'2.weight', '2.bias' have gradients"):
        handle.step()


@cases.each(["module", "DDP", "sharded"])
def test_layers_that_are_thawed_need_another_handle(world: World, kind: str) -> None:
    """An error before the step, when replicas are still equal."""
    model, group = mlp(6, 5, 3, frozen=[0]), world.group
    if kind == "sharded":
        mesh = mesh_of(2, 2)
        model, group = shard(model, mesh["shard"]), mesh.get_group("replicate")
    optimizer = sgd(model)

    def begun() -> tuple[nn.Module, Any]:
        module = DistributedDataParallel(model, process_group=group) if kind == "DDP" else model
        return module, local_sgd(module, optimizer, LocalSGD(2), process_group=group)

    module, handle = begun()
    fit(module, optimizer, world.rank, range(2), LOSS)
    model[0].requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"'0.weight', '0.bias' have gradients, .*handle.unregister\(\)"
    ):
        fit(module, optimizer, world.rank, [2], LOSS)
    assert world.agree(whole(model))
    handle.unregister()
    module, handle = begun()
    fit(module, optimizer, world.rank, [3], LOSS)
    assert not world.agree(whole(model))  # it is local still
    fit(module, optimizer, world.rank, [4], LOSS)
    assert world.agree(whole(model))


@cases.each({"own": None, "fused": partial(torch.optim.AdamW, lr=0.05, fused=True)})
def test_the_layout_of_parameters_does_not_matter(world: World, outer: Any) -> None:
    """channels_last parameters stay so, and mean the same, also to fused optimizers, which go by
    the order of memory."""
    found, loss = [], loss_on(75)
    for layout in (torch.channels_last, torch.contiguous_format):
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 8, 3).to(memory_format=layout)
        optimizer = sgd(conv)
        local_sgd(
            conv,
            optimizer,
            diloco(2, compressor=PowerSGD(1, min_compression_rate=1.0), outer=outer),
            process_group=world.group,
        )
        module = Layers(lambda self, x, conv=conv: conv(x.reshape(-1, 3, 5, 5)).flatten(1))
        fit(module, optimizer, world.rank, range(4), loss)
        assert conv.weight.is_contiguous(memory_format=layout)
        found.append(conv.weight.detach().contiguous())
    torch.testing.assert_close(*found)
    assert world.agree(found)


# --- optimizers of torch as outer ones: against ours, and against the very optimizer in a loop by
# hand ---

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def run_of(world: World, local: LocalSGD, group: Any = None, *, sharded: bool = False) -> LocalRun:
    """Of two shards for each replica, or of whole models."""
    if not sharded:
        return LocalRun(world, local, mlp(8, 7, 5).double(), process_group=group or world.group)
    mesh = mesh_of(2, 2)
    model = sharded_mlp((8, 7, 5), mesh["shard"], torch.float64)
    return LocalRun(world, local, model, process_group=mesh.get_group("replicate"))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for n, p in model.named_parameters()
    }


SCHEDULES: dict[str, dict[str, Any]] = {
    "one": {"period": 2},
    "streaming": {
        "period": 4,
        "fragments": 2,
        "overlap": 2,
        "compressor": PowerSGD(2, min_compression_rate=1),
    },
    "eager": {"period": 3, "eager": True},
    "hierarchy": {"period": {2: 1, "all": 3}, "start_step": 0, "state_dtype": "float64"},
    "sharded": {"period": 4, "fragments": 2, "overlap": 1},
}


@cases.each(SCHEDULES, slow=("eager", "hierarchy", "sharded"))
def test_sgd_of_torch_is_ours(world: World, options: dict[str, Any]) -> None:
    sharded = options is SCHEDULES["sharded"]
    ours, theirs = (
        run_of(world, diloco(outer=outer, **options), sharded=sharded) for outer in (None, NESTEROV)
    )
    for run in (ours, theirs):
        run.steps(0, 10)
    assert relative(whole(theirs.model), whole(ours.model)) < 1e-6
    assert "torch.optim.sgd.SGD(lr=0.7" in repr(theirs.handle.local)


@cases.each(
    {"AdamW": ADAMW, "NAdam": partial(torch.optim.NAdam, lr=0.05), "Rprop": torch.optim.Rprop},
    slow=("Rprop",),
)
def test_a_loop_by_hand_comes_to_the_same_and_goes_on_with_fewer_ranks(
    world: World, factory: Any
) -> None:
    """One optimizer from beginning to end, which nobody saves; and between two outer steps two of
    four ranks are left. Each outer step by hand begins with the parameters of the run: an optimizer
    that divides by what it remembers makes much of the last bit, and more in each step."""
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
            with torch.no_grad():
                for n, p in weights(run.model).items():
                    outer[n].copy_(p)

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
        refused = said(
            local_sgd, mlp(8, 7, 5), None, diloco(2, outer=factory), process_group=world.group
        )
        assert "outer=" in refused
        assert named in refused
    odd = ADAMW if world.rank else partial(torch.optim.AdamW, lr=0.06)
    assert "lr=0.06" in said(
        local_sgd, mlp(8, 7, 5), None, diloco(2, outer=odd), process_group=world.group
    )
    run = run_of(world, diloco(2, outer=ADAMW))
    run.steps(0, 2)
    other = run_of(world, diloco(2, outer=NESTEROV))
    with pytest.raises(ValueError, match="AdamW"):
        other.handle.load_state_dict(run.handle.state_dict())


# --- averages that travel while training goes on ---

LATE = {
    "one": diloco(6, overlap=3),
    "fragments": diloco(
        6, overlap=2, fragments=3, layout="size", compressor=PowerSGD(2, min_compression_rate=1)
    ),
    "progress": diloco(
        6, overlap=5, merge="progress", outer=ADAMW, compressor=WireDtype(AllReduce(), "int8")
    ),
    "eager": diloco(4, eager=True, outer=ADAMW, compressor=PowerSGD(2, min_compression_rate=1)),
}


WEIGHTED = diloco(4, overlap=3, weighted=True, compressor=PowerSGD(2, min_compression_rate=1))


def go_on(run: LocalRun, first: int, last: int) -> None:
    """With other weights in each step, if there are any: that of a difference on its way is in the
    memory."""
    for step in range(first, last):
        if run.handle.local.weighted:
            run.handle.weight = (run.rank + step) % 4
        run.steps(step, step + 1)


@cases.each(LATE | {"weighted": WEIGHTED}, slow=("one", "progress"))
def test_a_run_that_ends_while_messages_travel_goes_on_with_the_same_bits(
    world: World, local: LocalSGD
) -> None:
    """After each step of a period, wherever its messages are, from files of each rank."""
    through, saved, seen = LocalRun(world, local), {}, {}
    for step in range(20):
        torch.save((weights(through.model), through.handle.rank_state_dict()), file := io.BytesIO())
        saved[step] = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        go_on(through, step, step + 1)
        seen[step + 1] = through.seen()
    for step in range(16 - int(local.period), 16):  # type: ignore[call-overload]
        again = LocalRun(world, local)
        again.model.load_state_dict(saved[step][0])
        again.handle.load_state_dict(saved[step][1])
        go_on(again, step, step + 5)
        assert same_bits(again.seen(), seen[step + 5])
    late = saved[12][1] | ({"step": 9} if world.rank == 3 else {})
    assert "ranks differ in step: rank 0 has 12, others {3: '9'}" in said(
        again.handle.load_state_dict, late
    )
    assert "the state is of LocalSGD(period=" in said(
        LocalRun(world, diloco(5)).handle.load_state_dict, saved[12][1]
    )
    assert same_bits(again.seen(), seen[20])


@cases.each(LATE | {"waiting": diloco(3, fragments=2), "later": diloco(3, start_step=5, overlap=1)})
def test_outer_parameters_on_the_host_change_no_bit(world: World, local: LocalSGD) -> None:
    """Nor does a run that goes on from the other's state."""
    here, there = LocalRun(world, local), LocalRun(world, local, outer_device="cpu")
    for run in (here, there):
        run.steps(0, 9)
    assert same_bits(there.seen(), here.seen())
    assert same_bits(there.handle.outer_parameters(), here.handle.outer_parameters())
    states = [run.handle.rank_state_dict() for run in (here, there)]
    for run, state in zip((there, here), states, strict=True):
        run.handle.load_state_dict(state)
        run.steps(9, 16)
        run.handle.synchronize()
    assert same_bits(there.seen(), here.seen())
    assert same_bits(there.handle.state_dict(), here.handle.state_dict())
    for run in (here, there):
        run.handle.reconfigure(diloco(5, lr=0.1))
        run.steps(16, 22)
    assert same_bits(there.seen(), here.seen())


@cases.case
def test_what_is_on_its_way_may_be_left_there(world: World) -> None:
    """Between leaving and arriving: another schedule, none any more, an object that is dropped."""
    local = LATE["fragments"]
    for then in ("reconfigure", "unregister", "drop"):
        run = LocalRun(world, local)
        run.steps(0, 3)
        assert run.handle._in_flight is not None
        assert run.handle._in_flight._on_their_way
        if then == "reconfigure":
            run.handle.reconfigure(diloco(6))
            run.steps(3, 13)
            assert world.agree(weights(run.model)) == run.handle.synchronized
        elif then == "unregister":
            run.handle.unregister()
            assert world.agree(weights(run.model))
        del run
    dist.barrier(group=world.group)


@cases.case
def test_steps_go_on_while_another_rank_has_not_sent_yet(world: World) -> None:
    """Rank 2 does not come to its step 3, after which a difference leaves, before the others have
    done two more. Outer parameters are the same on all ranks."""
    run = LocalRun(world, diloco(4, overlap=3))
    run.steps(0, 3)
    store = dist.distributed_c10d._get_default_store()
    if world.rank == 2:
        store.wait(["ahead/0", "ahead/1"], PATIENCE)
    run.steps(3, 6)
    store.set(f"ahead/{world.rank}", "")
    run.steps(6, 7)
    outer = run.handle.outer_parameters()
    assert outer.keys() == dict(run.model.named_parameters()).keys()
    assert world.agree(dict(outer))
    assert not world.agree(weights(run.model))
    assert torch.func.functional_call(run.model, outer, torch.ones(2, 8)).shape == (2, 5)
    with pytest.raises(ValueError, match="no outer parameters"):
        LocalRun(world, LocalSGD(3)).handle.outer_parameters()


@cases.case
def test_messages_on_their_way_have_groups_of_their_own(world: World) -> None:
    """So that others do not wait behind them. They go with the schedule."""
    run = LocalRun(world, diloco(4, overlap=3, compressor=TwoLevel(AllReduce(), 2)))
    handle, groups = run.handle, dist.distributed_c10d._world.pg_map
    for partition in (None, PAIRS, ((0, 2), (1, 3))):
        assert handle._in_flight is not None
        assert handle._in_flight._groups[partition] is not handle._groups[partition]
    before = len(groups)
    handle.reconfigure(diloco(5, overlap=3, compressor=TwoLevel(AllReduce(), 2)))
    assert len(groups) == before
    handle.unregister()
    assert len(groups) == before - 3


@cases.each({name: LATE[name] for name in ("one", "fragments")})
def test_one_rank_that_breaks_while_messages_travel(world: World, local: LocalSGD) -> None:
    run = LocalRun(world, local)
    run.steps(0, 7)
    if world.rank == 1:
        with torch.no_grad():
            next(run.model.parameters()).fill_(float("nan"))
    run.steps(7, 18)
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert all(
        x.isfinite().all()
        for m in run.handle.rank_state_dict()["tensors"].values()
        for x in m.values()
    )


@cases.case
def test_no_thread_sends_or_receives(world: World) -> None:
    """There are as many as with messages that are waited for."""
    LocalRun(world, diloco(6)).steps(0, 6)
    before = threading.active_count()
    LocalRun(world, LATE["one"]).steps(0, 7)
    assert threading.active_count() == before
