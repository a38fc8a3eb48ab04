"""Flax nnx on a mesh of two axes: the compiler shards the model over "ici", gradwire compresses over "dcn"; orbax keeps the state.

python examples/scripts/nnx_two_axes.py --steps 50
python examples/scripts/nnx_two_axes.py --steps 100     # goes on from the 50
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradwire import PowerSGD, WireDtype
from gradwire.jax_backend import abstract_state, average_gradients, distribute, mark_varying, partition_specs, stats

parser = argparse.ArgumentParser()
parser.add_argument("--slices", type=int, default=2, help="replicas; the devices of each shard the model")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--checkpoint", type=Path, default="nnx")
args = parser.parse_args()
mesh = jax.make_mesh((args.slices, jax.device_count() // args.slices), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


graphdef, variables = nnx.split(Block(nnx.Rngs(0)))
start: Any = nnx.to_pure_dict(variables)
lying = {"up": {"kernel": P(None, "ici"), "bias": P("ici")}, "down": {"kernel": P("ici"), "bias": P()}}
start = jax.device_put(start, jax.tree.map(lambda spec: NamedSharding(mesh, spec), lying))
average = average_gradients(WireDtype(PowerSGD(16), "int8"), axis_name="dcn")
tx = optax.chain(average, optax.adamw(3e-3))  # the first link is the one that is added


def make(params: Any) -> dict[str, Any]:
    return {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), int)}


def train_step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.square(nnx.merge(graphdef, params)(x) - jnp.sort(x)).mean()

    loss, gradients = jax.value_and_grad(loss_of)(mark_varying(state["params"], "dcn"))
    updates, opt_state = tx.update(gradients, state["opt_state"], state["params"])
    state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state, "step": state["step"] + 1}
    return state, jax.lax.pmean(loss, "dcn")


shapes = abstract_state(jax.eval_shape(make, start), args.slices, mesh, "dcn", params=start)
shardings = jax.tree.map(lambda x: x.sharding, shapes)
with ocp.CheckpointManager(args.checkpoint.absolute()) as manager:
    if manager.latest_step() is None:
        state = jax.jit(lambda p: distribute(make(p), mesh, "dcn"), out_shardings=shardings)(start)
    else:  # with as many slices, of any number of devices
        state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(shapes))
    specs = partition_specs(state, "dcn")  # by hand over "dcn"; over "ici" as arrays lie
    places: dict[str, Any] = {"mesh": mesh, "in_specs": (specs, P("dcn")), "out_specs": (specs, P())}
    mapped = jax.shard_map(train_step, **places, axis_names={"dcn"})
    step = jax.jit(mapped, donate_argnums=0, out_shardings=(shardings, None))
    for number in range(int(state["step"]), args.steps):
        x = jax.random.normal(jax.random.key(number), (256, 64))  # your data
        state, loss = step(state, jax.device_put(x, NamedSharding(mesh, P(("dcn", "ici")))))
        if (number + 1) % 25 == 0:
            print(f"step {number + 1}  loss {loss:.3f}", flush=True)
    manager.save(args.steps, args=ocp.args.StandardSave(state))
print(stats(state))
