"""Flax linen under pmap: one link at the head of the optax chain, and a checkpoint that any number of devices goes on from.

python examples/scripts/linen.py --steps 50
python examples/scripts/linen.py --steps 100     # goes on from the 50
"""

import argparse
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from gradwire import PowerSGD, WireDtype
from gradwire.jax_backend import average_gradients, replicate, set_replicas, stats, unreplicate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--checkpoint", type=Path, default="linen.msgpack")
args = parser.parse_args()
replicas = jax.local_device_count()


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (256, 256):
            x = nn.gelu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Your data: here points, and in which of ten sectors each lies. One row of batches for each device."""
    x = jax.random.normal(jax.random.key(step), (replicas, 64, 32))
    return x, ((jnp.arctan2(x[..., 0], x[..., 1]) + jnp.pi) * (10 / (2 * jnp.pi))).astype(int)


def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(state.apply_fn({"params": params}, x), y).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), jax.lax.pmean(loss, "data")


model = Classifier()
params = model.init(jax.random.key(0), jnp.zeros((1, 32)))["params"]
method = WireDtype(PowerSGD(16), "int8")
average = average_gradients(method, axis_name="data")  # the line that is added, in place of a pmean of the gradients
tx = optax.chain(average, optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(3e-3, 1000)))
state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
if args.checkpoint.exists():
    saved = flax.serialization.msgpack_restore(args.checkpoint.read_bytes())
    state = set_replicas(flax.serialization.from_state_dict(state, saved), replicas)

first = int(state.step)
state = replicate(state, axis_name="data")  # gradwire's: the compression error differs between replicas
train_step = jax.pmap(train_step, axis_name="data", donate_argnums=0)
for step in range(first, args.steps):
    state, loss = train_step(state, *batch(step))
    if (step + 1) % 25 == 0:
        print(f"step {step + 1}  loss {loss[0]:.3f}", flush=True)
state = unreplicate(state)  # gradwire's: with the memory of every replica
args.checkpoint.write_bytes(flax.serialization.msgpack_serialize(flax.serialization.to_state_dict(state)))
print(stats(state))
