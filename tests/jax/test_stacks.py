"""Layers stacked by `nn.scan` are trained as layers in a loop are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from gradwire.jax_backend import power_sgd

REPLICAS, WIDTH, LAYERS, STEPS = 2, 32, 4, 60


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))), None


class Model(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, x):
        if self.scanned:
            stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(name="layers")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = Layer(name=f"layer_{i}")(x)
        return nn.Dense(16, name="head")(x)


def losses(scanned, **options):
    """The loss of each Adam step of replicas that `vmap` makes, from the same weights and batches; and the last state."""
    params = jax.jit(Model(True).init)(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    if not scanned:
        layers = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(LAYERS)}
        params = {"head": params["head"]} | layers
    average = power_sgd(4, axis_name="data", min_compression_rate=1.5, **options)
    adam = optax.adam(2e-3)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, REPLICAS, 16, WIDTH)).astype(np.float32)
    y = np.tanh(x @ (rng.normal(size=(WIDTH, 16)).astype(np.float32) / np.sqrt(WIDTH)))

    def loss(p, x, y):
        return jnp.mean((Model(scanned).apply({"params": p}, x) - y) ** 2)

    def step(carry, batch):
        p, state, moments = carry
        local = state._replace(local=jax.tree.map(lambda _: 0, state.local))
        axes = jax.tree.map(lambda _: None, state)._replace(local=local.local)

        def replica(state, x, y):
            value, gradients = jax.value_and_grad(loss)(p, x, y)
            average_gradients, state = average.update(gradients, state)
            return jax.lax.pmean(value, "data"), average_gradients, state

        mapped = jax.vmap(replica, (axes, 0, 0), (None, None, axes), axis_name="data")
        value, gradients, state = mapped(state, *batch)
        updates, moments = adam.update(gradients, moments, p)
        return (optax.apply_updates(p, updates), state, moments), value

    state = average.init(params)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape)), state.local)
    start = (params, state._replace(local=rows), adam.init(params))
    (_, state, _), values = jax.jit(lambda c, b: jax.lax.scan(step, c, b))(start, (x, y))
    return np.asarray(values), state


def test_scanned_layers_learn_what_layers_in_a_loop_learn():
    """The random initial factors differ, so the two runs are alike and not the same."""
    stack, state = losses(True, stacked={"layers/*": 1})
    loop, _ = losses(False)
    assert jax.tree.leaves(state.memory["q"]["layers"])[0].shape[:2] == (LAYERS, 4)
    assert np.mean(stack[-10:]) <= 1.02 * np.mean(loop[-10:])
    assert np.mean(loop[-10:]) < 0.7 * loop[0]
