"""Differences that are on their way: in states, under another schedule, when they are lost, and
when a replica breaks. In two processes."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradwire import (
    LocalSGD,
    NobodyCounts,
    OuterSGD,
    PowerSGD,
    Quantize,
    Sign,
    TopK,
    WireDtype,
    diloco,
)
from gradwire.torch_backend import local_sgd
from tests.torch.compare import relative, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases, World
from tests.torch.training import LocalRun, fit

cases = Cases(__file__, ranks=2)


def two_dtypes() -> nn.Module:
    """Whose messages are several in each round."""
    model = mlp(8, 7, 5)
    model[2].double()
    model[1] = Doubled()
    return model


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).double()


# --- states ---

STATES: dict[str, LocalSGD] = {
    "top_k": diloco(6, overlap=5, fragments=2, compressor=TopK(0.2)),
    "eager": diloco(4, eager=True, fragments=2, compressor=TopK(0.2)),
    "sign": diloco(5, overlap=4, compressor=Sign()),
    "quantize": diloco(5, overlap=4, compressor=Quantize("int4", block=8)),
    "half_steps": diloco(
        5, overlap=4, compressor=PowerSGD(2, half_step=True, min_compression_rate=1)
    ),
    "weighted": diloco(5, overlap=4, weighted=True, compressor=TopK(0.2)),
}


@cases.each(STATES, slow=STATES.keys() - {"top_k", "eager"})
def test_a_state_of_any_step_goes_on_with_the_same_bits(world: World, local: LocalSGD) -> None:
    """However many messages a round has: nothing is written to memory before it arrives."""
    for make in (lambda: None, two_dtypes)[0 if local is STATES["top_k"] else 1 :]:
        through, saved, seen = LocalRun(world, local, make()), {}, {}
        if local.weighted:
            through.handle.weight = 1.0 + world.rank
        for step in range(17):
            saved[step] = weights(through.model), through.handle.rank_state_dict()
            through.steps(step, step + 1)
            seen[step + 1] = through.seen()
        for step in range(6, 6 + int(local.period)):  # type: ignore[call-overload]
            again = LocalRun(world, local, make())
            if local.weighted:
                again.handle.weight = 1.0 + world.rank
            again.model.load_state_dict(saved[step][0])
            again.handle.load_state_dict(saved[step][1])
            again.steps(step, step + 6)
            assert same_bits(again.seen(), seen[step + 6]), step


@cases.case
def test_the_mean_of_what_is_on_its_way_is_what_the_message_brings(world: World) -> None:
    """By weight, which is in it."""
    local, found = diloco(4, overlap=3, weighted=True, momentum=0.0), []
    run = LocalRun(world, local)
    run.handle.weight = (1.0, 7.0)[world.rank]
    run.steps(0, 5)
    run.handle.synchronize()
    saved, model = run.handle.state_dict(), weights(run.model)
    again = LocalRun(world, local)
    again.model.load_state_dict(model)
    again.handle.load_state_dict(saved)
    for each in (run, again):
        each.handle.weight = 1.0
        each.steps(5, 7)
        found.append(each.handle.outer_parameters())
    assert relative(*found) < 1e-5


# --- another schedule ---

RECONFIGURED = {
    "it has arrived": (diloco(6, overlap=2), diloco(6, overlap=4), 8),
    "a longer one, on its way": (diloco(6, overlap=2), diloco(6, overlap=4), 7),
    "its time is over": (diloco(6, overlap=4), diloco(6, overlap=2), 9),
    "nothing has left": (diloco(6), diloco(6, overlap=4), 8),
    "none any more": (diloco(6, overlap=3), diloco(6), 7),
    "another period": (diloco(6, overlap=3), diloco(5, overlap=4), 10),
    "to eager": (diloco(6, overlap=3), diloco(6, eager=True), 10),
    "to eager, on its way": (diloco(6, overlap=3), diloco(6, eager=True), 7),
    "from eager": (diloco(6, eager=True), diloco(6, overlap=3), 8),
    "the same": (diloco(6, overlap=4), diloco(6, overlap=4, lr=0.5), 8),
    "other fragments": (
        diloco(6, overlap=4, fragments=2),
        diloco(6, overlap=4, fragments=3, layout="size"),
        8,
    ),
}
#: Cases in which what is on its way goes on.
KEPT = ("a longer one, on its way", "the same")


@cases.each(RECONFIGURED)
def test_another_schedule_is_that_from_there(
    world: World, case: tuple[LocalSGD, LocalSGD, int]
) -> None:
    """As if a run began with these parameters, outer parameters and velocities. What has left is
    applied once, or not at all: then parameters hold it."""
    before, then, at = case
    kept = any(case is RECONFIGURED[name] for name in KEPT)
    run = LocalRun(world, before)
    run.steps(0, at)
    run.handle.reconfigure(then)
    state = run.handle.rank_state_dict()
    assert (max(state.get("left", [-1])) >= 0) is kept
    assert (
        any(m["difference"].any() for m in state["tensors"].values() if "difference" in m) is kept
    )
    if not then.eager:
        assert world.agree({n: m["outer"] for n, m in state["tensors"].items()})
    again = LocalRun(world, then)
    again.model.load_state_dict(weights(run.model))
    again.handle.load_state_dict(state)
    moved = []
    for step in range(at, at + 9):
        outer = {n: x.clone() for n, x in run.handle.outer_parameters().items()}
        for each in (run, again):
            each.steps(step, step + 1)
        moved += [] if same_bits(outer, dict(run.handle.outer_parameters())) else [step]
    assert same_bits(again.seen(), run.seen())
    turns = {step: then.turn(step) for step in range(at, at + 9)}
    period = then.longest
    left = {f: s for f, s in enumerate(state.get("left", [])) if s >= 0}
    expected = []
    for step, turn in turns.items():
        due = {f for of, f in turn.due if of == period}
        arrives = {f for f in turn.arrives if left.get(f) == step - then.overlap}
        expected += [step] if arrives or (due and not then.overlap) else []
        left = {f: s for f, s in left.items() if f not in arrives} | dict.fromkeys(due, step)
    assert moved == expected


# --- a message that fails ---


@cases.each(
    {
        "waiting": diloco(4, weighted=True),
        "overlap": diloco(4, overlap=2, weighted=True),
        "eager": diloco(4, eager=True, weighted=True),
    }
)
def test_a_message_that_fails_is_forgotten(world: World, local: LocalSGD) -> None:
    """Nobody counts in it. Training goes on, and the next difference holds what has been learned
    since."""
    run, raised = LocalRun(world, local), []
    for step in range(21):
        run.handle.weight = 0.0 if step == 7 else 1.0
        try:
            run.steps(step, step + 1)
        except NobodyCounts:
            raised.append(step)
    assert len(raised) == 1
    assert run.handle.steps == 20
    outer = {n: x.clone() for n, x in run.handle.outer_parameters().items()}
    run.steps(21, 28)
    assert relative(dict(run.handle.outer_parameters()), outer) > 1e-3
    assert local.eager or world.agree(dict(run.handle.outer_parameters()))


# --- one NaN on one rank ---

INNER: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.01),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
}
QUICK = ("AdamW", "Adagrad")
LOSS = loss_on(4)
BROKEN: dict[str, LocalSGD] = {
    "waiting": diloco(4),
    "fragments": diloco(4, fragments=2),
    "overlap": diloco(4, overlap=3),
    "both": diloco(4, overlap=1, fragments=2),
    "eager": diloco(4, eager=True),
    "eager fragments": diloco(4, eager=True, fragments=2),
}
#: What the others meet: one that waits, one whose average comes later, and one that merges. All
#: schedules with each use of moments are met by those that are quick, all steps of a period by the
#: first of them.
OF_OTHERS = ("waiting", "both", "eager fragments")


@cases.each(INNER, slow=[name for name in INNER if name not in QUICK])
def test_all_recover_from_one_nan_on_one_rank(world: World, inner: Any) -> None:
    """In each step of a period, other optimizers in one for each schedule: what the outer
    parameters cannot restore, an optimizer's moments, begins anew. States of any moment can be
    loaded."""
    quick = inner in [INNER[name] for name in QUICK]
    for number, (name, local) in enumerate(BROKEN.items()):
        if not quick and name not in OF_OTHERS:
            continue
        for moments in ("keep", "average", "reset") if quick or name == "waiting" else ("keep",):
            if moments == "reset" and (local.delayed or inner is INNER["Adagrad"]):
                continue  # refused
            every = range(4, 8) if inner is INNER["AdamW"] else (4 + number % 4,)
            for broken in every if moments == "keep" else (5,):
                where = name, moments, broken
                model = mlp(4, 3, 2)
                optimizer = inner(model.parameters())
                handle = local_sgd(
                    model, optimizer, local, moments=moments, process_group=world.group
                )  # type: ignore[arg-type]
                for step in range(16):
                    scale = float("nan") if (world.rank, step) == (1, broken) else 1.0
                    fit(model, optimizer, world.rank, [step], lambda *of, by=scale: LOSS(*of) * by)
                    if step in (broken, broken + 2):
                        handle.load_state_dict(handle.rank_state_dict())
                    if step == 11:
                        outer = {n: x.clone() for n, x in handle.outer_parameters().items()}
                assert all(p.isfinite().all() for p in model.parameters()), where
                assert all(x.isfinite().all() for x in handle.outer_parameters().values()), where
                assert local.eager or world.agree(dict(handle.outer_parameters())), where
                assert not same_bits(dict(handle.outer_parameters()), outer), where
                # by which a gradient of NaN moves nothing
                if not local.eager and inner is not INNER["Rprop"]:
                    assert 1 <= handle.stats().skipped_averages <= local.fragments, where
                handle.unregister()


@cases.case
def test_averages_that_are_not_finite_are_said_once(world: World) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    run = LocalRun(world, diloco(2, compressor=WireDtype(PowerSGD(2), "bfloat16")))
    for step in range(12):
        if world.rank == 1:
            with torch.no_grad():
                next(run.model.parameters()).fill_(float("nan"))
        run.steps(step, step + 1)
    logging.getLogger("gradwire").removeHandler(handler)
    assert run.handle.stats().skipped_averages == 6
    assert len([line for line in said if "3 averages in a row were not finite" in line]) == (
        1 if world.rank == 0 else 0
    )


def still(run: LocalRun, first: int, last: int) -> None:
    """Steps without gradients, in which replicas of an eager schedule come together."""
    for _ in range(first, last):
        run.optimizer.zero_grad()
        for p in run.model.parameters():
            p.grad = torch.zeros_like(p)
        run.optimizer.step()


@cases.each(["one of them breaks", "all overflow", "another period", "other weights"])
def test_eager_replicas_come_together_again(world: World, after: str) -> None:
    """Each takes back what it has added of its own difference, whatever becomes of the average, and
    whatever replicas count for by then."""
    weighted, overflow = after == "other weights", after == "all overflow"
    outer = OuterSGD(4.0 if overflow else 1.0, momentum=0.0)
    local = partial(diloco, eager=True, outer=outer, weighted=weighted)
    run = LocalRun(world, local(4))
    run.steps(0, 10)
    if weighted:
        run.handle.weight = 9.0 if world.rank else 1.0
    elif after == "another period":
        run.handle.reconfigure(local(3))
    elif world.rank == 1 or overflow:
        with torch.no_grad():
            next(run.model.parameters()).fill_(-2e38 if overflow else float("nan"))
    still(run, 10, 12) if overflow else run.steps(10, 12)

    def apart() -> float:
        outer = dict(run.handle.outer_parameters())
        return relative(outer, world.everyones(outer)[1 - world.rank])

    assert apart() > 1e-3
    still(run, 12, 60)
    assert apart() < 1e-6
    assert bool(run.handle.stats().skipped_averages) is overflow


@cases.each({"whole": False, "by weight": True})
def test_a_broken_replica_is_synchronized_as_its_outer_parameters(
    world: World, weighted: bool
) -> None:
    """Before it comes to the next average, which would send it back there."""
    run = LocalRun(world, diloco(4, weighted=weighted))
    run.steps(0, 6)
    outer = {n: x.clone() for n, x in run.handle.outer_parameters().items()}
    own = weights(run.model)
    everyones = world.everyones(outer if world.rank == 1 else own)
    if world.rank == 1:
        with torch.no_grad():
            next(run.model.parameters()).fill_(float("nan"))
    run.handle.synchronize()
    expected = {n: torch.stack([each[n] for each in everyones]).mean(0) for n in own}
    assert relative(weights(run.model), expected) < 1e-6


@cases.case
def test_a_state_of_its_own_says_that_ranks_differ(world: World) -> None:
    """After a schedule that would take them to be equal at this step."""
    run = LocalRun(world, diloco(3))
    run.steps(0, 8)
    run.handle.reconfigure(diloco(4))
    assert not run.handle.synchronized
    run.handle.load_state_dict(run.handle.rank_state_dict())
    assert not run.handle.synchronized


@cases.case
def test_a_step_that_raises_leaves_nothing_for_the_next(world: World) -> None:
    """Under a GradScaler, whose gradients may be inf."""

    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError
            return super().step(closure)

    model, scaler = mlp(4, 3), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = Fails(model.parameters(), lr=0.1)
    local_sgd(model, optimizer, diloco(50), process_group=world.group)

    def step(scale: float, *, fails: bool, unscales: bool = False) -> None:
        optimizer.zero_grad()
        scaler.scale(LOSS(model, 0, 0) * scale).backward()
        if unscales:
            scaler.unscale_(optimizer)
        optimizer.fails = fails
        scaler.step(optimizer)
        scaler.update()

    for unscales in (False, True):
        for scale in (1.0, float("inf")):
            try:
                step(scale, fails=True, unscales=unscales)
            except MemoryError:
                scaler.update(8.0)
            before = weights(model)
            step(float("inf"), fails=False)
            assert same_bits(weights(model), before)
            step(1.0, fails=False)
            assert not same_bits(weights(model), before)
            assert all(p.isfinite().all() for p in model.parameters())
