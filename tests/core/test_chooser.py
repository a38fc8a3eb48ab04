"""Which method a chooser finds while it runs, and what that costs, by a clock that is simulated."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import Auto, Probe, Spec
from gradwire.core.advise.choosing.chooser import Chooser
from gradwire.core.advise.choosing.methods import Decisions, expected_order, methods_of
from gradwire.core.advise.choosing.paired_test import ERROR, PairedTest
from gradwire.core.advise.choosing.step_clock import clocked
from gradwire.core.advise.cost import Cost, cost_of
from gradwire.core.advise.probe import Level

#: Seconds of a step of uncompressed averages, and of others in the order of advice: on links of
#: about 100 Mbit/s and 1 Gbit/s, and where nothing waits for messages.
SLOW, MIDDLE, FAST = (1.1, 0.3, 0.42, 0.6), (0.5, 0.34, 0.36, 0.42), (0.3, 0.38, 0.36, 0.54)
STEPS = 10_000
#: Steps of a burst.
BURST = 5


def constant(seconds: tuple[float, ...]) -> np.ndarray:
    return np.tile(seconds, (STEPS, 1))


def changes(steps: int) -> np.ndarray:
    """A link that is slow, and fast for so many steps in 1,000."""
    trace = constant(SLOW)
    for begin in range(400, STEPS, 1000):
        trace[begin : begin + steps] = FAST
    return trace


def becomes(before: tuple[float, ...], after: tuple[float, ...], when: int) -> np.ndarray:
    trace = constant(before)
    trace[when:] = after
    return trace


def bursts() -> np.ndarray:
    """A neighbour takes the link for some steps now and then."""
    trace = constant(FAST)
    for begin in np.random.default_rng(1).integers(0, STEPS, STEPS // 250):
        trace[begin : begin + BURST] = SLOW
    return trace


def slow_rank() -> np.ndarray:
    """One rank of four computes longer, in some steps; all wait for it."""
    late = np.random.default_rng(2).random((STEPS, 4)) * [0, 0, 0, 0.2]
    return (constant(MIDDLE)[:, None, :] + late[:, :, None]).max(axis=1)


TRACES = {
    "100 Mbit/s": constant(SLOW),
    "1 Gbit/s": constant(MIDDLE),
    "unlimited": constant(FAST),
    "equal": constant((0.3, 0.3, 0.3)),
    "fast for 100 of 1,000 steps": changes(100),
    "fast for 400 of 1,000 steps": changes(400),
    "becomes slow": becomes(FAST, SLOW, 200),
    "becomes fast": becomes(SLOW, FAST, 900),
    "bursts": bursts(),
    "one slow rank": slow_rank(),
    "2 x 2": constant((0.9, 0.52, 0.3, 0.34, 0.7)),
    "alone": constant((0.3,)),
}


@pytest.mark.parametrize(
    ("name", "late"), [*((name, 1) for name in TRACES), ("100 Mbit/s", 2), ("becomes slow", 2)]
)
def test_choosing_costs_little(name: str, late: int) -> None:
    noise = np.random.default_rng(len(name)).normal(0, 0.03, TRACES[name].shape)
    trace = (TRACES[name] * np.exp(noise)).tolist()
    methods = len(trace[0])
    for steps in (1000, STEPS):
        best = min(sum(row[m] for row in trace[:steps]) for m in range(methods))
        # Nobody foresees the first burst, and nobody knows after it whether others will come.
        best += 2 * BURST * (SLOW[0] - min(SLOW)) / 1.02 if name == "bursts" else 0
        plain = sum(row[0] for row in trace[:steps]) / steps
        chooser = Chooser(methods)
        total, _ = clocked(chooser, lambda step, method, now: trace[step][method], steps, late)
        assert total <= 1.02 * best + 20 * plain, steps
        if name == "unlimited":
            assert chooser.chosen == 0, chooser.changes
    assert total <= 1.02 * best


@settings(max_examples=30, deadline=None)
@given(
    ratios=st.lists(st.floats(0.2, 3.0), min_size=1, max_size=3),
    noise=st.sampled_from([0.0, 0.02, 0.1]),
    seed=st.integers(0, 2**20),
)
def test_any_constant_link(ratios: list[float], noise: float, seed: int) -> None:
    """What is best by far is found, whatever the order, and all of it costs a few steps."""
    seconds = np.array([1.0, *ratios])
    factors = np.exp(np.random.default_rng(seed).normal(0, noise, (1000, len(seconds)))).tolist()
    chooser = Chooser(len(seconds))
    total, methods = clocked(
        chooser, lambda step, method, now: seconds[method] * factors[step][method], 1000
    )
    ordered = np.sort(seconds)
    if noise < 0.1 and ordered[0] * 1.3 < ordered[1]:
        assert chooser.chosen == int(np.argmin(seconds))
        # in the worst order: the prior is there to spare this
        assert total <= 1.02 * 1000 * ordered[0] + 45
    assert methods[:5] == [0] * 5


def noisy(trace: np.ndarray, seed: int, noise: float) -> list[list[float]]:
    """And some steps take far longer, as on a machine that others use too."""
    rng = np.random.default_rng(seed)
    trace = trace * np.exp(rng.normal(0, noise, trace.shape))
    hiccups = np.where(rng.random(trace.shape) < 0.05, 1 + rng.exponential(1.0, trace.shape), 1)
    found: list[list[float]] = (trace * (hiccups if noise else 1)).tolist()
    return found


@pytest.mark.parametrize(("noise", "most"), [(0.0, 40), (0.1, 80), (0.2, 120)])
def test_a_link_that_becomes_slow_is_left_soon_whatever_goes_on(noise: float, most: int) -> None:
    """In a trial too, and where noise was taken for other networks before."""
    for when in range(300, 360):
        trace = noisy(becomes((0.085, 0.1, 0.09), (1.3, 0.35, 0.66), when)[:900], when, noise)
        chooser = Chooser(3)
        _, methods = clocked(chooser, lambda step, method, now, t=trace: t[step][method], 900)
        assert chooser.chosen == 1, when
        assert methods[when:].count(0) <= most, when


def test_steps_that_take_long_in_turn_with_short_ones_are_compared_all_the_same() -> None:
    """As where each second batch is longer, on whatever method."""
    trace = (constant((0.68, 0.26, 0.45)) + np.arange(STEPS)[:, None] % 2).tolist()
    chooser = Chooser(3)
    _, methods = clocked(chooser, lambda step, method, now: trace[step][method], 1000)
    assert chooser.chosen == 1
    assert methods.count(1) > 900


def test_equal_times_give_equal_choices_and_a_pause_does_not_count() -> None:
    """As replicas that observe the same do; a step in which somebody paused is left out, and
    nothing rests on it."""
    rng = np.random.default_rng(0)
    one, other = Chooser(3), Chooser(3)
    for step in range(400):
        method = one.advance()
        assert method == other.advance()
        assert (one.timed, one.shared) == (other.timed, other.shared)
        if one.shared:
            seconds = (
                None
                if step % 7 == 0
                else (1.0, 0.5, 0.8)[method] * float(np.exp(rng.normal(0, 0.03)))
            )
            one.observe(seconds)
            other.observe(seconds)
    assert one.chosen == 1
    assert one.changes == other.changes
    assert all(change.seconds < change.before for change in one.changes)


def test_a_slow_method_has_two_timed_steps() -> None:
    chooser = Chooser(2)
    _, methods = clocked(chooser, lambda step, method, now: (1.0, 1.6)[method], 40)
    assert methods.count(1) == 3
    assert chooser.chosen == 0


def test_a_test_errs_as_seldom_as_it_says() -> None:
    """Of equal methods, with any symmetric noise, in each direction; and six clear pairs decide."""
    rng = np.random.default_rng(0)
    runs = 150
    for noise in (
        lambda: rng.standard_t(2),
        lambda: rng.choice([-1, 1]) * 0.3,
        lambda: rng.normal() * 0.01,
    ):
        found = []
        for _ in range(runs):
            test = PairedTest()
            for _ in range(30):
                test.add(1.0, float(np.exp(0.1 * noise())))
            found.append(test.faster)
        for way in (1, -1):
            assert found.count(way) <= runs * ERROR + 4 * (runs * ERROR) ** 0.5
    test = PairedTest()
    for _ in range(6):
        test.add(1.2, 1.0)
    assert test.faster == -1


def test_what_bursts_cost_counts_as_often_as_they_come() -> None:
    """Plain averages are fastest without them, and slowest with them; and after one alone they are
    chosen again."""
    for gap, chosen in ((250, 1), (10_000, 0)):
        bursts = range(100, STEPS, gap)

        def seconds(step: int, method: int, now: float, bursts: range = bursts) -> float:
            noise = float(np.exp(np.random.default_rng([step, method]).normal(0, 0.03)))
            return noise * (
                (9.0, 0.7)[method]
                if any(b <= step < b + BURST for b in bursts)
                else (0.38, 0.42)[method]
            )

        chooser = Chooser(2)
        _, methods = clocked(chooser, seconds, 5000)
        assert chooser.chosen == chosen, chooser.changes
        assert methods[-1000:].count(chosen) > 950


def test_a_probe_says_in_which_order_methods_have_their_trials() -> None:
    """By what they compute where messages are quick, and by what they send where these are slow."""
    specs = {"w": Spec((512, 512), "float32")}
    auto = Auto(loss="2%")
    methods = methods_of(auto, specs, 4)
    # less where more is sent
    computes = {method: 0.01 * (len(methods) - i) for i, method in enumerate(methods)}

    def cost(method: Any) -> Cost:
        return cost_of(method, specs, 4, lambda own: [computes[method]])

    assert expected_order(auto, methods, cost) == list(range(len(methods)))
    for seconds, expected in (
        (1e-9, [0, *range(len(methods) - 1, 0, -1)]),
        (10.0, list(range(len(methods)))),
    ):
        samples = ((1, 1e-6 * seconds), (1 << 20, seconds))
        probe = Probe("torch", "cpu", 4, 4, (Level("all", 4, samples, samples, 0.0),))
        assert expected_order(Auto(loss="2%", probe=probe), methods, cost) == expected


class Logged(Chooser):
    """One whose decisions are written, as drivers do, and how many lines there were before each
    step."""

    def __init__(self, methods: list[str]) -> None:
        super().__init__(len(methods))
        self.methods, self.number, self.lines = methods, 0, [""]
        self.known: list[int] = []

    def advance(self) -> int:
        number = super().advance()
        if number != self.number:
            chosen = self.methods[self.chosen]
            self.lines.append(
                Decisions.line(len(self.known), self.methods[number], self.trial, chosen)
            )
        self.number = number
        self.known.append(len(self.lines))
        return number


@settings(max_examples=100, deadline=None)
@given(
    seconds=st.lists(st.floats(0.2, 3.0), min_size=2, max_size=4),
    late=st.integers(1, 3),
    steps=st.integers(1, 300),
    seed=st.integers(0, 2**20),
)
def test_a_log_repeats_a_run_and_never_stays_in_a_trial(
    seconds: list[float], late: int, steps: int, seed: int
) -> None:
    """Whenever it ended, in a trial too: the steps that were taken are the same, and what stays
    after them is what was chosen then."""
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.05, (steps, len(seconds)))).tolist()
    names = [f"method {number}" for number in range(len(seconds))]
    chooser = Logged(names)
    chosen = []

    def took(step: int, method: int, now: float) -> float:
        chosen.append(chooser.chosen)
        return seconds[method] * noise[step][method]

    _, methods = clocked(chooser, took, steps, late)
    for end in {1, steps // 3 + 1, steps}:
        decisions = Decisions(names, "".join(chooser.lines[: chooser.known[end - 1]]))
        assert [decisions.at(step) for step in range(end)] == methods[:end]
        assert decisions.at(end + 100) == chosen[end - 1]


@pytest.mark.parametrize("line", ["3", "{}", '{"step": 1, "method": "a", "trial": "long"}'])
def test_what_is_no_log_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is no decision"):
        Decisions(["a"], line)


def test_a_line_takes_back_what_comes_after_it() -> None:
    """A run that has gone back to a saved state, with another method or the same."""
    changes = [(2, "b"), (5, "a"), (9, "b"), (5, "b"), (7, "a")]
    decisions = Decisions(["a", "b"], "".join(Decisions.line(*change) for change in changes))
    assert [decisions.at(step) for step in range(10)] == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0]
