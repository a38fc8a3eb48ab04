"""Weights in JAX, under every kind of map: against the simulator, with NaN where a replica is absent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gradwire.jax_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, Simulator, TopK, TwoLevel, WireDtype
from tests.jax.replicas import AXIS, Replicas, equal, gradients, refused

SHAPES = {"w": (24, 16), "x": (130,), "b": (7,)}
WEIGHTS = np.array([512, 0, 100, 7.5], np.float32)
ALGORITHMS = {
    "power_sgd": PowerSGD(2, half_step=True, start_step=1),
    "top_k": TopK(4, per=32),
    "codes": WireDtype(AllReduce(), "int8"),
    "levels": TwoLevel(PowerSGD(2), 2),
}
ROWS = [
    ("power_sgd", "shard_map_vma"),
    pytest.param("top_k", "vmap", marks=pytest.mark.slow),
    pytest.param("codes", "shard_map_vma", marks=pytest.mark.slow),
    pytest.param("levels", "pmap", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mode"), ROWS)
def test_an_absent_replica_changes_nothing(name, mode):
    tx = optax.chain(gw.average_gradients(ALGORITHMS[name], axis_name=AXIS), optax.scale(1.0))

    def update(given, state):
        return tx.update(given["gradients"], state, weight=given["weight"])

    run = Replicas(optax.GradientTransformation(tx.init, update), {n: jnp.zeros(s) for n, s in SHAPES.items()}, 4, mode)
    simulator = Simulator(ALGORITHMS[name], SHAPES, 4, dtype="float32")
    for step in range(3):
        mine = gradients(SHAPES, step)
        mine[1] = {n: x * np.nan for n, x in mine[1].items()}
        averages = run.update([{"gradients": g, "weight": w} for g, w in zip(mine, WEIGHTS, strict=True)])
        expected = simulator.step(mine, weights=WEIGHTS.tolist())
        for n, x in averages.items():
            np.testing.assert_allclose(x, expected[n], rtol=2e-5, atol=2e-5)
    # Nobody counts: the program cannot raise, so it says so in the averages, and the memory keeps its bits.
    before = run.global_state()[0]
    averages = run.update([{"gradients": g, "weight": np.float32(0)} for g in mine])
    after = run.global_state()[0]
    assert all(np.isnan(x).all() for x in averages.values())
    assert equal((before.memory, before.local), (after.memory, after.local))


def test_refusals():
    tx = gw.average_gradients(AllReduce(), axis_name=AXIS)
    ones = {"w": jnp.ones((4, 2))}

    def update(weight):
        return jax.vmap(lambda g: tx.update(g, tx.init(g), weight=weight)[0], axis_name=AXIS)(ones)

    for wrong in (-1, float("nan"), "2", True, jnp.ones(3)):
        with pytest.raises((TypeError, ValueError), match="weight"):
            update(wrong)
    assert update(2)["w"].tolist() == np.ones((4, 2)).tolist()

    # Parameters stay as they were where nobody counts.
    local_tx = gw.local_sgd(optax.sgd(1.0), LocalSGD(1, weighted=True), axis_name=AXIS)

    def alone(params, weight):
        return local_tx.average_params(params, local_tx.init(params), weight=weight)[0]

    mine = jnp.arange(4.0)
    assert jax.vmap(alone, axis_name=AXIS)(mine, jnp.zeros(4)).tolist() == mine.tolist()
    assert jax.vmap(alone, axis_name=AXIS)(mine, jnp.array([0.0, 0, 1, 3])).tolist() == [2.75] * 4

    for local, words in ((LocalSGD(2), "weighted=True"), (LocalSGD(2, start_step=2, weighted=True), "TrainState")):
        local_tx = gw.local_sgd(optax.sgd(0.1), local, axis_name=AXIS)

        def step(params, tx=local_tx):
            state = TrainState.create(apply_fn=None, params=params, tx=tx)
            return tx.step(params, state, weight=1).params

        with refused(words):
            jax.vmap(step, axis_name=AXIS)(ones)
