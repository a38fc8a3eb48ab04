"""The same model trained in torch (DDP, two processes) and in Flax (pmap, two devices): one loss curve."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD
from gradwire.torch_backend import register_comm_hook
from tests.torch.ranks import Cases

WIDTHS = (16, 48, 32, 4)
STEPS, BATCH, RATE, MOMENTUM, RANK = 45, 16, 0.05, 0.9, 2


def weights():
    """torch's orientation, (out, in), in both frameworks: a transposed matrix is another one to power iteration."""
    rng = np.random.default_rng(0)
    made = {}
    for i, (n_in, n_out) in enumerate(itertools.pairwise(WIDTHS)):
        made[f"weight{i}"] = (rng.standard_normal((n_out, n_in)) / np.sqrt(n_in)).astype(np.float32)
        made[f"bias{i}"] = np.zeros(n_out, np.float32)
    return made


PLANE = np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTHS[0], RANK)))[0].T * [[3.0], [1.5]]


def batch(step, replica):
    """Inputs near a plane: gradients have clearly the rank that is kept, or their last bits would decide what is sent (see `tests.methods.Method`)."""
    rng = np.random.default_rng([step + 1, replica])
    x = rng.standard_normal((BATCH, RANK)) @ PLANE + 0.05 * rng.standard_normal((BATCH, WIDTHS[0]))
    x = x.astype(np.float32)
    y = np.stack([np.sin(x[:, :4]).sum(1), x[:, 0] * x[:, 1], np.abs(x[:, 2]), x.mean(1)], axis=1)
    return x, y.astype(np.float32)


cases = Cases(__file__, ranks=2)


class InTorch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, value in weights().items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))

    def forward(self, x):
        for i in range(3):
            x = torch.nn.functional.linear(x, getattr(self, f"weight{i}"), getattr(self, f"bias{i}"))
            x = torch.tanh(x) if i < 2 else x
        return x


@cases.case
def in_torch(world):
    """This rank's losses, and how much was compressed."""
    model = InTorch()
    ddp = DistributedDataParallel(model, process_group=world.group)
    handle = register_comm_hook(ddp, PowerSGD(RANK))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        x, y = map(torch.from_numpy, batch(step, world.rank))
        loss = (ddp(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, handle.stats().compression_ratio


def in_flax():
    """Losses [replica, step]."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn
    from flax.training.train_state import TrainState

    from gradwire.jax_backend import power_sgd, replicate

    class Model(nn.Module):
        """A dense network with kernels in torch's orientation."""

        @nn.compact
        def __call__(self, x):
            for i, (n_in, n_out) in enumerate(itertools.pairwise(WIDTHS)):
                weight = self.param(f"weight{i}", nn.initializers.zeros, (n_out, n_in))
                x = x @ weight.T + self.param(f"bias{i}", nn.initializers.zeros, (n_out,))
                x = jnp.tanh(x) if i < 2 else x
            return x

    model = Model()
    params = jax.tree.map(jnp.asarray, weights())
    assert jax.tree.structure(params) == jax.tree.structure(model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"])
    tx = optax.chain(power_sgd(RANK, axis_name="batch"), optax.sgd(RATE, momentum=MOMENTUM))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train_step(state, x, y):
        def loss_fn(params):
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
def test_the_loss_curves_lie_on_each_other(results):
    losses, (ratio, _) = zip(*results("in_torch"), strict=True)
    losses = np.array(losses)
    assert ratio > 2  # it compressed
    assert losses[:, -5:].mean() < 0.5 * losses[:, :5].mean()  # and it learned
    np.testing.assert_allclose(in_flax(), losses, rtol=1e-4)
