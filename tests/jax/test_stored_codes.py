"""Codes of large arrays are stored otherwise for a TPU and for a GPU: with the same averages and
errors as on CPU, and as in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gradwire import Quantize, Simulator
from gradwire.jax_backend import average_gradients
from gradwire.jax_backend.ops import storage
from tests.jax.replicas import AXIS, Replicas

pytestmark = pytest.mark.slow

#: Tiles of which each of four replicas has as many, in a matrix and in a stack; of which it has
#: not; and what has no tiles.
SHAPES = {
    "matrix": (256, 512),
    "stack": (4, 128, 256),
    "uneven": (264, 256),
    "few": (16, 128),
    "vector": (300,),
}


@pytest.fixture(autouse=True)
def traced_anew():
    yield
    jax.clear_caches()


def steps(mode, given):
    """Averages of each step, and the errors after them."""
    start = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    run = Replicas(average_gradients(Quantize("int8"), axis_name=AXIS), start, 4, mode)
    averages = [run.update(each) for each in given]
    return averages, run.global_state().local.per_replica["error"]


@pytest.mark.parametrize(
    ("platform", "mode"), [("tpu", "vmap"), ("cuda", "vmap"), ("tpu", "shard_map_vma")]
)
def test_what_is_stored_for_an_accelerator_changes_nothing(platform, mode, monkeypatch):
    rng = np.random.default_rng(0)
    given = [
        [
            {name: np.float32(rng.standard_normal(shape)) for name, shape in SHAPES.items()}
            for _ in range(4)
        ]
        for _ in range(3)
    ]
    simulated = Simulator(Quantize("int8"), SHAPES, 4, dtype="float32").step(given[0])
    expected, errors = steps(mode, given)

    def platform_dependent(*arrays, default, **others):
        return others.get(platform, default)(*arrays)

    monkeypatch.setattr(lax, "platform_dependent", platform_dependent)
    monkeypatch.setattr(storage, "WORTH_TILES", 1)
    jax.clear_caches()
    found, after = steps(mode, given)
    for name in SHAPES:
        # Which replica remembers an error of the second rounding is the kernels' own, so in NumPy
        # later steps are others.
        assert np.allclose(found[0][name], simulated[name], rtol=1e-5, atol=1e-5), name
        for own, each in zip(found, expected, strict=True):
            assert np.allclose(own[name], each[name], rtol=1e-5, atol=1e-5), name
        assert np.allclose(after[name], errors[name], rtol=1e-5, atol=1e-5), name
