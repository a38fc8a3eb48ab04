"""A DDP that chooses its method while it trains, by a clock that says what each method takes."""

import copy
import json
import logging
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from gradwire import AllReduce, Auto, PowerSGD, Probe, WireDtype
from gradwire.core.advise.choosing.methods import Decisions, appended
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.probe import Level
from gradwire.core.advise.timeline import Group
from gradwire.torch_backend import register_comm_hook
from gradwire.torch_backend.cpu import compiled as loops
from gradwire.torch_backend.ddp import auto
from tests.torch.compare import relative, said, same_bits, weights
from tests.torch.models import loss_on, mlp
from tests.torch.ranks import Cases
from tests.torch.training import train

WIDTHS = (40, 64, 64, 28)
LOSS = loss_on(40)

cases = Cases(__file__, ranks=3)


def wrapped(world, algorithm, **options):
    ddp = DistributedDataParallel(mlp(*WIDTHS), process_group=options.pop("group", world.group))
    return ddp, register_comm_hook(ddp, algorithm, **options)


class Clock:
    """In place of the time of day: a step takes what its method takes on this rank."""

    def __init__(self, seconds):
        self.seconds, self.now, self.choosing, self._calls = seconds, 0.0, None, 0
        self.pauses, self.waits = [], []  # before steps, and in steps, for others that pause

    def __call__(self):
        began, self._calls = self._calls % 2 == 0, self._calls + 1
        self.now += (
            0.01 if began else self.seconds[min(self.choosing._number, len(self.seconds) - 1)]
        )
        if began and self._calls // 2 in self.pauses:
            self.now += 100
        if not began and (self._calls - 1) // 2 in self.waits:
            self.now += 100
        return self.now


def clocked(world, algorithm, seconds, steps, **options):
    """Trains with that clock."""
    training = {key: options.pop(key) for key in ("micro_batches", "local") if key in options}
    ddp, handle = wrapped(world, algorithm, **options)
    clock = Clock(seconds)
    clock.choosing = handle._choosing
    with mock.patch.object(auto, "perf_counter", clock):
        trace = train(ddp, LOSS, steps, **{"local": False, **training})
    return ddp, handle, trace


#: Of uncompressed averages, int8 and bfloat16; the first is fastest on rank 1 alone, and the
#: slowest rank counts.
SECONDS = ((1.0, 1.4, 0.5), (1.0, 0.3, 0.6), (0.9, 0.2, 0.4))


@cases.case
def test_all_ranks_go_by_the_slowest_and_a_log_repeats_the_run(world):
    path = world.folder / "decisions.jsonl"
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("gradwire")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        _, handle, trace = clocked(
            world, Auto(decisions=path), SECONDS[world.rank], 60, micro_batches=2
        )
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [c.number for c in handle.stats().choices] == [0, 2]
    assert handle.stats().scalars()["chosen_method"] == 2
    assert handle.algorithm == WireDtype(AllReduce(), "bfloat16")
    assert len([text for text in records if "Auto: from step" in text]) == (world.rank == 0)
    assert world.agree(trace.weights)
    assert world.agree(handle.stats().choices)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["method"] for line in lines}) == 3
    again, repeated = wrapped(world, Auto(decisions=path))
    assert same_bits(train(again, LOSS, 60, micro_batches=2, local=False).weights, trace.weights)
    assert repr(repeated.algorithm) == repr(handle.algorithm)
    assert len(path.read_text().splitlines()) == len(lines)


@cases.case
def test_plain_averages_stay_where_nothing_is_faster(world):
    _, handle, _ = clocked(world, Auto(), (1.0, 1.2, 1.6), 60)
    assert [c.number for c in handle.stats().choices] == [0]
    assert handle.algorithm == AllReduce()


@cases.case
def test_loops_are_compiled_at_registration_and_not_while_ranks_wait(world):
    with mock.patch.object(loops, "LEAST", 1):
        loops.compiled.cache_clear()
        ddp, handle = wrapped(world, Auto())
        made = loops.compiled.cache_info().misses
        clock = Clock((1.0, 0.4, 0.6))
        clock.choosing = handle._choosing
        with mock.patch.object(auto, "perf_counter", clock):
            train(ddp, LOSS, 30, local=False)
    assert handle.stats().choices[-1].method == "WireDtype(AllReduce(), 'int8')"
    assert made == loops.compiled.cache_info().misses
    assert made > 0 or loops._numba() is None


def errors(handle):
    """Those of this rank."""
    return copy.deepcopy(handle._choosing._driver().memory.state.tensors)


def said_when_saved(handle):
    """Whether every way to save a state says what it lacks; none else may."""
    said, sink = [], logging.Handler()
    sink.emit = lambda record: said.append(record.getMessage())
    memory = logging.getLogger("gradwire.torch_backend.state.memory")
    memory.addHandler(sink)
    try:
        ways = handle.state_dict, handle.rank_state_dict, handle.gathered_state_dict
        for save in (*ways, handle.sharded_state.state_dict):
            save()
            yes = bool(said)
            said.clear()
            if not yes:
                return False
    finally:
        memory.removeHandler(sink)
    return True


@cases.case
def test_what_was_not_sent_is_added_once_also_after_a_step_that_is_not_finite(world):
    """In sum the optimizer is given the sum of all gradients, but for what the method at work still
    remembers. Also after one in its own turn."""
    ddp, handle = wrapped(world, Auto(loss="5%"))
    choosing, total, expected = handle._choosing, 0.0, 0.0
    number = next(i for i, m in enumerate(choosing._methods) if "Quantize" in repr(m))
    choosing._chooser.advance = lambda: (
        number if choosing._driver().memory.steps in (1, 2, 3, 7) else 0
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for step in range(8):
        optimizer.zero_grad()
        loss = LOSS(ddp, world.rank, step)
        before = errors(handle)
        if step in (2, 4):  # in its turn, and the first one after it
            loss = loss * float("inf" if world.rank == 1 else 1)
        loss.backward()
        given = {n: p.grad.clone() for n, p in ddp.module.named_parameters()}
        if step in (2, 4):
            assert all(torch.isfinite(x).logical_not().any() for x in given.values())
            assert (
                same_bits(errors(handle), before) if step == 2 else choosing._driver().owed.errors
            )
            assert said_when_saved(handle) == (step == 4)
            continue
        alone = mlp(*WIDTHS)
        alone.load_state_dict(ddp.module.state_dict())
        LOSS(alone, world.rank, step).backward()
        local = torch.cat([p.grad.double().flatten() for p in alone.parameters()])
        mean = sum(world.everyones(local)) / world.size
        total = total + torch.cat([x.double().flatten() for x in given.values()])
        expected = expected + mean
        if step == 5:
            assert not choosing._driver().owed.errors
            assert relative(total, expected) < 3e-5
    assert relative(total, expected) > 1e-3  # the last step's error is remembered


@cases.case
def test_a_state_is_continued_with_its_method_by_any_number_of_ranks(world):
    """Right after a change: by as many bit for bit; by three, and by one, which has nothing to
    choose, from the mean. All of them choose alike."""
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [0], [1], [2])]
    pair, alone = groups[0], groups[1 + world.rank]
    whole = None
    if world.rank < 2:
        ddp, handle = wrapped(world, Auto(loss="5%"), group=pair)
        choosing = handle._choosing
        number = next(i for i, m in enumerate(choosing._methods) if "Quantize" in repr(m))
        choosing._chooser.advance = lambda: number if choosing._driver().memory.steps >= 2 else 0
        train(ddp, LOSS, 3, local=False)
        whole = handle.gathered_state_dict("all", to=None)
        own, weight = handle.rank_state_dict(), ddp.module.state_dict()
        other, fresh = wrapped(world, Auto(loss="5%"), group=pair)
        other.module.load_state_dict(weight)
        fresh.load_state_dict(own)
        fresh._choosing._chooser.advance = lambda: number
        assert same_bits(
            *(train(each, LOSS, range(3, 5), local=False).weights for each in (ddp, other))
        )
        assert fresh.algorithm == handle.algorithm
    whole, *_ = world.everyones(whole)
    for group in (world.group, alone):
        other, fresh = wrapped(world, Auto(loss="5%"), group=group)
        fresh.replay = True
        fresh.load_state_dict(whole)
        assert repr(fresh.algorithm) == "Quantize(dtype='int4')"
        assert fresh.replay
        fresh.replay = False
        assert fresh.stats().choices[-1].step == 3
        train(other, LOSS, range(3, 5), local=False)
        assert fresh.stats().steps == 5
        assert group is alone or world.agree((weights(other.module), fresh.stats().choices))
    before = fresh.algorithm
    assert "ValueError" in said(fresh.load_state_dict, {**whole, "algorithm": "Sign()"})
    assert fresh.algorithm == before


@cases.case
def test_a_checkpoint_of_torch_is_continued_with_its_method(world):
    """`torch.distributed.checkpoint` reads the names that a run gives as it loads, whatever method
    that is at: a new run's, or one's that goes back. And the log says that it has gone back."""
    path = world.folder / "went back.jsonl"
    ddp, handle = wrapped(world, Auto(loss="5%", decisions=path))
    codes = next(i for i, m in enumerate(handle._choosing._methods) if "Quantize" in repr(m))

    def advancing(handle, numbers):
        steps = lambda: handle._choosing._driver().memory.steps  # noqa: E731
        handle._choosing._chooser.advance = lambda: numbers[min(steps(), len(numbers) - 1)]

    folders = [world.folder / f"auto {step}" for step in (1, 3)]
    advancing(handle, [0, 0, codes])
    train(ddp, LOSS, 1, local=False)
    dcp.save({"c": handle.sharded_state}, checkpoint_id=folders[0])
    train(ddp, LOSS, range(1, 3), local=False)
    state, weight = handle.sharded_state, copy.deepcopy(ddp.module.state_dict())
    dcp.save({"c": state}, checkpoint_id=folders[1])
    goes_on = train(ddp, LOSS, range(3, 5), local=False).weights
    other, fresh = wrapped(world, Auto(loss="5%"))
    other.module.load_state_dict(weight)
    dcp.load({"c": fresh.sharded_state}, checkpoint_id=folders[1])
    assert repr(fresh.algorithm) == "Quantize(dtype='int4')"
    advancing(fresh, [codes])
    assert same_bits(train(other, LOSS, range(3, 5), local=False).weights, goes_on)
    dcp.load({"c": state}, checkpoint_id=folders[0])  # of the method that is at work now
    assert (repr(handle.algorithm), handle.stats().steps) == ("AllReduce()", 1)
    torch.distributed.barrier()
    again = Decisions(handle._choosing._methods, path.read_text())
    assert [again.at(step) for step in range(9)] == [0] * 9


@cases.case
def test_with_a_loss_scaler_and_pauses(world):
    """Skipped steps, a scale that grows, two micro-batches, and evaluations on one rank: what is
    not counted is not counted on any."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    ddp, handle = wrapped(world, Auto(loss="5%"), grad_scaler=scaler)
    clock = Clock((1.0, 0.4, 0.6, 0.7))
    clock.choosing = handle._choosing
    clock.pauses = [9, 12, 20] if world.rank else []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with mock.patch.object(auto, "perf_counter", clock):
        for step in range(60):
            optimizer.zero_grad()
            with ddp.no_sync():
                scaler.scale(LOSS(ddp, world.rank, 100 + step)).backward()
            loss = scaler.scale(LOSS(ddp, world.rank, step))
            (loss * float("inf") if step == 11 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert handle.stats().choices[-1].number == 1
    assert world.agree(weights(ddp.module))
    assert all(torch.isfinite(x).all() for x in weights(ddp.module).values())


@cases.case
def test_a_checkpoint_on_one_rank_is_no_burst_of_the_network(world):
    """For which the others wait in a step of theirs, and would put the fastest method aside."""
    ddp, handle = wrapped(world, Auto())
    clock = Clock((1.0, 0.4, 0.6))
    clock.choosing = handle._choosing
    clock.pauses, clock.waits = ([50, 70], []) if world.rank == 1 else ([], [50, 70])
    with mock.patch.object(auto, "perf_counter", clock):
        train(ddp, LOSS, 90, local=False)
    assert [c.number for c in handle.stats().choices] == [0, 1]
    assert handle._choosing._chooser._bursts.per_step(1) == 0


@cases.case
def test_iterations_with_a_pass_that_is_discarded_are_compared(world):
    """As of a GAN, whose generator's loss goes through the discriminator."""
    ddp, handle = wrapped(world, Auto())
    clock = Clock((1.0, 0.4, 0.6))
    clock.choosing = handle._choosing
    with mock.patch.object(auto, "perf_counter", clock):
        for step in range(40):
            with handle.discarded():
                LOSS(ddp, world.rank, 100 + step).backward()
            ddp.zero_grad()
            LOSS(ddp, world.rank, step).backward()
    assert handle.stats().choices[-1].number == 1


@cases.case
def test_decisions_have_a_folder_and_an_empty_file_has_none(world):
    path = world.folder / "runs" / "first" / "decisions.jsonl"
    for _ in range(2):
        _, handle = wrapped(world, Auto(decisions=path))
        assert path.parent.is_dir()
        assert handle._choosing._choice.decisions is None
    if world.rank == 0:
        (world.folder / "file").write_text("")
    words = said(wrapped, world, Auto(decisions=world.folder / "file" / "decisions.jsonl"))
    assert "decisions=" in words


def test_no_training_ends_for_a_log_that_cannot_be_written_any_more(tmp_path, caplog):
    path = tmp_path / "decisions.jsonl"
    assert appended(path, "one\n") == appended(path, "two\n") == path
    assert path.read_text() == "one\ntwo\n"
    assert appended(tmp_path / "gone" / "decisions.jsonl", "three\n") is None
    assert "are not written to" in caplog.text


@cases.case
def test_machines_of_different_sizes_choose_among_the_same_methods(world):
    """Where some find that ranks do not divide among machines as on theirs, and others do not."""
    asked = []

    def methods_of(*given):
        asked.append(given[3])
        return [AllReduce()]

    with (
        mock.patch.object(auto, "nodes_of", return_value=world.rank + 1),
        mock.patch.object(auto, "methods_of", methods_of),
    ):
        wrapped(world, Auto())
    assert asked == [1]


@cases.case
def test_what_cannot_be_is_refused_by_name(world):
    ddp, handle = wrapped(world, Auto())
    assert "chooses the method of a DDP while it trains" in said(handle.reconfigure, Auto())
    with mock.patch.object(auto, "capturing", return_value=True):
        assert "fix the method that it has chosen, plain" in said(train, ddp, LOSS, 1, local=False)
    handle.reconfigure(PowerSGD(rank=2))
    train(ddp, LOSS, 2, local=False)
    assert handle.algorithm == PowerSGD(rank=2)
    assert not handle.stats().choices
    plain = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
    missing = world.folder / "none.json"
    assert "none.json" in said(register_comm_hook, plain, Auto(loss="1%", comparison=missing))
    assert "ranks differ in auto" in said(
        register_comm_hook, plain, Auto(loss=0.01 if world.rank else 0.02)
    )
    wrong = world.folder / "wrong.jsonl"
    if world.rank == 0:
        wrong.write_text("{}\n")
    assert "is no decision" in said(register_comm_hook, plain, Auto(decisions=wrong))
    assert "none.json" in said(register_comm_hook, plain, Auto(probe=missing))
    samples = ((1 << 20, 1e-9),)
    probe = Probe("torch", "cpu", 3, 3, (Level("all", 3, samples, samples, 0.0),))
    costs = {
        "int8": Cost(((Group(4, 2.0, ()),),)),
        "bfloat16": Cost(((Group(4, 1.0 + world.rank, ()),),)),
    }
    with mock.patch.object(auto, "method_cost", lambda method, *given: costs[method.dtype]):
        ordered = DistributedDataParallel(mlp(*WIDTHS), process_group=world.group)
        methods = register_comm_hook(ordered, Auto(probe=probe))._choosing._methods
    # as the first rank has it, on all
    assert [getattr(m, "dtype", "") for m in methods] == ["", "bfloat16", "int8"]
    with mock.patch.object(auto, "store_of", return_value=None):
        assert "come and go" in said(register_comm_hook, plain, Auto())
    register_comm_hook(plain, Auto())  # nothing has been changed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"loss": "much"}, "loss='much' must be a share"),
        ({"comparison": "found.json"}, "say how much it may be higher"),
        ({"decisions": 3}, "decisions=3 is a int; give a path"),
    ],
)
def test_arguments_that_cannot_be(arguments, words):
    assert words in said(Auto, **arguments)
