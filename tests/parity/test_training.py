"""The same model trained in torch (DDP, two processes) and in Flax (pmap, two devices): one loss curve."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import linen as nn
from flax.training.train_state import TrainState

from gradwire.jax_backend import power_sgd, replicate
from tests.forked import run_ranks
from tests.parity.training import MOMENTUM, RANK, RATE, STEPS, WIDTHS, batch, weights


class Model(nn.Module):
    """A dense network with kernels in torch's orientation."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, (n_in, n_out) in enumerate(itertools.pairwise(WIDTHS)):
            weight = self.param(f"weight{i}", nn.initializers.zeros, (n_out, n_in))
            bias = self.param(f"bias{i}", nn.initializers.zeros, (n_out,))
            x = x @ weight.T + bias
            x = jnp.tanh(x) if i < 2 else x
        return x


def in_flax() -> np.ndarray:
    """Losses [replica, step]."""
    model = Model()
    params = jax.tree.map(jnp.asarray, weights())
    assert jax.tree.structure(params) == jax.tree.structure(model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"])
    tx = optax.chain(power_sgd(RANK, axis_name="batch"), optax.sgd(RATE, momentum=MOMENTUM))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: object) -> jax.Array:
            return jnp.square(state.apply_fn({"params": params}, x) - y).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=gradients), loss

    devices = jax.devices()[:2]
    step_fn = jax.pmap(train_step, axis_name="batch", devices=devices)
    state = replicate(state, devices, axis_name="batch")
    losses = []
    for step in range(STEPS):
        x, y = (np.stack(both) for both in zip(*(batch(step, r) for r in range(2)), strict=True))
        state, loss = step_fn(state, x, y)
        losses.append(np.asarray(loss))
    return np.array(losses).T


@pytest.mark.slow
def test_the_loss_curves_lie_on_each_other(tmp_path: Path) -> None:
    run_ranks(Path(__file__).with_name("training_worker.py"), 2, str(tmp_path))
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    in_torch = np.array([s["losses"] for s in saved])
    assert saved[0]["stats"] > 2  # it compressed
    assert in_torch[:, -5:].mean() < 0.5 * in_torch[:, :5].mean()  # and it learned
    np.testing.assert_allclose(in_flax(), in_torch, rtol=1e-4)
