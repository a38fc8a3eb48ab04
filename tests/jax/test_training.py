"""Flax training steps, linen and nnx, under pmap and shard_map: gradients compressed, or the optimizer's state sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax

import gradwire.jax_backend as gw
from tests.jax.quadratic import assert_close
from tests.jax.replicas import AXIS, require_equal_shards, training

STEPS = 25


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


def linen_training(tx):
    """Where training starts, a step of it, and the parameters of a state."""
    model = Linen()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32)))["params"]

    def step(state, x, y):
        def loss_fn(params):
            return ((state.apply_fn({"params": params}, x) - y) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(gw.mark_varying(state.params, AXIS))
        return state.apply_gradients(grads=gradients), lax.pmean(loss, AXIS)

    return TrainState.create(apply_fn=model.apply, params=params, tx=tx), step, lambda state: state.params


def nnx_training(tx):
    model = Nnx(nnx.Rngs(0))
    graph, start = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state, x, y):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(lambda m: ((m(x) - y) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), lax.pmean(loss, AXIS)

    return start, step, lambda state: nnx.to_pure_dict(nnx.state(nnx.merge(graph, state)[0], nnx.Param))


def is_kernel(params):
    """By name."""
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)


ADAMW, AVERAGE = optax.adamw(3e-3, weight_decay=0.3, mask=is_kernel), gw.power_sgd(2, axis_name=AXIS)
WHOLE = optax.chain(AVERAGE, ADAMW)
SHARDED = optax.chain(AVERAGE, gw.zero1(ADAMW, axis_name=AXIS, replicas=4, averaged=True))


def train(framework, tx, mode):
    """Losses, the state in global form, and its parameters; replicas are alike."""
    start, step, params_of = framework(tx)
    (*_, state), losses = zip(*training(step, start, batches(), mode), strict=True)
    require_equal_shards(state)
    assert losses[-1] < 0.6 * losses[0]
    state = gw.unreplicate(state) if mode == "pmap" else state
    return losses, state, params_of(state)


#: Under `check_vma` parameters are marked as varying, which `nnx.grad` of a module leaves no place for.
@pytest.mark.parametrize(
    ("framework", "other"), [(linen_training, "vma"), pytest.param(nnx_training, "no vma", marks=pytest.mark.slow)]
)
def test_a_sharded_optimizer_trains_as_the_whole_one_does(framework, other):
    """Under another map, behind the same compression."""
    (losses, state, params), (others, other_state, other_params) = (
        train(framework, tx, mode) for tx, mode in ((WHOLE, "pmap"), (SHARDED, other))
    )
    assert np.allclose(losses, others, rtol=1e-5)
    assert_close(other_params, params, 1e-5)
    found, others = (errors(of) for of in (state, other_state))
    assert len(found) == 2
    for name, x in found.items():
        assert np.allclose(x, others[name], rtol=1e-3, atol=1e-5), name
        assert len({row.tobytes() for row in np.asarray(x)}) == 4, "every replica has an error of its own"


def errors(state):
    """Of each matrix."""
    named = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(state)[0]}
    return {name: x for name, x in named.items() if "error" in name and x.ndim > 2}
