"""A Flax training that is stopped and resumed is the training that was not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training.train_state import TrainState

from gradwire.jax_backend import power_sgd, replicate, unreplicate
from tests.jax.replicas import AXIS

REPLICAS = 2


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(4)(linen.tanh(linen.Dense(32)(x)))


def batch(step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(step).standard_normal((REPLICAS, 16, 16)).astype(np.float32)
    return x, np.sort(x, axis=-1)[..., :4]


def transformation() -> optax.GradientTransformation:
    return optax.chain(power_sgd(2, axis_name=AXIS), optax.adamw(3e-3))


def linen_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.square(state.apply_fn({"params": params}, x) - y).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), jax.lax.pmean(loss, AXIS)


def linen_state(tx: optax.GradientTransformation) -> TrainState:
    model = Mlp()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def test_a_training_state_resumes_bit_for_bit() -> None:
    devices = jax.devices()[:REPLICAS]
    mapped = jax.pmap(linen_step, axis_name=AXIS, devices=devices)

    def run(state: Any, steps: range) -> Any:
        for t in steps:
            state, _ = mapped(state, *batch(t))
        return state

    whole = run(replicate(linen_state(transformation()), devices, axis_name=AXIS), range(8))
    half = unreplicate(run(replicate(linen_state(transformation()), devices, axis_name=AXIS), range(4)))
    errors = half.opt_state[0].local.per_replica["error"]["Dense_1"]["kernel"]
    assert errors.shape == (REPLICAS, 16, 32)
    assert not np.array_equal(errors[0], errors[1])  # both replicas' memory, and they differ
    resumed = run(replicate(half, devices, axis_name=AXIS), range(4, 8))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
