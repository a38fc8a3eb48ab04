"""`max_norm`: each replica's gradient is clipped, by the norm of the whole model, before the error is added."""

import copy

import numpy as np
import pytest

from gradwire import LocalSGD, LocalSimulator, PowerSGD, Simulator, WireDtype, plan

SHAPES = {"w": (12, 10), "conv": (8, 3, 4), "b": (12,), "scalar": ()}


def gradients(rng, scales=(1.0, 1.0, 1.0)):
    return [{k: s * rng.normal(size=shape) for k, shape in SHAPES.items()} for s in scales]


def norm(gradient):
    return float(np.sqrt(sum((g * g).sum() for g in gradient.values())))


def clipped(gradient, max_norm):
    factor = min(1.0, max_norm / norm(gradient))
    return {k: factor * g for k, g in gradient.items()}


def same(a, b, rtol=1e-12):
    return all(np.allclose(a[k], b[k], rtol=rtol, atol=1e-12) for k in b)


@pytest.mark.parametrize("options", [{}, {"half_step": True}, {"error_feedback": False}], ids=repr)
def test_it_is_clipping_by_hand(options):
    """Of each replica by itself, over all tensors, the uncompressed ones too."""
    ours = Simulator(PowerSGD(2, max_norm=20.0, **options), SHAPES, replicas=3)
    by_hand = Simulator(PowerSGD(2, **options), SHAPES, replicas=3)
    unclipped = Simulator(PowerSGD(2, **options), SHAPES, replicas=3)
    rng = np.random.default_rng(0)
    for _ in range(5):
        step = gradients(rng, (0.5, 1.0, 8.0))
        assert norm(step[0]) < 20 < norm(step[2])
        average = ours.step(step)
        assert same(average, by_hand.step([clipped(g, 20.0) for g in step]))
        assert not same(average, unclipped.step(step), rtol=0.1)
    for a, b in zip(ours.states, by_hand.states, strict=True):
        assert all(same(a.tensors[name], b.tensors[name]) for name in b.tensors)


def test_what_is_short_enough_is_left_alone_to_the_bit():
    ours, plain = (Simulator(PowerSGD(2, max_norm=n), SHAPES, replicas=3) for n in (1e9, None))
    rng = np.random.default_rng(0)
    for _ in range(3):
        step = gradients(rng)
        a, b = ours.step(step), plain.step(step)
        assert all(np.array_equal(a[k], b[k]) for k in b)
        assert ours.traffic == plain.traffic  # nothing is sent for it
    assert plan(SHAPES, PowerSGD(2, max_norm=1.0)).steps == plan(SHAPES, PowerSGD(2)).steps


def test_dense_steps_are_not_clipped():
    simulator = Simulator(PowerSGD(2, max_norm=1.0, start_step=1), SHAPES, replicas=3)
    step = gradients(np.random.default_rng(0))
    mean = {k: np.mean([g[k] for g in step], axis=0) for k in SHAPES}
    assert same(simulator.step(step), mean)
    assert norm(simulator.step(step)) < 1.0 < norm(mean)


@pytest.mark.parametrize(("name", "value"), [("w", np.inf), ("b", -np.inf), ("scalar", np.nan)])
def test_a_gradient_that_is_not_finite_is_not_clipped_to_one_that_is(name, value):
    """Here and in every other tensor: all replicas see it, and skip the step."""
    simulator = Simulator(PowerSGD(2, max_norm=1.0), SHAPES, replicas=3)
    rng = np.random.default_rng(0)
    simulator.step(gradients(rng))
    before, step = copy.deepcopy(simulator.states), gradients(rng)
    step[1][name] = np.full(SHAPES[name], value)
    averages = simulator.step(step)
    assert all(np.isnan(g).all() for g in averages.values())
    for a, b in zip(simulator.states, before, strict=True):
        assert all(np.array_equal(a.tensors[n][k], b.tensors[n][k]) for n in b.tensors for k in b.tensors[n])


def test_a_norm_that_overflows_is_not_a_gradient_of_zeros():
    simulator = Simulator(PowerSGD(2, max_norm=1.0), SHAPES, replicas=2, dtype="float32")
    step = [{k: np.full(shape, value) for k, shape in SHAPES.items()} for value in (1e25, 1.0)]
    assert all(np.isnan(g).all() for g in simulator.step(step).values())


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_factor_beyond_half_precision(dtype):
    """1e-6 has hardly a digit in float16."""
    simulator = Simulator(PowerSGD(1, max_norm=1e-2), {"w": (40, 40)}, replicas=1, dtype=dtype)
    average = simulator.step([{"w": np.full((40, 40), 500.0)}])["w"].astype(np.float64)
    assert np.linalg.norm(average) == pytest.approx(1e-2, rel=5e-3)


def test_under_a_wire_dtype():
    step = gradients(np.random.default_rng(0), (8.0, 8.0))
    assert norm(Simulator(WireDtype(PowerSGD(2, max_norm=1.0), "float16"), SHAPES, replicas=2).step(step)) < 1.001


def test_of_differences_of_parameters():
    """What a compressor of `LocalSGD` is given."""
    start = {k: np.zeros(shape) for k, shape in SHAPES.items()}
    local = LocalSimulator(LocalSGD(1, compressor=PowerSGD(2, max_norm=1.0)), start, replicas=2)
    step = gradients(np.random.default_rng(0), (8.0, 8.0))
    local.step(step, lambda replica, params, g: {k: params[k] - g[k] for k in params})
    assert 0.1 < norm(local.parameters[0]) < 1.001
