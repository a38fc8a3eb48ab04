"""An inf or NaN in one rank's gradient: all ranks see it, nobody's memory changes, and training goes on as if the step had not been.

That of every method: tests/composition. With a GradScaler: test_composition.py.
"""

import logging
import math

import pytest
import torch

from gradwire import PowerSGD
from gradwire.torch_backend import PowerSGDState, powerSGD_hook
from gradwire.torch_backend.monitor.skipped_steps import SkippedSteps
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.compare import relative, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, train

cases = Cases(__file__, ranks=3)

WIDTHS = (40, 36, 32, 28)
COMPRESSED = {"0.weight", "2.weight", "4.weight"}

#: The value, the parameter in which it comes up on rank 1, the step at which it does: after the first one buckets are rebuilt.
BAD = {
    "inf in a matrix, half step": (PowerSGD(rank=2, half_step=True), math.inf, "2.weight", 3),
    "-inf in a bias": (PowerSGD(rank=2), -math.inf, "0.bias", 3),
    "nan in the first step": (PowerSGD(rank=2), math.nan, "4.bias", 0),
    "under torch's names": (None, math.inf, "2.weight", 3),
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


def made(world, algorithm):
    """A model, and a function that gives what is remembered."""
    ddp, handle = hooked(mlp(*WIDTHS), algorithm, world.group, message_bytes=0)
    if handle is not None:
        return ddp, handle.rank_state_dict
    state = PowerSGDState(world.group, 2, 0)
    ddp.register_comm_hook(state, powerSGD_hook)
    return ddp, lambda: state.state_dict()["memory"]


@cases.each(BAD)
def test_a_bad_step_is_bad_on_every_rank_and_leaves_no_trace(world, variant):
    algorithm, value, parameter, at = variant
    loss = bad_loss(value, parameter, at)
    (ddp, memory), (other, _) = made(world, algorithm), made(world, algorithm)
    train(ddp, loss, at, local=False)
    before, start = memory(), weights(ddp.module)
    (given,) = train(ddp, loss, [at], local=False).given
    assert not any(given[name].isfinite().all() for name in {parameter} | COMPRESSED)
    # NaN in one place, NaN in the same place everywhere; its sign bit may depend on which operand came first.
    torch.testing.assert_close(given, world.everyones(given)[0], rtol=0, atol=0, equal_nan=True)
    after = memory()
    assert same_bits([after["tensors"], after["shared"]], [before["tensors"], before["shared"]])
    assert after["step"] == before["step"] + 1
    ddp.module.load_state_dict(start)  # what a GradScaler does: the optimizer skips this step
    rest = train(ddp, loss, range(at + 1, STEPS), local=False).weights
    assert world.agree(rest)
    without = train(other, loss, [s for s in range(STEPS) if s != at], local=False).weights
    # In the first step: buckets are rebuilt one good step earlier, and three ranks' sums have another order.
    assert same_bits(rest, without) if at else relative(rest, without) < 1e-6


@pytest.mark.parametrize(
    ("bad", "lines"), [(range(3, 12), 0), (range(3, 13), 1), (range(30), 1), ([*range(12), *range(13, 30)], 2)]
)
def test_ten_skipped_steps_in_a_row_are_said_once(caplog, bad, lines):
    """Nine in a row are a loss scaler at work; one that was not skipped begins a new run."""
    skipped = SkippedSteps("PowerSGD(rank=2)", torch.device("cpu"), 0, seen_by_host=True)
    with caplog.at_level(logging.WARNING, "gradwire"):
        for step in range(30):
            skipped.add(torch.tensor(step not in bad))
            skipped.look(step + 1)
    assert len(caplog.records) == lines
    assert all(record.getMessage().startswith("PowerSGD(rank=2): 10 steps in a row") for record in caplog.records)
    assert int(skipped.count) == len(bad)


@cases.case
def test_the_rank_with_the_bad_gradient_names_its_parameter(world):
    if not TorchOps(torch.device("cpu")).host_knows:  # else it looks at every tenth step, at what has arrived
        return
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)
    try:
        ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(rank=2), world.group)
        for step in range(10):
            ddp.zero_grad()
            bad_loss(math.nan, "0.bias", step)(ddp, world.rank, step).backward()
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
    lines = [line for line in lines if "10 steps in a row were skipped" in line]
    assert len(lines) == (world.rank < 2)
    assert handle.stats().skipped_steps == 10
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
