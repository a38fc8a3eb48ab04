"""An inf or NaN in one rank's gradient: all ranks see it, nobody's memory changes, and training goes on as if the step had not been."""

import itertools
import math

import torch

from gradwire import AllReduce, PowerSGD, Quantize, WireDtype
from gradwire.torch_backend import PowerSGDState, powerSGD_hook
from tests.torch.compare import relative, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import hooked, sgd, train

cases = Cases(__file__, ranks=3)

WIDTHS = (40, 36, 32, 28)
COMPRESSED = {"0.weight", "2.weight", "4.weight"}

ALGORITHMS = {
    "PowerSGD": PowerSGD(rank=2),
    "half step": PowerSGD(rank=2, half_step=True),
    "square": PowerSGD(rank=2, square=True),
    "no error feedback": PowerSGD(rank=2, error_feedback=False),
    "no warm start": PowerSGD(rank=2, warm_start=False),
    "bfloat16 on the wire": WireDtype(PowerSGD(rank=2), "bfloat16"),
    "8 bits": Quantize("int8"),
    "powers of two on the wire": WireDtype(PowerSGD(rank=2), "e3m0"),
}
#: value, parameter in which it comes up on rank 1, step at which it does; after the first step buckets are rebuilt
BAD = {
    "inf in a matrix": (math.inf, "2.weight", 3),
    "nan in a matrix": (math.nan, "2.weight", 3),
    "-inf in a bias": (-math.inf, "0.bias", 3),
    "nan in the first step": (math.nan, "4.bias", 0),
}
STEPS = 7
#: Every algorithm once, and every kind of bad step.
PAIRS = [("PowerSGD", bad) for bad in BAD] + [(a, "nan in a matrix") for a in ALGORITHMS if a != "PowerSGD"]


def bad_loss(value, parameter, at):
    """One element of one gradient of one rank is `value`."""

    def loss(model, rank, step):
        y = loss_on(40)(model, rank, step)
        if step == at and rank == 1:
            weights = dict(getattr(model, "module", model).named_parameters())
            y = y + value * weights[parameter].view(-1)[5]
        return y

    return loss


VARIANTS = {f"{a}, {b}": (ALGORITHMS[a], *BAD[b]) for a, b in PAIRS}
#: Options of the same program.
SLOW = [name for name in VARIANTS if name.startswith(("square", "no "))]


@cases.each(VARIANTS, slow=SLOW)
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
    if (
        algorithm == ALGORITHMS["no warm start"]
    ):  # whose factor is drawn by the number of the step, which the bad one has too
        return
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


@cases.each({"registered": PowerSGD(rank=2), "torch's names": None})
def test_a_grad_scaler_skips_on_all_ranks_and_recovers(world, algorithm):
    """A loop with a GradScaler, as users write it; step 2 overflows on rank 1."""
    ddp, _ = hooked(mlp(*WIDTHS), algorithm, world.group)
    if algorithm is None:
        ddp.register_comm_hook(PowerSGDState(world.group, 2, 0), powerSGD_hook)
    optimizer = sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    loss = bad_loss(math.inf, "2.weight", 2)
    steps = []
    for step in range(8):
        optimizer.zero_grad()
        y = loss(ddp, world.rank, step)
        scaler.scale(y).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append((scaler.get_scale(), weights(ddp.module)))
    assert world.agree(steps)
    scales, trained = zip(*steps, strict=True)
    assert scales == (2.0**10,) * 2 + (2.0**9,) * 6
    assert [same_bits(a, b) for a, b in itertools.pairwise(trained)] == [False, True, False, False, False, False, False]
    assert all(p.isfinite().all() for p in trained[-1].values())
