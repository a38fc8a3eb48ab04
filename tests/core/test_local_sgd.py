"""Local SGD in the lock-step simulator, against what the papers say, written down by hand."""

import collections
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from benchmarks.shapes import gpt
from gradwire import AllReduce, LocalSGD, LocalSimulator, OuterSGD, PowerSGD, Spec, WireDtype, diloco, plan
from gradwire.core.protocol.collective_requests import Reduce
from gradwire.core.simulate import PoisonOps

SHAPES = {"w": (10, 8), "v": (9, 12), "b": (7,), "s": ()}
SPECS = {n: Spec(shape) for n, shape in SHAPES.items()}
RATE = 0.1
rng = np.random.default_rng(0)
START = {n: rng.standard_normal(shape) for n, shape in SHAPES.items()}
#: Replica r pulls towards its own target with its own strength, and wanders.
TARGETS = [{n: rng.standard_normal(shape) for n, shape in SHAPES.items()} for _ in range(4)]


def gradient(replica, step, p):
    noise = np.random.default_rng([replica, step])
    return {n: (0.5 + 0.4 * replica) * (p[n] - TARGETS[replica][n]) + 0.1 * noise.standard_normal(SHAPES[n]) for n in p}


def sgd(replica, p, g):
    return {n: p[n] - RATE * g[n] for n in p}


def train(local, steps, replicas=4, *, start=START, each=lambda sim: None, **options):
    sim = LocalSimulator(local, start, replicas, **options)
    for step in range(steps):
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        each(sim)
    return sim


def average(dictionaries):
    return {n: np.mean([d[n] for d in dictionaries], axis=0) for n in dictionaries[0]}


def assert_close(mine, expected, rtol=1e-12):
    for n in expected:
        np.testing.assert_allclose(mine[n], expected[n], rtol=rtol, atol=1e-13)


def assert_wandered(local, steps, meet, rtol=1e-10):
    """By hand: each replica steps by itself, and `meet(step, parameters)` says where they all are then."""
    sim, ps = LocalSimulator(local, START, 4), [START] * 4
    for step in range(steps):
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        ps = meet(step, [sgd(r, p, gradient(r, step, p)) for r, p in enumerate(ps)])
        for mine, expected in zip(sim.parameters, ps, strict=True):
            assert_close(mine, expected, rtol)


@pytest.mark.parametrize(
    ("local", "period"),
    [
        *((local, 1) for local in (LocalSGD(1), LocalSGD(1, outer=OuterSGD()), LocalSGD(9, start_step=50))),
        *((local, 3) for local in (LocalSGD(3), LocalSGD(3, outer=OuterSGD(1.0)))),
        (LocalSGD(3, compressor=AllReduce()), 3),
    ],
)
def test_averaging_now_and_then_by_hand(local, period):
    """After every step it is synchronous SGD."""
    assert_wandered(local, 14, lambda step, ps: [average(ps)] * 4 if step % period == period - 1 else ps)


def test_an_outer_optimizer_above_pairs_that_average_plainly():
    anchor, velocity = START, {n: np.zeros(shape) for n, shape in SHAPES.items()}

    def meet(step, ps):
        nonlocal anchor, velocity
        if step % 6 == 5:
            velocity = {n: 0.7 * velocity[n] + anchor[n] - average(ps)[n] for n in anchor}
            anchor = {n: anchor[n] - 0.4 * velocity[n] for n in anchor}
            return [anchor] * 4
        return [average(ps[:2])] * 2 + [average(ps[2:])] * 2 if step % 2 else ps

    assert_wandered(diloco({2: 2, "all": 6}, lr=0.4, momentum=0.7, nesterov=False), 20, meet)


def test_groups_average_among_themselves():
    def meet(step, ps):
        if step % 4 == 3:
            return [average(ps)] * 4
        return [average(ps[::2]), average(ps[1::2])] * 2 if step % 2 else ps

    assert_wandered(LocalSGD({((0, 2), (1, 3)): 2, "all": 4}), 9, meet)


HALF, PAIRS, EVERYONE = [], [(((0, 1), (2, 3)), 4)], [(None, 4)]


@pytest.mark.parametrize(
    ("local", "expected", "equal"),
    [
        # Two in pairs after every second step, all four after every fourth, where pairs are due as well and lose.
        (LocalSGD({2: 2, 4: 4}), [HALF, PAIRS, HALF, EVERYONE] * 2 + [HALF], [True, False, False, False]),
        # Gradients are averaged among all until the start, and then never again.
        (LocalSGD(100, start_step=5), [EVERYONE] * 5 + [[]] * 7, [True, False, False, False]),
        (LocalSGD(100, start_step=5, subgroup=2), [EVERYONE] * 5 + [PAIRS] * 7, [True, True, False, False]),
        (LocalSGD(100, start_step=5, subgroup=4), [EVERYONE] * 12, [True] * 4),
    ],
    ids=repr,
)
def test_exactly_these_messages_are_asked_for(local, expected, equal):
    asked = []

    def noted(sim):
        asked.append([(r.groups, len(r.arrays)) for r in sim.requests if isinstance(r, Reduce)])

    sim = train(local, len(expected), each=noted)
    assert asked == expected
    assert [np.array_equal(sim.parameters[0]["w"], p["w"]) for p in sim.parameters] == equal


def test_extras_travel_with_their_owners():
    """Moments with their parameter's fragment, buffers with the first; as they are, whatever happens to parameters."""
    local = diloco(4, fragments=2)
    extras = {"w": {"moment": np.zeros((10, 8))}, "bn": {"": np.zeros(3)}}
    sim = LocalSimulator(local, START, 4, extras=extras)
    of_w = next(i for i, part in enumerate(local.parts(SPECS)) if "w" in part)
    due = {of_w: ("w", "moment"), 0: ("bn", "")}
    for step in range(8):
        for r, mine in enumerate(sim.extras):
            for owned in mine.values():
                for x in owned.values():
                    x[...] = r
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        for part in (0, 1):
            averaged = step % 4 == 2 * part + 1
            for owner, key in [due[part]] if part in due else []:
                values = [np.unique(mine[owner][key]).tolist() for mine in sim.extras]
                assert values == ([[1.5]] * 4 if averaged else [[0], [1], [2], [3]])


CONFIGURATIONS = {
    "plain": LocalSGD(3),
    "post local": LocalSGD(2, start_step=3, subgroup=2),
    "hierarchical": diloco({2: 2, "all": 6}, start_step=1),
    "fragments": diloco(4, fragments=3),
    "overlap": diloco(6, fragments=3, overlap=5),
    "eager": diloco(6, fragments=3, eager=True, compressor=PowerSGD(2, min_compression_rate=1.0)),
    "power_sgd": LocalSGD(3, compressor=PowerSGD(2, min_compression_rate=1.0)),
    "half step": diloco(3, fragments=2, compressor=PowerSGD(1, half_step=True, start_step=1, min_compression_rate=1.0)),
    "wire dtype": LocalSGD({2: 2, 4: 4}, subgroup=2, compressor=WireDtype(AllReduce(), "float16")),
    "buckets": LocalSGD(2, compressor=AllReduce(bucket_bytes=300)),
    "no feedback": LocalSGD(2, compressor=PowerSGD(1, error_feedback=False, min_compression_rate=1.0)),
    "by name": LocalSGD(4, fragments=2, compressor=PowerSGD({"w": 1}, min_compression_rate=1.0)),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_is_what_is_sent_and_no_array_is_used_after_it_was_given_away(name):
    local = CONFIGURATIONS[name]
    planned = plan(SHAPES, local, itemsize=8)
    phases, late = (local.compressor.cycle, local.compressor.start_step) if local.compressor else (1, 0)
    first = local.start_step + local.levels(4)[0].period * late
    sent, steps, extras = [], first + 2 * local.cycle * phases, {"bn": {"": np.ones(3)}}
    sim = train(local, steps, each=lambda sim: sent.append(sim.traffic))
    poisoned = train(local, steps, ops=PoisonOps(), extras=extras)
    np.testing.assert_equal(poisoned.parameters, sim.parameters)
    np.testing.assert_equal(poisoned.extras, [extras] * 4)
    assert planned.memory_bytes == sum(x.nbytes for m in sim.states[0].tensors.values() for x in m.values())
    assert sent[first:] == list(planned.steps) * 2
    # A compressor's start is counted in rounds: before it they are dense.
    assert sum(t.nbytes for t in sent[local.start_step : first]) == late * planned.dense_bytes
    assert planned.wire_bytes == np.mean([t.nbytes for t in sent[first:]])
    assert planned.peak_bytes == max(t.nbytes for t in sent[first:])
    # Whole bytes only where a half step sends P alone, or half of an odd number of them: tensor by tensor it is the same sum.
    assert sum(t.wire_bytes for t in planned.tensors) == pytest.approx(planned.wire_bytes, abs=len(SHAPES))


def test_the_plan_by_hand():
    one = plan({"w": (100, 10), "b": (10,)}, LocalSGD(8))
    assert (one.dense_bytes, one.wire_bytes, one.peak_bytes, one.collectives) == (4040, 505, 4040, 0.125)
    assert one.compression_ratio == 8
    nested = plan({"w": (100, 10)}, LocalSGD({8: 4, "all": 16}, subgroup=8))
    # A gradient in each step within subgroups; of four averages three within them, one among all.
    assert nested.wire_bytes == 4000 + 4000 / 4
    assert nested.subgroup_bytes == 4000 + 4000 * 3 / 16
    assert "largest step: 8,000 bytes" in str(nested)
    assert "among all: 250" in str(nested)
    cut = plan({f"p{i}": (1000,) for i in range(4)}, diloco(8, fragments=4))
    assert (cut.wire_bytes, cut.peak_bytes) == (2000, 4000)
    half = plan({"w": (64, 32)}, diloco(10, compressor=PowerSGD(2, half_step=True)))
    assert [t.nbytes for t in half.steps if t.nbytes] == [64 * 2 * 4, 32 * 2 * 4]
    assert half.tensors[0].rank == 2


@settings(max_examples=30)
@given(st.data())
def test_kinds_of_steps_are_counted_as_if_each_were_looked_at(data):
    long = data.draw(st.integers(1, 40))
    shorter = data.draw(st.lists(st.integers(1, 40), max_size=2, unique=True))
    steps = sorted({long, *shorter})
    period = long if len(steps) == 1 else dict(zip((2, 4, "all")[-len(steps) :], steps, strict=True))
    fragments = data.draw(st.integers(1, min(3, steps[0])))
    compressor = PowerSGD(1, half_step=True, start_step=data.draw(st.integers(0, 2)), min_compression_rate=1.0)
    outer = data.draw(st.sampled_from([{}, {"compressor": compressor}]))
    local = LocalSGD(period, start_step=data.draw(st.integers(0, 5)), fragments=fragments, **outer)
    planned = plan(SHAPES, local, world_size=8)
    listed = list(planned.steps)
    assert len(listed) == local.cycle * (2 if outer else 1)
    counted = collections.Counter()
    for traffic, times in planned.kinds:
        counted[traffic] += times
    assert counted == collections.Counter(listed)
    assert planned.steps[-1] == listed[-1]
    assert planned.steps[1:5] == tuple(listed[1:5])
    acting = [s for s in range(local.start_step, local.start_step + local.cycle) if local.acts(s, 8)]
    assert local.acting_steps(8) == acting


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "local",
    [
        LocalSGD(3_000_000),
        LocalSGD(1 << 62),
        diloco(1 << 62, fragments=3, compressor=PowerSGD(2, half_step=True)),
        LocalSGD({2: 1_000_003, 4: (1 << 40) + 1, "all": 1 << 62}, fragments=2),
    ],
    ids=repr,
)
def test_a_plan_takes_no_longer_for_a_longer_period(local):
    phases = local.compressor.cycle if local.compressor else 1
    planned = plan({f"p{i}": (100, 10) for i in range(4)}, local)
    assert sum(times for _, times in planned.kinds) == local.cycle * phases
    assert 0 < planned.wire_bytes < 16_000 / 900_000
    assert str(planned)


@pytest.mark.parametrize(
    ("local", "bad"),
    [
        (diloco(3), np.inf),
        (LocalSGD(3, compressor=PowerSGD(2, min_compression_rate=1.0)), np.nan),
        (LocalSGD(3, compressor=AllReduce()), np.inf),
    ],
)
def test_a_replica_that_went_wrong_comes_back_to_the_outer_parameters(local, bad):
    sim = train(local, 3)
    before = [state.map(np.array).tensors for state in sim.states]
    for step in range(3, 6):
        gradients = [gradient(r, step, p) for r, p in enumerate(sim.parameters)]
        if step == 4:
            gradients[2]["v"][3, 3] = bad
        with np.errstate(invalid="ignore"):
            sim.step(gradients, sgd)
    for p, state, old in zip(sim.parameters, sim.states, before, strict=True):
        np.testing.assert_equal(p, {n: old[n]["outer"] for n in SHAPES})
        for n in ("w", "v"):  # all of them, not only the one with the bad number
            np.testing.assert_equal(state.tensors[n], old[n])
    sim.step([gradient(r, 6, p) for r, p in enumerate(sim.parameters)], sgd)
    assert all(np.isfinite(p[n]).all() for p in sim.parameters for n in SHAPES)


@pytest.mark.parametrize("options", [{}, {"state_dtype": "float64"}, {"overlap": 1}, {"eager": True}], ids=str)
def test_what_overflows_as_it_is_added_up_leaves_outer_parameters_alone(options):
    """Each average is finite. The velocity, or the outer parameter as a parameter, is not."""
    local = LocalSGD(2, outer=OuterSGD(1.0, 0.9), **options)
    sim = LocalSimulator(local, {"w": np.zeros(4, np.float32)}, 2, dtype="float32")
    outers = []
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(12):
            sim.step([{"w": np.full(4, -7e37 if step < 6 else 1.0)}] * 2, lambda _, p, g: {"w": p["w"] - g["w"]})
            outers.append(sim.states[0].tensors["w"]["outer"].copy())
            assert all(np.isfinite(x).all() for state in sim.states for x in state.tensors["w"].values())
    assert np.max(outers) > 1e38  # the first average counts
    assert all(np.isfinite(p["w"]).all() for p in sim.parameters)


def test_outer_parameters_are_kept_in_the_dtype_asked_for():
    start = {n: x.astype(np.float16) for n, x in START.items()}
    sim = train(diloco(2, state_dtype="float32"), 4, start=start, dtype="float16")
    for p, state in zip(sim.parameters, sim.states, strict=True):
        assert {x.dtype.name for x in p.values()} == {"float16"}
        assert {x.dtype.name for m in state.tensors.values() for x in m.values()} == {"float32"}
        assert all(np.array_equal(p[n], state.tensors[n]["outer"].astype(np.float16)) for n in SHAPES)
    assert sim.traffic.nbytes == sum(4 * x.size for x in start.values())


def test_the_table_on_the_page_is_what_the_plan_says():
    page = (Path(__file__).parents[2] / "docs" / "local-sgd.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for code, *figures in rows:
        planned = plan(gpt(), eval(code, vars(gw)))
        among_all = planned.wire_bytes - planned.subgroup_bytes
        numbers = planned.wire_bytes, among_all, planned.peak_bytes
        assert figures == [*(f"{n:,.0f}" for n in numbers), f"{planned.collectives:g}"], code
