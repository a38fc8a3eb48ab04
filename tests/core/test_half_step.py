"""Half-steps are epfml/powersgd's: the same averages as its formulas, written down independently with QR, in float64."""

import numpy as np
import pytest

import gradwire
from benchmarks.epfml import HalfSteps
from gradwire import PowerSGD, Simulator

REPLICAS = 2
SHAPES = {"w1": (40, 32), "b1": (40,), "w2": (24, 40)}


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_averages_are_those_of_the_method(rank):
    simulator = Simulator(PowerSGD(rank, half_step=True), SHAPES, REPLICAS)
    reference = HalfSteps(SHAPES, REPLICAS, rank, seed=0)
    reference.q = {name: simulator.states[0].tensors[name]["q"].T.copy() for name in reference.matrices}
    random = np.random.default_rng(rank)
    signal = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    for step in range(20):
        gradients = [
            {name: np.cos(step) * signal[name] + random.standard_normal(shape) for name, shape in SHAPES.items()}
            for _ in range(REPLICAS)
        ]
        ours, theirs = simulator.step(gradients), reference(gradients)
        for name, expected in theirs.items():
            np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-8 * np.abs(expected).max())
            compressed = np.linalg.matrix_rank(ours[name]) if ours[name].ndim > 1 else rank
            assert compressed == rank


def test_its_price_is_in_the_plan():
    shapes = {"w": (64, 64)}
    for algorithm in (PowerSGD(1, half_step=True), gradwire.WireDtype(PowerSGD(1, half_step=True), "bfloat16")):
        assert "Clip gradients" in str(gradwire.plan(shapes, algorithm))
    assert gradwire.plan(shapes, PowerSGD(1)).notes == ()
