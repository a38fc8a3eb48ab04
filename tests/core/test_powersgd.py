"""PowerSGD in the simulator against the paper's algorithm, written down once more in float64 with QR and columns."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.epfml import HalfSteps
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.kernels import random
from gradwire.core.protocol.collective_requests import Reduce
from gradwire.core.protocol.local_requests import Orthonormalize
from gradwire.core.simulate import NumpyOps, Simulator

STEPS = 6

seeds = st.integers(0, 2**32 - 1)
worlds = st.integers(1, 4)
matrices = st.tuples(st.integers(2, 24), st.integers(2, 24))
ranks = st.integers(1, 6)

#: Compresses whatever is a matrix: the reference below has no rule about sizes.
ALWAYS = {"min_compression_rate": 1e-3}


def gradients_of(seed, shape, world, steps=STEPS):
    """[step][replica]: one part common to all replicas and steps, one common to all steps, one of its own."""
    rng = np.random.default_rng(seed)
    common, own = rng.normal(size=shape), rng.normal(size=(world, *shape))
    return [[common + own[r] + rng.normal(size=shape) for r in range(world)] for _ in range(steps)]


def simulate(algorithm, gradients):
    """The averaged gradients and the errors of all replicas, step by step."""
    shape = gradients[0][0].shape
    simulator = Simulator(algorithm, {"w": shape}, replicas=len(gradients[0]))
    start = {k: v.copy() for k, v in simulator.states[0].tensors["w"].items()}
    trace = []
    for step in gradients:
        average = simulator.step([{"w": g} for g in step])["w"]
        trace.append((average, [s.tensors["w"].get("error") for s in simulator.states]))
    return start, trace


def orthonormal_columns(x):
    return np.linalg.qr(x)[0]


def transmit(inputs, q):
    """Algorithm 1 of the paper: inputs (n, m) of all replicas and Q (m, r) to P, each replica's Q, and the mean Q."""
    p = orthonormal_columns(np.mean([m @ q for m in inputs], axis=0))
    local = [m.T @ p for m in inputs]
    return p, local, np.mean(local, axis=0)


def powersgd(gradients, q, *, errors_of="local", fresh=None, present=1.0):
    """Updates and errors. `errors_of`: "local" for the paper, "mean" for torch's hook, None for no error feedback.

    `q` (m, r) of the first step; `fresh(step)` draws it anew for each. `present`: 0 where a matrix is filled up, which nobody sees.
    """
    errors = [np.zeros_like(g) for g in gradients[0]]
    trace = []
    for step, local in enumerate(gradients):
        inputs = [g + e for g, e in zip(local, errors, strict=True)]
        p, own, mean_q = transmit(inputs, fresh(step) if fresh else q)
        update = p @ mean_q.T * present
        if errors_of == "local":
            errors = [present * (m - p @ o.T) for m, o in zip(inputs, own, strict=True)]
        elif errors_of == "mean":
            errors = [m - update for m in inputs]
        q = mean_q
        trace.append((update, errors))
    return trace


def half_steps(gradients, q, *, present=1.0):
    """The two factors in turn, of which the other one's basis is known to everyone."""
    p, errors, trace = None, [np.zeros_like(g) for g in gradients[0]], []
    for step, local in enumerate(gradients):
        inputs = [g + e for g, e in zip(local, errors, strict=True)]
        if step % 2 == 0:
            basis = orthonormal_columns(q)
            sent = [m @ basis @ basis.T for m in inputs]
            p = np.mean([m @ basis for m in inputs], axis=0)
        else:
            basis = orthonormal_columns(p)
            sent = [basis @ basis.T @ m for m in inputs]
            q = np.mean([m.T @ basis for m in inputs], axis=0)
        errors = [present * (m - s) for m, s in zip(inputs, sent, strict=True)]
        trace.append((np.mean(sent, axis=0) * present, errors))
    return trace


def assert_same(trace, expected, *, errors=True, tolerance=1e-9):
    scale = max(np.abs(u).max() for u, _ in expected)
    for (update, error), (expected_update, expected_error) in zip(trace, expected, strict=True):
        np.testing.assert_allclose(update, expected_update, rtol=0, atol=tolerance * scale)
        if errors:
            for a, b in zip(error, expected_error, strict=True):
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@given(seeds, matrices, worlds, ranks)
def test_updates_and_errors_are_those_of_the_paper(seed, shape, world, rank):
    gradients = gradients_of(seed, shape, world)
    start, trace = simulate(PowerSGD(rank, seed=seed, **ALWAYS), gradients)
    assert start["q"].shape == (min(rank, *shape), shape[1])
    assert_same(trace, powersgd(gradients, start["q"].T))
    # torch's form of the error gives the same updates and mean errors.
    torchs = powersgd(gradients, start["q"].T, errors_of="mean")
    assert_same(*([(u, [np.mean(e, axis=0)]) for u, e in each] for each in (trace, torchs)))


@given(seeds, matrices, worlds, ranks)
def test_half_steps_alternate_the_two_factors(seed, shape, world, rank):
    """And their averages are those of epfml/powersgd, whose error is another one of the same mean."""
    gradients = gradients_of(seed, shape, world)
    start, trace = simulate(PowerSGD(rank, half_step=True, **ALWAYS), gradients)
    epfml = HalfSteps({"w": shape}, world, len(start["q"]), seed=0)
    epfml.q = {"w": start["q"].T.copy()}
    theirs = [(epfml([{"w": g} for g in local])["w"], None) for local in gradients]
    assert_same(trace, theirs, errors=False)
    assert_same(trace, half_steps(gradients, start["q"].T))


@st.composite
def views(draw):
    """A shape, the options of a view, and the matrices of a tensor as they are cut out by hand."""
    if draw(st.booleans()):
        shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple).filter(lambda s: np.prod(s) >= 4))
        side = int(np.ceil(np.sqrt(np.prod(shape))))
        return shape, {"square": True}, lambda x: [np.pad(x.ravel(), (0, side**2 - x.size)).reshape(side, side)]
    shape = draw(st.lists(st.integers(2, 5), min_size=2, max_size=4).map(tuple))
    stacked = draw(st.integers(0, len(shape) - 2))
    rows, transposed = draw(st.integers(1, len(shape) - stacked - 1)), draw(st.booleans())
    count, n = (int(np.prod(shape[a:b])) for a, b in ((0, stacked), (stacked, stacked + rows)))
    options = {"stacked": {"w": stacked}, "rows": {"w": rows}, "transpose": ("w",) * transposed}
    return shape, options, lambda x: [m.T if transposed else m for m in x.reshape(count, n, -1)]


OPTIONS = [{}, {"half_step": True}, {"error_feedback": False}, {"warm_start": False}]


@settings(max_examples=80)
@given(seeds, views(), worlds, ranks, st.sampled_from(OPTIONS))
def test_a_tensor_is_its_matrices_each_by_itself(seed, view, world, rank, options):
    """Without a warm start every step has a sketch of its own."""
    shape, seen, cut = view
    gradients = gradients_of(seed, shape, world, steps=4)
    start, trace = simulate(PowerSGD(rank, seed=7, **seen, **options, **ALWAYS), gradients)
    remembers, key, inside = "error_feedback" not in options, random.key(7, "w/q"), cut(np.ones(shape))
    factors = len(inside), min(rank, *inside[0].shape), inside[0].shape[1]
    for i, present in enumerate(inside):

        def fresh(step, i=i):
            return random.uniform(NumpyOps(), key, factors, step)[i].astype(float).T

        own = [[cut(g)[i] for g in local] for local in gradients]
        q = start["q"].reshape(factors)[i].T if "q" in start else None
        if "half_step" in options:
            expected = half_steps(own, q, present=present)
        else:
            errors_of = "local" if remembers else None
            expected = powersgd(own, q, errors_of=errors_of, fresh=None if "q" in start else fresh, present=present)
        mine = [(cut(update)[i], [cut(e)[i] for e in errors] if remembers else errors) for update, errors in trace]
        assert_same(mine, expected, errors=remembers)


def test_a_stack_is_one_request_of_each_kind():
    shapes = {"layers": (12, 20, 16), "bias": (12, 16), "w": (20, 16)}
    simulator = Simulator(PowerSGD(2, stacked={"layers": 1, "bias": 1}), shapes, replicas=2)
    simulator.step([{k: np.ones(s) for k, s in shapes.items()}] * 2)
    sent = [[a.shape for a in r.arrays] for r in simulator.requests if isinstance(r, Reduce)]
    # The biases are twelve vectors and travel as they are.
    assert sent == [[(12, 2, 20), (2, 20), (12, 16)], [(12, 2, 16), (2, 16)]]
    orthonormalized = [[a.shape for a in r.arrays] for r in simulator.requests if isinstance(r, Orthonormalize)]
    assert orthonormalized == [[(12, 2, 16), (2, 16)], [(12, 2, 20), (2, 20)]]


@pytest.mark.parametrize(
    "algorithm", [PowerSGD(4), PowerSGD(4, warm_start=False), PowerSGD(4, half_step=True)], ids=repr
)
@settings(max_examples=8)
@given(seed=seeds, world=worlds, true_rank=st.integers(1, 4))
def test_a_gradient_of_no_more_than_the_rank_is_recovered_exactly(algorithm, seed, world, true_rank):
    algorithm = dataclasses.replace(algorithm, **ALWAYS)
    rng = np.random.default_rng(seed)
    left, right = np.linalg.qr(rng.normal(size=(20, true_rank)))[0], np.linalg.qr(rng.normal(size=(16, true_rank)))[0]
    # The same low-rank space each step, so that also the half-step, which sees one side at a time, can find it.
    gradients = [[left @ rng.normal(size=(true_rank, true_rank)) @ right.T for _ in range(world)] for _ in range(6)]
    _, trace = simulate(algorithm, gradients)
    before = np.zeros((20, 16))
    for step, (entry, local) in enumerate(zip(trace, gradients, strict=True)):
        # A half-step that fits the rows leaves an error whose columns are those of the gradient: the next one sends it exactly.
        if not algorithm.half_step or step % 2 == 1:
            np.testing.assert_allclose(entry[0], np.mean(local, axis=0) + before, rtol=0, atol=1e-8)
            np.testing.assert_allclose(entry[1], np.zeros_like(entry[1]), rtol=0, atol=1e-8)
        before = mean_error(entry)


def mean_error(entry):
    return np.mean(entry[1], axis=0)


@pytest.mark.parametrize("half_step", [False, True])
def test_directions_lost_to_a_poor_gradient_come_back(half_step):
    """After a zero or a low-rank gradient the surplus directions of the factor are drawn anew; power iteration never would."""
    rng = np.random.default_rng(0)

    def rich():
        return rng.normal(size=(16, 3)) @ rng.normal(size=(3, 12))

    for poor in (np.zeros((16, 12)), np.outer(np.arange(16.0), np.ones(12))):
        simulator = Simulator(PowerSGD(3, half_step=half_step, error_feedback=False), {"w": (16, 12)}, replicas=2)
        for _ in range(4):
            result = simulator.step([{"w": poor}] * 2)["w"]
        np.testing.assert_allclose(result, poor, atol=1e-10)
        matrix = rich()
        for _ in range(4 if half_step else 1):
            result = simulator.step([{"w": matrix}] * 2)["w"]
        np.testing.assert_allclose(result, matrix, atol=1e-9)


def test_float32_and_half_precision_follow_the_float64_run():
    shapes = {"w": (20, 15), "b": (15,)}
    rng = np.random.default_rng(1)
    low = rng.normal(size=(20, 2)) @ rng.normal(size=(2, 15))
    steps = [
        [{"w": low + 0.1 * rng.normal(size=(20, 15)), "b": rng.normal(size=15)} for _ in range(2)] for _ in range(8)
    ]
    oracle = Simulator(PowerSGD(2), shapes, replicas=2)
    expected = [oracle.step(s)["w"] for s in steps]
    for dtype, tolerance in (("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 8e-2)):
        simulator = Simulator(PowerSGD(2), shapes, replicas=2, dtype=dtype)
        for step, e in zip(steps, expected, strict=True):
            result = simulator.step(step)["w"]
            assert result.dtype.name == dtype
            assert np.linalg.norm(result.astype(float) - e) <= tolerance * np.linalg.norm(e)
        assert {v.dtype.name for v in simulator.states[0].tensors["w"].values()} == {dtype}


def test_every_tensor_has_random_numbers_of_its_own():
    shapes = {"a": (12, 10), "b": (12, 10)}
    first, again, other = (Simulator(PowerSGD(2, seed=s), shapes, replicas=2).states for s in (0, 0, 1))
    qs = [first[0].tensors["a"], first[0].tensors["b"], other[0].tensors["a"]]
    for i, x in enumerate(qs):
        for y in qs[:i]:
            assert not np.intersect1d(x["q"], y["q"]).size
    for states in (first, again):
        for state in states:
            np.testing.assert_array_equal(state.tensors["a"]["q"], qs[0]["q"])
