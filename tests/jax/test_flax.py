"""In Flax training as users write it: linen's TrainState and nnx.Optimizer, pmap and shard_map, alone and in chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from gradwire.jax_backend import distribute, local, partition_specs, power_sgd, replicate, unreplicate
from tests.jax.replicas import AXIS, mesh_of, require_equal_shards

REPLICAS, STEPS = 2, 25


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(4)(linen.tanh(linen.Dense(32)(x)))


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.out = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


def batch(step: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(step).standard_normal((REPLICAS, 16, 16)).astype(np.float32)
    return x, np.sort(x, axis=-1)[..., :4]


def transformation() -> optax.GradientTransformation:
    return optax.chain(power_sgd(2, axis_name=AXIS), optax.adamw(3e-3))


def linen_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.square(state.apply_fn({"params": params}, x) - y).mean()

    # `local` changes nothing but under check_vma=True, where it is what keeps the gradients local.
    loss, gradients = jax.value_and_grad(loss_fn)(local(state.params, AXIS))
    return state.apply_gradients(grads=gradients), jax.lax.pmean(loss, AXIS)


def linen_state(tx: optax.GradientTransformation) -> TrainState:
    model = Mlp()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train(step: Callable[..., Any], state: Any, mode: str) -> tuple[list[float], Any]:
    """Losses, and the state in the form of the map."""
    if mode == "pmap":
        devices = jax.devices()[:REPLICAS]
        mapped = jax.pmap(step, axis_name=AXIS, devices=devices)
        state = replicate(state, devices, axis_name=AXIS)
    else:
        mesh = mesh_of(REPLICAS)
        specs = partition_specs(state, AXIS)
        state = distribute(state, mesh, AXIS)

        def body(state: Any, x: Any, y: Any) -> Any:
            return step(state, x[0], y[0])

        check = mode == "shard_map_vma"
        mapped = jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=(specs, P(AXIS), P(AXIS)), out_specs=(specs, P()), check_vma=check)
        )
    losses = []
    for t in range(STEPS):
        state, loss = mapped(state, *batch(t))
        losses.append(float(np.asarray(loss).ravel()[0]))
    require_equal_shards(state)
    return losses, state


def test_linen_learns_alike_under_every_map() -> None:
    curves = {
        mode: train(linen_step, linen_state(transformation()), mode)[0]
        for mode in ("pmap", "shard_map", "shard_map_vma")
    }
    assert np.mean(curves["pmap"][-5:]) < 0.8 * np.mean(curves["pmap"][:5])
    np.testing.assert_allclose(curves["shard_map"], curves["pmap"], rtol=1e-5)
    np.testing.assert_allclose(curves["shard_map_vma"], curves["pmap"], rtol=1e-5)


def test_nnx_learns_alike_under_pmap_and_shard_map() -> None:
    def started() -> tuple[Any, Any]:
        model = NnxMlp(nnx.Rngs(0))
        return nnx.split((model, nnx.Optimizer(model, transformation(), wrt=nnx.Param)))

    graphdef, state = started()

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, gradients = nnx.value_and_grad(lambda m: jnp.square(m(x) - y).mean())(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), jax.lax.pmean(loss, AXIS)

    by_pmap, _ = train(step, state, "pmap")
    by_shard_map, _ = train(step, started()[1], "shard_map")
    assert np.mean(by_pmap[-5:]) < 0.8 * np.mean(by_pmap[:5])
    np.testing.assert_allclose(by_shard_map, by_pmap, rtol=1e-5)


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


def test_memory_of_other_replicas_is_refused() -> None:
    devices = jax.devices()
    state = unreplicate(replicate(linen_state(transformation()), devices[:4], axis_name=AXIS))
    with pytest.raises(ValueError, match="memory of 4 replicas and there are 2"):
        replicate(state, devices[:2], axis_name=AXIS)
    with pytest.raises(ValueError, match="memory of 4 replicas and there are 2"):
        distribute(state, mesh_of(2), AXIS)
