"""RandomProjection: along random directions, equal on all replicas and others in each step, and with an error memory."""

import numpy as np
import pytest

from gradwire import RandomProjection, Simulator, plan
from gradwire.core.kernels import random
from gradwire.core.kernels.numpy import NumpyOps


def test_it_is_a_projection_and_a_memory():
    shapes = {"w": (5, 12), "conv": (4, 3, 2, 2), "b": (5,)}
    matrices = {"w": (5, 12), "conv": (4, 12)}
    rng = np.random.default_rng(0)
    simulator = Simulator(RandomProjection(4, seed=3), shapes, replicas=3)
    errors = {name: [np.zeros(shape)] * 3 for name, shape in matrices.items()}
    for step in range(6):
        gradients = [{k: rng.normal(size=s) for k, s in shapes.items()} for _ in range(3)]
        averages = simulator.step(gradients)
        for name, matrix in matrices.items():
            drawn = random.uniform(NumpyOps(), random.key(3, name), (4, 12), step).astype(float)
            basis, _ = np.linalg.qr(drawn.T)
            inputs = [g[name].reshape(matrix) + e for g, e in zip(gradients, errors[name], strict=True)]
            errors[name] = [x - x @ basis @ basis.T for x in inputs]
            right = np.mean(inputs, axis=0) @ basis @ basis.T
            np.testing.assert_allclose(averages[name].reshape(matrix), right, atol=1e-12)
            for state, error in zip(simulator.states, errors[name], strict=True):
                np.testing.assert_allclose(state.tensors[name]["error"].reshape(matrix), error, atol=1e-12)
        np.testing.assert_allclose(averages["b"], np.mean([g["b"] for g in gradients], axis=0), atol=1e-15)
        assert all(set(state.tensors) == set(matrices) for state in simulator.states)


def test_what_it_compresses_and_what_that_sends():
    shapes = {"wide": (30, 100), "narrow": (100, 8), "vector": (30,), "scalar": ()}
    p = plan(shapes, RandomProjection(4))
    compressed = {"wide": True, "narrow": False, "vector": False, "scalar": False}
    assert {t.name: t.compressed for t in p.tensors} == compressed
    assert (p.wire_bytes, p.collectives) == ((4 * 30 + 100 * 8 + 30 + 1) * 4, 1)
    assert [t.compressed for t in plan(shapes, RandomProjection(4, min_compression_rate=1.9)).tensors][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"rank": 2, "min_compression_rate": 0}, "min_compression_rate=0 must be a positive number"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        RandomProjection(**options)
