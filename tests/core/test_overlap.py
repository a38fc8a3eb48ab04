"""DiLoCo whose averages are taken later than their differences leave: against torchft's numbers, and against the papers written down by hand."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import LocalSGD, LocalSimulator, OuterSGD, PowerSGD, Spec, diloco
from gradwire.core.local_sgd.fragments import fragments_of, layers
from gradwire.core.plan.advice import warn_of_few_rounds
from gradwire.core.simulate import PoisonOps
from tests.core import golden
from tests.core.authors import muloco
from tests.core.test_local_sgd import SHAPES, SPECS, START, assert_close, average, gradient, sgd

TORCHFT, MULOCO = (
    json.loads((Path(__file__).parent / "authors" / f"{name}.json").read_text()) for name in ("torchft", "muloco")
)


@pytest.mark.parametrize("case", TORCHFT, ids=lambda case: f"delay {case['delay']}, alpha {case['alpha']}")
def test_torchft_comes_to_the_same_numbers(case):
    """There a difference leaves `delay` steps before the turn of its fragment, here at its turn: here begins so many steps earlier, with none taken."""
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
    assert {str(step): seen[step] for step in range(15)} == {k: x for k, x in case["parameters"].items() if int(k) < 15}
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


def by_hand(period, fragments, overlap, merge, nesterov, start_step, steps, *, replicas=3, lr=0.7, momentum=0.9):
    """Algorithm 2 of Streaming DiLoCo, for plain averages; of one fragment and no overlap it is DiLoCo, Algorithm 1 of Douillard et al. 2023."""
    parts = fragments_of(SPECS, fragments, "strided")
    ps, outer, velocity = [START] * replicas, START, {n: np.zeros(shape) for n, shape in SHAPES.items()}
    sent = {}
    for step in range(steps):
        ps, since = [sgd(r, p, gradient(r, step, p)) for r, p in enumerate(ps)], step + 1 - start_step
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
                    outer = outer | {n: outer[n] - lr * (mean + momentum * velocity[n] if nesterov else velocity[n])}
                    for r, (p, then) in enumerate(zip(ps, left, strict=True)):
                        progress = outer[n] + (p[n] - then[n])
                        ps[r] = p | {n: progress if merge == "progress" else merge * p[n] + (1 - merge) * outer[n]}
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
            gradients = [{n: [golden.gradient(r, step)] * 2 for n in golden.NAMES} for r in range(2)]
            sim.step(gradients, lambda _, p, g: {n: p[n] - 0.1 * np.array(g[n]) for n in p})
        return sim.states[1].tensors

    golden.assert_golden(schedule, memory_after)
    assert local.parts({n: Spec((2,)) for n in golden.NAMES}) == [list(part) for part in golden.PARTS]


@pytest.mark.parametrize(("replicas", "fragments"), [(1, 1), (3, 1), (2, 2)])
def test_eager_updates_are_what_the_paper_says(replicas, fragments):
    """Algorithm 2 of arXiv 2502.12996: the others' differences are those of the last round, its own the newest."""
    period, rate, momentum = 4, 0.7, 0.9
    local = diloco(period, eager=True, fragments=fragments)
    sim, parts = LocalSimulator(local, START, replicas, ops=PoisonOps()), local.parts(SPECS)
    ps, outers = [dict(START) for _ in range(replicas)], [dict(START) for _ in range(replicas)]
    speeds = [{n: np.zeros(SHAPES[n]) for n in START} for _ in range(replicas)]
    before = [{n: np.zeros(SHAPES[n]) for n in START} for _ in range(replicas)]
    for step in range(5 * period + 2):
        sim.step([gradient(r, step, p) for r, p in enumerate(sim.parameters)], sgd)
        ps = [sgd(r, p, gradient(r, step, p)) for r, p in enumerate(ps)]
        number, early = divmod((step + 1) % period or period, period // fragments)
        for n in parts[number - 1] if not early else ():
            now = [outer[n] - p[n] for outer, p in zip(outers, ps, strict=True)]
            for r in range(replicas):
                others = sum(before[m][n] for m in range(replicas) if m != r)
                step_by = (others + now[r]) / replicas
                speeds[r][n] = momentum * speeds[r][n] + step_by
                outers[r][n] = outers[r][n] - rate * (step_by + momentum * speeds[r][n])
                ps[r][n] = outers[r][n]
            for r in range(replicas):
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
            sim.step([gradient(r, step, p) if finite(p) else spoilt for r, p in enumerate(sim.parameters)], sgd)
        seen.append([finite(p) for p in sim.parameters])
        memories = [m for s in sim.states for m in s.tensors.values()]
        assert all(finite(m if step > 13 else {k: m[k] for k in m if k != "difference"}) for m in memories)
    assert seen == [[True, step != 2, True] for step in range(20)]  # fragments have their turns after steps 1, 3, 5, …
    assert not np.array_equal(sim.states[1].tensors["w"]["outer"], before)


def test_a_layer_is_what_shares_a_name_up_to_its_first_number():
    names = [f"h.{i}.{part}" for i in (0, 1, 2, 10, 11) for part in ("b", "w")] + ["wte", "ln_f"]
    assert [sorted({n.rpartition(".")[0] for n in layer}) for layer in layers(names)][:5] == [
        ["h.0"], ["h.1"], ["h.2"], ["h.10"], ["h.11"],
    ]  # fmt: skip
    assert layers(names)[5:] == [["ln_f"], ["wte"]]
    specs = {n: Spec((2,)) for n in names}
    strided, contiguous = (fragments_of(specs, 2, layout) for layout in ("strided", "contiguous"))
    assert {n.split(".")[1] for n in strided[0] if n[0] == "h"} == {"0", "2", "11"}
    assert {n.split(".")[1] for n in contiguous[0] if n[0] == "h"} == {"0", "1", "2", "10"}
    assert fragments_of(specs, 2, ("h.1*", "*"))[0] == [n for n in names if n.startswith("h.1")]


@settings(max_examples=40)
@given(st.permutations([f"block{i}/w" for i in range(12)] + ["head", "embed"]), st.integers(1, 8), st.data())
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
