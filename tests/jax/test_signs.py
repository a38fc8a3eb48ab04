"""Signs of several tensors, compressed together, and the order in which a TPU has their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gradwire
from gradwire import Sign
from gradwire.jax_backend import average_gradients
from gradwire.jax_backend.ops.kernels import JaxOps
from tests.bounds import relative
from tests.jax.replicas import AXIS, Replicas, gradients

#: Vectors of one length, of another, and of one whose bits fill no whole bytes; matrices, small
#: ones of one shape in stacks.
SHAPES = {
    **{f"v{i}": (24,) for i in range(9)},
    **{f"long{i}": (1024,) for i in range(2)},
    **{f"odd{i}": (27,) for i in range(2)},
    **{f"matrix{i}": (16, 12) for i in range(9)},
    "stack": (2, 9, 5),
}


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        (Sign(), "pmap"),
        (Sign(per="row", magnitudes=2), "shard_map_vma"),
        (Sign(per="column", magnitudes=2), "vmap"),
    ],
    ids=str,
)
def test_together_they_follow_the_simulator(algorithm, mode):
    oracle = gradwire.Simulator(algorithm, SHAPES, 2)
    start = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    run = Replicas(average_gradients(algorithm, axis_name=AXIS), start, 2, mode)
    for step in range(3):
        given = gradients(SHAPES, step, 2)
        if step == 2:
            given[1]["v4"] = given[1]["v4"] * np.nan
        expected, got = oracle.step(given), run.update(given)
        for name in SHAPES:
            if step == 2 and name in oracle.states[0].tensors:
                assert not np.isfinite(got[name]).any()
            else:
                assert relative(got[name], expected[name]) <= 1e-5


@pytest.mark.parametrize("shape", [(128, 256), (3, 64, 128), (130, 128), (64, 130), (40,)], ids=str)
def test_bits_come_back_on_a_tpu(shape, monkeypatch):
    """Where rows fill its tiles, bytes are in their order."""
    monkeypatch.setattr(
        lax, "platform_dependent", lambda *arrays, default, tpu=None: (tpu or default)(*arrays)
    )
    ops, x = JaxOps(), jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    packed = ops.pack_bits(x > 0, of=x)
    assert packed.shape == (-(-x.size // 8),)
    np.testing.assert_array_equal(ops.unpack_bits(packed, shape), x > 0)
    np.testing.assert_array_equal(ops.unpack_bits(ops.pack_bits(x > 0), shape), x > 0)
    if shape == (128, 256):
        rows = np.packbits(np.asarray(x > 0).reshape(8, 16, 256), axis=0, bitorder="little")[0]
        first = packed[:1024].reshape(8, 128)  # a tile
        np.testing.assert_array_equal(first, rows[:8, :128])
    jax.clear_caches()
