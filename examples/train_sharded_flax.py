"""Train a byte-level Transformer with FSDP inside each slice, which is left to the compiler, and
gradients compressed by gradwire between slices.

python examples/train_sharded_flax.py --slices 2 --chips 2 --rank 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model_flax import Transformer
from text import VOCABULARY, load
from train_flax import VIEWS

import gradwire
from gradwire.jax_backend import (
    abstract_state,
    distribute,
    mark_varying,
    parameter_shapes,
    partition_specs,
    power_sgd,
)


def lying(x: Any, mesh: jax.sharding.Mesh) -> Any:
    """A parameter cut along its longest axis; vectors, and stacks of them, whole on every chip."""
    entries: list[Any] = [None] * x.ndim
    longest = max(range(x.ndim), key=lambda axis: x.shape[axis])
    if x.size > 4096 and x.shape[longest] % mesh.shape["ici"] == 0:
        entries[longest] = "ici"
    struct: Any = jax.ShapeDtypeStruct
    spec: Any = PartitionSpec
    return struct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(*entries)))


def train(args: argparse.Namespace) -> None:
    mesh = jax.make_mesh((args.slices, args.chips), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, heads=4)
    tx = optax.chain(
        power_sgd(args.rank, axis_name="dcn", **VIEWS),
        optax.clip_by_global_norm(1.0),
        optax.adamw(args.lr),
    )

    def make() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, args.context), jnp.int32))["params"]
        made: TrainState = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return made

    # Shapes first: no chip ever holds more than its part of the state.
    fresh = jax.eval_shape(make)
    params = jax.tree.map(lambda x: lying(x, mesh), fresh.params)
    shapes = abstract_state(fresh, args.slices, mesh, "dcn", params=params)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    if args.resume:
        with ocp.CheckpointManager(args.resume.absolute()) as manager:
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(shapes))
    else:
        state = jax.jit(lambda: distribute(make(), mesh, "dcn"), out_shardings=shardings)()

    def train_step(
        state: TrainState, inputs: jax.Array, targets: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
                state.apply_fn({"params": params}, inputs), targets
            )
            return losses.mean()

        loss, gradients = jax.value_and_grad(loss_of)(mark_varying(state.params, "dcn"))
        mean: jax.Array = jax.lax.pmean(loss, "dcn")
        return state.apply_gradients(grads=gradients), mean

    specs, rows = partition_specs(state, "dcn"), PartitionSpec("dcn")
    mapped = jax.shard_map(  # by hand over "dcn"; over "ici" as arrays lie
        train_step,
        mesh=mesh,
        in_specs=(specs, rows, rows),
        out_specs=(specs, PartitionSpec()),
        axis_names={"dcn"},
    )
    step = jax.jit(mapped, donate_argnums=0, out_shardings=(shardings, None))

    text = load(context=args.context)
    everywhere = NamedSharding(mesh, PartitionSpec(("dcn", "ici")))
    plan = gradwire.plan(parameter_shapes(params), gradwire.PowerSGD(args.rank, **VIEWS))
    print(
        f"each slice sends {plan.steps[0].nbytes:,} bytes a step, in place of {plan.dense_bytes:,}"
    )
    for number in range(int(state.step), args.steps):
        batches = [
            text.batch(0, number, i, args.batch_size, args.context)
            for i in range(args.slices * args.chips)
        ]
        inputs, targets = (np.concatenate(x) for x in zip(*batches, strict=True))
        state, loss = step(state, *jax.device_put((inputs, targets), everywhere))
        print(f"step {number + 1}  loss {float(loss):.3f}", flush=True)
    if args.checkpoint:
        with ocp.CheckpointManager(args.checkpoint.absolute()) as manager:
            manager.save(args.steps, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--slices", type=int, default=2, help="replicas of the model")
    p.add_argument("--chips", type=int, default=2, help="devices of a slice, which shard the model")
    p.add_argument(
        "--platform",
        choices=["cpu", "any"],
        default="cpu",
        help="any: the GPUs or TPUs that JAX finds",
    )
    p.add_argument("--rank", type=int, default=4, help="of PowerSGD")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--context", type=int, default=64)
    p.add_argument("--batch-size", type=int, default=8, help="windows for each chip")
    p.add_argument("--checkpoint", type=Path, help="write a checkpoint to this folder in the end")
    p.add_argument(
        "--resume",
        type=Path,
        help="go on from a checkpoint of as many slices, of any number of chips",
    )
    args = p.parse_args()
    if args.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.slices * args.chips)
    train(args)


if __name__ == "__main__":
    main()
