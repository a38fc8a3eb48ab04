"""An inf or NaN in one rank's gradient: all ranks see it, nobody's memory changes, and training goes on as if the step had not been."""

import itertools
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.torch_backend import PowerSGDState, powerSGD_hook, register_comm_hook
from tests.torch.ranks import Cases
from tests.torch.training import loss_on, mlp, relative, same_bits, train

cases = Cases(__file__, ranks=3)
results = cases.fixture()

WIDTHS = (40, 36, 32, 28)
COMPRESSED = {"0.weight", "2.weight", "4.weight"}

ALGORITHMS = {
    "PowerSGD": PowerSGD(rank=2),
    "half step": PowerSGD(rank=2, half_step=True),
    "square": PowerSGD(rank=2, square=True),
    "no error feedback": PowerSGD(rank=2, error_feedback=False),
    "no warm start": PowerSGD(rank=2, warm_start=False),
    "bfloat16 on the wire": WireDtype(PowerSGD(rank=2), "bfloat16"),
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


@cases.each({f"{a}, {b}": (ALGORITHMS[a], *BAD[b]) for a, b in PAIRS})
def one_bad_step(world, variant):
    algorithm, value, parameter, at = variant

    def wrapped():
        ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
        return ddp, register_comm_hook(ddp, algorithm, message_bytes=0)

    ddp, handle = wrapped()
    loss = bad_loss(value, parameter, at)
    if at:
        train(ddp, loss, at, local=False)
    before, weights = handle.rank_state_dict(), {n: p.detach().clone() for n, p in ddp.module.named_parameters()}
    bad = train(ddp, loss, [at], local=False)
    after, stats = handle.rank_state_dict(), handle.stats()
    ddp.module.load_state_dict(weights)  # what a GradScaler does: the optimizer skips this step
    rest = train(ddp, loss, range(at + 1, STEPS), local=False)

    ddp, handle = wrapped()
    without = train(ddp, loss, [s for s in range(STEPS) if s != at], local=False)
    return {
        "before": before,
        "after": after,
        "stats": stats,
        "given": bad.given[0],
        "weights": rest.weights,
        "without": without.weights,
    }


each_pair = pytest.mark.parametrize(("algorithm", "bad"), PAIRS, ids=lambda x: x.replace(" ", "-"))


@each_pair
def test_every_rank_is_given_the_same_non_finite_result(results, algorithm, bad):
    first, *others = results(f"one_bad_step[{algorithm}, {bad}]")
    _, where, _ = BAD[bad]
    assert not first["given"][where].isfinite().any() or where not in COMPRESSED
    for name in {where} | COMPRESSED:
        assert not first["given"][name].isfinite().all()
    for other in others:
        # NaN in one place, NaN in the same place everywhere; its sign bit may depend on which operand came first.
        for name, given in other["given"].items():
            torch.testing.assert_close(given, first["given"][name], rtol=0, atol=0, equal_nan=True)


@each_pair
def test_memory_is_what_it_was_and_the_step_counts_as_skipped(results, algorithm, bad):
    for rank in results(f"one_bad_step[{algorithm}, {bad}]"):
        assert same_bits(rank["after"]["tensors"], rank["before"]["tensors"])
        assert same_bits(rank["after"]["shared"], rank["before"]["shared"])
        assert rank["after"]["step"] == rank["before"]["step"] + 1
        assert rank["stats"].skipped_steps == 1


# Without warm start a factor is drawn by the number of the step, and the bad one has a number too.
@pytest.mark.parametrize(("algorithm", "bad"), [pair for pair in PAIRS if pair[0] != "no warm start"])
def test_the_steps_after_equal_a_run_without_the_bad_one(results, algorithm, bad):
    ranks = results(f"one_bad_step[{algorithm}, {bad}]")
    _, _, at = BAD[bad]
    for rank in ranks:
        assert same_bits(rank["weights"], ranks[0]["weights"])
        if at:
            assert same_bits(rank["weights"], rank["without"])
        else:  # buckets are rebuilt one good step earlier, and three ranks' sums have another order
            exact = not isinstance(ALGORITHMS[algorithm], WireDtype)
            assert relative(rank["weights"], rank["without"]) < (1e-6 if exact else torch.finfo(torch.bfloat16).eps)


@cases.each({"AllReduce": AllReduce(), "dense start": PowerSGD(rank=2, start_step=10)})
def without_memory(world, algorithm):
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    handle = register_comm_hook(ddp, algorithm)
    before = handle.rank_state_dict()["tensors"]
    trace = train(ddp, bad_loss(math.inf, "2.weight", 1), 2, local=False)
    return {
        "given": trace.given[1],
        "stats": handle.stats(),
        "before": before,
        "after": handle.rank_state_dict()["tensors"],
    }


@pytest.mark.parametrize("variant", ["AllReduce", "dense start"])
def test_uncompressed_steps_hand_the_bad_element_on(results, variant):
    for rank in results(f"without_memory[{variant}]"):
        bad = ~rank["given"]["2.weight"].isfinite()
        assert bad.view(-1).nonzero().tolist() == [[5]]
        assert all(g.isfinite().all() for n, g in rank["given"].items() if n != "2.weight")
        assert same_bits(rank["after"], rank["before"])
        assert rank["stats"].skipped_steps == 0


@cases.each({"registered": True, "torch's names": False})
def grad_scaler(world, registered):
    """A loop with a GradScaler, as users write it; step 2 overflows on rank 1."""
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=0.006)
    if registered:
        register_comm_hook(ddp, PowerSGD(rank=2))
    else:
        ddp.register_comm_hook(PowerSGDState(world.group, 2, 0), powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    loss = bad_loss(math.inf, "2.weight", 2)
    steps = []
    for step in range(8):
        optimizer.zero_grad()
        y = loss(ddp, world.rank, step)
        scaler.scale(y).backward()
        scaler.step(optimizer)
        scaler.update()
        steps.append((scaler.get_scale(), {n: p.detach().clone() for n, p in ddp.module.named_parameters()}))
    return steps


@pytest.mark.parametrize("variant", ["registered", "torch's names"])
def test_a_grad_scaler_skips_on_all_ranks_and_recovers(results, variant):
    first, *others = results(f"grad_scaler[{variant}]")
    for other in others:
        assert same_bits(other, first)
    scales = [scale for scale, _ in first]
    assert scales == [2.0**10] * 2 + [2.0**9] * 6
    weights = [w for _, w in first]
    assert [same_bits(a, b) for a, b in itertools.pairwise(weights)] == [False, True, False, False, False, False, False]
    assert all(p.isfinite().all() for p in weights[-1].values())


if __name__ == "__main__":
    cases.main()
