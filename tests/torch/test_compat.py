"""torch's own names: the same arguments, near or equal to what torch's hooks and plain DDP do; and
what users build round them."""

import copy
import inspect
import io
import math
import os
import pickle
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks as torchs
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, Auto, PowerSGD, WireDtype, plan
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import Layers, loss_on, mlp
from tests.torch.ranks import Cases, World
from tests.torch.training import collective_payloads, hooked, train

cases = Cases(__file__, ranks=2)

WIDTHS = (48, 40, 32, 24)
SHAPES = {name: tuple(p.shape) for name, p in mlp(*WIDTHS).named_parameters()}
MATRICES = [shape for shape in SHAPES.values() if len(shape) > 1]
DENSE = plan(SHAPES, AllReduce()).dense_bytes
LOSS = loss_on(48)
STEPS = 6


def low_rank(world, rank=2, start=2, **options):
    return gw.PowerSGDState(
        world.group, matrix_approximation_rank=rank, start_powerSGD_iter=start, **options
    )


def wrapped(world, state, hook=gw.powerSGD_hook, **options):
    ddp, _ = hooked(mlp(*WIDTHS), None, world.group, **options)
    ddp.register_comm_hook(state, hook)
    return ddp


def run(ddp, steps=STEPS):
    """The weights after training, and what was sent."""
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, steps, local=False)
    return trace.weights, sent


def nbytes(sent):
    return sum(p.nbytes for p in sent)


def of_two_dtypes():
    torch.manual_seed(0)
    first, last = mlp(48, 40, 32), nn.Linear(32, 24).bfloat16()
    return Layers(
        lambda self, x: last(torch.tanh(first(x)).bfloat16()).float(), first=first, last=last
    )


def stepping(ddp):
    zero = gw.ZeroOptimizer(ddp.module.named_parameters(), torch.optim.SGD, lr=0.1)
    ddp.register_comm_hook(None, gw.hook_with_zero_step(gw.allreduce_hook, ddp, zero))
    return True


#: Registers a hook, and returns whether it updates parameters. Low rank begins one step later where
#: the graph is not static.
STATIC = {
    "allreduce_hook": lambda world, ddp, static: ddp.register_comm_hook(None, gw.allreduce_hook),
    "powerSGD_hook": lambda world, ddp, static: ddp.register_comm_hook(
        low_rank(world, start=2 if static else 3), gw.powerSGD_hook
    ),
    "hook_with_zero_step": lambda world, ddp, static: stepping(ddp),
    "post_localSGD_hook": lambda world, ddp, static: ddp.register_comm_hook(
        gw.PostLocalSGDState(world.group, None, 3), gw.post_localSGD_hook
    ),
    "Auto": lambda world, ddp, static: gw.register_comm_hook(ddp, Auto()) and None,
}


@cases.each(STATIC)
def test_the_first_pass_of_a_static_graph_of_two_dtypes_ends(world, register):
    """There DDP calls each of its buckets the first, and none the last."""

    def trained(static):
        ddp, _ = hooked(of_two_dtypes(), None, world.group, cap=25, static_graph=static)
        steps = register(world, ddp, static)
        # or an update by this optimizer beside that of the hook
        return train(ddp, LOSS, STEPS, local=False, lr=0.0 if steps else 0.1).weights

    found = trained(True)
    assert world.agree(found)
    # in bfloat16 two of three roundings are the same
    assert relative(found, trained(False)) < 1e-3


@cases.case
def test_parameters_of_a_static_graph_are_called_as_in_the_module(world):
    """By the buckets of its second pass, which are those of the first."""
    shapes = []
    for static in (True, False):
        ddp, _ = hooked(of_two_dtypes(), None, world.group, static_graph=static)
        state = low_rank(world, start=2)
        ddp.register_comm_hook(state, gw.powerSGD_hook)
        train(ddp, LOSS, 3 + static, local=False)
        assert state.iter == 3
        saved = state.state_dict()
        memory = saved["memory"]["tensors"]
        shapes.append(
            (saved["names"], {n: {k: x.shape for k, x in own.items()} for n, own in memory.items()})
        )
    assert shapes[0] == shapes[1]


STATELESS = {
    "allreduce_hook": (torch.float32, gw.allreduce_hook),
    "fp16_compress_hook": (torch.float16, gw.fp16_compress_hook),
    "bf16_compress_hook": (torch.bfloat16, gw.bf16_compress_hook),
    "fp16 wrapper": (torch.float16, gw.fp16_compress_wrapper(gw.allreduce_hook)),
    "bf16 round torch's hook": (
        torch.bfloat16,
        gw.bf16_compress_wrapper(default_hooks.allreduce_hook),
    ),
}

LOW_RANK = {
    "powerSGD_hook": (PowerSGD(rank=2, start_step=2), gw.powerSGD_hook),
    "batched_powerSGD_hook": (
        PowerSGD(rank=2, start_step=2, square=True),
        gw.batched_powerSGD_hook,
    ),
    "fp16 wrapper": (
        WireDtype(PowerSGD(rank=2, start_step=2), "float16"),
        gw.fp16_compress_wrapper(gw.powerSGD_hook),
    ),
    "bf16 wrapper, batched": (
        WireDtype(PowerSGD(rank=2, start_step=2, square=True), "bfloat16"),
        gw.bf16_compress_wrapper(gw.batched_powerSGD_hook),
    ),
}


@cases.case
def test_complex_gradients_are_averaged_as_ddp_does(world):
    """In DDP's buckets they are pairs of real numbers, of which hooks are shown half as the
    gradient."""

    def gradient(hook=None, state=world.group):
        phase = torch.nn.Parameter(torch.zeros(24, 20, dtype=torch.complex64))
        ddp, _ = hooked(
            Layers(lambda self, factor: (phase * factor).real.sum(), phase=phase), None, world.group
        )
        if hook is not None:
            ddp.register_comm_hook(state, hook)
        ddp(1 + world.rank + 2j * world.rank).backward()
        return phase.grad

    with pytest.raises(
        ValueError, match=r"parameters of shapes \(24, 20\) are complex: .*Use allreduce_hook"
    ):
        gradient(gw.powerSGD_hook, low_rank(world))
    for hook in (None, gw.allreduce_hook, gw.fp16_compress_hook):
        assert torch.equal(gradient(hook), torch.full((24, 20), 1.5 - 1j))


@cases.each(STATELESS)
def test_hooks_without_a_state_send_their_dtype_and_stay_near_plain_ddp(world, variant):
    dtype, hook = variant
    right, _ = run(hooked(mlp(*WIDTHS), None, world.group)[0])
    mine, sent = run(wrapped(world, world.group, hook))
    assert {p.dtype for p in sent} == {dtype}
    assert nbytes(sent) == STEPS * DENSE * dtype.itemsize / 4
    assert world.agree(mine)
    # With two ranks a sum has only one order. Where a gradient is rounded, then twice on its way,
    # and the weights move by a tenth of it.
    assert same_bits(mine, right) == (dtype == torch.float32)
    assert relative(mine, right) < 2 * torch.finfo(dtype).eps


@cases.each(LOW_RANK)
def test_hooks_with_a_state_equal_the_algorithm_of_the_same_options(world, variant):
    algorithm, hook = variant

    right, _ = run(hooked(mlp(*WIDTHS), algorithm, world.group)[0])
    ddp, _ = hooked(mlp(*WIDTHS), None, world.group)
    ddp.register_comm_hook(low_rank(world, named_parameters=ddp.module.named_parameters()), hook)
    mine, sent = run(ddp)
    assert same_bits(mine, right)
    assert world.agree(mine)
    # codes travel from rank to rank, and are not summed on their way
    if isinstance(algorithm, WireDtype):
        assert not sent
        return
    planned = plan(SHAPES, algorithm)
    assert nbytes(sent) == 2 * DENSE + (STEPS - 2) * planned.wire_bytes
    assert len(sent) == 2 + (STEPS - 2) * planned.collectives
    assert {p.dtype for p in sent} == {torch.float32}


SAVED = {
    "with names": (True, torch.float32),
    "without names": (False, torch.float32),
    "two dtypes": (False, torch.float64),
}


@cases.each(SAVED)
def test_a_saved_state_resumes_bit_for_bit(world, variant):
    """What was saved in the middle: pickled, or as dictionaries; in the same wrapper, or in another
    with another bucket size."""
    (named, dtype), options = variant, {"random_seed": 9, "min_compression_rate": 1.5}

    def made(state, cap, weights=None):
        model = mlp(*WIDTHS)
        model[2].to(dtype).register_forward_pre_hook(lambda _, x: x[0].to(dtype))
        model[4].register_forward_pre_hook(lambda _, x: x[0].float())
        if weights:
            model.load_state_dict(weights)
        ddp, _ = hooked(model, None, world.group, cap=cap)
        names = ddp.module.named_parameters() if named else None
        state = state or low_rank(world, named_parameters=names, **options)
        ddp.register_comm_hook(state, gw.powerSGD_hook)
        return ddp, state

    def rest(ddp):
        return train(ddp, LOSS, range(STEPS, 2 * STEPS), local=False).weights

    ddp, state = made(None, 0.006)
    train(ddp, LOSS, STEPS, local=False)
    weights = copy.deepcopy(ddp.module.state_dict())
    file, plain = io.BytesIO(), io.BytesIO()
    torch.save({"state": state}, file)
    torch.save(state.state_dict(), plain)
    uninterrupted, stats = rest(ddp), state.compression_stats()

    plain.seek(0)
    kept = torch.load(plain, weights_only=True)
    state.load_state_dict(kept)  # back in the middle of training
    ddp.module.load_state_dict(weights)
    fresh = low_rank(world, named_parameters=None, **options)
    fresh.load_state_dict(kept)
    file.seek(0)
    with mock.patch("logging.Logger.warning") as told:
        pickled = torch.load(file, weights_only=False)["state"]
    assert "process group" in str(told.call_args)
    assert pickled.iter == STEPS
    pickled.process_group = world.group
    for resumed, again in ((ddp, state), made(fresh, 25, weights), made(pickled, 25, weights)):
        assert same_bits(rest(resumed), uninterrupted)
        assert again.compression_stats() == stats


def test_a_damaged_state_is_refused_before_and_in_training_and_changes_nothing(alone):
    """Other damages: tests/fuzz."""
    running, fresh = gw.PowerSGDState(alone, 2, 0), gw.PowerSGDState(alone, 2, 0)
    ddp, _ = hooked(mlp(40, 36, 32), None, alone)
    ddp.register_comm_hook(running, gw.powerSGD_hook)
    train(ddp, loss_on(40), 3, local=False)
    good = running.state_dict()
    tensors = good["memory"]["tensors"]
    nan = {"error": tensors["parameter.0"]["error"] * math.nan}
    changes = {
        "PowerSGDState.state_dict": {"format": 2},
        "elements": {"elements": [b"x", 1]},
        "names": {"names": 3},
        "step": {"memory": {**good["memory"], "step": -1}},
        "'error' of parameter 'parameter.0'": {
            "memory": {**good["memory"], "tensors": {**tensors, "parameter.0": nan}}
        },
    }
    train(ddp, loss_on(40), 1, local=False)
    for state in (running, fresh):
        before = state.state_dict()
        for words, change in changes.items():
            with pytest.raises(ValueError, match=words):
                state.load_state_dict({**good, **change})
            assert same_bits(state.state_dict(), before)
    running.load_state_dict(good)
    assert same_bits(running.state_dict(), good)


def test_names_arguments_and_defaults_are_torchs():
    mine = inspect.signature(gw.PowerSGDState).parameters
    torchs_own = inspect.signature(theirs.PowerSGDState).parameters
    assert list(mine) == [*torchs_own, "named_parameters"]
    for name, parameter in torchs_own.items():
        assert (mine[name].default, mine[name].kind) == (parameter.default, parameter.kind), name
    assert mine["named_parameters"].kind == inspect.Parameter.KEYWORD_ONLY
    half = [
        f"{dtype}_compress_{kind}" for dtype in ("fp16", "bf16") for kind in ("hook", "wrapper")
    ]
    names = {
        theirs: ("powerSGD_hook", "batched_powerSGD_hook"),
        torchs: ("register_ddp_comm_hook",),
        default_hooks: ("allreduce_hook", *half),
    }
    for module, name in [(module, name) for module, many in names.items() for name in many]:
        ours, others = (
            list(inspect.signature(getattr(each, name)).parameters) for each in (gw, module)
        )
        assert ours == others, name
    assert list(inspect.signature(gw.noop_hook).parameters) == ["_", "bucket"]
    assert [member.name for member in gw.DDPCommHookType] == [
        member.name for member in torchs.DDPCommHookType
    ]
    assert {*HOOKS, *QUANTIZED} == {member.name for member in gw.DDPCommHookType}


QUANTIZED = ("QUANTIZE_PER_TENSOR", "QUANTIZE_PER_CHANNEL")
#: What is done, the exception, and what its message names.
REFUSED = [
    (lambda: gw.PowerSGDState(None, 0), ValueError, "rank=0"),
    (lambda: gw.PowerSGDState(None, start_powerSGD_iter=-1), ValueError, "start_step=-1"),
    (lambda: gw.PowerSGDState(None, min_compression_rate=0), ValueError, "min_compression_rate=0"),
    *(
        (lambda kind=kind: gw.register_ddp_comm_hook(kind, None), error, named)
        for kind, error, named in (
            (torchs.DDPCommHookType.ALLREDUCE, TypeError, "comm_hook_type="),
            ("ALLREDUCE", TypeError, "comm_hook_type='ALLREDUCE'"),
            *(
                (gw.DDPCommHookType[name], ValueError, f"DDPCommHookType.{name}")
                for name in QUANTIZED
            ),
        )
    ),
]


@pytest.mark.parametrize(("done", "error", "named"), REFUSED, ids=[named for *_, named in REFUSED])
def test_refused_by_name(done, error, named):
    with pytest.raises(error, match=re.escape(named)):
        done()


#: What each name stands for: a hook, and the rank of its state if it has one.
HOOKS = {
    "ALLREDUCE": ("allreduce_hook", None),
    "FP16_COMPRESS": ("fp16_compress_hook", None),
    "BF16_COMPRESS": ("bf16_compress_hook", None),
    "POWER_SGD": ("powerSGD_hook", 1),
    "POWER_SGD_RANK2": ("powerSGD_hook", 2),
    "BATCHED_POWER_SGD": ("batched_powerSGD_hook", 1),
    "BATCHED_POWER_SGD_RANK2": ("batched_powerSGD_hook", 2),
    "NOOP": ("noop_hook", None),
}


@cases.each(HOOKS.keys())
def test_a_name_registers_its_hook(world, name):
    hook, rank = HOOKS[name]
    for by_value in (False, True):
        ddp, _ = hooked(mlp(40, 36, 28), None, world.group)
        kind = gw.DDPCommHookType[name]
        if by_value:
            kind.value(model=ddp, state=world.group)
        else:
            gw.register_ddp_comm_hook(kind, ddp, world.group)
        registered, state = ddp._comm_hooks[0][0:2]
        assert registered is getattr(gw, hook)
        assert getattr(state, "matrix_approximation_rank", None) == rank
        trace = train(ddp, loss_on(40), 3)
        assert same_bits(trace.given, trace.local) == (name == "NOOP")
        assert world.agree(trace.given) == (name != "NOOP")


def logged(state: gw.PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return gw.powerSGD_hook(state, bucket)


@cases.case
def test_a_wrapper_round_a_users_hook_runs_low_rank_in_half_precision(world: World) -> None:
    ddp = wrapped(world, low_rank(world), gw.fp16_compress_wrapper(logged))
    with collective_payloads() as sent:
        trace = train(ddp, LOSS, 4, local=False)
    assert {each.dtype for each in sent} == {torch.float16}
    assert min(each.numel for each in sent) < 2 * sum(WIDTHS) + sum(WIDTHS[1:])  # factors
    assert world.agree(trace.weights)


@cases.case
def test_a_hook_that_waits_for_a_later_bucket_is_told_so(world: World) -> None:
    def timed(
        state: gw.PowerSGDState, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        future = gw.powerSGD_hook(state, bucket)
        future.wait()
        return future

    with pytest.raises(RuntimeError, match="completed in the call for the last bucket"):
        train(wrapped(world, low_rank(world, start=0), timed), LOSS, 3, local=False)
    train(wrapped(world, low_rank(world, start=0), timed, cap=25), LOSS, 2, local=False)


@cases.case
def test_a_state_serves_one_model(world: World) -> None:
    state = low_rank(world, 1, 0)
    first, second = wrapped(world, state), wrapped(world, state)
    train(first, LOSS, 1, local=False)
    with pytest.raises(ValueError, match="a state of its own") as raised:
        train(second, LOSS, 1, local=False)
    assert len(str(raised.value)) < 500


#: The step in which compression starts, what is assigned after three, and what is expected: the
#: rank, tensors with an error, steps.
CHANGES = {
    "rank": (2, "matrix_approximation_rank", 2, (2, 3, 5)),
    "start": (1000, "start_powerSGD_iter", 3, (1, 3, 5)),
    "iter": (1000, "iter", 1000, (1, 3, 1002)),
    "feedback": (2, "use_error_feedback", False, (1, 0, 5)),
}


@cases.case
def test_what_is_compressed_after_an_earlier_state_is_counted_from_there(world):
    state = low_rank(world, 1, 2)
    ddp = wrapped(world, state)
    train(ddp, LOSS, 2, local=False)
    early = copy.deepcopy(state.state_dict())
    train(ddp, LOSS, 3, local=False)
    rate, before, after = state.compression_stats()
    state.load_state_dict(early)
    assert state.compression_stats()[1:] == (0, 0)
    train(ddp, LOSS, 6, local=False)
    assert state.compression_stats() == (rate, 2 * before, 2 * after)


@cases.case
def test_a_later_start_counts_on(world):
    state = low_rank(world, 1, 0)
    ddp = wrapped(world, state)
    train(ddp, LOSS, 3, local=False)
    before = state.compression_stats()
    state.start_powerSGD_iter = 6
    train(ddp, LOSS, 2, local=False)
    assert state.compression_stats() == before
    train(ddp, LOSS, 3, local=False)
    rate, dense, sent = state.compression_stats()
    assert rate == pytest.approx(before[0])
    assert (dense * 3, sent * 3) == tuple(5 * n for n in before[1:])


FIRST_STEPS = {
    "names": lambda world: low_rank(world, named_parameters=[("x", nn.Parameter(torch.ones(1)))]),
    "another configuration": lambda world: loaded_for_another_rank(world),
}


def loaded_for_another_rank(world):
    begun, state = low_rank(world, 1, 0), low_rank(world, 2, 0)
    train(wrapped(world, begun), LOSS, 1, local=False)
    state.load_state_dict(begun.state_dict())
    return state


@cases.each(FIRST_STEPS)
def test_ddp_takes_another_pass_after_a_first_step_that_is_refused(world, make):
    ddp = wrapped(world, make(world))
    for _ in range(2):
        assert "ValueError" in (heard := said(train, ddp, LOSS, 1, local=False)), heard


@cases.case
def test_an_optimizer_does_not_step_where_the_hook_before_it_has_failed(world):
    """Ranks at different steps."""
    state, (ddp, _) = low_rank(world, 1, 0), hooked(mlp(*WIDTHS), None, world.group)
    zero = gw.ZeroOptimizer(ddp.module.named_parameters(), torch.optim.SGD, lr=0.1)
    ddp.register_comm_hook(state, gw.hook_with_zero_step(gw.powerSGD_hook, ddp, zero))
    LOSS(ddp, world.rank, 0).backward()
    before, steps = weights(ddp.module), zero.stats().steps
    saved = state.state_dict()
    saved["memory"] = {**saved["memory"], "step": 7 * world.rank + 1}
    state.load_state_dict(saved)
    assert "ranks differ" in (heard := said(lambda: LOSS(ddp, world.rank, 1).backward())), heard
    assert same_bits(weights(ddp.module), before)
    assert zero.stats().steps == steps


@cases.each(CHANGES)
def test_options_that_are_assigned_in_the_middle_are_heeded(world: World, change: Any) -> None:
    start, option, value, (rank, remembered, steps) = change
    state = low_rank(world, 1, start)
    ddp = wrapped(world, state)
    assert (state.error_dict, state.q_memory_dict, state.total_numel_before_compression) == (
        {},
        {},
        0,
    )
    train(ddp, LOSS, 3, local=False)
    before = state.compression_stats()[2]
    with pytest.raises(ValueError, match="rank=0"):
        state.matrix_approximation_rank = 0
    assert state.matrix_approximation_rank == 1
    setattr(state, option, value)
    assert world.agree(train(ddp, LOSS, 2, local=False).weights)
    vectors, factors = sum(WIDTHS[1:]), sum(n + m for n, m in MATRICES)
    assert state.compression_stats()[2] - before == 2 * (rank * factors + vectors)
    assert (len(state.error_dict), state.iter) == (remembered, steps)
    shown = state.total_numel_before_compression, state.total_numel_after_compression
    assert shown == state.compression_stats()[1:]
    assert [tuple(x.shape) for x in state.error_dict.values()] == MATRICES[:remembered]
    assert {tuple(x.shape) for x in state.q_memory_dict.values()} <= {
        (rank, m) for _, m in MATRICES
    }


@cases.case
def test_a_ddp_that_is_pickled_or_copied_leaves_its_hook_behind(world: World) -> None:
    """DDP itself is pickled with the default process group only."""
    ddp = DistributedDataParallel(mlp(*WIDTHS))
    handle = gw.register_comm_hook(ddp, PowerSGD(rank=2))
    train(ddp, LOSS, 1, local=False)
    for twin in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        handle_there = gw.register_comm_hook(twin, PowerSGD(rank=1))
        train(twin, LOSS, 2, local=False)
        assert handle_there.stats().steps == 2
        assert handle_there.stats().compression_ratio > 2
    train(ddp, LOSS, 1, local=False)
    assert handle.stats().steps == 2


@cases.case
def test_a_subgroup_that_cannot_be_found_is_missed_when_it_is_needed(world: World) -> None:
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        ddp = DistributedDataParallel(nn.Linear(4, 4), process_group=world.group)
        ddp.register_comm_hook(
            gw.PostLocalSGDState(world.group, None, start_localSGD_iter=2), gw.post_localSGD_hook
        )

        def passes(times: int) -> None:
            for _ in range(times):
                ddp(torch.ones(2, 4)).sum().backward()

        with pytest.warns(UserWarning, match="from step 2 on.*give subgroup") as caught:
            passes(2)
        (warned,) = caught
        with pytest.raises(ValueError, match=re.escape(str(warned.message))):
            passes(1)


# Against torch's `powerSGD_hook` where that works: one bucket, no biases, the same initial Q.
# Compared are averaged gradients: the errors that ranks keep differ, and only their means reach the
# updates.

#: Every matrix has its own number of columns, by which its Q is known.
BIASLESS = (64, 48, 56, 40)
MATRICES_ALONE = {name: tuple(p.shape) for name, p in mlp(*BIASLESS, bias=False).named_parameters()}
LARGE_LOSS = loss_on(64, batch=48)
#: torch cannot compress before the third step.
START, MORE_STEPS = 2, 12
#: gradwire's options, torch's where they are called otherwise, and how many of the three matrices
#: are compressed.
OPTIONS = {
    "rank 1": ({"rank": 1}, {}, 3),
    "rank 4, no error feedback": (
        {"rank": 4, "error_feedback": False},
        {"use_error_feedback": False},
        3,
    ),
    "rank 2, min_compression_rate": (
        {"rank": 2, "min_compression_rate": 13.0},
        {"min_compression_rate": 13.0},
        1,
    ),
}


def steps_of(world, register, cap=0.006):
    ddp, _ = hooked(mlp(*BIASLESS, bias=False), None, world.group, cap=cap)
    register(ddp)
    with collective_payloads() as sent:
        trace = train(ddp, LARGE_LOSS, MORE_STEPS, local=False)
    return trace, nbytes(sent)


@cases.each(OPTIONS)
def test_updates_and_statistics_are_those_of_torch(world, variant):
    options, torchs_options, compressed = variant
    algorithm, states = PowerSGD(start_step=START, **options), []
    _, first = hooked(mlp(*BIASLESS, bias=False), algorithm, world.group)
    initial = {
        memory["q"].shape[1]: memory["q"] for memory in first.state_dict()["tensors"].values()
    }
    assert len(initial) == compressed

    # torch draws each Q (1, m, r) by torch.randn when it first compresses, then orthogonalizes it,
    # as gradwire does with its own. What is drawn is replaced by gradwire's initial Q of that
    # matrix.
    real = torch.randn

    def randn(*shape, **others):
        if len(shape) != 3:
            return real(*shape, **others)
        _, m, r = shape
        q = initial[m]
        assert q.shape == (r, m)
        return q.mT.unsqueeze(0)

    def register_state(ddp, state_type=gw.PowerSGDState, hook=gw.powerSGD_hook):
        named = (
            {}
            if state_type is theirs.PowerSGDState
            else {"named_parameters": ddp.module.named_parameters()}
        )
        states.append(state_type(world.group, options["rank"], START, **torchs_options, **named))
        ddp.register_comm_hook(states[-1], hook)

    def register_torchs(ddp):
        register_state(ddp, theirs.PowerSGDState, theirs.powerSGD_hook)

    with mock.patch.object(theirs.torch, "randn", randn):
        right, torchs_bytes = steps_of(world, register_torchs, cap=25)
    planned = plan(MATRICES_ALONE, algorithm)
    expected = START * planned.dense_bytes + (MORE_STEPS - START) * planned.wire_bytes
    for register in (lambda ddp: gw.register_comm_hook(ddp, algorithm), register_state):
        mine, sent = steps_of(world, register)
        for given, theirs_given in zip(mine.given, right.given, strict=True):
            assert relative(given, theirs_given) < 1e-4
        assert relative(mine.weights, right.weights) < 1e-4
        # both compressed, and as much
        assert sent == torchs_bytes == expected < MORE_STEPS * planned.dense_bytes
    (theirs_iter, theirs_stats), (mine_iter, mine_stats) = (
        (state.iter, state.compression_stats()) for state in states
    )
    assert mine_iter == theirs_iter
    assert mine_stats == theirs_stats
    assert mine_stats[0] > 1
