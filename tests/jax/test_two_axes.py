"""Averages over one of two manual axes of a mesh, under `check_vma=True`: what is equal along the
other axis stays so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradwire import AllReduce, PowerSGD, TopK, WireDtype
from gradwire.jax_backend import average_gradients
from tests.jax.replicas import AXIS

SPECS = {
    "replicated": P(),
    "sharded": P("model"),
    "replicated vector": P(),
    "sharded vector": P("model"),
}
#: Of rank 1, so that PowerSGD loses nothing.
SHAPES = {
    "replicated": (32, 16),
    "sharded": (64, 16),
    "replicated vector": (7,),
    "sharded vector": (6,),
}

# So many that they are sliced from a message as many are.
SPECS |= {f"{i}": P() for i in range(9)}
SHAPES |= {f"{i}": (16, 24) for i in range(9)}


@pytest.mark.parametrize("algorithm", [AllReduce(64), PowerSGD(1, max_norm=0.8)], ids=repr)
def test_averages_and_the_norm_that_is_clipped(algorithm):
    """That of all parts of a replica: of what is divided over the other axis every part counts, of
    what is not one copy."""
    common = directions()
    norm = float(np.sqrt(sum((x * x).sum() for x in common.values())))
    common = {n: x / norm for n, x in common.items()}  # replica 0, with half of it, is short enough
    averages = jax.jit(step_of(algorithm))(given(common))
    for name, x in common.items():
        right = x if isinstance(algorithm, AllReduce) else 0.65 * x
        np.testing.assert_allclose(averages[name], right, atol=1e-4 * np.abs(x).max(), rtol=0)
    # Others are typed in the same way, before XLA compiles anything.
    for other in (
        PowerSGD(1, half_step=True),
        PowerSGD(1, start_step=2),
        WireDtype(PowerSGD(1), "bfloat16"),
    ):
        typed = jax.eval_shape(step_of(other), given(common))
        assert {n: x.shape for n, x in typed.items()} == SHAPES


def directions():
    rng = np.random.default_rng(0)
    return {
        n: np.outer(rng.normal(size=s[0]), rng.normal(size=s[1:])).reshape(s)
        for n, s in SHAPES.items()
    }


def given(common):
    """Half of it on one replica and one and a half of it on the other."""
    return {n: jnp.asarray(np.stack([0.5 * x, 1.5 * x]), jnp.float32) for n, x in common.items()}


def step_of(algorithm):
    """The first step, which returns the averages."""
    tx = average_gradients(algorithm, axis_name=AXIS)
    mesh = jax.make_mesh((2, 2), (AXIS, "model"), axis_types=(AxisType.Auto,) * 2)

    def step(gradients):
        mine = jax.tree.map(lambda x: x[0], gradients)
        return tx.update(mine, tx.init(mine))[0]

    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=({n: P(AXIS, *spec) for n, spec in SPECS.items()},),
        out_specs=SPECS,
    )


def test_what_gathers_over_axes_of_two_kinds_is_refused_by_name():
    """JAX itself fails there, without a word."""
    mesh = jax.make_mesh((2,), ("host",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    gradients = {"w": np.arange(4 * 16 * 12.0, dtype=np.float32).reshape(2, 2, 16, 12)}

    def step(algorithm):
        tx = average_gradients(algorithm, axis_name=("host", "simulated"))

        def one(g):
            return tx.update(g, tx.init(g))[0]

        def host(g):
            mapped = jax.vmap(one, axis_name="simulated")(jax.tree.map(lambda x: x[0], g))
            return jax.tree.map(lambda x: x[None], mapped)

        each = P("host")
        return jax.jit(
            jax.shard_map(host, mesh=mesh, in_specs=each, out_specs=each, check_vma=False)
        )

    averages = step(AllReduce())(gradients)["w"]
    expected = np.broadcast_to(gradients["w"].mean((0, 1)), averages.shape)
    np.testing.assert_allclose(averages, expected, rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"'simulated' of jax\.vmap"):
        step(TopK(2, per=16))(gradients)
