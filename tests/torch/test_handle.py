"""What a user does with a handle: sees what it does, gives the gradients back to DDP, changes the
algorithm in a running job, drops passes and errors."""

import copy
import gc
import logging
import warnings
import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, WireDtype, diloco
from gradwire.torch_backend import (
    Averager,
    DataParallel,
    PowerSGDState,
    local_sgd,
    powerSGD_hook,
    register_comm_hook,
)
from gradwire.torch_backend.ddp.bucket_hook import raise_after_backward
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.monitor import fidelity
from gradwire.torch_backend.ops.kernels import TorchOps
from tests.torch.compare import alive, gradients, relative, said, same_bits, weights
from tests.torch.models import Branches, branching_loss, loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import collective_payloads, distance, fit, hooked, paralleled, sgd, train

WIDTHS = (40, 36, 36, 28)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=2)


def wrapped(world, algorithm=None, model=None, **options):
    return hooked(model or mlp(*WIDTHS), algorithm, world.group, message_bytes=1000, **options)


def given(ddp, steps, loss=LOSS):
    return train(ddp, loss, steps, local=False).given


USED = {
    "all": (lambda: mlp(*WIDTHS), LOSS, {}),
    "some": (Branches, branching_loss, {"find_unused_parameters": True}),
}


@cases.case
def test_the_size_of_the_error_does_not_depend_on_a_loss_scale(world):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ddp, handle = wrapped(world, PowerSGD(rank=2))
    other, scaled = wrapped(world, PowerSGD(rank=2), grad_scaler=scaler)
    train(ddp, LOSS, 3, lr=0.0, local=False)
    train(other, lambda *step: scaler.scale(LOSS(*step)), 3, lr=0.0, local=False)
    assert scaled.local_error_norm() == pytest.approx(handle.local_error_norm(), rel=1e-4)


@cases.each(USED)
def test_after_unregister_ddp_averages_as_without_a_hook_and_takes_another(world, variant):
    """Compressed for two steps, plain, and compressed again; beside a DDP that has no hook, begins
    with those weights, and is given its first."""
    make, loss, options = variant
    ddp, handle = wrapped(world, PowerSGD(rank=2), make(), **options)
    given(ddp, 2, loss)
    plain, _ = wrapped(world, None, make(), **options)
    plain.module.load_state_dict(ddp.module.state_dict())
    before = handle.stats()
    handle.unregister()
    # nobody keeps count any more
    assert not any(p._post_accumulate_grad_hooks for p in ddp.module.parameters())
    with collective_payloads() as payloads:
        after = given(ddp, range(2, 5), loss)
    assert same_bits(after, given(plain, range(2, 5), loss))
    assert handle.stats() == before
    assert sum(p.nbytes for p in payloads) == 3 * 4 * sum(p.numel() for p in ddp.parameters())
    assert repr(handle).startswith("CommHook(unregistered; PowerSGD(rank=2): ")
    for words in (
        said(handle.unregister),
        said(handle.reconfigure, PowerSGD(rank=4)),
        said(handle.load_state_dict, handle.state_dict()),
        said(handle.set, threshold=0.5),
        said(setattr, handle, "weight", 2.0),
    ):
        assert words.startswith("ValueError: this handle is unregistered; register_comm_hook")
    driver = {"driver": weakref.ref(handle._driver)}
    del handle
    assert alive(driver) == []
    handles = [
        register_comm_hook(each, PowerSGD(rank=1), message_bytes=1000) for each in (ddp, plain)
    ]
    assert (
        relative(*(train(each, loss, range(5, 7), local=False).weights for each in (ddp, plain)))
        < 1e-6
    )
    assert [h.stats().steps for h in handles] == [2, 2]
    assert len(ddp._comm_hooks) == 1


def local_on(world, local, optimizer=torch.optim.AdamW, lr=0.01, **options):
    """A DDP, its optimizer and the handle of local SGD on both, after as many steps."""
    ddp, _ = wrapped(world)
    made = optimizer(ddp.parameters(), lr=lr)
    return ddp, made, local_sgd(ddp, made, local, **options)


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


@cases.each(["keep", "reset"])
def test_after_unregister_of_local_sgd_replicas_are_equal_and_stay_so(world, moments):
    """In the midst of a period. Beside a DDP that nobody has touched, and then with a hook in the
    place of local SGD."""
    ddp, optimizer, handle = local_on(world, diloco(3), moments=moments)
    fit(ddp, optimizer, world.rank, range(5), LOSS)
    mine, remembered, before = weights(ddp.module), state_of(optimizer), handle.stats()
    assert not world.agree(mine)
    handle.unregister()
    everyone, memories = world.everyones(mine), world.everyones(remembered)
    assert (
        relative(weights(ddp.module), {n: sum(x[n] for x in everyone) / world.size for n in mine})
        < 1e-6
    )
    if moments == "keep":
        for i, moment in state_of(optimizer).items():
            for key in ("exp_avg", "exp_avg_sq"):
                assert relative(moment[key], sum(x[i][key] for x in memories) / world.size) < 1e-6
    assert len(state_of(optimizer)) == (6 if moments == "keep" else 0)
    assert world.agree(state_of(optimizer))
    assert handle.stats().steps == before.steps == 5
    assert repr(handle).startswith("LocalSGDHandle(unregistered; LocalSGD(period=3, ")
    saved = handle.rank_state_dict()
    for call in (
        handle.unregister,
        handle.step,
        lambda: handle.reconfigure(LocalSGD(2)),
        lambda: handle.load_state_dict(saved),
        lambda: handle.set(threshold=0.5),
        lambda: setattr(handle, "weight", 2.0),
    ):
        assert "this handle is unregistered; local_sgd" in said(call)
    assert "_step_supports_amp_scaling" not in vars(optimizer)

    plain, _ = wrapped(world)
    plain.module.load_state_dict(ddp.module.state_dict())
    alone = torch.optim.AdamW(plain.parameters(), lr=0.01)
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepping in ((ddp, optimizer), (plain, alone)):
        fit(each, stepping, world.rank, range(5, 8), LOSS)
        register_comm_hook(each, PowerSGD(rank=2), message_bytes=1000)
    assert same_bits(weights(ddp.module), weights(plain.module))
    fit(ddp, optimizer, world.rank, range(8, 11), LOSS)
    assert world.agree(weights(ddp.module))


@cases.case
def test_what_ranks_remember_apart_becomes_one(world):
    """Moments are averaged; counters, factors of other shapes, and what one rank alone has are
    those of the first."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(4, 3)) for _ in range(3)], lr=0.1)
    first, second, third = optimizer.param_groups[0]["params"]
    mine = float(world.rank)
    optimizer.state[first] = {
        "step": torch.tensor(mine),
        "moment": torch.full((4, 3), mine),
        "rows": torch.full((4,), mine),
    }
    optimizer.state[second if world.rank else third] = {
        "moment": torch.full((4, 3), 2.0),
        "step": 7,
    }
    moments = Moments(optimizer, {"a": first, "b": second, "c": third}, "keep", world.group)
    moments.make_equal(Collectives(ProcessGroups(world.group), TorchOps(torch.device("cpu"))))
    half = torch.full((4, 3), 0.5)
    assert same_bits(
        dict(optimizer.state),
        {
            first: {"step": torch.tensor(0.0), "moment": half, "rows": torch.zeros(4)},
            third: {"moment": 2 * half, "step": 7},
        },
    )


def hook_on(world, algorithm):
    ddp, handle = wrapped(world, algorithm)
    return ddp, sgd(ddp), handle


SAME = {
    "hook": (hook_on, PowerSGD(rank=2, half_step=True)),
    "averages": (local_on, LocalSGD(3, start_step=2)),
    "diloco": (local_on, diloco(3, fragments=2, compressor=PowerSGD(2, half_step=True))),
    "two levels": (local_on, diloco(3, compressor=TwoLevel(PowerSGD(2), 2))),
}


@cases.each(SAME)
def test_the_same_again_changes_no_bit(world, variant):
    make, algorithm = variant
    seen = []
    for again in (True, False):
        ddp, optimizer, handle = make(world, algorithm)
        fit(ddp, optimizer, world.rank, range(4), LOSS)
        assert not (again and handle.reconfigure(algorithm))
        fit(ddp, optimizer, world.rank, range(4, 9), LOSS)
        stats = handle.stats()
        counted = stats.steps, stats.bytes_sent, stats.collectives
        seen.append((weights(ddp.module), handle.rank_state_dict(), counted))
    assert same_bits(*seen)
    assert stats.steps == 9


@cases.case
def test_local_sgd_keeps_the_memory_that_fits(world):
    ddp, optimizer, handle = local_on(world, diloco(2, compressor=PowerSGD(2)))
    fit(ddp, optimizer, world.rank, range(5), LOSS)
    before = handle.rank_state_dict()["tensors"]
    difference = handle.reconfigure(diloco(3, lr=0.5, compressor=PowerSGD(4)))
    after = handle.rank_state_dict()["tensors"]
    assert len(difference.reshaped) == 3  # the factors of the weights
    for name, memory in after.items():
        kept = memory.keys() - {"q"}
        assert {"outer", "velocity"} <= kept
        assert same_bits(
            {key: memory[key] for key in kept}, {key: before[name][key] for key in kept}
        )
        assert ("q" in memory) == ("error" in kept) == name.endswith("weight")
        assert "q" not in memory or memory["q"].shape[0] == 4
    assert not handle.synchronized
    fit(ddp, optimizer, world.rank, [5], LOSS)
    assert handle.steps == 6
    assert handle.synchronized
    assert world.agree(weights(ddp.module))


@cases.case
def test_a_schedule_that_begins_with_equal_replicas_finds_them_so(world):
    ddp, optimizer, handle = local_on(world, LocalSGD(4))

    def require_outer_parameters_here():
        outers = {
            name: memory["outer"] for name, memory in handle.rank_state_dict()["tensors"].items()
        }
        assert same_bits(outers, weights(ddp.module))
        assert world.agree(outers)

    fit(ddp, optimizer, world.rank, range(2), LOSS)
    handle.reconfigure(LocalSGD(2))
    assert not handle.synchronized  # by the new schedule an average would have been due
    assert "RuntimeError" in said(handle.state_dict)
    mean = {
        n: sum(x[n] for x in world.everyones(weights(ddp.module))) / world.size
        for n in weights(ddp.module)
    }
    handle.reconfigure(diloco(2))
    require_outer_parameters_here()
    assert relative(weights(ddp.module), mean) < 1e-6
    fit(ddp, optimizer, world.rank, [2], LOSS)
    handle.reconfigure(diloco(2, start_step=6))
    for step in range(3, 5):  # gradients are averaged, and so the optimizers have to agree
        fit(ddp, optimizer, world.rank, [step], LOSS)
        assert world.agree([weights(ddp.module), state_of(optimizer)])
    handle.reconfigure(diloco(2, start_step=4))  # which began with other parameters than it finds
    require_outer_parameters_here()


@cases.case
def test_memory_is_kept_where_it_fits(world):
    """As a hook of that rank, on a DDP of its own, that has loaded what fits of the state."""
    ddp, handle = wrapped(world, PowerSGD(rank=2))
    other, loaded = wrapped(world, PowerSGD(rank=4))
    given(ddp, 3), given(other, 3)
    other.module.load_state_dict(ddp.module.state_dict())
    loaded.load_state_dict(handle.gathered_state_dict("all", to=None), strict=False)
    fresh = wrapped(world, PowerSGD(rank=4))[1].rank_state_dict()["tensors"]
    # what does not fit begins anew, and here it has begun
    for (
        name,
        memory,
    ) in loaded._driver.memory.state.tensors.items():
        memory["q"].copy_(fresh[name]["q"])
    error = handle.local_error_norm()
    difference = handle.reconfigure(PowerSGD(rank=4))
    assert handle.local_error_norm() == error > 0
    assert same_bits(*(given(each, range(3, 8)) for each in (ddp, other)))
    assert world.agree(weights(ddp.module))
    assert difference.algorithm == ("PowerSGD(rank=2)", "PowerSGD(rank=4)")
    assert len(difference.reshaped) == 3
    assert (repr(handle.algorithm), handle.stats().steps) == ("PowerSGD(rank=4)", 8)


@cases.case
def test_data_parallel_is_reconfigured_too(world):
    """To uncompressed averages, in buckets that are divided on their way, and back."""
    model = DataParallel(
        mlp(*WIDTHS), PowerSGD(rank=2), process_group=world.group, bucket_cap_mb=0.006
    )
    twin, _ = wrapped(world)
    given(model, 2)
    twin.module.load_state_dict(model.module.state_dict())
    model.handle.reconfigure(AllReduce())
    assert same_bits(*(given(each, range(2, 5)) for each in (model, twin)))
    messages = model.handle.stats().collectives
    given(model, [5])
    assert len(model.buckets()) == model.handle.stats().collectives - messages > 1
    model.handle.reconfigure(PowerSGD(rank=1))
    trace = train(model, LOSS, range(6, 9))
    assert distance(PowerSGD(rank=1), world.everyones(trace)) < 1e-4
    assert model.handle.algorithm == PowerSGD(rank=1)
    assert "PowerSGD(rank=1): 3 of 6 tensors" in repr(model)


@cases.case
def test_one_line_for_each_registration_on_the_first_rank(world):
    logger, lines = logging.getLogger("gradwire"), []
    seen = logging.Handler(logging.INFO)
    seen.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger.addHandler(seen)
    logger.setLevel(logging.INFO)
    ddp, handle = wrapped(world, PowerSGD(rank=2))
    train(ddp, LOSS, 2, local=False)
    shown = repr(handle)
    handle.reconfigure(WireDtype(AllReduce(), torch.bfloat16))
    DataParallel(
        mlp(400, 300), PowerSGD(rank=2, start_step=100, half_step=True), process_group=world.group
    )
    Averager(PowerSGD(rank=2), {"w": torch.zeros(40, 36)}, world.group)
    logger.removeHandler(seen)
    # 36·40 + 36·36 + 28·36 weights and 36 + 36 + 28 biases; (36 + 40 + 36 + 36 + 28 + 36) · 2
    # numbers for the weights.
    first = "PowerSGD(rank=2): 3 of 6 tensors, 15.4 kB → 2.1 kB (7.3×), 2 messages; error memory 15.0 kB"
    messages = [
        first,
        "WireDtype(algorithm=AllReduce(), dtype='bfloat16'): 6 tensors, 15.4 kB → 7.7 kB (2.0×), 1 message",
        "PowerSGD(rank=2, start_step=100, half_step=True): 1 of 2 tensors, 481.2 kB → 4.0 kB (120×), 1 message from step 100 on; "
        "error memory 480.0 kB",
        "PowerSGD(rank=2): 1 of 1 tensors, 5.8 kB → 608 bytes (9.5×), 2 messages; error memory 5.8 kB",
    ]
    assert lines == [("INFO", message) for message in messages if world.rank == 0]
    assert shown.startswith(f"CommHook({first}; 2 steps, 26.6 kB saved, ")


@cases.case
def test_a_step_is_measured_against_a_full_average(world):
    """Of what goes in, gradients and errors; and it is the step that it would have been."""
    (ddp, handle), (plain, twin) = (
        wrapped(world, PowerSGD(rank=2)),
        wrapped(world, PowerSGD(rank=2)),
    )
    given(ddp, 2), given(plain, 2)
    errors = {name: memory["error"] for name, memory in handle.rank_state_dict()["tensors"].items()}
    with handle.measured() as found:
        trace = train(ddp, LOSS, [2])
    assert same_bits(trace.given, given(plain, [2]))
    assert same_bits(handle.rank_state_dict()["tensors"], twin.rank_state_dict()["tensors"])
    stats, expected = handle.stats(), twin.stats()
    assert (stats.bytes_sent, stats.collectives) == (expected.bytes_sent, expected.collectives)
    put_in = {n: x + errors.get(n, 0) for n, x in trace.local[0].items()}
    means = {n: sum(each[n] for each in world.everyones(put_in)) / world.size for n in put_in}
    off = {n: trace.given[0][n] - x for n, x in means.items()}
    whole = relative(trace.given[0], means)
    assert 0.1 < whole < 1
    assert found.relative_error == pytest.approx(whole, rel=1e-4)
    for name, x in means.items():
        assert found.by_parameter[name] == pytest.approx(
            float(off[name].norm() / x.norm()), rel=1e-4, abs=1e-6
        )
    given(ddp, [3])
    assert found.step == 3  # the next one is not measured
    model = DataParallel(mlp(*WIDTHS), AllReduce(), process_group=world.group)
    with model.handle.measured() as there:
        given(model, [0])
    assert there.relative_error == pytest.approx(0, abs=1e-6)


#: What goes wrong on the last rank, and what comes of it on the first.
TROUBLE = {
    "before the step": ("_wide", None, "it went wrong on another rank"),
    "after the step": ("_ratio", 3, ""),
}


@cases.each(TROUBLE)
def test_a_measurement_that_goes_wrong_ends_no_step(world, variant):
    function, elsewhere, words = variant
    (ddp, handle), (plain, _) = wrapped(world, PowerSGD(rank=2)), wrapped(world, PowerSGD(rank=2))
    given(ddp, 2), given(plain, 2)
    wrong = mock.patch.object(fidelity, function, side_effect=RuntimeError("out of memory"))
    mine = world.rank == world.size - 1
    with warnings.catch_warnings(record=True) as seen, wrong if mine else nullcontext():
        warnings.simplefilter("always")
        with handle.measured() as found:
            after = given(ddp, [2])
    assert same_bits(after, given(plain, [2]))
    assert found.step == (None if mine else elsewhere)
    told = [(str(each.message), each.filename) for each in seen]
    words = "RuntimeError: out of memory" if mine else words
    assert told == (
        [(f"handle.measured(): a step was not measured, since {words}", __file__)] if words else []
    )
    with handle.measured() as found:
        assert same_bits(given(ddp, [3]), given(plain, [3]))
    assert 0.1 < found.relative_error < 1


@cases.case
def test_the_profiler_shows_what_is_done(world):
    ddp, _ = wrapped(world, WireDtype(PowerSGD(rank=2), "bfloat16"))
    train(ddp, LOSS, 2, local=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(ddp, LOSS, 2, local=False)
    counted = {
        event.key: event.count
        for event in profile.key_averages()
        if event.key.startswith("gradwire")
    }
    assert counted.keys() == {"gradwire: PowerSGD send", "gradwire: PowerSGD finish"}
    assert counted["gradwire: PowerSGD finish"] == 2
    assert counted["gradwire: PowerSGD send"] >= 2


# --- what the error remembers: backward passes that leave no trace, error that is forgotten ---

CLIPPED = PowerSGD(2, max_norm=0.1)


def made(world, door=hooked, algorithm=CLIPPED, **options):
    """With several buckets, each of which is a message of its own."""
    return door(mlp(*WIDTHS), algorithm, world.group, message_bytes=0, **options)


def backward(module, rank, step, factor=1.0):
    module.zero_grad()
    (factor * LOSS(module, rank, step)).backward()
    return gradients(module.module)


VARIANTS = {
    "half-step": (hooked, PowerSGD(2, half_step=True)),
    "clipped": (hooked, CLIPPED),
    "bfloat16 on the wire": (hooked, WireDtype(PowerSGD(2), "bfloat16")),
    "DataParallel": (paralleled, PowerSGD(2)),
}


@cases.each(VARIANTS)
def test_a_discarded_pass_leaves_no_trace(world, variant):
    """After one step and after two, so at both phases of a half-step; whether it is finite or not;
    and with another loss scale, which clipping knows and memory only follows in a step that
    counts."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    (module, handle), (other, twin) = (made(world, *variant, grad_scaler=scaler) for _ in range(2))
    limit = 2.0 * 0.1 * 1.001 if variant[1] == CLIPPED else float("inf")
    for step in range(3):
        for each in (module, other):
            backward(each, world.rank, step)
        before, stats = handle.rank_state_dict(), handle.stats()
        scaler.update(2.0)
        with handle.discarded():
            given = backward(module, world.rank, 50 + step, factor=1000.0)
            bad = backward(module, world.rank, 60, float("inf") if world.rank == 1 else 1.0)
        scaler.update(4.0)
        assert same_bits(handle.rank_state_dict(), before)
        after = handle.stats()
        assert (after.steps, after.skipped_steps) == (stats.steps, stats.skipped_steps)
        assert after.bytes_sent > stats.bytes_sent  # it was averaged
        assert world.agree(given)
        norm = torch.cat([g.flatten() for g in given.values()]).norm()
        assert limit / 2 < norm <= limit if variant[1] == CLIPPED else norm > 0
        assert not any(g.isfinite().all() for name, g in bad.items() if name.endswith("weight"))
    # Nor does what comes later know of it. Another configuration within goes on discarding.
    assert same_bits(*(backward(each, world.rank, 9) for each in (module, other)))
    with handle.discarded():
        handle.reconfigure(PowerSGD(1))
        backward(module, world.rank, 51)
    twin.reconfigure(PowerSGD(1))
    for step in (10, 11):
        assert same_bits(*(backward(each, world.rank, step) for each in (module, other)))
        assert same_bits(handle.rank_state_dict(), twin.rank_state_dict())
    # It is compressed like any other, as if nothing had been left out before.
    twin.forget()
    with handle.discarded():
        dropped = backward(module, world.rank, 20)
    assert same_bits(dropped, backward(other, world.rank, 20))


@cases.case
def test_of_two_models_in_one_backward_pass_one_may_be_discarded(world):
    """A generator's step goes through the discriminator, whose gradients are dropped."""
    models = (
        paralleled(mlp(*widths), PowerSGD(2), world.group) for widths in ((8, 32, 40), (40, 32, 1))
    )
    (g, ours), (d, theirs) = models
    noise = torch.randn(6, 8, generator=torch.Generator().manual_seed(world.rank))
    d(g(noise).detach()).mean().backward()
    before = theirs.rank_state_dict()
    d.zero_grad()
    with theirs.discarded():
        (-d(g(noise)).mean()).backward()
    assert same_bits(theirs.rank_state_dict(), before)
    assert (ours.stats().steps, theirs.stats().steps) == (1, 1)
    assert world.agree(gradients(g.module))


@cases.case
def test_contexts_within_each_other_exceptions_and_ranks_that_do_not_agree(world):
    ddp, handle = made(world, algorithm=PowerSGD(2))
    with handle.discarded():
        with handle.discarded():
            backward(ddp, world.rank, 0)
        backward(ddp, world.rank, 1)
        sent = handle.stats().bytes_sent
        with ddp.no_sync():
            backward(ddp, world.rank, 2)
    assert handle.stats().bytes_sent == sent > 0  # under no_sync nothing is sent
    with pytest.raises(RuntimeError, match="stop"), handle.discarded():
        raise RuntimeError("stop")
    assert handle.stats().steps == 0
    backward(ddp, world.rank, 3)
    assert handle.stats().steps == 1
    assert handle.local_error_norm() > 0
    with handle.discarded() if world.rank == 0 else nullcontext():
        given = [backward(ddp, world.rank, 4)]
    given += [backward(ddp, world.rank, step) for step in (5, 6)]
    assert world.agree(given)  # averages stay equal, and steps part
    assert handle.stats().steps == (3 if world.rank == 0 else 4)


@cases.case
def test_torchs_state_discards_and_forgets(world):
    """The very first pass is one to be dropped; and memory that was loaded is forgotten before the
    first step."""

    def torchs():
        ddp, state = wrapped(world)[0], PowerSGDState(world.group, 2, start_powerSGD_iter=0)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, state

    (module, state), (other, twin), (later, loaded) = (torchs() for _ in range(3))
    with state.discarded():
        backward(module, world.rank, 50)
        state.matrix_approximation_rank = 1
        backward(module, world.rank, 51)
    twin.matrix_approximation_rank = loaded.matrix_approximation_rank = 1
    assert state.state_dict()["memory"]["step"] == 0
    assert not any(x.any() for x in state.error_dict.values())
    for step in range(2):
        assert same_bits(backward(module, world.rank, step), backward(other, world.rank, step))
    assert all(x.any() for x in state.error_dict.values())
    state.forget("*.0")
    assert all(x.any() != name.endswith(".0") for name, x in state.error_dict.items())
    with pytest.raises(ValueError, match=r"'\*\.9'"):
        state.forget(["*.0", "*.9"])
    loaded.load_state_dict(twin.state_dict())
    loaded.forget()
    with loaded.discarded():
        again = copy.deepcopy(loaded)  # a copy is at work by itself
    backward(later, world.rank, 2)
    twin.forget()
    backward(other, world.rank, 2)
    assert same_bits(loaded.error_dict, twin.error_dict)
    assert (again.iter, again._discarding) == (2, False)


@cases.case
def test_errors_are_forgotten_by_pattern_and_nothing_else_is(world):
    ddp, handle = made(world, algorithm=PowerSGD(2))
    for step in range(2):
        backward(ddp, world.rank, step)
    before = handle.rank_state_dict()

    def errors():
        """Of which parameters there are any; all else is what it was."""
        state = handle.rank_state_dict()
        without = [copy.deepcopy(s) for s in (before, state)]
        for memory in (m for s in without for m in s["tensors"].values()):
            del memory["error"]
        assert same_bits(*without)
        return "".join(n[0] for n, m in state["tensors"].items() if m["error"].any())

    assert errors() == "024"
    for names, left in (("0.*", "24"), (["2.weight", "*.bias"], "4"), (None, "")):
        handle.forget(names)
        assert errors() == left


@cases.case
def test_a_discarded_pass_with_unused_parameters(world):
    ddp, handle = hooked(
        Branches(), PowerSGD(2), world.group, message_bytes=0, find_unused_parameters=True
    )

    def step(taken, i):
        ddp.zero_grad()
        loss_on(40)(lambda x: ddp(x, taken), world.rank, i).backward()

    step(("left", "right"), 0)
    before = handle.rank_state_dict()
    with handle.discarded():
        step(("left",) if world.rank == 0 else (), 1)
        step(("left", "right"), 2)
    assert same_bits(before, handle.rank_state_dict())
    assert len(gradients(ddp.module)) == len(list(Branches().parameters()))


def test_what_a_rank_without_data_meets_is_raised_at_once():
    """DDP's `join` calls hooks where no backward pass runs."""
    with pytest.raises(ArithmeticError, match="lost"):
        raise_after_backward(ArithmeticError("a peer is lost"))


@pytest.mark.usefixtures("alone")
def test_an_unregistered_handle_measures_nothing_and_says_so():
    _, handle = hooked(mlp(*WIDTHS), PowerSGD(1), None)
    handle.unregister()
    with pytest.raises(ValueError, match="this handle is unregistered"), handle.measured():
        pass


@pytest.mark.usefixtures("alone")
def test_gradients_with_a_graph_are_refused_by_an_averager():
    model = mlp(*WIDTHS)
    named = dict(model.named_parameters())
    averager = Averager(PowerSGD(1), named)
    loss = LOSS(model, 0, 0)
    inner = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    with pytest.raises(ValueError, match=r"gradients\['0.weight'\] has a graph of its own"):
        averager(dict(zip(named, inner, strict=True)))
    averager({n: g.detach() for n, g in zip(named, inner, strict=True)})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("by", ["hook", "DataParallel"])
def test_parameters_that_are_wrapped_again_keep_no_hooks(by):
    model, options = mlp(*WIDTHS), {"find_unused_parameters": True}
    for _ in range(3):
        wrapper = (
            DataParallel(model, **options)
            if by == "DataParallel"
            else hooked(model, PowerSGD(1), None, **options)[0]
        )
        LOSS(wrapper, 0, 0).backward()
        del wrapper
        gc.collect()
    assert {len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()} == {0}
