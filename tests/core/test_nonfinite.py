"""A step with an inf or NaN on one replica: everyone skips it, and it leaves no trace."""

import copy

import numpy as np
import pytest

from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.algorithms.wire_dtype import WireDtype
from gradwire.core.simulate import Simulator

SHAPES = {"w": (12, 10), "conv": (8, 3, 4), "b": (12,), "scalar": ()}
COMPRESSED = ("w", "conv")

ALGORITHMS = [
    PowerSGD(2),
    PowerSGD(2, error_feedback=False),
    PowerSGD(2, half_step=True),
    PowerSGD(2, half_step=True, start_step=1),
    PowerSGD(2, square=True),
    PowerSGD(2, state_dtype="float64"),
    PowerSGD(2, max_norm=5.0),
    WireDtype(PowerSGD(2), "bfloat16"),
]


def gradients(rng):
    return [{k: rng.normal(size=s) for k, s in SHAPES.items()} for _ in range(3)]


def spoil(step, replica, name, value):
    spoiled = copy.deepcopy(step)
    target = np.asarray(spoiled[replica][name])
    target.reshape(-1)[target.size // 3] = value
    spoiled[replica][name] = target
    return spoiled


def assert_same_state(a, b):
    for x, y in zip(a, b, strict=True):
        assert x.shared.keys() == y.shared.keys()
        for key in x.shared:
            np.testing.assert_array_equal(x.shared[key], y.shared[key])
        for name in x.tensors:
            for key in x.tensors[name]:
                # Bits, not values: -0.0 is not 0.0.
                assert x.tensors[name][key].tobytes() == y.tensors[name][key].tobytes(), (name, key)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("value", "at"), [(-np.inf, 2), (np.nan, 3)])
def test_a_bad_step_is_non_finite_everywhere_and_leaves_no_trace(algorithm, name, value, at):
    rng = np.random.default_rng(0)
    steps = [gradients(rng) for _ in range(6)]
    skipping, plain = (Simulator(algorithm, SHAPES, replicas=3, dtype="float32") for _ in range(2))
    assert set(plain.states[0].tensors) == set(COMPRESSED)
    for i, step in enumerate(steps):
        if i == at:
            before = copy.deepcopy(skipping.states)
            # The simulator itself checks that all replicas are given the same.
            averages = skipping.step(spoil(step, replica=i % 3, name=name, value=value))
            assert not np.isfinite(averages[name]).all()
            for compressed in COMPRESSED:
                assert np.isnan(averages[compressed]).all()
            assert_same_state(skipping.states, before)
        a, b = skipping.step(step), plain.step(step)
        for key in SHAPES:
            np.testing.assert_array_equal(a[key], b[key])
        assert_same_state(skipping.states, plain.states)


def test_without_warm_start_the_error_alone_is_kept():
    """Its sketch depends on the number of the step, so here the step is repeated, not shifted."""
    rng = np.random.default_rng(0)
    step = gradients(rng)
    simulator = Simulator(PowerSGD(2, warm_start=False), SHAPES, replicas=3)
    simulator.step(step)
    before = copy.deepcopy(simulator.states)
    assert np.isnan(simulator.step(spoil(step, 1, "w", np.inf))["w"]).all()
    assert_same_state(simulator.states, before)
    assert np.isfinite(simulator.step(step)["w"]).all()


def test_a_bad_number_in_an_uncompressed_tensor_alone_stops_the_phase():
    simulator = Simulator(PowerSGD(2, half_step=True), SHAPES, replicas=2)
    for value, phase in ((1.0, 1), (np.nan, 1), (1.0, 0)):
        simulator.step([{"b": np.full(12, value)}, {"b": np.ones(12)}])
        assert [int(s.shared["phase"]) for s in simulator.states] == [phase] * 2


def test_no_message_is_added_to_find_out():
    rng = np.random.default_rng(0)
    simulator = Simulator(PowerSGD(2), SHAPES, replicas=3)
    simulator.step(gradients(rng))
    usual = simulator.traffic
    simulator.step(spoil(gradients(rng), 0, "w", np.nan))
    assert simulator.traffic == usual


def test_opposite_infinities_do_not_cancel():
    rng = np.random.default_rng(0)
    step = spoil(spoil(gradients(rng), 0, "w", np.inf), 1, "w", -np.inf)
    averages = Simulator(PowerSGD(2), SHAPES, replicas=3).step(step)
    assert np.isnan(averages["w"]).all()


def test_a_gradient_too_large_for_its_dtype_is_skipped():
    """Finite on every replica, but not its product with the factor."""
    rng = np.random.default_rng(0)
    step = gradients(rng)
    for replica in step:
        replica["w"] = np.full(SHAPES["w"], 3e38)
    simulator = Simulator(PowerSGD(2, min_compression_rate=0.1), SHAPES, replicas=3, dtype="float32")
    before = copy.deepcopy(simulator.states)
    assert np.isnan(simulator.step(step)["w"]).all()
    assert_same_state(simulator.states, before)


@pytest.mark.parametrize("name", ["w", "b"])
def test_overflow_on_a_float16_wire_is_a_bad_step(name):
    step = gradients(np.random.default_rng(0))
    step[1][name] = step[1][name] * 1e6  # finite in float32, beyond 65504
    simulator = Simulator(WireDtype(PowerSGD(2), "float16"), SHAPES, replicas=3, dtype="float32")
    before = copy.deepcopy(simulator.states)
    averages = simulator.step(step)
    assert not np.isfinite(averages[name]).all()
    assert np.isnan(averages["w"]).all()
    assert_same_state(simulator.states, before)


@pytest.mark.parametrize("algorithm", [AllReduce(), PowerSGD(2, start_step=9)], ids=repr)
def test_an_uncompressed_step_passes_the_bad_number_on(algorithm):
    step = spoil(gradients(np.random.default_rng(0)), 2, "b", np.nan)
    averages = Simulator(algorithm, SHAPES, replicas=3).step(step)
    assert np.isnan(averages["b"]).sum() == 1
    assert np.isfinite(averages["w"]).all()
