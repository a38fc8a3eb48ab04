"""Local SGD in the lock-step simulator, against what the papers say, written down by hand, and
against torchft's and MuLoCo's numbers."""

import collections
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from benchmarks.shapes import gpt
from gradwire import (
    AllReduce,
    LocalSGD,
    LocalSimulator,
    OuterSGD,
    PowerSGD,
    Spec,
    WireDtype,
    diloco,
    plan,
)
from gradwire.core.local_sgd.fragments import fragments_of, layers
from gradwire.core.local_sgd.turns import all_turns, is_of_another_step
from gradwire.core.plan.advice import warn_of_few_rounds
from gradwire.core.protocol.reductions import Reduce
from gradwire.core.simulate import PoisonOps
from tests.core import golden
from tests.core.authors import muloco

SHAPES = {"w": (10, 8), "v": (9, 12), "b": (7,), "s": ()}
SPECS = {n: Spec(shape) for n, shape in SHAPES.items()}
RATE = 0.1
rng = np.random.default_rng(0)
START = {n: rng.standard_normal(shape) for n, shape in SHAPES.items()}
#: Replica r pulls towards its own target with its own strength, and wanders.
TARGETS = [{n: rng.standard_normal(shape) for n, shape in SHAPES.items()} for _ in range(4)]


def gradient(replica, step, p):
    noise = np.random.default_rng([replica, step])
    return {
        n: (0.5 + 0.4 * replica) * (p[n] - TARGETS[replica][n])
        + 0.1 * noise.standard_normal(SHAPES[n])
        for n in p
    }


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
    """By hand: each replica steps by itself, and `meet(step, parameters)` says where they all are
    then."""
    sim, ps = LocalSimulator(local, START, 4), [START] * 4
    for step in range(steps):
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        ps = meet(step, [sgd(r, p, gradient(r, step, p)) for r, p in enumerate(ps)])
        for mine, expected in zip(sim.parameters, ps, strict=True):
            assert_close(mine, expected, rtol)


@pytest.mark.parametrize(
    ("local", "period"),
    [
        *(
            (local, 1)
            for local in (LocalSGD(1), LocalSGD(1, outer=OuterSGD()), LocalSGD(9, start_step=50))
        ),
        *(
            (LocalSGD(3, **options), 3)
            for options in ({}, {"outer": OuterSGD(1.0)}, {"compressor": AllReduce()})
        ),
    ],
)
def test_averaging_now_and_then_by_hand(local, period):
    """After every step it is synchronous SGD."""
    assert_wandered(
        local, 14, lambda step, ps: [average(ps)] * 4 if step % period == period - 1 else ps
    )


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


HALF, PAIRS, EVERYONE = [], [(((0, 1), (2, 3)), 4)], [(None, 4)]


@pytest.mark.parametrize(
    ("local", "expected", "equal"),
    [
        # Two in pairs after every second step, all four after every fourth, where pairs are due as
        # well and lose.
        (
            LocalSGD({2: 2, 4: 4}),
            [HALF, PAIRS, HALF, EVERYONE] * 2 + [HALF],
            [True, False, False, False],
        ),
        # Gradients are averaged among all until the start, and then never again.
        (LocalSGD(100, start_step=5), [EVERYONE] * 5 + [[]] * 7, [True, False, False, False]),
        (
            LocalSGD(100, start_step=5, subgroup=2),
            [EVERYONE] * 5 + [PAIRS] * 7,
            [True, True, False, False],
        ),
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
    """Moments with their parameter's fragment, buffers with the first; as they are, whatever
    happens to parameters."""
    local = diloco(4, fragments=2)
    extras = {"w": {"moment": np.zeros((10, 8))}, "bn": {"": np.zeros(3)}}
    sim = LocalSimulator(local, START, 4, extras=extras)
    part_of = {
        ("w", "moment"): next(i for i, part in enumerate(local.parts(SPECS)) if "w" in part),
        ("bn", ""): 0,
    }
    for step in range(8):
        for r, mine in enumerate(sim.extras):
            for owner, key in part_of:
                mine[owner][key][...] = r
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        for (owner, key), part in part_of.items():
            values = [np.unique(mine[owner][key]).tolist() for mine in sim.extras]
            assert values == ([[1.5]] * 4 if step % 4 == 2 * part + 1 else [[0], [1], [2], [3]])


CONFIGURATIONS = {
    "plain": LocalSGD(3),
    "post local": LocalSGD(2, start_step=3, subgroup=2),
    "hierarchical": diloco({2: 2, "all": 6}, start_step=1),
    "fragments": diloco(4, fragments=3),
    "overlap": diloco(6, fragments=3, overlap=5),
    "eager": diloco(6, fragments=3, eager=True, compressor=PowerSGD(2, min_compression_rate=1.0)),
    "power_sgd": LocalSGD(3, compressor=PowerSGD(2, min_compression_rate=1.0)),
    "half step": diloco(
        3,
        fragments=2,
        compressor=PowerSGD(1, half_step=True, start_step=1, min_compression_rate=1.0),
    ),
    "wire dtype": LocalSGD({2: 2, 4: 4}, subgroup=2, compressor=WireDtype(AllReduce(), "float16")),
    "buckets": LocalSGD(2, compressor=AllReduce(bucket_bytes=300)),
    "no feedback": LocalSGD(
        2, compressor=PowerSGD(1, error_feedback=False, min_compression_rate=1.0)
    ),
    "by name": LocalSGD(4, fragments=2, compressor=PowerSGD({"w": 1}, min_compression_rate=1.0)),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_is_what_is_sent_and_no_array_is_used_after_it_was_given_away(name):
    local = CONFIGURATIONS[name]
    planned = plan(SHAPES, local, itemsize=8)
    phases, late = (
        (local.compressor.cycle, local.compressor.start_step) if local.compressor else (1, 0)
    )
    first = local.start_step + local.levels(4)[0].period * late
    sent, steps, extras = [], first + 2 * local.cycle * phases, {"bn": {"": np.ones(3)}}
    sim = train(local, steps, each=lambda sim: sent.append(sim.traffic))
    poisoned = train(local, steps, ops=PoisonOps(), extras=extras)
    np.testing.assert_equal(poisoned.parameters, sim.parameters)
    np.testing.assert_equal(poisoned.extras, [extras] * 4)
    assert planned.memory_bytes == sum(
        x.nbytes for m in sim.states[0].tensors.values() for x in m.values()
    )
    counted = sent[first:]
    if (
        local.overlap or local.eager
    ):  # what leaves is taken later, so that of the first cycle something is still on its way
        counted = sent[-len(planned.steps) :]
        assert collections.Counter(counted) == collections.Counter(planned.steps)
    else:
        assert counted == list(planned.steps) * 2
    # A compressor's start is counted in rounds: before it they are dense.
    assert sum(t.nbytes for t in sent[local.start_step : first]) == late * planned.dense_bytes
    assert planned.wire_bytes == np.mean([t.nbytes for t in counted])
    assert planned.peak_bytes == max(t.nbytes for t in counted)
    # Whole bytes only where a half step sends P alone, or half of an odd number of them: tensor by
    # tensor it is the same sum.
    assert sum(t.wire_bytes for t in planned.tensors) == pytest.approx(
        planned.wire_bytes, abs=len(SHAPES)
    )


def test_the_plan_by_hand():
    one = plan({"w": (100, 10), "b": (10,)}, LocalSGD(8))
    assert (one.dense_bytes, one.wire_bytes, one.peak_bytes, one.collectives) == (
        4040,
        505,
        4040,
        0.125,
    )
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
    steps = sorted(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True)))
    period = (
        steps[0] if len(steps) == 1 else dict(zip((2, 4, "all")[-len(steps) :], steps, strict=True))
    )
    fragments, late = data.draw(st.integers(1, min(3, steps[0]))), data.draw(st.integers(0, 2))
    half = PowerSGD(1, half_step=True, start_step=late, min_compression_rate=1.0)
    outer = data.draw(st.sampled_from([{}, {"compressor": half}]))
    local = LocalSGD(period, start_step=data.draw(st.integers(0, 5)), fragments=fragments, **outer)
    planned = plan(SHAPES, local, world_size=8)
    listed, counted = list(planned.steps), collections.Counter()
    assert len(listed) == local.cycle * (2 if outer else 1)
    for traffic, times in planned.kinds:
        counted[traffic] += times
    assert counted == collections.Counter(listed)
    assert (planned.steps[-1], planned.steps[1:5]) == (listed[-1], tuple(listed[1:5]))
    acting = [
        s for s in range(local.start_step, local.start_step + local.cycle) if local.acts(s, 8)
    ]
    assert local.acting_steps(8) == acting
    delayed = (
        replace(
            local, **data.draw(st.sampled_from([{}, {"overlap": steps[-1] // 2}, {"eager": True}]))
        )
        if outer
        else local
    )
    turns, number = all_turns(delayed), local.start_step + 3 * local.cycle
    assert len(turns) == len({*turns})
    assert {*turns} == {delayed.turn(n) for n in range(number)}
    for told in turns[:5]:
        for n in range(min(number, 10)):
            assert is_of_another_step(delayed, told, n) == (told != delayed.turn(n))


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
    assert len(local.periods) > 1 or len(all_turns(local)) == local.fragments + 1
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


@pytest.mark.parametrize(
    "options", [{}, {"state_dtype": "float64"}, {"overlap": 1}, {"eager": True}], ids=str
)
def test_what_overflows_as_it_is_added_up_leaves_outer_parameters_alone(options):
    """Each average is finite. The velocity, or the outer parameter as a parameter, is not."""
    local = LocalSGD(2, outer=OuterSGD(1.0, 0.9), **options)
    sim = LocalSimulator(local, {"w": np.zeros(4, np.float32)}, 2, dtype="float32")
    outers = []
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(12):
            sim.step(
                [{"w": np.full(4, -7e37 if step < 6 else 1.0)}] * 2,
                lambda _, p, g: {"w": p["w"] - g["w"]},
            )
            outers.append(sim.states[0].tensors["w"]["outer"].copy())
            assert all(
                np.isfinite(x).all() for state in sim.states for x in state.tensors["w"].values()
            )
    assert np.max(outers) > 1e38  # the first average counts
    assert all(np.isfinite(p["w"]).all() for p in sim.parameters)


def test_outer_parameters_are_kept_in_the_dtype_asked_for():
    start = {n: x.astype(np.float16) for n, x in START.items()}
    sim = train(diloco(2, state_dtype="float32"), 4, start=start, dtype="float16")
    for p, state in zip(sim.parameters, sim.states, strict=True):
        assert {x.dtype.name for x in p.values()} == {"float16"}
        assert {x.dtype.name for m in state.tensors.values() for x in m.values()} == {"float32"}
        assert all(
            np.array_equal(p[n], state.tensors[n]["outer"].astype(np.float16)) for n in SHAPES
        )
    assert sim.traffic.nbytes == sum(4 * x.size for x in start.values())


def test_the_table_on_the_page_is_what_the_plan_says():
    page = (Path(__file__).parents[2] / "docs" / "evidence.md").read_text()
    rows = re.findall(
        r"^\| `(.+?)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 9
    for code, *figures in rows:
        planned = plan(gpt(), eval(code, vars(gw)))
        among_all = planned.wire_bytes - planned.subgroup_bytes
        numbers = planned.wire_bytes, among_all, planned.peak_bytes
        assert figures == [*(f"{n:,.0f}" for n in numbers), f"{planned.collectives:g}"], code


TORCHFT, MULOCO = (
    json.loads((Path(__file__).parent / "authors" / f"{name}.json").read_text())
    for name in ("torchft", "muloco")
)


@pytest.mark.parametrize(
    "case", TORCHFT, ids=lambda case: f"delay {case['delay']}, alpha {case['alpha']}"
)
def test_torchft_comes_to_the_same_numbers(case):
    """There a difference leaves `delay` steps before the turn of its fragment, here at its turn:
    here begins so many steps earlier, with none taken."""
    delay, names = case["delay"], ["layers.0", "layers.1"]
    outer = OuterSGD(lr=2.0)
    local = LocalSGD(6, fragments=2, overlap=delay, merge=case["alpha"], outer=outer)
    sim = LocalSimulator(local, {n: [1.0] for n in names}, 2)
    seen, outers = {}, {}
    for step in range(-delay, 15):
        seen[step] = [float(sim.parameters[0][n][0]) for n in names]
        outers[step] = [float(sim.states[0].tensors[n]["outer"][0]) for n in names]
        gradients = [{n: [0.0 if step < 0 else 2.0] for n in names}] * 2
        sim.step(gradients, lambda _, p, g: {n: p[n] - g[n] for n in p})
    assert {str(step): seen[step] for step in range(15)} == {
        k: x for k, x in case["parameters"].items() if int(k) < 15
    }
    assert {step: outers[int(step)] for step in case["outer"]} == case["outer"]


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_authors_of_muloco_come_to_the_same_numbers(replicas):
    """Replicas that all do the same are one."""
    a, target, begin = muloco.problem()
    sim = LocalSimulator(diloco(muloco.PERIOD, **muloco.OUTER), {"w": begin}, replicas)
    for step in range(1, muloco.STEPS + 1):
        gradients = [{"w": a.T @ (a @ p["w"] - target) / 6} for p in sim.parameters]
        sim.step(gradients, lambda _, p, g: {"w": p["w"] - muloco.RATE * g["w"]})
        if str(step) in MULOCO:
            np.testing.assert_allclose(sim.parameters[-1]["w"], MULOCO[str(step)], rtol=1e-9)
    assert len(MULOCO) == 10


def by_hand(
    period,
    fragments,
    overlap,
    merge,
    nesterov,
    start_step,
    steps,
    *,
    replicas=3,
    lr=0.7,
    momentum=0.9,
):
    """Algorithm 2 of Streaming DiLoCo, for uncompressed averages; of one fragment and no overlap it
    is DiLoCo, Algorithm 1 of Douillard et al. 2023."""
    parts = fragments_of(SPECS, fragments, "strided")
    ps, outer, velocity = (
        [START] * replicas,
        START,
        {n: np.zeros(shape) for n, shape in SHAPES.items()},
    )
    sent = {}
    for step in range(steps):
        ps, since = (
            [sgd(r, p, gradient(r, step, p)) for r, p in enumerate(ps)],
            step + 1 - start_step,
        )
        if since <= 0:
            outer = average(ps)
            ps = [outer] * replicas
        for number, part in enumerate(parts):
            turn = (number + 1) * period // fragments
            if since >= turn and (since - turn) % period == 0:
                sent[number] = [{n: p[n] for n in part} for p in ps]
            if number in sent and (since - overlap - turn) % period == 0:
                left = sent.pop(number)
                for n in part:
                    mean = np.mean([outer[n] - p[n] for p in left], axis=0)
                    velocity[n] = momentum * velocity[n] + mean
                    outer = outer | {
                        n: outer[n]
                        - lr * (mean + momentum * velocity[n] if nesterov else velocity[n])
                    }
                    for r, (p, then) in enumerate(zip(ps, left, strict=True)):
                        progress = outer[n] + (p[n] - then[n])
                        ps[r] = p | {
                            n: progress
                            if merge == "progress"
                            else merge * p[n] + (1 - merge) * outer[n]
                        }
    return ps, outer


@settings(max_examples=35)
@given(
    period=st.integers(3, 7),
    fragments=st.sampled_from([1, 2, 3]),
    overlap=st.integers(0, 6),
    merge=st.sampled_from([0.0, None, 0.3, "progress"]),
    nesterov=st.booleans(),
    start_step=st.sampled_from([0, 4]),
)
def test_streaming_is_what_the_paper_says(period, fragments, overlap, merge, nesterov, start_step):
    """Which merges halves, where nothing else is said."""
    overlap, steps = min(overlap, period - 1), start_step + 3 * period + 1
    late = {"overlap": overlap, "merge": merge, "nesterov": nesterov, "start_step": start_step}
    sim = LocalSimulator(diloco(period, fragments=fragments, **late), START, 3, ops=PoisonOps())
    for step in range(steps):
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
    if merge is None:
        merge = 0.5 if overlap else 0.0
    expected, outer = by_hand(period, fragments, overlap, merge, nesterov, start_step, steps)
    for mine, theirs in zip(sim.parameters, expected, strict=True):
        assert_close(mine, theirs, 1e-9)
    assert_close({n: sim.states[0].tensors[n]["outer"] for n in START}, outer, 1e-9)


@pytest.mark.parametrize("schedule", golden.SCHEDULES)
def test_the_simulator_keeps_to_the_golden_schedule(schedule):
    local, start = golden.SCHEDULES[schedule], {n: [1.0, 2.0] for n in golden.NAMES}
    sim = LocalSimulator(local, start, 2)

    def memory_after(step):
        if step >= 0:
            gradients = [
                {n: [golden.gradient(r, step)] * 2 for n in golden.NAMES} for r in range(2)
            ]
            sim.step(gradients, lambda _, p, g: {n: p[n] - 0.1 * np.array(g[n]) for n in p})
        return sim.states[1].tensors

    golden.assert_golden(schedule, memory_after)
    assert local.parts({n: Spec((2,)) for n in golden.NAMES}) == [
        list(part) for part in golden.PARTS
    ]


@pytest.mark.parametrize(("replicas", "fragments"), [(1, 1), (3, 1), (2, 2)])
def test_eager_updates_are_what_the_paper_says(replicas, fragments):
    """Algorithm 2 of arXiv 2502.12996: the others' differences are those of the last round, its own
    the newest."""
    period, rate, momentum = 4, 0.7, 0.9
    local = diloco(period, eager=True, fragments=fragments)
    sim, parts = LocalSimulator(local, START, replicas, ops=PoisonOps()), local.parts(SPECS)
    ps, outers = ([dict(START) for _ in range(replicas)] for _ in range(2))
    speeds, before = (
        [{n: np.zeros(SHAPES[n]) for n in START} for _ in range(replicas)] for _ in range(2)
    )
    for step in range(5 * period + 2):
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        ps = [sgd(r, p, gradient(r, step, p)) for r, p in enumerate(ps)]
        number, early = divmod((step + 1) % period or period, period // fragments)
        for n in parts[number - 1] if not early else ():
            now, last = (
                [outer[n] - p[n] for outer, p in zip(outers, ps, strict=True)],
                [d[n] for d in before],
            )
            for r in range(replicas):
                step_by = (sum(last) - last[r] + now[r]) / replicas
                speeds[r][n] = momentum * speeds[r][n] + step_by
                ps[r][n] = outers[r][n] = outers[r][n] - rate * (step_by + momentum * speeds[r][n])
                before[r][n] = now[r]
    for mine, theirs in zip(sim.parameters, ps, strict=True):
        assert_close(mine, theirs, 1e-9)


DELAYED = [{"overlap": 2}, {"overlap": 3, "fragments": 3, "merge": "progress"}, {"eager": True}]


@pytest.mark.parametrize("options", DELAYED, ids=repr)
@pytest.mark.parametrize("compressor", [None, PowerSGD(2, min_compression_rate=1)], ids=repr)
def test_a_run_that_stops_anywhere_goes_on_with_the_same_bits(compressor, options):
    """All that is on its way is in the memory: a copy of parameters and states is enough."""
    local = diloco(4, compressor=compressor, **options)
    through = LocalSimulator(local, START, 2, dtype="float32")
    for step in range(13):
        again = LocalSimulator(local, START, 2, dtype="float32")
        again.parameters = [{n: np.array(x) for n, x in p.items()} for p in through.parameters]
        again.states = [s.map(np.array) for s in through.states]
        again.steps = through.steps
        for sim in (through, again):
            sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        assert_close(again.parameters[1], through.parameters[1], 0)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": 2, "compressor": PowerSGD(2, min_compression_rate=1)},
        {"overlap": 1, "merge": "progress"},
        {"eager": True},
        {"eager": True, "compressor": PowerSGD(2, min_compression_rate=1)},
    ],
)
@pytest.mark.parametrize("broken", [list(START), ["w"]], ids=["whole", "in part"])
def test_a_replica_that_breaks_comes_back_with_all_its_fragments(options, broken):
    """A gradient depends on all parameters: what has not come back breaks what has."""
    sim, seen = LocalSimulator(diloco(6, fragments=3, **options), START, 3, ops=PoisonOps()), []

    def finite(tree):
        return all(np.isfinite(x).all() for x in tree.values())

    for step in range(20):
        if step == 2:
            for n in broken:
                sim.parameters[1][n][...] = np.nan
        if step == 14:
            before = sim.states[1].tensors["w"]["outer"].copy()
        spoilt = {n: np.full(SHAPES[n], np.nan) for n in START}
        with np.errstate(all="ignore"):
            sim.step(
                [
                    gradient(r, step, p) if finite(p) else spoilt
                    for r, p in enumerate(sim.parameters)
                ],
                sgd,
            )
        seen.append([finite(p) for p in sim.parameters])
        memories = [m for s in sim.states for m in s.tensors.values()]
        assert all(
            finite(m if step > 13 else {k: m[k] for k in m if k != "difference"}) for m in memories
        )
    # fragments have their turns after steps 1, 3, 5, …
    assert seen == [[True, step != 2, True] for step in range(20)]
    assert not np.array_equal(sim.states[1].tensors["w"]["outer"], before)


@pytest.mark.parametrize("period", [{2: 3, "all": 6}, 6])
def test_hierarchies_and_a_start_have_their_turns_as_before(period):
    """Between replicas that all do the same an overlap of a plain merge only postpones."""
    now, later = (
        LocalSimulator(diloco(period, start_step=2, lr=1.0, momentum=0.0, **options), START, 4)
        for options in ({}, {"overlap": 2, "merge": "progress"})
    )
    for step in range(22):
        for sim in (now, later):
            same = gradient(0, step, START)
            sim.step([same] * 4, lambda _, p, g: {n: p[n] - 0.1 * g[n] for n in p})
    assert_close(later.parameters[2], now.parameters[2], 1e-9)


def test_a_layer_is_what_shares_a_name_up_to_its_first_number():
    names = [f"h.{i}.{part}" for i in (0, 1, 2, 10, 11) for part in ("b", "w")] + ["wte", "ln_f"]
    assert [sorted({n.rpartition(".")[0] for n in layer}) for layer in layers(names)][:5] == [
        ["h.0"], ["h.1"], ["h.2"], ["h.10"], ["h.11"],
    ]  # fmt: skip
    assert layers(names)[5:] == [["ln_f"], ["wte"]]
    longer = [
        f"h{'0' * zeros}{digit}{'1' * 5000}"
        for zeros, digit in ((0, "9"), (1, "2"), (0, "10"), (0, "2"))
    ]
    assert layers(longer) == [sorted(longer[1::2]), longer[:1], longer[2:3]]
    specs = {n: Spec((2,)) for n in names}
    strided, contiguous = (fragments_of(specs, 2, layout) for layout in ("strided", "contiguous"))
    assert {n.split(".")[1] for n in strided[0] if n[0] == "h"} == {"0", "2", "11"}
    assert {n.split(".")[1] for n in contiguous[0] if n[0] == "h"} == {"0", "1", "2", "10"}
    assert fragments_of(specs, 2, ("h.1*", "*"))[0] == [n for n in names if n.startswith("h.1")]


@settings(max_examples=40)
@given(
    st.permutations([f"block{i}/w" for i in range(12)] + ["head", "embed"]),
    st.integers(1, 8),
    st.data(),
)
def test_fragments_are_a_partition_by_name_alone(names, count, data):
    layout = data.draw(st.sampled_from(["strided", "contiguous", "size"]))
    specs = {n: Spec((data.draw(st.integers(1, 50)), 3)) for n in names}
    parts = fragments_of(specs, count, layout)
    assert sorted(n for part in parts for n in part) == sorted(names)
    assert len(parts) == count
    assert all(parts)
    again = fragments_of({n: specs[n] for n in sorted(names)}, count, layout)
    assert [set(part) for part in parts] == [set(part) for part in again]
    if layout == "size":  # balanced to within one tensor
        filled = [sum(specs[n].nbytes for n in part) for part in parts]
        assert max(filled) - min(filled) <= max(spec.nbytes for spec in specs.values())


@pytest.mark.parametrize(
    ("local", "steps", "said"),
    [
        *((diloco(10), steps, steps == 499) for steps in (499, 500, None)),
        (diloco(10, start_step=100), 550, True),
        (LocalSGD(10), 20, False),
    ],
)
def test_a_run_with_few_outer_steps_is_told(local, steps, said):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_few_rounds(local, steps)
    assert [f"steps={steps}" in str(each.message) for each in found] == [True] * said
