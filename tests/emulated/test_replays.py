"""Graphs of the emulated accelerator keep CUDA's rules; and steps that are replayed as graphs come
to the bits of eager ones, whatever happens beside them.

Each training has an eager twin: the same algorithm, gradients and ranks. After every step averages,
memory and counts are the same to the last bit, and so is what was sent.
"""

import gc
import itertools
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.calls import calls_of
from gradwire import (
    AllReduce,
    LocalSGD,
    PowerSGD,
    Quantize,
    Sign,
    TopK,
    TwoLevel,
    Weighted,
    WireDtype,
)
from gradwire.core.ops import Spec
from gradwire.torch_backend import (
    Averager,
    DataParallel,
    LocalSGDHandle,
    local_sgd,
    register_comm_hook,
)
from gradwire.torch_backend.engine import replays, stretches
from gradwire.torch_backend.engine.collectives import Pending
from gradwire.torch_backend.engine.driver import Driver
from gradwire.torch_backend.engine.scheduler import BATCHES, Step
from gradwire.torch_backend.ops.workspace import Scratch
from tests.methods import METHODS
from tests.parity.cases import SHAPES as OF_THE_LIST
from tests.torch.compare import same_bits
from tests.torch.everything import Everything
from tests.torch.logs import logged
from tests.torch.models import Half, mlp
from tests.torch.ranks import Cases, variants

if "RANK" in os.environ:
    from tests.emulated.device import DEVICE, core, event, stream, watched
    from tests.emulated.graphs import EmulatedGraphs, with_graphs
    from tests.emulated.process_group import BACKEND

    with_graphs()

cases = Cases(__file__, ranks=2)
KB = 1 / 1024
SHAPES = {
    "a": (48, 24),
    "b": (24, 48),
    "bias": (48,),
    "c": (48, 24),
    "scalar": (),
    "conv": (8, 4, 3, 3),
}
GROUPS = (("a", "b"), ("bias", "c"), ("scalar", "conv"))
#: Of the list of methods, whose patterns of names ask for its tensors.
THIRDS = [list(OF_THE_LIST)[i::3] for i in range(3)]
#: Steps until one is replayed.
FIRST = replays.EQUAL
STEPS = 8
#: In which a gradient of the last rank holds inf.
OVERFLOW = 5


# --- graphs -------------------------------------------------------------------------------------


def captured(work):
    with EmulatedGraphs().capture() as graph:
        result = work()
    return graph, result


@cases.case
def test_what_is_captured_runs_in_replays_on_the_same_memory(world):
    x, place = torch.zeros(4, device=DEVICE), torch.zeros(2, device=DEVICE)
    graph, y = captured(lambda: (x.add_(1), place.copy_(x[:2]), x * 2)[2])
    assert x.tolist() == [0.0] * 4
    for times in (1, 2):
        graph.replay()
        assert (x.tolist(), place.tolist(), y.tolist()) == (
            [times] * 4,
            [times] * 2,
            [2 * times] * 4,
        )
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [12.0] * 4


FORBIDDEN = {
    "a value": lambda x: x.sum().item(),
    "a truth": lambda x: bool((x > 0).all()),
    "positions": lambda x: x.nonzero(),
    "a copy to the host": lambda x: x.cpu(),
    "a copy to the device": lambda x: x.copy_(torch.ones(4)),
    "pinned memory": lambda x: torch.ones(4).pin_memory(),
    "waiting for the device": lambda x: torch.accelerator.synchronize(DEVICE),
    "waiting for an event": lambda x: event().synchronize(),
    "asking for an event": lambda x: event().query(),
    "a time": lambda x: torch.Event(DEVICE, enable_timing=True).record(
        torch.accelerator.current_stream(DEVICE)
    ),
    "another stream": lambda x: on_another_stream(lambda: x.add_(1)),
    "a message": lambda x: dist.all_reduce(x, group=dist.new_group(backend=BACKEND)),
    "a graph in a graph": lambda x: captured(lambda: x.add_(1)),
}


def on_another_stream(work):
    with stream(3):
        work()


@cases.each(FORBIDDEN)
def test_what_cuda_forbids_in_a_capture_breaks_it(world, action):
    x = torch.zeros(4, device=DEVICE)
    with pytest.raises((RuntimeError, ValueError), match=r"capture"):
        captured(lambda: action(x))
    captured(lambda: x.add_(1))[0].replay()  # and nothing else
    assert x.tolist() == [1.0] * 4


@cases.case
def test_an_error_that_was_swallowed_breaks_a_capture_too(world):
    def swallows():
        with pytest.raises(RuntimeError, match="a value was read"):
            torch.zeros(1, device=DEVICE).item()

    with pytest.raises(RuntimeError, match="the capture was broken"):
        captured(swallows)


@cases.case
def test_a_graph_does_not_keep_what_it_works_on(world):
    kept = [torch.zeros(4, device=DEVICE)]
    graph, _ = captured(lambda: [kept[0].add_(1)].clear())
    kept.clear()
    with pytest.raises(RuntimeError, match="replayed on memory that was given back"):
        graph.replay()


@cases.case
def test_memory_of_a_pool_is_used_again_and_goes_with_it(world):
    x, graphs, before = torch.zeros(1000, device=DEVICE), EmulatedGraphs(), core.memory()[1]
    for _ in range(2):
        with graphs.capture():
            place = (x + 1).data_ptr()
        with graphs.capture():
            assert (x * 2).data_ptr() == place
    assert graphs.nbytes == core.memory()[1] - before == x.nbytes
    del graphs
    assert core.memory()[1] == before


# --- twins --------------------------------------------------------------------------------------


class Training:
    """A driver with gradients that lie where they lie."""

    def __init__(
        self, algorithm, dtype, group, *, replay, shapes=SHAPES, parts=GROUPS, message_bytes=2048
    ):
        specs = {
            name: Spec(shape, str(dtype).removeprefix("torch.")) for name, shape in shapes.items()
        }
        self.driver = Driver(algorithm, specs, DEVICE, group, message_bytes)
        self.driver.replays.wanted = replay
        self.gradients = {
            name: torch.zeros(shape, dtype=dtype, device=DEVICE) for name, shape in shapes.items()
        }
        self.parts = parts

    def fill(self, step):
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        for name, x in self.gradients.items():
            given = torch.randn(x.shape, generator=draw).to(x.dtype)
            if (step, name, dist.get_rank()) == (OVERFLOW, "b", dist.get_world_size() - 1):
                given.view(-1)[3] = float("inf")
            x.copy_(given.pin_memory(), non_blocking=True)

    def step(self, number):
        self.fill(number)
        for i, names in enumerate(self.parts):
            gradients = {name: self.gradients[name] for name in names}
            self.driver.add(gradients, first=i == 0, last=i + 1 == len(self.parts))

    def found(self):
        """What has to be the same."""
        return found_in(self.driver) | {name: x.cpu() for name, x in self.gradients.items()}


def found_in(driver):
    state, known = driver.memory.state, driver.collectives
    found = {
        f"{name}.{key}": x.cpu()
        for name, memory in state.tensors.items()
        for key, x in memory.items()
    }
    found |= {key: x.cpu() for key, x in state.shared.items()}
    counts = (
        driver.memory.steps,
        int(driver.skipped.count),
        known.asked,
        *vars(known.sent).values(),
    )
    return found | {"counts": torch.tensor(counts)}


class Twins:
    """A training whose steps may be replayed, and one whose steps are not; and whether they have
    differed."""

    def __init__(self, make, *, groups=None):
        eager, replayed = groups or (
            dist.new_group(backend=BACKEND),
            dist.new_group(backend=BACKEND),
        )
        self.both = [make(eager, replay=False), make(replayed, replay=True)]
        watched.clear()

    def step(self, number):
        for each in self.both:
            each.step(number)

    def do(self, action):
        return [action(each) for each in self.both]

    def differ(self):
        eager, replayed = (each.found() for each in self.both)
        return [name for name, x in eager.items() if not same_bits(x, replayed[name])]

    @property
    def replayed(self):
        return self.both[1].driver.replays.replayed

    def run(self, steps, before=lambda step, twins: None):
        """In which steps they differ, and in what; and problems that the eager one does not
        have."""
        wrong = []
        for step in steps:
            before(step, self)
            self.step(step)
            if names := self.differ():
                wrong.append((step, names))
        return wrong


def twins_of(algorithm, dtype=torch.float32, *, groups=None, **options):
    return Twins(
        lambda group, replay: Training(algorithm, dtype, group, replay=replay, **options),
        groups=groups,
    )


def problems_of_replays():
    return [each for each in watched.problems if any("replays.py" in line for line in each.where)]


QUICK = {
    "PowerSGD": PowerSGD(2),
    "Quantize": Quantize("int8"),
    "WireDtype": WireDtype(AllReduce(), "int8"),
    "TopK": TopK(16),
    "Sign": Sign(),
}
#: Half steps have two kinds of step; the others compute with the step's number, on the device.
MORE = {
    "half steps": PowerSGD(2, half_step=True),
    "cold start": PowerSGD(2, warm_start=False),
    "by chance": Quantize("int4", stochastic=True),
    "norm": PowerSGD(2, max_norm=1.0),
    "start": PowerSGD(2, start_step=2),
    "both": WireDtype(PowerSGD(4), "int8"),
    "own": Half(),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: The dtypes by turns: each costs a process as much as the method itself.
TURNS = itertools.cycle(DTYPES)
TABLE = {name: (algorithm, DTYPES[next(TURNS)]) for name, algorithm in QUICK.items()}
TABLE |= {name: (algorithm, torch.float32) for name, algorithm in MORE.items()}
ALL = {
    f"{name} of the list": (method.algorithm, DTYPES[next(TURNS)], True)
    for name, method in METHODS.items()
}


@cases.each(TABLE | ALL, slow=ALL)
def test_replayed_steps_have_the_bits_of_eager_ones(world, row):
    algorithm, dtype, *of_the_list = row
    options = {"shapes": OF_THE_LIST, "parts": THIRDS} if of_the_list else {}
    # several groups, with memory of their own and in common
    if algorithm in (QUICK["PowerSGD"], MORE["half steps"]):
        options["message_bytes"] = 0
    twins = twins_of(algorithm, dtype, **options)
    base = FIRST + 2 if of_the_list else STEPS  # others meet an inf as well
    steps = base + 2 * algorithm.start_step + (2 if algorithm.cycle > 1 else 0)
    assert twins.run(range(steps)) == []
    assert (
        twins.replayed >= steps - algorithm.start_step - FIRST * algorithm.cycle - algorithm.cycle
    )
    assert problems_of_replays() == []


@cases.case
def test_more_groups_than_go_on_at_a_time(world):
    """Programs of a device's step compute together what they compute alike, and replayed ones do
    not: nor do eager ones of a driver that replays, since a device may round otherwise what many
    compute together."""
    each = [(name,) for name in SHAPES]
    twins = twins_of(PowerSGD(2), parts=each, message_bytes=0)
    assert len(each) > BATCHES
    assert twins.run(range(FIRST + 2)) == []
    assert twins.replayed == 2
    assert twins.do(lambda each: each.driver._programs.fuses) == [True, False]


@cases.case
def test_a_rank_alone(world):
    for algorithm in (PowerSGD(2), Quantize("int8")):
        alone = [dist.new_group([rank], backend=BACKEND) for _ in range(2) for rank in range(2)]
        assert twins_of(algorithm, groups=alone[world.rank :: 2]).run(range(STEPS)) == []


@cases.case
def test_each_rank_replays_or_not_by_itself(world):
    twins = twins_of(PowerSGD(2))
    twins.both[1].driver.replays.wanted = world.rank == 0
    assert twins.run(range(STEPS)) == []
    assert (twins.replayed > 0) == (world.rank == 0)


@cases.case
def test_what_reads_on_the_host_stays_eager(world):
    """It branches on an average, which the host has to know: the capture is broken, once and for
    all."""
    twins = twins_of(Everything())
    before = EmulatedGraphs.captured
    assert twins.run(range(FIRST)) == []
    tried = EmulatedGraphs.captured
    assert twins.run(range(FIRST, FIRST + 2)) == []
    assert twins.replayed == 0
    assert tried > before
    assert EmulatedGraphs.captured == tried


# --- faults -------------------------------------------------------------------------------------


def forgets_addresses(patch):
    patch.setattr(replays, "key_of", tuple)


class Twice(Scratch):
    """Memory that is handed out again and again."""

    def take(self, *args, **kwargs):
        taken = super().take(*args, **kwargs)
        for pool in self._pools.values():
            pool.taken = 0
        return taken


def hands_out_twice(patch):
    patch.setattr(Scratch, "another", lambda self: Twice())


def number_stands_still(patch):
    patch.setattr(
        stretches.Number, "computed", property(lambda number: False, lambda number, computed: None)
    )


def counts_something_else(patch):
    patch.setattr(replays, "SENT", ["dense_bytes"] * len(replays.SENT))


def forgets_the_kind(patch):
    of_next = replays.Replays._kind_of_next
    patch.setattr(replays.Replays, "_kind_of_next", lambda self: of_next(self) and 0)


def reads_before_it_has_arrived(patch):
    patch.setattr(Pending, "arrive", lambda pending, times: None)


def forgets_flags(patch):
    patch.setattr(Step, "note", lambda step, flags: None)


FAULTS = {
    "an address that moves": (PowerSGD(2), forgets_addresses),
    "memory handed out twice": (WireDtype(PowerSGD(2), "int8"), hands_out_twice),
    "the number of the step": (Quantize("int4", stochastic=True), number_stands_still),
    "messages that are not counted": (PowerSGD(2), counts_something_else),
    "messages that nobody waits for": (PowerSGD(2), reads_before_it_has_arrived),
    "steps that are not finite": (PowerSGD(2), forgets_flags),
    "the kind of step": (PowerSGD(2, half_step=True), forgets_the_kind),
}


@cases.each(FAULTS)
def test_planted_faults_are_noticed(world, fault):
    algorithm, plant = fault

    def move(step, twins):
        if step == FIRST + 1 and plant is forgets_addresses:
            twins.do(lambda each: each.gradients.update(c=torch.zeros_like(each.gradients["c"])))

    # Of messages with faults in them ranks may ask for different things.
    alone = [dist.new_group([rank], backend=BACKEND) for _ in range(2) for rank in range(2)]
    twins = twins_of(algorithm, groups=alone[world.rank :: 2])
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        try:
            wrong = twins.run(range(STEPS), move)
        except RuntimeError as error:
            wrong = [str(error)]
    assert any(world.everyones(bool(wrong or watched.problems)))


@cases.case
def test_a_capture_that_fails_leaves_steps_eager(world):
    """In the middle of a step, for a reason that the engine cannot know."""
    for fails_after in (0, 2, 5):
        twins = twins_of(PowerSGD(2))
        EmulatedGraphs.fails_at = EmulatedGraphs.captured + fails_after
        try:
            assert twins.run(range(FIRST + 2)) == []
        finally:
            EmulatedGraphs.fails_at = None
        assert twins.replayed == 0


class Waits:
    """What somebody has dropped that waits for the device when it goes."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        torch.accelerator.synchronize(DEVICE)


@cases.case
def test_what_others_have_dropped_does_not_go_in_a_capture(world):
    capture, before = EmulatedGraphs.capture, gc.get_threshold()

    @contextmanager
    def littered(graphs):
        with capture(graphs) as graph:
            Waits()
            yield graph

    twins = twins_of(PowerSGD(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmulatedGraphs, "capture", littered)
        gc.set_threshold(1, 1, 1)
        try:
            assert twins.run(range(FIRST + 2)) == []
        finally:
            gc.set_threshold(*before)
    assert twins.replayed == 2
    assert gc.isenabled()


# --- what happens beside it ---------------------------------------------------------------------


@cases.case
def test_gradients_that_move_once(world):
    """In the middle of a step: those before are replayed, those after are not; and later all are
    again. The ends of all groups are one graph, if all are replayed."""
    twins = twins_of(PowerSGD(2), message_bytes=0)

    def move(step, twins):
        if step == FIRST + 2:
            twins.do(
                lambda each: each.gradients.update(conv=torch.zeros_like(each.gradients["conv"]))
            )

    before = EmulatedGraphs.replayed
    assert twins.run(range(FIRST + 2)) == []
    assert twins.replayed == 2
    (whole,) = twins.both[1].driver.replays._sets
    counts = [
        sum(1 + bool(each.compute_overlap) for each in tape.stretches) for tape in whole.tapes
    ]
    assert len(counts) == len(GROUPS)
    assert EmulatedGraphs.replayed - before == 2 * (sum(counts) + 1)
    assert twins.run([FIRST + 2], move) == []
    assert EmulatedGraphs.replayed - before == 2 * (sum(counts) + 1) + sum(
        n + 1 for n in counts[:-1]
    )
    assert twins.replayed == 2
    assert twins.run(range(FIRST + 3, STEPS + FIRST)) == []
    assert twins.replayed == 2 + STEPS + FIRST - (2 * FIRST + 2)


def move_all(training):
    training.gradients = {name: x.clone() for name, x in training.gradients.items()}


@cases.case
def test_a_fifth_set_waits_for_its_place(world):
    """Gradients that lie in five places by turns: four are replayed, which make place when they
    come no more."""
    twins, places = twins_of(AllReduce(), message_bytes=0), []
    for _ in range(replays.SETS + 1):
        twins.do(move_all)
        places.append(twins.do(lambda each: each.gradients))

    def take_turns(step, twins):
        for each, gradients in zip(twins.both, places[step % len(places)], strict=True):
            each.gradients = gradients

    rounds = FIRST + 2
    assert twins.run(range(rounds * len(places)), take_turns) == []
    assert twins.replayed == (rounds - FIRST) * replays.SETS
    nbytes = twins.both[1].driver.replays.nbytes
    last = range(rounds * len(places), rounds * len(places) + replays.MISSES)
    assert twins.run(last, lambda step, twins: take_turns(len(places) - 1, twins)) == []
    # The first of the others has been missed by so many steps before.
    assert twins.replayed == (rounds - FIRST + 1) * replays.SETS
    assert 0 < twins.both[1].driver.replays.nbytes <= nbytes


@cases.case
def test_kinds_that_never_come_again_make_place(world):
    twins = twins_of(PowerSGD(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "SETS", 1)
        patch.setattr(replays, "MISSES", 2)
        for first in (0, FIRST + 2):
            before = twins.replayed
            assert twins.run(range(first, first + FIRST + 2)) == []
            assert twins.replayed == before + 2
            for each in twins.both:  # memory moves
                state = each.driver.memory.state
                for name, own in state.tensors.items():
                    state.tensors[name] = {key: x.clone() for key, x in own.items()}


@cases.case
def test_gradients_that_always_move_are_given_up(world):
    twins, kept = twins_of(AllReduce(), message_bytes=0), []

    def move(step, twins):
        kept.append(twins.do(lambda each: dict(each.gradients)))
        twins.do(move_all)

    with logged() as said:
        assert twins.run(range(replays.TRIES + 5), move) == []
    assert twins.replayed == 0
    (line,) = said
    assert "are not replayed" in line
    assert not twins.both[1].driver._programs.fuses
    assert not twins.both[1].driver.replays.wanted


@cases.case
def test_gradients_that_soon_move_are_given_up(world):
    """After as many captures as are kept: each takes the host as long as a step."""
    twins, before, kept = twins_of(AllReduce(), message_bytes=0), EmulatedGraphs.captured, []
    stays = FIRST + replays.WORTH - 1

    def move(step, twins):
        if step % stays == 0:
            kept.append(twins.do(lambda each: dict(each.gradients)))
            twins.do(move_all)

    steps = stays * (replays.SETS + 3) + replays.MISSES
    with logged() as said:
        assert twins.run(range(steps), move) == []
    of_a_set = (EmulatedGraphs.captured - before) // replays.SETS
    assert EmulatedGraphs.captured - before == of_a_set * replays.SETS > 0
    assert twins.replayed == replays.SETS * (stays - FIRST)
    (line,) = said
    assert "or soon" in line
    assert not twins.both[1].driver.replays.wanted
    assert twins.both[1].driver.replays.nbytes == 0


@cases.case
def test_memory_that_is_saved_loaded_and_forgotten_in_between(world):
    twins, saved = twins_of(PowerSGD(2)), []

    def beside(step, twins):
        if step == FIRST + 1:
            saved.extend(twins.do(lambda each: each.driver.memory.own()))
        if step == FIRST + 3:
            twins.do(lambda each: each.driver.forget())
        if step == FIRST + 4:
            for each, state in zip(twins.both, saved, strict=True):
                each.driver.load_state_dict(state)

    assert twins.run(range(STEPS), beside) == []
    assert twins.replayed == STEPS - FIRST


@cases.case
def test_weights_are_those_of_the_step(world):
    twins = twins_of(Weighted(PowerSGD(2)))
    weights = [1.0, 2.0, 0.0, 3.0, 0.5]

    def weigh(step, twins):
        twins.do(lambda each: each.driver.weight.fill_(weights[step % 5] if world.rank else 1.0))

    assert twins.run(range(STEPS), weigh) == []
    assert twins.replayed == STEPS - FIRST


@cases.case
def test_a_users_streams_and_graphs(world):
    """Steps on one stream and another, and a graph of the user's own between them."""
    twins = twins_of(WireDtype(PowerSGD(2), "int8"))
    wrong, x = [], torch.zeros(4, device=DEVICE)
    own, _ = captured(lambda: x.add_(1))
    for step in range(STEPS):
        core.wait_for(20 + step % 2, 0)
        with stream(20 + step % 2):
            twins.step(step)
            own.replay()
        core.wait_for(0, 20 + step % 2)
        wrong += twins.differ()
    assert wrong == []
    assert x.tolist() == [STEPS] * 4
    assert twins.replayed == STEPS - FIRST
    assert watched.problems == []


@cases.case
def test_ranges_and_times_are_those_of_eager_steps(world):
    """The profiler sees the same parts of a step, and each message is noted with its bytes, from
    its launch to its arrival."""
    twins, seen = twins_of(PowerSGD(2), message_bytes=0), []
    assert twins.run(range(FIRST + 1)) == []
    for each in twins.both:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            each.step(FIRST + 1)
        torch.accelerator.synchronize(DEVICE)
        ranges = [event.name for event in profiler.events() if event.name.startswith("gradwire: ")]
        noted = each.driver.watch.times._steps[-1]
        assert all(
            launched.elapsed_time(arrived) >= start.elapsed_time(arrived) >= 0
            for _, launched, start, arrived in noted.messages
        )
        found = each.driver.stats()
        times = [found.step_seconds > 0, found.compress_seconds > 0, found.wait_seconds >= 0]
        seen.append(
            (
                sorted(ranges),
                [nbytes for nbytes, *_ in noted.messages],
                len(noted.work),
                times,
                found.steps,
            )
        )
    assert twins.replayed == 2
    eager, replayed = seen
    assert eager == replayed
    assert eager[0].count("gradwire: PowerSGD send") == len(GROUPS)
    assert len(eager[1]) > 0
    assert all(eager[3])


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def measured(driver):
    driver.measure()
    try:
        yield
    finally:
        driver.measurement = None


@contextmanager
def discarded(driver):
    driver.discarding = True
    try:
        yield
    finally:
        driver.discarding = False


@contextmanager
def in_a_users_graph(driver):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradwire.torch_backend.engine.step.capturing", lambda: True)
        yield


EAGER = {
    "measured": measured,
    "discarded": discarded,
    "captured by the user": in_a_users_graph,
    "looked at": lambda driver: Looks(),
    "anomalies": lambda driver: torch.autograd.detect_anomaly(check_nan=False),
}


@cases.each(EAGER)
def test_what_the_host_decides_is_eager(world, context):
    """In the middle of steps that are replayed, before and after it."""
    twins, wrong = twins_of(PowerSGD(2)), []
    for step in range(STEPS):
        for each in twins.both:
            before = each.driver.replays.replayed
            with context(each.driver) if step in (FIRST + 1, FIRST + 2) else nullcontext():
                each.step(step)
            if step in (FIRST + 1, FIRST + 2):
                assert each.driver.replays.replayed == before
        wrong += twins.differ()
    assert wrong == []
    assert twins.replayed == STEPS - FIRST - 2


# --- doors --------------------------------------------------------------------------------------


@dataclass
class Loop:
    """A model in a user's loop."""

    model: nn.Module
    wrapped: nn.Module
    handle: object
    scaler: object = None
    set_to_none: bool = True
    average: bool = False
    kept: list = field(default_factory=list)

    @property
    def driver(self):
        return (
            self.handle._gradients
            if isinstance(self.handle, LocalSGDHandle)
            else self.handle._driver
        )

    def step(self, number):
        draw = torch.Generator().manual_seed(100 * number + dist.get_rank())
        data = torch.randn(8, 64, generator=draw).pin_memory().to(DEVICE, non_blocking=True)
        loss = self.wrapped(data).square().mean()
        if number == OVERFLOW and dist.get_rank():
            loss = loss * torch.full((), float("inf"), device=DEVICE)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()
        if self.average:
            self.handle({name: p.grad for name, p in self.model.named_parameters()})
        self.now = {name: p.grad.cpu() for name, p in self.model.named_parameters()}
        for p in self.model.parameters():
            p.data.add_(p.grad.nan_to_num(0.0, 0.0, 0.0), alpha=-0.1)
        if isinstance(self.handle, LocalSGDHandle):
            self.handle.step()
        if self.set_to_none:
            # so that none lies where another has lain
            self.kept.append([p.grad for p in self.model.parameters()])
            self.model.zero_grad()
        else:
            self.model.zero_grad(set_to_none=False)

    def found(self):
        return found_in(self.driver) | self.now


def ddp(algorithm, *, loops=None, **options):
    def make(group, replay):
        torch.manual_seed(0)
        model = mlp(64, 48, 48, 32).to(DEVICE)
        wrapped = DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=10 * KB, **options
        )
        handle = register_comm_hook(wrapped, algorithm, message_bytes=2048)
        if not replay:  # by itself, they are
            handle.replay = False
        return Loop(model, wrapped, handle, **loops or {})

    return make


def data_parallel(algorithm):
    def make(group, replay):
        torch.manual_seed(0)
        model = mlp(64, 48, 48, 32).to(DEVICE)
        buckets = {"bucket_cap_mb": 10 * KB, "first_bucket_mb": KB, "message_bytes": 2048}
        wrapped = DataParallel(model, algorithm, process_group=group, **buckets)
        if not replay:
            wrapped.handle.replay = False
        return Loop(model, wrapped, wrapped.handle)

    return make


def averager(algorithm, set_to_none):
    def make(group, replay):
        torch.manual_seed(0)
        model = mlp(64, 48, 48, 32).to(DEVICE)
        handle = Averager(algorithm, dict(model.named_parameters()), group)
        if not replay:  # by itself, they are
            handle.replay = False
        return Loop(model, model, handle, set_to_none=set_to_none, average=True)

    return make


def by_local_sgd(group, replay):
    torch.manual_seed(0)
    model = mlp(64, 48, 48, 32).to(DEVICE)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=10 * KB)
    handle = local_sgd(wrapped, None, LocalSGD(4, subgroup=2), message_bytes=2048)
    if not replay:  # by itself, they are
        handle.replay = False
    return Loop(model, wrapped, handle)


#: How many of the steps are replayed: buckets of DDP are rebuilt after the first, those of
#: `DataParallel` too.
DOORS = {
    "DDP": (ddp(PowerSGD(2)), STEPS - FIRST - 1),
    "DDP, views": (ddp(PowerSGD(2), gradient_as_bucket_view=True), STEPS - FIRST - 1),
    "DDP, static graph": (ddp(PowerSGD(2), static_graph=True), STEPS - FIRST - 2),
    "DDP, unused parameters": (ddp(PowerSGD(2), find_unused_parameters=True), 0),
    "DataParallel": (data_parallel(PowerSGD(2)), STEPS - FIRST - 1),
    "Averager, gradients that stay": (averager(PowerSGD(2), False), STEPS - FIRST),
    "Averager, gradients that move": (averager(PowerSGD(2), True), 0),
    "local_sgd, in subgroups": (by_local_sgd, STEPS - FIRST - 1),
}


@cases.each(DOORS)
def test_doors(world, row):
    make, expected = row
    twins = Twins(make)
    assert twins.run(range(STEPS)) == []
    assert twins.replayed == expected, twins.replayed
    assert [each.handle.stats().replayed_steps for each in twins.both] == [0, expected]


@cases.case
def test_parameters_that_are_loaded_in_between(world):
    twins = Twins(ddp(PowerSGD(2)))
    saved = twins.do(lambda each: {name: x.clone() for name, x in each.model.state_dict().items()})

    def load(step, twins):
        if step == FIRST + 3:
            for each, state in zip(twins.both, saved, strict=True):
                each.model.load_state_dict(state)

    assert twins.run(range(STEPS), load) == []
    assert twins.replayed == STEPS - FIRST - 1


@cases.case
def test_two_models_and_another_algorithm_in_the_middle(world):
    first, second = Twins(ddp(PowerSGD(2))), Twins(ddp(Sign()))
    wrong = []
    for step in range(STEPS):
        if step == FIRST + 3:
            assert first.replayed
            first.do(lambda each: each.handle.reconfigure(PowerSGD(3)))
            assert first.do(lambda each: each.handle.replay) == [False, True]
        for twins in (first, second):
            twins.step(step)
            wrong += twins.differ()
    for step in range(STEPS, STEPS + 2):
        first.step(step)
        wrong += first.differ()
    assert wrong == []
    assert second.replayed == STEPS - FIRST - 1
    assert first.replayed > 0


@cases.case
def test_a_loss_scaler_is_eager(world):
    def make(group, replay):
        torch.manual_seed(0)
        model = mlp(64, 48, 48, 32).to(DEVICE)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
        wrapped = DistributedDataParallel(model, process_group=group)
        handle = register_comm_hook(wrapped, PowerSGD(2), grad_scaler=scaler)
        handle.replay = replay
        return Loop(model, wrapped, handle, scaler)

    twins = Twins(make)
    assert twins.run(range(FIRST + 3)) == []
    assert twins.replayed == 0


@cases.case(slow=True)
def test_two_levels(world):
    twins = Twins(ddp(TwoLevel(PowerSGD(2), "node")))
    assert twins.run(range(STEPS)) == []
    assert twins.replayed == STEPS - FIRST - 1


# --- what it costs ------------------------------------------------------------------------------

#: A transformer of twelve layers, small.
LAYERS = {
    f"{i}.{name}": shape
    for i in range(12)
    for name, shape in {
        "qkv": (192, 64),
        "out": (64, 64),
        "up": (256, 64),
        "down": (64, 256),
        "bias": (64,),
    }.items()
}
BUCKETS = [list(LAYERS)[i : i + 10] for i in range(0, len(LAYERS), 10)]
COSTS = {**QUICK, "both": WireDtype(PowerSGD(16), "int8")}


#: The others differ from these in what they launch.
SLOW = [name for name in COSTS if name not in ("PowerSGD", "Quantize")]


@cases.each(COSTS, slow=SLOW)
def cost(world, algorithm):
    """Calls, messages, the most memory beside what is kept, and that of graphs; eager and
    replayed."""
    found = []
    for replay in (False, True):
        group = dist.new_group(backend=BACKEND)
        training = Training(
            algorithm,
            torch.float32,
            group,
            replay=replay,
            shapes=LAYERS,
            parts=BUCKETS,
            message_bytes=None,
        )
        for step in range(FIRST + 2):
            training.step(step)
        state = training.driver.memory.state.tensors
        kept = [
            *training.gradients.values(),
            *[x for memory in state.values() for x in memory.values()],
        ]
        gc.collect()
        before, sent = core.memory()[1], training.driver.memory.sent.collectives
        calls = calls_of(lambda training=training: training.step(FIRST + 2))
        peak = core.memory()[0]
        scratch = sum(x.nbytes for x in _tensors_in(training.driver.collectives.scratch))
        graphs = training.driver.replays.nbytes
        found.append(
            (
                calls,
                training.driver.memory.sent.collectives - sent,
                (scratch, graphs, peak - before),
            )
        )
        assert training.driver.stats().replayed_steps == (3 if replay else 0)
        assert (training.driver.stats().graph_bytes > 0) is replay
        del training, state, kept
    return found


def _tensors_in(scratch):
    return [x for pool in scratch._pools.values() for x in pool.tensors] + [scratch.brief._bytes]


@pytest.mark.parametrize("name", variants(COSTS, SLOW))
def test_calls_and_memory_of_a_replayed_step(results, name):
    """The host does a replay and a collective for each message; and memory is what an eager step
    works in."""
    for (eager_calls, messages, eager_bytes), (calls, same_messages, nbytes) in results(
        f"cost[{name}]"
    ):
        assert messages == same_messages
        assert calls <= 300 + 60 * messages < eager_calls
        assert sum(nbytes) <= 1.05 * sum(eager_bytes), (nbytes, eager_bytes)
