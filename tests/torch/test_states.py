"""Memory of several ranks: in files, of another loss scale; ranks that are not in the same state,
or do not all come, which is an error that names them and no long wait; and steps that are not
finite. On other numbers of ranks, and bad steps of every method: tests/composition."""

import copy
import logging
import math
import random
import time
from datetime import timedelta
from functools import partial
from itertools import count
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from gradwire import LocalSGD, PowerSGD, diloco
from gradwire.core.state import checkpoint
from gradwire.torch_backend import (
    PowerSGDState,
    ZeroOptimizer,
    hook_with_zero_step,
    local_sgd,
    powerSGD_hook,
)
from gradwire.torch_backend.engine.groups import barrier
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.monitor.watcher import SkippedSteps
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.state import loss_scale, means
from tests.torch import doors
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import fit, hooked, paralleled, sgd, train

WIDTHS = (24, 40, 32, 24)
LOSS = loss_on(WIDTHS[0])
HALF = timedelta(seconds=0.5)

cases = Cases(__file__, ranks=3)


def made(world, algorithm, door=hooked, seed=0, **options):
    return door(mlp(*WIDTHS, seed=seed), algorithm, world.group, cap=0.005, **options)


def go_on(wrapped, steps):
    train(wrapped, LOSS, steps, local=False)


# --- moved ---


@cases.each(["bfloat16", "float64"], slow=["bfloat16", "float64"])
def test_the_mean_is_formed_in_a_wide_dtype_and_changes_nothing(world, dtype):
    """At every destination; and what is of that dtype already must not be summed where it is."""
    ddp, handle = made(world, PowerSGD(2, state_dtype=dtype))
    go_on(ddp, 2)
    before = handle.rank_state_dict()
    own = world.everyones(before["tensors"]["0.weight"]["error"])
    expected = (sum(x.double() for x in own) / world.size).to(own[0].dtype)
    to_two, to_all = (handle.gathered_state_dict(to=to) for to in (2, None))
    assert (to_two is None) == (world.rank != 2)
    for state in filter(None, (to_two, to_all)):
        # In float64, only the order of the sum may differ.
        assert relative(state["local"]["0.weight"]["error"], expected[None]) <= (
            1e-12 if dtype == "float64" else 0
        )
    assert same_bits(handle.rank_state_dict(), before)


#: Powers of two, which a GradScaler's float32 divides by exactly.
SCALE, GROWTH = 1024.0, 8.0


def scaler_of(scale, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **{"growth_interval": 100} | options)


@cases.case(slow=True)
def test_memory_follows_the_loss_scale(world):
    """The same steps without a scaler, with one that the memory follows, and with one that it does
    not know of. In step 3 the scale has grown, step 4 overflows."""

    def errors(state):
        return {n: m["error"] / state.get("scale", 1.0) for n, m in state["tensors"].items()}

    def run(scaler, known, numbers=range(8), load=None):
        model, options = mlp(*WIDTHS).double(), {"grad_scaler": scaler if known else None}
        ddp, handle = hooked(model, PowerSGD(2), world.group, cap=25, **options)
        optimizer = sgd(model, lr=0.05)
        if load is not None:
            model.load_state_dict(load[0])
            handle.load_state_dict(load[1])
        for number in numbers:
            optimizer.zero_grad()
            y = LOSS(lambda x: ddp(x.double()), world.rank, number)
            if number == 4:
                y = y * float("inf")
            scaler.scale(y).backward()
            scaler.step(optimizer)
            scaler.update()
        return copy.deepcopy(model.state_dict()), handle.rank_state_dict()

    def scaler():
        return scaler_of(SCALE, growth_interval=3, growth_factor=GROWTH)

    expected, state = run(scaler_of(1.0, backoff_factor=0.999999999), False)
    followed, memory = run(scaler(), True)
    assert relative(followed, expected) < 1e-10
    assert relative(run(scaler(), False)[0], expected) > 1e-4  # what happens otherwise
    assert relative(errors(memory), errors(state)) < 1e-10
    assert "scale" not in state
    # Stopped when the scale has just grown, and continued with a scaler that begins anew, or
    # unscaled.
    half = run(scaler(), True, range(3))
    assert half[1]["scale"] == SCALE  # of the last step, by which its errors are too large
    assert relative(run(scaler(), True, range(3, 8), half)[0], expected) < 1e-10
    unscaled, until_four = (
        run(scaler_of(1.0), False, range(3, 4), half),
        run(scaler_of(1.0), False, range(4)),
    )
    assert relative(unscaled[0], until_four[0]) < 1e-10
    assert "scale" not in unscaled[1]
    assert relative(errors(unscaled[1]), errors(until_four[1])) < 1e-10


@cases.case
def test_errors_that_are_not_loaded_follow_the_loss_scale_by_themselves(world):
    """The state is of a quarter of the scale, and lacks one parameter; the scale has doubled."""
    scaler = scaler_of(SCALE)
    scaler.scale(torch.ones(1))
    ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(2), world.group, grad_scaler=scaler)
    LOSS(ddp, world.rank, 0).backward()
    before = handle.rank_state_dict()
    kept, *loaded = before["tensors"]
    state = {**before, "scale": SCALE / 4, "tensors": dict(before["tensors"])}
    del state["tensors"][kept]
    scaler.update(2 * SCALE)
    assert handle.load_state_dict(state, strict=False).added == (kept,)
    after = handle.rank_state_dict()["tensors"]
    for name, times in {kept: 2, **dict.fromkeys(loaded, 8)}.items():
        error = before["tensors"][name]["error"]
        assert error.any()
        assert after[name]["error"].equal(times * error)


@pytest.mark.slow
def test_states_live_in_files_without_pickle(alone, tmp_path):
    ddp, handle = hooked(mlp(*WIDTHS), PowerSGD(2, half_step=True), alone)
    train(ddp, LOSS, 3, local=False)
    optimizer = torch.optim.SGD((model := mlp(*WIDTHS)).parameters(), lr=0.1)
    local = local_sgd(model, optimizer, LocalSGD(2, compressor=PowerSGD(2)))
    for name, state in {
        "one rank's": handle.rank_state_dict(),
        "all ranks'": handle.gathered_state_dict(),
        "local SGD": local.rank_state_dict(),
    }.items():
        torch.save(state, tmp_path / "state.pt")
        assert same_bits(torch.load(tmp_path / "state.pt", weights_only=True), state)
        arrays, metadata = checkpoint.flatten(state)
        safetensors.torch.save_file(arrays, tmp_path / name, metadata)
        with safetensors.safe_open(tmp_path / name, "pt") as file:
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            found = checkpoint.unflatten(arrays, file.metadata())
        assert same_bits(found, state)


@pytest.mark.slow
def test_arrays_of_other_libraries_are_taken(alone):
    (ddp, source), (_, handle) = (
        hooked(mlp(*WIDTHS).bfloat16(), PowerSGD(2, half_step=True), alone) for _ in range(2)
    )
    ddp(torch.ones(4, WIDTHS[0]).bfloat16()).square().mean().backward()

    def to_numpy(x):
        if isinstance(x, dict):
            return {k: to_numpy(v) for k, v in x.items()}
        if not isinstance(x, torch.Tensor):
            return x
        return (
            x.view(torch.int16).numpy().view(np.dtype("bfloat16"))
            if x.dtype == torch.bfloat16
            else x.numpy()
        )

    pytest.importorskip("ml_dtypes")
    handle.load_state_dict(to_numpy(source.gathered_state_dict()))
    assert same_bits(handle.rank_state_dict(), source.rank_state_dict())


COUNTING = {
    "hook": partial(doors.algorithm, which=PowerSGD(2, start_step=2)),
    "DataParallel": partial(doors.data_parallel, which=PowerSGD(2)),
    "Averager": partial(doors.averager, which=PowerSGD(2)),
    "local SGD after its warm-up": partial(doors.local, which=LocalSGD(2, start_step=2)),
    "DiLoCo in flight": partial(doors.local, which=diloco(3, overlap=2)),
    "ZeroOptimizer": partial(doors.zero_optimizer, average=True),
    "ZeroOptimizer in a hook": partial(doors.zero_hook, make=hook_with_zero_step),
}


@cases.each(COUNTING, slow=["DataParallel", "Averager", "ZeroOptimizer in a hook"])
def test_a_resumed_run_counts_on_what_it_has_sent(world, door):
    """In each form of its state: totals are those of the run that was not interrupted."""

    def begun():
        module, optimizer, handle = door(world, mlp(*WIDTHS))
        return module, optimizer, optimizer if isinstance(optimizer, ZeroOptimizer) else handle

    def totals(handle):
        found = handle.stats()
        return found.steps, found.bytes_sent, found.dense_bytes

    module, optimizer, handle = begun()
    fit(module, optimizer, world.rank, range(5), LOSS)
    getattr(handle, "synchronize", lambda: None)()
    whole = getattr(handle, "consolidated_state_dict", lambda to: handle.state_dict())(to=None)
    states = [(handle.rank_state_dict(), totals(handle)), (whole, totals(handle))]
    fit(module, optimizer, world.rank, range(5, 8), LOSS)
    for state, before in states:
        module, optimizer, resumed = begun()
        resumed.load_state_dict(state)
        assert totals(resumed) == before
        fit(module, optimizer, world.rank, range(5, 8), LOSS)
        assert totals(resumed) == totals(handle)
        key = "counted" if isinstance(optimizer, ZeroOptimizer) else "sent"
        for damaged in (
            {},
            {**state[key], "steps": -1},
            3,
            {"steps": 4, "skipped_steps": 0, "sent": {"nbytes": 1}},
        ):
            assert "in the state must be" in said(resumed.load_state_dict, {**state, key: damaged})
        assert totals(resumed) == totals(handle)


@cases.each({"on all ranks": None, "on one": 1})
def test_means_of_any_number_of_tensors_are_a_message_for_each_64_mib(world, to):
    draw = torch.Generator().manual_seed(world.rank)
    tensors = [torch.randn(i % 7, 3, generator=draw) for i in range(60)]
    counts = [None] * 59 + [torch.tensor([float(world.rank)])]
    everyones = world.everyones(tensors)
    right = [
        sum(own.double() for own in each) / world.size for each in zip(*everyones, strict=True)
    ]
    right[-1] = (everyones[1][-1].double() + 2 * everyones[2][-1].double()) / 3
    elements = sum(x.numel() for x in tensors)
    for at_once, messages in ((means.SUMMED_AT_ONCE, 1), (100, -(-elements // 100))):
        with (
            mock.patch.object(means, "SUMMED_AT_ONCE", at_once),
            mock.patch.object(means, "_sum_over", wraps=means._sum_over) as summed,
        ):
            found = means.means_over(tensors, world.group, torch.device("cpu"), to, counts)
        assert summed.call_count == messages + 1  # that of the weights
        assert max(call.args[0].numel() for call in summed.call_args_list) <= at_once
        if to in (None, world.rank):
            for mean, expected in zip(found, right, strict=True):
                torch.testing.assert_close(mean, expected.float(), rtol=1e-5, atol=1e-5)


@cases.case
def test_a_checkpoint_in_parts_has_a_slice_of_the_mean_on_each_rank(world):
    """Of the longest axis, in as many messages however many tensors there are; put together it is
    the mean."""
    draw = torch.Generator().manual_seed(world.rank)
    shapes = [(), (0, 3), (1,), (2, 7), (5,), (40, 3), *[(i % 7, 3) for i in range(40)]]
    tensors = [torch.randn(shape, generator=draw) for shape in shapes]
    counts = [None] * (len(shapes) - 1) + [torch.tensor([float(world.rank)])]
    whole = means.means_over(tensors, world.group, torch.device("cpu"), None, counts)
    for at_once, messages in ((means.SUMMED_AT_ONCE, 1), (60, None)):
        with (
            mock.patch.object(means, "SUMMED_AT_ONCE", at_once),
            mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
        ):
            slices = means.mean_slices(tensors, world.group, torch.device("cpu"), counts)
        assert messages in (None, sent.call_count)
        assert max(call.args[1].numel() for call in sent.call_args_list) <= max(at_once, world.size)
        for own, expected in zip(slices, whole, strict=True):
            assert own.shape == expected[None].shape
            assert own.to_local().numel() <= -(-max(own.shape) // world.size) * (
                own.numel() // max(1, *own.shape) or 1
            )
            torch.testing.assert_close(
                means.put_together(own), expected[None], rtol=1e-6, atol=1e-6
            )
    model, handle = hooked(mlp(24, 40, 8), PowerSGD(2))
    model(torch.randn(3, 24, generator=draw)).square().mean().backward()
    parts, state = handle.sharded_state.state_dict(), handle.state_dict()
    assert parts["local"].keys() == state["local"].keys()
    for kept in parts["local"].values():
        (error,) = kept.values()
        assert error.to_local().numel() < error.numel()
    before = handle.local_error_norm()
    handle.load_state_dict(parts)  # slices of all ranks, without each rank's own
    assert handle.local_error_norm() != before
    handle.load_state_dict(state)
    again = handle.state_dict()["local"]
    assert all(same_bits(again[name]["error"], state["local"][name]["error"]) for name in again)


# --- called on some ranks only, or with different states ---


@cases.case(slow=True)
def test_a_state_that_some_ranks_ask_for_is_an_error_that_names_the_others(world):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger(barrier.__name__).addHandler(handler)
    ddp, handle = made(world, PowerSGD(2))
    optimizer = ZeroOptimizer(
        ddp.module.named_parameters(), torch.optim.AdamW, process_group=world.group
    )
    fit(ddp, optimizer, world.rank, range(2), LOSS)
    if world.rank == 1:
        calls = handle.state_dict, handle.gathered_state_dict, optimizer.consolidate_state_dict
        with (
            mock.patch.object(loss_scale, "LONGEST", HALF),
            mock.patch.object(barrier, "PATIENCE", timedelta(0)),
        ):
            for call in calls:
                words = said(call)
                told = f"{call.__name__}(): rank 1 has waited in vain for ranks [0, 2]. "
                assert words.startswith(f"RuntimeError: {told}")
                assert "rank_state_dict() communicates nothing" in words
        assert len(records) == 3
        assert records[0].startswith("state_dict(): rank 1 waits for ranks [0, 2]. ")
    dist.barrier(world.group)
    assert same_bits(handle.state_dict(), handle.state_dict())  # they meet when all have come
    assert world.agree(handle.state_dict())


@cases.case(slow=True)
def test_ranks_that_give_up_and_come_again_meet_in_the_end(world):
    """Ranks come at random, and give up so soon that some come while others leave: they meet in the
    end, as often one as the other."""
    generator, table = random.Random(world.rank), Meeting(world.group)
    found, given_up = [], 0
    for turn in range(40):
        for attempt in count(1):
            time.sleep(generator.uniform(0, 0.004))
            try:
                found.append(table.come("turn", "", str(turn), timedelta(seconds=0.001 * attempt)))
                break
            except RuntimeError:
                given_up += 1
    assert found == [[]] * 40
    assert sum(world.everyones(given_up)) > 0
    assert Meeting(world.group).come("turn", "", str(world.rank)) == ["0", "1", "2"]
    keys = []
    for _ in range(3):
        table.come("again", "", "x")
        dist.barrier(world.group)
        keys.append(table.store.num_keys())
        dist.barrier(world.group)
    assert keys[0] == keys[2]  # nothing is left behind


DOORS = {
    "hook, dense start": (hooked, PowerSGD(2, start_step=4)),
    "DataParallel": (paralleled, PowerSGD(2)),
}


@cases.each(DOORS, slow=DOORS)
def test_ranks_in_different_states_all_raise_before_anything_is_sent(world, variant):
    door, algorithm = variant
    (before, handle), (other, source) = (made(world, algorithm, door, seed) for seed in (0, 1))
    for each in (before, other):
        go_on(each, 5)
    saved, of_another = handle.state_dict(), source.state_dict()

    def attempt(given):
        """What is said, and whether the ranks are as they were, or have gone on together."""
        ddp, loaded = made(world, algorithm, door)
        ddp.module.load_state_dict(before.module.state_dict())
        if given is not None:
            loaded.load_state_dict(given)
        words = said(fit, ddp, sgd(ddp), world.rank, range(5, 7), LOSS)
        assert same_bits(ddp.module.state_dict(), before.module.state_dict()) is bool(words)
        assert world.agree(ddp.module.state_dict())
        return words

    for fine in (None, saved, handle.rank_state_dict()):
        assert not attempt(fine)
    assert "ranks differ in step (rank 0: 5, rank 1: 0, rank 2: 0)" in attempt(
        saved if world.rank == 0 else None
    )
    assert "ranks [1] have loaded another one" in attempt(saved if world.rank != 1 else of_another)
    own = handle.rank_state_dict()
    for options in ({}, {"strict": False}) if world.rank else ():
        words = said(handle.load_state_dict, {**own, "rank": 0}, **options)
        assert (
            f"that of rank=0, replicas=3, with the error of that rank; this is rank={world.rank}"
            in words
        )
    assert f"that of rank={world.rank}, replicas=2" in said(
        handle.load_state_dict, {**own, "replicas": 2}
    )
    assert same_bits(handle.rank_state_dict(), own)


@cases.case(slow=True)
def test_a_rank_that_loads_in_the_middle_is_not_left_to_average_with_the_others(world):
    """One rank goes back to a checkpoint, and the others go on: they have no reason to compare
    anything."""
    ddp, handle = made(world, PowerSGD(2, half_step=True), paralleled)
    go_on(ddp, 3)
    saved, model, comes = handle.state_dict(), copy.deepcopy(ddp.module.state_dict()), []
    meeting = handle._driver._meeting
    come = meeting.come
    meeting.come = lambda *args: comes.append(1) or come(*args)
    go_on(ddp, range(3, 5))
    assert not comes  # later steps compare nothing
    if world.rank == 0:
        handle.load_state_dict(saved)
        with mock.patch.object(meeting, "_timeout", HALF):
            words = said(go_on, ddp, [3])
        assert "rank 0 has waited in vain for ranks [1, 2]" in words
        assert "have loaded no state in the middle of training where others have" in words
    dist.barrier(world.group)
    if world.rank != 0:  # what it asks for
        handle.load_state_dict(saved)
    ddp.module.load_state_dict(model)
    go_on(ddp, range(3, 5))
    assert world.rank == 0 or comes == [1]
    assert world.agree(ddp.module.state_dict())


@cases.case(slow=True)
def test_local_sgd_takes_a_state_that_is_everybodys_or_its_own(world):
    def run():
        ddp, _ = made(world, None)
        optimizer = sgd(ddp)
        return ddp, optimizer, local_sgd(ddp, optimizer, diloco(4, compressor=PowerSGD(2)))

    def errors(state, part):
        return {n: m["error"] for n, m in state[part].items() if "error" in m}

    ddp, optimizer, handle = run()
    handle.state_dict()
    fit(ddp, optimizer, world.rank, range(6), LOSS)
    before = handle.rank_state_dict()
    for _ in range(2):
        assert said(handle.state_dict).startswith("RuntimeError: after 6 steps of ")
        words = said(handle.load_state_dict, world.everyones(before)[0])
        assert "the state is that of rank=0" in words
        assert world.rank or "rank 1 cannot take part" in words
        assert same_bits(handle.rank_state_dict(), before)
        handle.load_state_dict(before)
    fit(ddp, optimizer, world.rank, range(6, 8), LOSS)
    assert handle.synchronized
    portable = handle.state_dict()
    own = world.everyones(errors(handle.rank_state_dict(), "tensors"))
    for name, mean in errors(portable, "local").items():
        torch.testing.assert_close(mean[0], sum(each[name] for each in own) / world.size)
    other = {
        **portable,
        "tensors": {n: {k: x + 1 for k, x in m.items()} for n, m in portable["tensors"].items()},
    }
    assert "ranks differ in state" in said(
        handle.load_state_dict, other if world.rank == 1 else portable
    )
    if world.rank == 2:
        with mock.patch("gradwire.torch_backend.local_sgd.handle.LONGEST", HALF):
            words = said(handle.load_state_dict, portable)
        assert "load_state_dict(): rank 2 has waited in vain for ranks [0, 1]" in words
    dist.barrier(world.group)
    _, _, handle = run()
    handle.load_state_dict(portable)
    assert handle.synchronized
    handle.state_dict()


# --- an inf or NaN in one rank's gradient: all see it, nobody's memory changes, and training goes
# on as if the step had not been ---

COMPRESSED = {"0.weight", "2.weight", "4.weight"}

#: The value, the parameter in which it comes up on rank 1, the step at which it does: after the
#: first one buckets are rebuilt.
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
        y = LOSS(model, rank, step)
        if step == at and rank == 1:
            weights = dict(getattr(model, "module", model).named_parameters())
            y = y + value * weights[parameter].view(-1)[5]
        return y

    return loss


def seen_of(world, algorithm):
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
    (ddp, memory), (other, _) = (seen_of(world, algorithm) for _ in range(2))
    train(ddp, loss, at, local=False)
    before, start = memory(), weights(ddp.module)
    (given,) = train(ddp, loss, [at], local=False).given
    assert not any(given[name].isfinite().all() for name in {parameter} | COMPRESSED)
    # NaN in one place, NaN in the same place everywhere; its sign bit may depend on which operand
    # came first.
    torch.testing.assert_close(given, world.everyones(given)[0], rtol=0, atol=0, equal_nan=True)
    after = memory()
    assert same_bits([after["tensors"], after["shared"]], [before["tensors"], before["shared"]])
    assert after["step"] == before["step"] + 1
    ddp.module.load_state_dict(start)  # what a GradScaler does: the optimizer skips this step
    rest = train(ddp, loss, range(at + 1, STEPS), local=False).weights
    assert world.agree(rest)
    without = train(other, loss, [s for s in range(STEPS) if s != at], local=False).weights
    # In the first step: buckets are rebuilt one good step earlier, and three ranks' sums have
    # another order.
    assert same_bits(rest, without) if at else relative(rest, without) < 1e-6


@pytest.mark.parametrize(
    ("bad", "lines"),
    [(range(3, 12), 0), (range(3, 13), 1), (range(30), 1), ([*range(12), *range(13, 30)], 2)],
)
def test_ten_skipped_steps_in_a_row_are_said_once(caplog, bad, lines):
    """Nine in a row are a loss scaler at work; one that was not skipped begins a new run."""
    skipped = SkippedSteps("PowerSGD(rank=2)", torch.device("cpu"), 0, seen_by_host=True)
    with caplog.at_level(logging.WARNING, "gradwire"):
        for step in range(30):
            skipped.add(torch.tensor(step not in bad))
            skipped.look(step + 1)
    assert len(caplog.records) == lines
    assert all(
        record.getMessage().startswith("PowerSGD(rank=2): 10 steps in a row")
        for record in caplog.records
    )
    assert int(skipped.count) == len(bad)


@cases.case
def test_the_rank_with_the_bad_gradient_names_its_parameter(world):
    # else it looks at every tenth step, at what has arrived
    if not TorchOps(torch.device("cpu")).host_knows:
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
    assert [("on rank 1 that of '0.bias' does" in line) for line in lines] == [
        world.rank == 1
    ] * len(lines)


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


@pytest.mark.parametrize("begins", [1.0, 2.0])
def test_an_error_of_float16_is_finite_whatever_scale_it_follows(begins):
    """A scale that grows and falls back leaves it so; as an inf it would end all later steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=begins)
    scaler.scale(torch.ones(1))  # as in a step before
    scale, error = (
        loss_scale.LossScale(scaler),
        torch.tensor([40000.0, -3.0, -50000.0], dtype=torch.float16),
    )
    scale.follow([error])
    scaler.update(4.0)
    scale.follow([error])
    scaler.update(1.0)
    scale.follow([error])
    assert torch.isfinite(error).all()
    assert error[1] == -3
