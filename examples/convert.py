"""Move a training run from torch to Flax, or back: weights, AdamW's moments, and what compression
remembers.

    python examples/convert.py flax run.pt run.msgpack         # then train_flax.py --resume --checkpoint run.msgpack
    python examples/convert.py torch run.msgpack run.pt

With the flags that the training was given (`--width`, `--rank`, …). What is moved is what decides
how the run goes on: on the other side its losses are those that it would have had, up to rounding.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import checkpoints
import flags
import flax.serialization
import jax
import jax.numpy as jnp
import model_torch
import numpy as np
import torch
import train_flax
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict
from model_flax import Transformer
from text import VOCABULARY

from gradwire import FlaxNames, PowerSGD
from gradwire.jax_backend import from_portable, parameter_shapes, to_portable


def algorithms(args: argparse.Namespace) -> tuple[PowerSGD, PowerSGD]:
    """In torch, in Flax."""
    options = {"half_step": args.half_step, "start_step": args.start_step}
    return PowerSGD(args.rank, **options), PowerSGD(args.rank, **train_flax.VIEWS, **options)


def to_flax(
    saved: dict[str, Any], like: TrainState, args: argparse.Namespace, replicas: int = 1
) -> TrainState:
    """What `train_torch.py` saved, as the state of `train_flax.py` in global form.

    Args:
        saved: the content of a checkpoint.
        like: a state of the same model and optimizer, as it is before training.
        args: the flags of the training.
        replicas: there are from now on.
    """
    _, there = algorithms(args)
    names = FlaxNames(saved["model"], parameter_shapes(like.params))
    moments = saved["optimizer"]["state"]

    def tree(arrays: dict[str, Any]) -> Any:
        return unflatten_dict(
            {n: jnp.asarray(x) for n, x in names.to_flax(arrays).items()}, sep="/"
        )

    # With `VIEWS`, Flax compresses the matrices that torch has.
    moved = names.state_to_flax(saved["compressor"], there)
    average, clip, (adam, decay, rate) = like.opt_state
    count = jnp.asarray(saved["step"], jnp.int32)
    mu, nu = (
        tree({n: moments[i][key] for i, n in enumerate(saved["model"])})
        for key in ("exp_avg", "exp_avg_sq")
    )
    opt_state = (
        from_portable(moved, there, average, replicas=replicas),
        clip,
        (adam._replace(count=count, mu=mu, nu=nu), decay, rate._replace(count=count)),
    )
    return like.replace(step=saved["step"], params=tree(saved["model"]), opt_state=opt_state)


def to_torch(state: TrainState, like: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """A state of `train_flax.py` in global form, as `train_torch.py` saves it.

    Args:
        state: to be moved.
        like: "model" and "optimizer" of the same model in torch: their `state_dict`s before
            training.
        args: the flags of the training.
    """
    here, there = algorithms(args)
    average, _, (adam, *_) = state.opt_state
    names = FlaxNames(like["model"], parameter_shapes(state.params))

    def tensors(tree: Any) -> dict[str, torch.Tensor]:
        return {
            name: torch.tensor(x) for name, x in names.to_torch(flatten_dict(tree, sep="/")).items()
        }

    mu, nu = tensors(adam.mu), tensors(adam.nu)
    step = torch.tensor(float(adam.count))
    moments = {
        i: {"step": step.clone(), "exp_avg": mu[n], "exp_avg_sq": nu[n]}
        for i, n in enumerate(like["model"])
    }
    moved = names.state_to_torch(to_portable(average, there, errors="all"), here)
    portable = jax.tree.map(lambda x: torch.tensor(x) if isinstance(x, np.ndarray) else x, moved)
    optimizer = {"state": moments, "param_groups": like["optimizer"]["param_groups"]}
    return {
        "step": int(state.step),
        "model": tensors(state.params),
        "optimizer": optimizer,
        "compressor": portable,
    }


def flax_state(args: argparse.Namespace) -> TrainState:
    """Before training."""
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, args.heads)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, args.context), jnp.int32))[
        "params"
    ]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    state: TrainState = TrainState.create(
        apply_fn=model.apply, params=params, tx=train_flax.optimizer(args)
    )
    return state


def torch_state(args: argparse.Namespace) -> dict[str, Any]:
    """Before training."""
    model = model_torch.Transformer(VOCABULARY, args.context, args.width, args.layers, args.heads)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def main() -> None:
    p = flags.parser(__doc__)
    p.add_argument("to", choices=["flax", "torch"], help="where the run is to go on")
    p.add_argument("source", type=Path, help="a checkpoint of the other one")
    p.add_argument("destination", type=Path, help="the checkpoint to write")
    args = flags.check(p.parse_args(), p)
    if args.compress != "powersgd" or args.zero or args.local_sgd or args.diloco:
        p.error(
            "this example moves runs with PowerSGD, AdamW on every replica, and gradients averaged in each step"
        )
    content = checkpoints.read(args.source)
    like = flax_state(args)
    if args.to == "flax":
        saved = torch.load(io.BytesIO(content), weights_only=True)
        compressor, wanted = saved.get("compressor"), repr(algorithms(args)[0])
        if compressor is None or compressor["algorithm"] != wanted:
            of = "no PowerSGD" if compressor is None else compressor["algorithm"]
            raise SystemExit(f"{args.source} is of a run with {of}, not with {wanted}")
        state = to_flax(saved, like, args)
        checkpoints.write(
            args.destination, train_flax.packed(args, state, saved["step"], saved["seconds"])
        )
        return
    data = flax.serialization.msgpack_restore(content)
    if data["options"] != train_flax.described(args):
        raise SystemExit(
            f"{args.source} is of a run with {data['options']}, not with {train_flax.described(args)}"
        )
    state = flax.serialization.from_state_dict(like, data["state"])
    packed = io.BytesIO()
    torch.save(to_torch(state, torch_state(args), args) | {"seconds": data["seconds"]}, packed)
    checkpoints.write(args.destination, packed.getvalue())


if __name__ == "__main__":
    main()
