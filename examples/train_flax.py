"""Train a byte-level Transformer in Flax under pmap, its gradients compressed by gradwire.

python examples/train_flax.py --devices 2 --rank 4
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from itertools import accumulate, cycle
from typing import Any

import checkpoints
import flags
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from model_flax import Transformer
from report import Report
from text import VOCABULARY, load

import gradwire
from gradwire.jax_backend import (
    LocalOptimizer,
    PerReplica,
    all_reduce_mean,
    clip_by_global_norm,
    local_sgd,
    parameter_shapes,
    power_sgd,
    replicate,
    set_replicas,
    stack_replicas,
    this_replica,
    unreplicate,
    zero1,
)

#: What makes gradwire see the matrices that the model has in torch: the two runs can be compared,
#: and `convert.py` moves one to the other. `nn.scan` stacks the blocks, so each parameter's first
#: axis counts layers; those of biases in attention are (layers, heads, dimensions), and no
#: matrices. Kernels (in, out) are compressed as weights (out, in).
VIEWS: dict[str, Any] = {"stacked": {"blocks/*/bias": 2, "blocks/*": 1}, "transpose": ("*/kernel",)}


def optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    # The line that a training script gains, in place of a pmean on the gradients:
    if args.compress == "powersgd":
        average = power_sgd(
            args.rank,
            axis_name="batch",
            half_step=args.half_step,
            start_step=args.start_step,
            **VIEWS,
        )
    else:
        average = all_reduce_mean(axis_name="batch")
    rates = jnp.array([flags.learning_rate(step, args) for step in range(args.steps)])
    # After `average` the gradients are the same on all replicas: so is what clipping does to them.
    clip = optax.clip_by_global_norm(1.0)
    adamw = optax.adamw(lambda step: rates[step], b1=0.9, b2=0.95, weight_decay=0.01)
    local = local_of(args)
    if local is not None:
        # Here gradients are each replica's own; what is averaged are parameters, in `train_step`.
        return local_sgd(optax.chain(clip, adamw), local, axis_name="batch")
    if not args.zero:
        return optax.chain(average, clip, adamw)
    replicas = jax.device_count()
    if args.compress == "powersgd":
        return optax.chain(
            average, clip, zero1(adamw, axis_name="batch", replicas=replicas, averaged=True)
        )
    # It averages, too, and its clipping is by the norm of all pieces.
    return zero1(
        optax.chain(clip_by_global_norm(1.0, "batch"), adamw), axis_name="batch", replicas=replicas
    )


def local_of(args: argparse.Namespace) -> gradwire.LocalSGD | None:
    """What --local-sgd and --diloco ask for."""
    compressor = None
    if args.compress == "powersgd":
        compressor = gradwire.PowerSGD(args.rank, half_step=args.half_step, **VIEWS)
    if args.local_sgd is not None:
        return gradwire.LocalSGD(args.local_sgd, start_step=args.start_step, compressor=compressor)
    if args.diloco is not None:
        return gradwire.diloco(args.diloco, start_step=args.start_step, compressor=compressor)
    return None


def loss_of(params: Any, state: TrainState, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    logits = state.apply_fn({"params": params}, inputs)
    losses: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean()


@functools.partial(jax.pmap, axis_name="batch", donate_argnums=0)
def train_step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
    mine = on_this_replica(state)
    loss, gradients = jax.value_and_grad(loss_of)(mine.params, mine, inputs, targets)
    mine = mine.apply_gradients(grads=gradients)
    if not isinstance(mine.tx, LocalOptimizer):
        return mine, loss
    params, opt_state = mine.tx.average_params(mine.params, mine.opt_state)
    return stack_replicas(mine.replace(params=params, opt_state=opt_state)), loss


def on_this_replica(state: Any) -> TrainState:
    """Under local SGD every array of the state is this replica's own, and marked so."""
    mine: TrainState = this_replica(state) if isinstance(state, PerReplica) else state
    return mine


@functools.partial(jax.pmap, axis_name="batch")
def validation_loss(state: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    state = on_this_replica(state)
    mean: jax.Array = jax.lax.pmean(loss_of(state.params, state, inputs, targets), "batch")
    return mean


def train(args: argparse.Namespace) -> None:
    replicas = jax.local_device_count()
    text = load(args.text, context=args.context)
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, args.heads)
    params = jax.jit(model.init)(
        jax.random.key(args.seed), jnp.zeros((1, args.context), jnp.int32)
    )["params"]
    state: Any = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer(args))
    if local_of(args) is not None:
        state = stack_replicas(state)
    done, seconds = 0, 0.0
    if args.resume:
        state, done, seconds = restore(args, state)
    traffic = list(sent_so_far(args, params))
    state = replicate(state, axis_name="batch")

    def stacked(batches: Any) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = zip(*batches, strict=True)
        return np.stack(inputs), np.stack(targets)

    held_out = stacked(
        text.validation_batch(i, replicas, args.eval_windows, args.context) for i in range(replicas)
    )
    with Report(args.steps, done, args.metrics, args.progress) as report:
        for step in range(done, args.steps):
            began = time.perf_counter()
            batches = (
                text.batch(args.seed, step, i, args.batch_size, args.context)
                for i in range(replicas)
            )
            state, losses = train_step(state, *stacked(batches))
            trained = float(losses[0])
            seconds += time.perf_counter() - began

            done, last = step + 1, step + 1 == args.steps
            validation = None
            if done % args.eval_every == 0 or last:
                validation = float(validation_loss(state, *held_out)[0])
            bytes_sent, collectives = traffic[done]
            report.step(
                done,
                trained,
                validation,
                bytes_sent=bytes_sent,
                collectives=collectives,
                seconds=seconds,
            )
            if args.checkpoint and (done % args.checkpoint_every == 0 or last):
                save(args, state, done, seconds)


def sent_so_far(args: argparse.Namespace, params: Any) -> Iterator[tuple[int, int]]:
    """Bytes and collectives of a replica after 0, 1, 2, … steps: known before the training, since
    nothing depends on the data."""
    shapes = parameter_shapes(params)
    dense = gradwire.plan(shapes, gradwire.AllReduce()).steps[0]
    local = local_of(args)
    compressed = gradwire.plan(
        shapes, gradwire.PowerSGD(args.rank, half_step=args.half_step, **VIEWS)
    ).steps
    start = args.start_step if args.compress == "powersgd" else args.steps
    updates = gradwire.Traffic(0, 0)
    if args.zero:
        specs = {name: gradwire.Spec(shape) for name, shape in shapes.items()}
        shards = gradwire.shard_by_element(specs, jax.device_count())
        if args.compress == "powersgd":
            updates = gradwire.plan(shapes, gradwire.Zero(shards, algorithm=None)).steps[0]
        else:
            dense = gradwire.plan(shapes, gradwire.Zero(shards, max_norm=1.0)).steps[0]
    if local is not None:
        start, compressed = args.start_step, gradwire.plan(shapes, local).steps
    phases = cycle(compressed)
    steps = (dense if step < start else next(phases) for step in range(args.steps))
    return accumulate(
        ((t.nbytes + updates.nbytes, t.collectives + updates.collectives) for t in steps),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        initial=(0, 0),
    )


def save(args: argparse.Namespace, state: Any, done: int, seconds: float) -> None:
    """The compression error differs between replicas: gradwire's `unreplicate` keeps all of it,
    Flax's only the first's."""
    checkpoints.write(args.checkpoint, packed(args, unreplicate(state), done, seconds))


def packed(args: argparse.Namespace, state: Any, done: int, seconds: float) -> bytes:
    """The content of a checkpoint. `state` is in global form."""
    data = {"state": flax.serialization.to_state_dict(state), "done": done, "seconds": seconds}
    content: bytes = flax.serialization.msgpack_serialize(data | {"options": described(args)})
    return content


def restore(args: argparse.Namespace, state: Any) -> tuple[Any, int, float]:
    """On any number of devices, unless state is sharded or training is local: then on as many as
    there were."""
    data = flax.serialization.msgpack_restore(checkpoints.read(args.checkpoint))
    if data["options"] != described(args):
        raise SystemExit(
            f"{args.checkpoint} is of a run with {data['options']}, not with {described(args)}"
        )
    restored = flax.serialization.from_state_dict(state, data["state"])
    return set_replicas(restored, jax.device_count()), data["done"], data["seconds"]


def described(args: argparse.Namespace) -> str:
    """What decides about the form of the state: Flax itself does not compare shapes."""
    names = (
        "compress",
        "rank",
        "half_step",
        "start_step",
        "zero",
        "local_sgd",
        "diloco",
        "width",
        "layers",
        "context",
    )
    return " ".join(f"{name}={getattr(args, name, None)}" for name in names)


def main() -> None:
    p = flags.parser(__doc__)
    p.add_argument(
        "--devices",
        type=int,
        default=2,
        metavar="N",
        help="replicas on the CPU; 0 takes the GPUs or TPUs that JAX finds",
    )
    args = flags.check(p.parse_args(), p)
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.eval_windows % jax.local_device_count():
        p.error(
            f"--eval-windows {args.eval_windows} is not a multiple of the {jax.local_device_count()} devices"
        )
    train(args)


if __name__ == "__main__":
    main()
