"""torch's own names: the same arguments, and near or equal to what torch's hooks and plain DDP do."""

import copy
import inspect
import io
import logging
import pickle

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, PowerSGD, WireDtype, plan
from gradwire.torch_backend import (
    PowerSGDState,
    allreduce_hook,
    batched_powerSGD_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    powerSGD_hook,
    register_comm_hook,
)
from tests.torch.ranks import Cases
from tests.torch.training import collective_payloads, loss_on, mlp, relative, same_bits, train

cases = Cases(__file__, ranks=2)
results = cases.fixture()

WIDTHS = (48, 40, 32, 24)
SHAPES = {name: tuple(p.shape) for name, p in mlp(*WIDTHS).named_parameters()}
LOSS = loss_on(48)
STEPS = 6


def low_rank(world, **options):
    return PowerSGDState(world.group, matrix_approximation_rank=2, start_powerSGD_iter=2, **options)


def run(world, register, cap=0.006):
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group, bucket_cap_mb=cap)
    handle = register(ddp)
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, STEPS, local=False)
    return {"weights": trace.weights, "sent": sent, "handle": handle}


PLAIN = {
    "plain DDP": lambda ddp, world: None,
    "AllReduce": lambda ddp, world: register_comm_hook(ddp, AllReduce(), message_bytes=0) and None,
    "AllReduce, fused": lambda ddp, world: register_comm_hook(ddp, AllReduce()) and None,
    "allreduce_hook": lambda ddp, world: ddp.register_comm_hook(world.group, allreduce_hook),
}

HALF = {
    "fp16_compress_hook": (torch.float16, lambda world: (world.group, fp16_compress_hook)),
    "bf16_compress_hook": (torch.bfloat16, lambda world: (world.group, bf16_compress_hook)),
    "fp16 wrapper": (torch.float16, lambda world: (world.group, fp16_compress_wrapper(allreduce_hook))),
    "bf16 wrapper": (torch.bfloat16, lambda world: (world.group, bf16_compress_wrapper(allreduce_hook))),
    "fp16 round torch's hook": (
        torch.float16,
        lambda world: (world.group, fp16_compress_wrapper(default_hooks.allreduce_hook)),
    ),
    "bf16 round torch's hook": (
        torch.bfloat16,
        lambda world: (world.group, bf16_compress_wrapper(default_hooks.allreduce_hook)),
    ),
}

LOW_RANK = {
    "powerSGD_hook": (PowerSGD(rank=2, start_step=2), powerSGD_hook),
    "batched_powerSGD_hook": (PowerSGD(rank=2, start_step=2, square=True), batched_powerSGD_hook),
    "fp16 wrapper": (WireDtype(PowerSGD(rank=2, start_step=2), "float16"), fp16_compress_wrapper(powerSGD_hook)),
    "bf16 wrapper, batched": (
        WireDtype(PowerSGD(rank=2, start_step=2, square=True), "bfloat16"),
        bf16_compress_wrapper(batched_powerSGD_hook),
    ),
}


class Phase(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.phase = torch.nn.Parameter(torch.zeros(24, 20, dtype=torch.complex64))

    def forward(self, factor):
        return (self.phase * factor).real.sum()


@cases.case
def complex_parameters(world):
    """In DDP's buckets they are pairs of real numbers, of which hooks are shown half as the gradient."""

    def gradient(hook, state):
        model = Phase()
        ddp = DistributedDataParallel(model, process_group=world.group)
        if hook is not None:
            ddp.register_comm_hook(state, hook)
        ddp(1 + world.rank + 2j * world.rank).backward()
        return model.phase.grad

    with pytest.raises(ValueError, match=r"parameters of shapes \(24, 20\) are complex: .*Use allreduce_hook"):
        gradient(powerSGD_hook, low_rank(world))
    return gradient(None, None), *(gradient(hook, world.group) for hook in (allreduce_hook, fp16_compress_hook))


def test_complex_gradients_are_averaged_as_ddp_does(results):
    for plain, *ours in results("complex_parameters"):
        assert torch.equal(plain, torch.full((24, 20), 1.5 - 1j))
        assert all(torch.equal(plain, each) for each in ours)


@cases.each(PLAIN)
def plain(world, register):
    return run(world, lambda ddp: register(ddp, world))


@cases.each(HALF)
def half(world, variant):
    _, make = variant
    return run(world, lambda ddp: ddp.register_comm_hook(*make(world)))


@cases.each(LOW_RANK)
def by_state(world, variant):
    _, hook = variant

    def register(ddp):
        state = low_rank(world, named_parameters=ddp.module.named_parameters())
        ddp.register_comm_hook(state, hook)

    return run(world, register)


@cases.each(LOW_RANK)
def by_algorithm(world, variant):
    algorithm, _ = variant
    return run(world, lambda ddp: register_comm_hook(ddp, algorithm) and None)


@pytest.mark.parametrize("variant", PLAIN)
def test_averaging_hooks_equal_plain_ddp(results, variant):
    for mine, right in zip(results(f"plain[{variant}]"), results("plain[plain DDP]"), strict=True):
        assert same_bits(mine["weights"], right["weights"])  # with two ranks a sum has only one order
        if variant != "plain DDP":
            assert sum(p.nbytes for p in mine["sent"]) == STEPS * plan(SHAPES, AllReduce()).dense_bytes


@pytest.mark.parametrize("variant", HALF)
def test_half_precision_hooks_send_two_bytes_and_stay_near_plain_ddp(results, variant):
    dtype, _ = HALF[variant]
    for mine, right in zip(results(f"half[{variant}]"), results("plain[plain DDP]"), strict=True):
        assert {p.dtype for p in mine["sent"]} == {dtype}
        assert sum(p.nbytes for p in mine["sent"]) == STEPS * plan(SHAPES, AllReduce()).dense_bytes / 2
        # A gradient is rounded twice on its way and the weights move by a tenth of it.
        assert 0 < relative(mine["weights"], right["weights"]) < 2 * torch.finfo(dtype).eps
    first, second = results(f"half[{variant}]")
    assert same_bits(first["weights"], second["weights"])


@pytest.mark.parametrize("variant", LOW_RANK)
def test_hooks_with_a_state_equal_the_algorithm_of_the_same_options(results, variant):
    algorithm, _ = LOW_RANK[variant]
    planned = plan(SHAPES, algorithm)
    dense = plan(SHAPES, WireDtype(AllReduce(), algorithm.dtype) if isinstance(algorithm, WireDtype) else AllReduce())
    for mine, right in zip(results(f"by_state[{variant}]"), results(f"by_algorithm[{variant}]"), strict=True):
        assert same_bits(mine["weights"], right["weights"])
        assert sum(p.nbytes for p in mine["sent"]) == 2 * dense.wire_bytes + (STEPS - 2) * planned.wire_bytes
        assert len(mine["sent"]) == 2 + (STEPS - 2) * planned.collectives
    first, second = results(f"by_state[{variant}]")
    assert same_bits(first["weights"], second["weights"])


@pytest.mark.parametrize("variant", ["fp16 wrapper", "bf16 wrapper, batched"])
def test_wrappers_round_compressing_hooks_send_two_bytes(results, variant):
    dtype = torch.float16 if "fp16" in variant else torch.bfloat16
    for mine in results(f"by_state[{variant}]"):
        assert {p.dtype for p in mine["sent"]} == {dtype}


# One bucket, where torch's own hook works on Gloo.


@cases.case
def statistics(world):
    seen = {}
    for whose, (state_type, hook) in {
        "torch": (theirs.PowerSGDState, theirs.powerSGD_hook),
        "gradwire": (PowerSGDState, powerSGD_hook),
    }.items():
        ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
        state = state_type(world.group, matrix_approximation_rank=3, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, hook)
        seen[whose] = []
        for step in range(5):
            train(ddp, LOSS, [step], local=False)
            seen[whose].append((state.iter, state.compression_stats()))
    return seen


def test_compression_stats_are_those_of_torch(results):
    for rank in results("statistics"):
        assert rank["gradwire"] == rank["torch"]
        assert rank["gradwire"][-1][1][0] > 2


SAVED = {
    "with names": (True, torch.float32),
    "without names": (False, torch.float32),
    "two dtypes": (False, torch.float64),
}


@cases.each(SAVED)
def saved(world, variant):
    """Uninterrupted training for 2·STEPS, and from the middle on with what was saved there: pickled, or as dictionaries, in the same
    wrapper or in another with another bucket size."""
    named, dtype = variant

    def wrapped(state, cap, weights=None):
        model = mlp(*WIDTHS)
        model[2].to(dtype).register_forward_pre_hook(lambda _, x: x[0].to(dtype))
        model[4].register_forward_pre_hook(lambda _, x: x[0].float())
        if weights:
            model.load_state_dict(weights)
        ddp = DistributedDataParallel(model, process_group=world.group, bucket_cap_mb=cap)
        state = state or low_rank(world, named_parameters=ddp.module.named_parameters() if named else None)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, state

    ddp, state = wrapped(None, 0.006)
    train(ddp, LOSS, STEPS, local=False)
    weights = copy.deepcopy(ddp.module.state_dict())
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save({"state": state}, file)
    torch.save(state.state_dict(), plain)
    uninterrupted = train(ddp, LOSS, range(STEPS, 2 * STEPS), local=False)
    all_stats = state.compression_stats()

    plain.seek(0)
    kept = torch.load(plain, weights_only=True)
    state.load_state_dict(kept)  # back in the middle of training
    ddp.module.load_state_dict(weights)
    again = train(ddp, LOSS, range(STEPS, 2 * STEPS), local=False)
    again_stats = state.compression_stats()
    fresh = low_rank(world, named_parameters=None)
    fresh.load_state_dict(kept)
    ddp, _ = wrapped(fresh, 25, weights)
    loaded = train(ddp, LOSS, range(STEPS, 2 * STEPS), local=False)

    file.seek(0)
    state = torch.load(file, weights_only=False)["state"]
    iterations = state.iter
    state.process_group = world.group
    ddp, _ = wrapped(state, 25, weights)
    resumed = train(ddp, LOSS, range(STEPS, 2 * STEPS), local=False)
    return {
        "uninterrupted": uninterrupted.weights,
        "resumed": [resumed.weights, again.weights, loaded.weights],
        "iterations": iterations,
        "stats": [all_stats, state.compression_stats(), again_stats, fresh.compression_stats()],
    }


@pytest.mark.parametrize("variant", SAVED)
def test_a_saved_state_resumes_bit_for_bit(results, variant):
    for rank in results(f"saved[{variant}]"):
        assert rank["iterations"] == STEPS
        assert all(same_bits(weights, rank["uninterrupted"]) for weights in rank["resumed"])
        assert len(set(rank["stats"])) == 1


def test_a_state_of_something_else_is_refused():
    state = PowerSGDState(None, 3)
    before = state.state_dict()
    with pytest.raises(ValueError, match=r"not what PowerSGDState\.state_dict"):
        state.load_state_dict({"format": 1, "step": 3})
    assert state.state_dict() == before


def test_arguments_and_defaults_are_those_of_torch():
    ours = inspect.signature(PowerSGDState).parameters
    torchs = inspect.signature(theirs.PowerSGDState).parameters
    assert list(ours) == [*torchs, "named_parameters"]
    for name, parameter in torchs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    assert ours["named_parameters"].kind == inspect.Parameter.KEYWORD_ONLY
    assert ours["named_parameters"].default is None


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (powerSGD_hook, theirs.powerSGD_hook),
        (batched_powerSGD_hook, theirs.batched_powerSGD_hook),
        (allreduce_hook, default_hooks.allreduce_hook),
        (fp16_compress_hook, default_hooks.fp16_compress_hook),
        (bf16_compress_hook, default_hooks.bf16_compress_hook),
        (fp16_compress_wrapper, default_hooks.fp16_compress_wrapper),
        (bf16_compress_wrapper, default_hooks.bf16_compress_wrapper),
    ],
)
def test_functions_take_what_torchs_take(ours, torchs):
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(torchs).parameters)


def test_the_state_keeps_its_options_when_pickled_and_says_that_the_group_is_lost(caplog):
    state = PowerSGDState(
        None, 3, start_powerSGD_iter=7, min_compression_rate=1.5, use_error_feedback=False, random_seed=9
    )
    with caplog.at_level(logging.WARNING):
        copy = pickle.loads(pickle.dumps(state))
    assert copy.algorithm(square=False) == state.algorithm(square=False)
    assert copy.algorithm(square=False) == PowerSGD(
        rank=3, start_step=7, min_compression_rate=1.5, error_feedback=False, seed=9, rows={"*": 1}
    )
    assert copy.process_group is None
    assert "process group" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"matrix_approximation_rank": 0}, "rank=0"),
        ({"start_powerSGD_iter": -1}, "start_step=-1"),
        ({"min_compression_rate": 0}, "min_compression_rate=0"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        PowerSGDState(None, **arguments)


if __name__ == "__main__":
    cases.main()
