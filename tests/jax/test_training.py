"""Flax training steps, linen and nnx, under pmap and shard_map: the same losses, replicas alike, and far fewer bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax

import gradwire.jax_backend as gw
from tests.jax.replicas import AXIS, require_equal_shards, training

STEPS = 25
TX = optax.chain(gw.power_sgd(2, axis_name=AXIS), optax.adam(3e-3))


def batches():
    """32 examples a step, 8 for each replica.

    They lie near a plane, so gradients have clearly the rank that is kept. Otherwise a change in the last bit grows with every step (see
    `tests.jax.replicas.gradients`), and what two programs make of the same training could not be compared.
    """
    random = np.random.default_rng(0)
    plane = np.linalg.qr(random.standard_normal((32, 2)))[0].T * [[3.0], [1.5]]
    truth = random.standard_normal((32, 8)) / 2
    inputs = random.standard_normal((STEPS, 32, 2)) @ plane + 0.05 * random.standard_normal((STEPS, 32, 32))
    return [(x, np.tanh(x @ truth).astype(np.float32)) for x in inputs.astype(np.float32)]


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8)(linen.tanh(linen.Dense(64)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.tanh(self.hidden(x)))


def linen_start():
    model = Linen()
    params = model.init(jax.random.key(0), jnp.zeros((1, 32)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def linen_step(state, x, y):
    def loss_fn(params):
        return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(gw.mark_varying(state.params, AXIS))
    return state.apply_gradients(grads=gradients), lax.pmean(loss, AXIS)


def nnx_start():
    model = Nnx(nnx.Rngs(0))
    return nnx.split((model, nnx.Optimizer(model, TX, wrt=nnx.Param)))


GRAPH = nnx_start()[0]


def nnx_step(state, x, y):
    model, optimizer = nnx.merge(GRAPH, state)
    loss, gradients = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return nnx.state((model, optimizer)), lax.pmean(loss, AXIS)


def train(start, step, mode):
    """Losses, and the state in global form."""
    (*_, state), losses = zip(*training(step, start, batches(), mode), strict=True)
    require_equal_shards(state)
    return losses, gw.unreplicate(state) if mode == "pmap" else state


@pytest.mark.parametrize(
    ("start", "step", "modes"),
    [(linen_start(), linen_step, ("pmap", "vma")), (nnx_start()[1], nnx_step, ("pmap", "no vma"))],
    ids=["linen", "nnx"],
)
def test_training_is_the_same_under_every_map(start, step, modes):
    (losses, state), (other_losses, other_state) = (train(start, step, mode) for mode in modes)
    assert losses[-1] < 0.6 * losses[0]
    assert np.allclose(losses, other_losses, rtol=1e-5)
    errors = 0
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(state)[0], jax.tree.leaves(other_state), strict=True):
        assert np.allclose(x, y, rtol=1e-3, atol=1e-5), jax.tree_util.keystr(path)
        if "per_replica" in jax.tree_util.keystr(path) and "record" not in jax.tree_util.keystr(path):
            errors += 1
            assert x.shape[0] == 4
            assert len({row.tobytes() for row in np.asarray(x)}) == 4, "every replica has an error of its own"
    assert errors == 2


def test_a_linen_step_sends_two_messages_and_the_loss():
    x, y = (jax.ShapeDtypeStruct((8, n), jnp.float32) for n in (32, 8))
    sent = gw.collective_traffic(linen_step, linen_start(), x, y, axis_env=[(AXIS, 4)])
    assert gw.total_traffic(sent).collectives == 3
    # Both kernels at rank 2, both biases, and the loss.
    assert gw.total_traffic(sent).nbytes == 4 * (2 * (32 + 64) + 2 * (64 + 8) + 64 + 8 + 1)
