"""An inf or NaN in one rank's gradient: all ranks see it, nobody's memory changes, and training goes on as if the step had not been.

That of every method: tests/composition. With a GradScaler: test_composition.py.
"""

import logging
import math

import pytest
import torch

from gradwire import AllReduce, PowerSGD, Quantize
from gradwire.torch_backend import PowerSGDState, powerSGD_hook
from gradwire.torch_backend.monitor.skipped_steps import SkippedSteps
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, train

cases = Cases(__file__, ranks=3)

WIDTHS = (40, 36, 32, 28)
COMPRESSED = {"0.weight", "2.weight", "4.weight"}

#: value, parameter in which it comes up on rank 1, step at which it does; after the first step buckets are rebuilt
BAD = {
    "inf in a matrix": (math.inf, "2.weight", 3),
    "nan in a matrix": (math.nan, "2.weight", 3),
    "-inf in a bias": (-math.inf, "0.bias", 3),
    "nan in the first step": (math.nan, "4.bias", 0),
}
STEPS = 7


def bad_loss(value, parameter, at):
    """One element of one gradient of one rank is `value`."""

    def loss(model, rank, step):
        y = loss_on(40)(model, rank, step)
        if step == at and rank == 1:
            weights = dict(getattr(model, "module", model).named_parameters())
            y = y + value * weights[parameter].view(-1)[5]
        return y

    return loss


@cases.each(
    {bad: (PowerSGD(rank=2), *BAD[bad]) for bad in BAD}
    | {"half step": (PowerSGD(rank=2, half_step=True), *BAD["inf in a matrix"])}
)
def test_a_bad_step_is_bad_on_every_rank_and_leaves_no_trace(world, variant):
    algorithm, value, parameter, at = variant
    loss = bad_loss(value, parameter, at)
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group, message_bytes=0)
    if at:
        train(ddp, loss, at, local=False)
    before, start = handle.rank_state_dict(), weights(ddp.module)
    (given,) = train(ddp, loss, [at], local=False).given
    assert not given[parameter].isfinite().any() or parameter not in COMPRESSED
    for name in {parameter} | COMPRESSED:
        assert not given[name].isfinite().all()
    # NaN in one place, NaN in the same place everywhere; its sign bit may depend on which operand came first.
    torch.testing.assert_close(given, world.everyones(given)[0], rtol=0, atol=0, equal_nan=True)
    after = handle.rank_state_dict()
    assert same_bits([after["tensors"], after["shared"]], [before["tensors"], before["shared"]])
    assert after["step"] == before["step"] + 1
    assert handle.stats().skipped_steps == 1
    ddp.module.load_state_dict(start)  # what a GradScaler does: the optimizer skips this step
    rest = train(ddp, loss, range(at + 1, STEPS), local=False).weights
    assert world.agree(rest)
    ddp, _ = hooked(mlp(*WIDTHS), algorithm, world.group, message_bytes=0)
    without = train(ddp, loss, [s for s in range(STEPS) if s != at], local=False).weights
    if at:
        assert same_bits(rest, without)
    else:  # buckets are rebuilt one good step earlier, and three ranks' sums have another order
        assert relative(rest, without) < 1e-6


@cases.each({"AllReduce": AllReduce(), "dense start": PowerSGD(rank=2, start_step=10)})
def test_uncompressed_steps_hand_the_bad_element_on(world, algorithm):
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group)
    before = handle.rank_state_dict()["tensors"]
    given = train(ddp, bad_loss(math.inf, "2.weight", 1), 2, local=False).given[1]
    assert (~given["2.weight"].isfinite()).view(-1).nonzero().tolist() == [[5]]
    assert all(g.isfinite().all() for n, g in given.items() if n != "2.weight")
    assert same_bits(handle.rank_state_dict()["tensors"], before)
    assert handle.stats().skipped_steps == 0


@cases.each(["portable", "all", "rank"])
def test_a_state_that_is_not_finite_is_refused_and_changes_nothing(world, form):
    ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(rank=2), world.group)
    train(ddp, loss_on(40), 2, local=False)
    made = {
        "portable": handle.state_dict,
        "all": lambda: handle.gathered_state_dict("all", None),
        "rank": handle.rank_state_dict,
    }
    good = made[form]()
    train(ddp, loss_on(40), 1, local=False)
    before = handle.rank_state_dict()
    for key in ("q", "error"):
        section = "local" if key == "error" and form != "rank" else "tensors"
        for damage in (math.nan, math.inf, None):
            memory = {**good[section]["2.weight"]}
            memory[key] = memory[key].to("meta") if damage is None else memory[key].clone()
            if damage is not None:
                memory[key].view(-1)[-1] = damage  # of the last rank: no rank takes it
            words = said(handle.load_state_dict, {**good, section: {**good[section], "2.weight": memory}})
            assert words.startswith(f"ValueError: memory '{key}' of parameter '2.weight' ")
            assert same_bits(handle.rank_state_dict(), before)
    handle.load_state_dict(good)
    assert handle.rank_state_dict()["step"] == good["step"]


#: Else it looks at every tenth step, at what has arrived.
HOST_KNOWS = TorchOps(torch.device("cpu")).host_knows


@pytest.mark.skipif(not HOST_KNOWS, reason="the host sees every step on the CPU alone")
@pytest.mark.parametrize(
    ("bad", "lines"), [(range(3, 12), 0), (range(3, 13), 1), (range(30), 1), ([*range(12), *range(13, 30)], 2)]
)
def test_ten_skipped_steps_in_a_row_are_said_once(alone, caplog, bad, lines):
    """On one rank: nine in a row are a loss scaler at work; one that was not skipped begins a new run."""
    ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(rank=2), alone)
    with caplog.at_level(logging.WARNING, "gradwire"):
        for step in range(30):
            ddp.zero_grad()
            loss_on(40)(ddp, 0, step).mul(math.nan if step in bad else 1.0).backward()
    said_of = [record.getMessage() for record in caplog.records if "in a row were skipped" in record.getMessage()]
    assert len(said_of) == lines
    assert all(line.startswith("PowerSGD(rank=2): 10 steps") for line in said_of)
    assert handle.stats().skipped_steps == len(bad)


@cases.each({"PowerSGD": PowerSGD(rank=2), "8 bits": Quantize("int8")})
def test_the_rank_with_the_bad_gradient_names_its_parameter(world, algorithm):
    if not HOST_KNOWS:
        return
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)
    try:
        ddp, _ = hooked(mlp(*WIDTHS), algorithm, world.group)
        for step in range(10):
            ddp.zero_grad()
            bad_loss(math.nan, "0.bias", step)(ddp, world.rank, step).backward()
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
    lines = [line for line in lines if "10 steps in a row were skipped" in line]
    assert len(lines) == (world.rank < 2)
    assert [("on rank 1 that of '0.bias' does" in line) for line in lines] == [world.rank == 1] * len(lines)


def test_on_a_device_the_host_waits_for_nothing_to_see_a_run_of_skipped_steps(monkeypatch, caplog):
    """Copies arrive when they like: what has not arrived is looked at later."""

    class Event:
        arrived = False

        def query(self):
            return Event.arrived

        def record(self, stream):
            pass

    skipped = SkippedSteps("method", torch.device("cpu"), 0, seen_by_host=False)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    skipped._arrived = Event()
    said_after = []
    for step in range(1, 61):
        Event.arrived = step > 25
        skipped.add(torch.tensor(step <= 10))
        skipped.look(step)
        said_after += [step] * (len(caplog.records) > len(said_after))
    # Copied after step 10, and seen at 30, when it had arrived; copied then, and seen at 40.
    assert said_after == [40]
    assert int(skipped.count) == 50


@cases.case
def test_a_bad_step_leaves_no_trace_under_torchs_names(world):
    ddp, _ = hooked(mlp(*WIDTHS), None, world.group)
    state = PowerSGDState(world.group, 2, 0)
    ddp.register_comm_hook(state, powerSGD_hook)
    loss = bad_loss(math.inf, "2.weight", 2)
    train(ddp, loss, 2, local=False)
    before = state.state_dict()["memory"]
    (given,) = train(ddp, loss, [2], local=False).given
    assert not any(given[name].isfinite().all() for name in COMPRESSED)
    after = state.state_dict()["memory"]
    assert same_bits([after["tensors"], after["shared"]], [before["tensors"], before["shared"]])
