"""Where the time of a step goes, what the log says of it, and that this costs nothing: with a clock
that the tests turn."""

import logging
from dataclasses import replace

import pytest
import torch

from benchmarks.dry import PretendedGroup, _Arrived
from gradwire import LocalSGD, PowerSGD
from gradwire.core.zero.sharded_step import Zero
from gradwire.torch_backend import ZeroOptimizer
from gradwire.torch_backend.engine.collectives import Pending
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.local_sgd.handle import LocalSGDHandle
from gradwire.torch_backend.local_sgd.moments import Moments
from gradwire.torch_backend.local_sgd.target import Target
from gradwire.torch_backend.monitor import watcher
from gradwire.torch_backend.monitor.report import verdict
from gradwire.torch_backend.monitor.timers import Times
from gradwire.torch_backend.monitor.watcher import (
    LAST,
    NORM_EVERY,
    NORMS,
    REPORT_AFTER,
    StepEnded,
    StepTimes,
)
from gradwire.torch_backend.setup.assumptions import Assumptions

CPU = torch.device("cpu")


class Clock:
    """Stands still until it is told."""

    now = 0.0

    def __call__(self):
        return self.now

    def go(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(watcher, "perf_counter", clock := Clock())
    return clock


def step(times, clock, *, compress=0.25):
    times.begin()
    clock.go(1)
    start = times.now()
    clock.go(compress)
    launched = times.now()
    times.waited(1000, launched, launched)  # a message that was there at once
    waits = times.now()
    clock.go(0.5)
    times.waited(1000, launched, waits)
    times.worked(start)
    times.end()


def test_figures_are_those_of_the_last_steps_and_of_none_that_is_abandoned(clock):
    times = StepTimes(CPU)
    assert times.read() == Times()
    step(times, clock)
    times.begin()
    clock.go(40)
    for _ in range(2):
        step(times, clock)
    found = times.read()
    assert (found.steps, found.step_seconds, found.compress_seconds) == (
        3,
        1.75,
        0.25,
    )  # no step follows the abandoned one
    for _ in range(5):
        step(times, clock, compress=100)
    for _ in range(LAST):
        step(times, clock)
    found = times.read()
    assert (found.steps, found.step_seconds, found.wait_seconds) == (LAST, 1.75, 0.5)
    assert found.compress_seconds == pytest.approx(0.25)
    assert found.bytes_per_second > 1e9


class SlowGroup(PretendedGroup):
    """Messages take 4 seconds to wait for, on a clock; the host goes on meanwhile."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def allreduce(self, tensors, options):
        arrived, clock = super().allreduce(tensors, options), self.clock

        class Slow(_Arrived):
            def wait(self, timeout=None):
                clock.go(4)
                return True

        return Slow(tensors) if arrived else arrived


class Slow:
    """An algorithm that takes so many seconds to compress."""

    def __init__(self, algorithm, clock, seconds):
        self.algorithm, self.clock, self.seconds = algorithm, clock, seconds

    def __getattr__(self, name):
        return getattr(self.algorithm, name)

    def __repr__(self):
        return repr(self.algorithm)

    async def step(self, ops, gradients, state, step):
        self.clock.go(self.seconds if step >= self.start_step else 0)
        return await self.algorithm.step(ops, gradients, state, step)


def driven(clock, algorithm, seconds):
    """A driver of eight ranks, and its gradients."""
    gradients = {"w": torch.randn(40, 30), "b": torch.randn(40)}
    return Driver(
        Slow(algorithm, clock, seconds), specs_of(gradients), CPU, SlowGroup(clock)
    ), gradients


def run(driver, gradients, clock, steps):
    for _ in range(steps):
        clock.go(10)
        driver.add({n: g.clone() for n, g in gradients.items()}, first=True, last=True)


def test_a_driver_notes_its_messages_and_its_work(clock):
    """A pass that is discarded is not noted; it takes as long, between two steps."""
    driver, gradients = driven(clock, PowerSGD(1), 2)
    run(driver, gradients, clock, 3)
    stats = driver.stats()
    wait = 4 * stats.collectives / stats.steps
    assert (stats.step_seconds, stats.compress_seconds, stats.wait_seconds) == (
        10 + 2 + wait,
        2,
        wait,
    )
    assert stats.compress_share == pytest.approx(2 / (12 + wait))
    seconds = {"step_ms": 1e3 * (12 + wait), "compress_ms": 2e3, "wait_ms": 1e3 * wait}
    counts = {"bytes_sent": stats.bytes_sent, "compression_ratio": stats.compression_ratio}
    assert stats.scalars() == {"steps": 3, "skipped_steps": 0} | counts | seconds
    before = driver.watch.times.read()
    driver.discarding = True
    run(driver, gradients, clock, 1)
    assert driver.watch.times.read() == before
    driver.discarding = False
    run(driver, gradients, clock, 1)
    after = driver.watch.times.read()
    assert (after.steps, after.compress_seconds) == (4, before.compress_seconds)
    assert after.step_seconds == before.step_seconds * 4 / 3


def logged(caplog, clock, algorithm, seconds, steps):
    with caplog.at_level(logging.INFO, "gradwire"):
        driver, gradients = driven(clock, algorithm, seconds)
        run(driver, gradients, clock, steps)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_one_line_says_after_some_steps_what_compression_costs(caplog, clock):
    """And warns if steps take longer than they took in full."""
    assert logged(caplog, clock, PowerSGD(1), 2, REPORT_AFTER - 1) == []
    # 40·30 + 40 numbers of four bytes, and 40 + 30 + 40 as they are sent.
    line = (
        "PowerSGD(rank=1): 452.0 kB saved in 100 steps (11.3× now); a step takes 20 s, of which 2.0 s compressing (10%) and 8.0 s waiting for "
        "messages (40%); it pays if sending 5.0 kB in full would hold a step up for more than 10 s"
    )
    assert logged(caplog, clock, PowerSGD(1), 2, 3 * REPORT_AFTER) == [("INFO", line)]
    caplog.clear()
    ((level, line),) = logged(caplog, clock, PowerSGD(1, start_step=30), 6, 30 + REPORT_AFTER)
    assert level == "WARNING"
    assert "a step takes 24 s, of which 6.0 s compressing (25%)" in line
    assert "it costs more than it saves: a step took 14 s" in line
    caplog.clear()
    # too few to compare
    assert logged(caplog, clock, PowerSGD(1, start_step=5), 6, 30 + REPORT_AFTER)[0][0] == "INFO"


NOW = Times(
    steps=50, step_seconds=1.0, compress_seconds=0.2, wait_seconds=0.1, bytes_per_second=1e9
)


@pytest.mark.parametrize(
    ("now", "dense", "before", "full"),
    [
        # 700 ms of its own, and at the rate of the quickest message less a fifth 125 ms for the
        # gradients.
        (NOW, 1e8, None, "825 ms"),
        (NOW, 1e9, None, ""),  # in full, they might take a second
        (NOW, 0.25e9, None, ""),  # not clear
        (replace(NOW, step_seconds=20.0), 1e8, None, ""),  # not worth a word
        (Times(steps=50), 1e8, None, ""),
        (replace(NOW, bytes_per_second=0.0), 1e8, None, ""),  # nobody can tell
        (NOW, 1e8, replace(NOW, step_seconds=0.99), ""),  # not clear
        (NOW, 1e9, replace(NOW, step_seconds=0.9), "900 ms"),
    ],
)
def test_the_verdict_is_only_given_where_it_is_clear(now, dense, before, full):
    said = verdict(now, dense, before)
    assert bool(said) == bool(full)
    assert full in said


def test_how_the_error_develops(clock):
    driver, gradients = driven(clock, PowerSGD(1), 2)
    norms = []
    for _ in range(3):
        run(driver, gradients, clock, NORM_EVERY)
        norms.append(driver.local_error_norm())
    assert driver.stats().local_error_norms == tuple(
        (NORM_EVERY * (i + 1), norm) for i, norm in enumerate(norms)
    )
    assert driver.stats().scalars()["local_error_norm"] == norms[-1] > 0
    for i in range(NORMS):
        ended = StepEnded(NORM_EVERY * i, driver._progress, lambda: [torch.full((4,), 8.0)], 2.0)
        driver.watch.step_ended(ended)
    assert driver.stats().local_error_norms == tuple((NORM_EVERY * i, 8.0) for i in range(NORMS))


def test_a_step_that_is_captured_is_not_watched(clock, monkeypatch):
    """A CUDA graph would keep what is launched for it, and repeat no notes."""
    monkeypatch.setattr("gradwire.torch_backend.engine.driver.capturable", lambda device: True)
    driver, gradients = driven(clock, PowerSGD(1), 2)
    run(driver, gradients, clock, NORM_EVERY - 1)
    before = driver.watch.times.read()
    for captured in (True, False):
        monkeypatch.setattr(
            "gradwire.torch_backend.engine.step.capturing", lambda captured=captured: captured
        )
        run(driver, gradients, clock, 1)
        if captured:
            assert driver.memory.steps == NORM_EVERY
            assert driver.stats().local_error_norms == ()
            assert driver.watch.times.read() == before
    assert driver.watch.times.read().step_seconds == before.step_seconds  # no step follows a replay
    for where in ("step", "cuda_graphs"):
        monkeypatch.setattr(f"gradwire.torch_backend.engine.{where}.capturing", lambda: True)
    driver.measure()
    with pytest.raises(
        RuntimeError, match=r"handle.measured\(\), .* cannot be captured in a CUDA graph"
    ):
        run(driver, gradients, clock, 1)


class Averaged(Target):
    averages_always = True


def local(clock, schedule):
    """Local SGD of eight ranks on 300 numbers, and the gradients' driver: messages take 4
    seconds."""
    parameters = {"w": torch.nn.Parameter(torch.zeros(10, 30))}
    group = SlowGroup(clock)
    moments = Moments(None, parameters, "keep", group)
    assumed = Assumptions("local_sgd", parameters, {}, None, None, "")
    return LocalSGDHandle(
        schedule, Averaged(parameters, group), {}, moments, ProcessGroups(group), assumed
    )


def train(handle, clock, steps, *, seconds=10):
    for _ in range(steps):
        clock.go(seconds)
        handle._gradients.add({"w": torch.ones(10, 30)}, first=True, last=True)
        handle.step()


def test_local_sgd_notes_whole_cycles(clock):
    handle = local(clock, LocalSGD(period=60))
    train(handle, clock, 61)
    stats = handle.stats()
    assert (stats.step_seconds, stats.compress_seconds, stats.wait_seconds) == pytest.approx(
        (10 + 4 / 60, 0, 4 / 60)
    )
    train(handle, clock, 60)  # however far a cycle has come: 60 steps hold one average
    assert handle.stats().wait_seconds == pytest.approx(4 / 60)
    assert handle.stats().scalars()["wait_ms"] == pytest.approx(4000 / 60)
    told = "1 tensors, 1.2 kB; 121 steps, 142.8 kB saved, 0% of a step spent averaging"
    assert repr(handle) == f"LocalSGDHandle(LocalSGD(period=60): {told})"
    handle = local(clock, LocalSGD(period=2))
    # every second step waits 400 times as long as the others take: no pause
    train(handle, clock, 21, seconds=0.01)
    clock.go(600)  # an evaluation is one
    train(handle, clock, 10, seconds=0.01)
    assert handle.stats().step_seconds == pytest.approx(2.01, rel=0.1)


def test_local_sgd_counts_the_gradients_that_are_averaged_first(clock):
    handle = local(clock, LocalSGD(period=8, start_step=1000))
    train(handle, clock, 3)
    assert (handle.stats().step_seconds, handle.stats().wait_seconds) == (14, 4)
    handle.synchronize()
    train(handle, clock, 1)
    assert (handle.stats().step_seconds, handle.stats().wait_seconds) == pytest.approx(
        (46 / 3, 16 / 3)
    )


def test_one_line_says_what_local_sgd_costs(caplog, clock):
    with caplog.at_level(logging.INFO, "gradwire"):
        handle = local(clock, LocalSGD(period=8))
        train(handle, clock, 104)
        assert not caplog.records
        train(handle, clock, 200)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "INFO",
        "LocalSGD(period=8): 110.4 kB saved in 105 steps (8.0× now); a step takes 11 s, of which 0 averaging (0%) and 500 ms waiting for "
        "messages (5%); it pays if sending 1.2 kB in full would hold a step up for more than 500 ms",
    )


@pytest.mark.usefixtures("alone")
def test_a_sharded_optimizer_notes_its_messages_and_not_its_own_step(clock, monkeypatch):
    messages, step = [], Zero.step

    def settle(pending):
        messages.append(pending)
        clock.go(4)

    async def slow(self, *args):
        clock.go(2)
        return await step(self, *args)

    class SGD(torch.optim.SGD):
        def step(self, closure=None):
            clock.go(50)
            return super().step(closure)

    monkeypatch.setattr(Zero, "step", slow)
    monkeypatch.setattr(Pending, "settle", settle)
    w = torch.nn.Parameter(torch.zeros(10, 30))
    zero = ZeroOptimizer([("w", w)], SGD, lr=0.1, average_gradients=True)
    assert "step_ms" not in zero.stats().scalars()
    messages.clear()
    for _ in range(3):
        clock.go(10)
        w.grad = torch.ones(10, 30)
        zero.step()
    wait, stats = 4 * len(messages) / 3, zero.stats()
    assert wait > 0
    assert (stats.step_seconds, stats.compress_seconds, stats.wait_seconds) == (
        10 + 2 + 50 + wait,
        2,
        wait,
    )
    first, *groups = repr(zero).splitlines()
    assert first.startswith(
        "SGD, whose state is divided among 1 ranks by element: 1.2 kB of 1.2 kB of parameters "
    )
    assert " are updated here; 3 steps, " in first
    assert first.endswith(f"3% of a step spent packing, {wait / (62 + wait):.0%} waiting")
    assert groups[0] == "ZeroOptimizer ("
