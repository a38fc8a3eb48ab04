"""Move a training run from torch to Flax, or back: weights, AdamW's moments, and what compression remembers.

    python examples/convert.py flax run.pt run.msgpack         # then train_flax.py --resume --checkpoint run.msgpack
    python examples/convert.py torch run.msgpack run.pt

With the flags that the training was given (`--width`, `--rank`, …). What is moved is what decides how the run goes on: on the other side its
losses are those that it would have had, up to rounding.
"""

from __future__ import annotations

import argparse
import io
import re
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

from gradwire import PowerSGD
from gradwire.core import checkpoint
from gradwire.jax_backend import from_neutral, to_neutral


def flax_name(name: str) -> str:
    """torch's name of a parameter → Flax's: `blocks.0.norm_1.weight` → `blocks_0/norm_1/scale`."""
    path = re.sub(r"blocks\.(\d+)", r"blocks_\1", name).split(".")
    if path[-1] == "weight":
        layer = path[-2]
        path[-1] = "embedding" if layer == "embed" else "scale" if layer.startswith("norm") else "kernel"
    return "/".join(path)


def turned(name: str, x: Any) -> Any:
    """A Flax kernel is a torch weight, transposed; everything else lies alike."""
    x = np.asarray(x)
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)) if flax_name(name).endswith("/kernel") else x


def memory(name: str, key: str, x: Any) -> Any:
    """The error turns with its kernel. Factors stay as they are: `PowerSGD(transpose=…)` compresses the matrix that torch has."""
    return turned(name, x) if key == "error" else np.asarray(x)


def algorithms(args: argparse.Namespace) -> tuple[PowerSGD, PowerSGD]:
    """In torch, in Flax."""
    options = {"half_step": args.half_step, "start_step": args.start_step}
    return PowerSGD(args.rank, **options), PowerSGD(args.rank, transpose=train_flax.KERNELS, **options)


def to_flax(saved: dict[str, Any], like: TrainState, args: argparse.Namespace, replicas: int = 1) -> TrainState:
    """What `train_torch.py` saved, as the state of `train_flax.py` in global form.

    Args:
        saved: the content of a checkpoint.
        like: a state of the same model and optimizer, as it is before training.
        args: the flags of the training.
        replicas: there are from now on.
    """
    _, there = algorithms(args)
    names = list(saved["model"])
    moments = saved["optimizer"]["state"]

    def tree(arrays: dict[str, Any]) -> Any:
        flat = {flax_name(name): jnp.asarray(turned(name, x)) for name, x in arrays.items()}
        return unflatten_dict(flat, sep="/")

    moved = checkpoint.renamed(
        saved["compressor"], {n: flax_name(n) for n in names}, algorithm=repr(there), tensor=memory
    )
    average, clip, (adam, decay, rate) = like.opt_state
    count = jnp.asarray(saved["step"], jnp.int32)
    mu, nu = (tree({n: moments[i][key] for i, n in enumerate(names)}) for key in ("exp_avg", "exp_avg_sq"))
    opt_state = (
        from_neutral(moved, there, average, replicas=replicas),
        clip,
        (adam._replace(count=count, mu=mu, nu=nu), decay, rate._replace(count=count)),
    )
    return like.replace(step=saved["step"], params=tree(saved["model"]), opt_state=opt_state)


def to_torch(state: TrainState, like: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """A state of `train_flax.py` in global form, as `train_torch.py` saves it.

    Args:
        state: to be moved.
        like: "model" and "optimizer" of the same model in torch: their `state_dict`s before training.
        args: the flags of the training.
    """
    here, there = algorithms(args)
    average, _, (adam, *_) = state.opt_state
    names = {flax_name(name): name for name in like["model"]}

    def tensors(tree: Any) -> dict[str, torch.Tensor]:
        flat = flatten_dict(tree, sep="/")
        return {name: torch.tensor(turned(name, flat[path])) for path, name in names.items()}

    mu, nu = tensors(adam.mu), tensors(adam.nu)
    step = torch.tensor(float(adam.count))
    moments = {i: {"step": step.clone(), "exp_avg": mu[n], "exp_avg_sq": nu[n]} for i, n in enumerate(names.values())}
    neutral = checkpoint.renamed(
        to_neutral(average, there, errors="all"),
        names,
        algorithm=repr(here),
        tensor=lambda path, key, x: torch.tensor(memory(names[path], key, x)),
    )
    neutral["shared"] = {key: torch.tensor(x) for key, x in neutral["shared"].items()}
    optimizer = {"state": moments, "param_groups": like["optimizer"]["param_groups"]}
    return {"step": int(state.step), "model": tensors(state.params), "optimizer": optimizer, "compressor": neutral}


def flax_state(args: argparse.Namespace) -> TrainState:
    """Before training."""
    model = Transformer(VOCABULARY, args.context, args.width, args.layers, args.heads)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, args.context), jnp.int32))["params"]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    state: TrainState = TrainState.create(apply_fn=model.apply, params=params, tx=train_flax.optimizer(args))
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
        p.error("this example moves runs with PowerSGD, AdamW on every replica, and gradients averaged in each step")
    content = checkpoints.read(args.source)
    like = flax_state(args)
    if args.to == "flax":
        saved = torch.load(io.BytesIO(content), weights_only=True)
        state = to_flax(saved, like, args)
        checkpoints.write(args.destination, train_flax.packed(args, state, saved["step"], saved["totals"]["seconds"]))
        return
    data = flax.serialization.msgpack_restore(content)
    state = flax.serialization.from_state_dict(like, data["state"])
    totals = {"bytes_sent": 0, "collectives": 0, "seconds": data["seconds"]}
    packed = io.BytesIO()
    torch.save(to_torch(state, torch_state(args), args) | {"totals": totals}, packed)
    checkpoints.write(args.destination, packed.getvalue())


if __name__ == "__main__":
    main()
