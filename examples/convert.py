"""Move a training run from torch to Flax, or back: weights, AdamW's moments, and what compression remembers.

    python examples/convert.py flax run.pt run.msgpack         # then train_flax.py --resume --checkpoint run.msgpack
    python examples/convert.py torch run.msgpack run.pt

With the flags that the training was given (`--width`, `--rank`, …). What is moved is what decides how the run goes on: on the other side its
losses are those that it would have had, up to rounding.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterable, Mapping
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
from gradwire.jax_backend import from_portable, parameter_shapes, to_portable


def place(name: str) -> tuple[str, int | None]:
    """torch's name of a parameter → Flax's, and the layer of the stack: `blocks.0.norm_1.weight` → `blocks/norm_1/scale`, 0."""
    path = name.split(".")
    layer = int(path.pop(1)) if path[0] == "blocks" else None
    if path[-1] == "weight":
        module = path[-2]
        path[-1] = "embedding" if module == "embed" else "scale" if module.startswith("norm") else "kernel"
    return "/".join(path), layer


def turned(name: str, x: Any) -> Any:
    """torch's weight (out, in) is a Flax kernel, transposed; everything else lies alike. The same back."""
    return np.swapaxes(x, -1, -2) if place(name)[0].endswith("/kernel") else x


def joined(arrays: Mapping[str, Any], axis: int = 0) -> dict[str, Any]:
    """By torch's names → by Flax's, with the layers stacked on a new axis."""
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        flax_name, layer = place(name)
        if layer is None:
            found[flax_name] = np.asarray(x)
        else:
            found.setdefault(flax_name, {})[layer] = np.asarray(x)
    return {
        name: np.stack([x[layer] for layer in sorted(x)], axis) if isinstance(x, dict) else x
        for name, x in found.items()
    }


def apart(arrays: Mapping[str, Any], names: Iterable[str], axis: int = 0) -> dict[str, Any]:
    """What was `joined`: by torch's names, of which those are left out that Flax does not have."""
    found = {}
    for name in names:
        flax_name, layer = place(name)
        if flax_name in arrays:
            x = np.asarray(arrays[flax_name])
            found[name] = x if layer is None else np.take(x, layer, axis)
    return found


def as_in_flax(arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], leading: int = 0) -> dict[str, Any]:
    """Weights, moments or errors. Attention has kernels (width, heads, dimensions) in Flax, where torch has (heads·dimensions, width).

    Args:
        arrays: by torch's names, in torch's shapes.
        shapes: in Flax, by Flax's names.
        leading: axes before those of the parameter: one, for the replicas, in errors.
    """
    stacks = joined({name: turned(name, np.asarray(x)) for name, x in arrays.items()}, leading)
    return {name: x.reshape(*x.shape[:leading], *shapes[name]) for name, x in stacks.items()}


def as_in_torch(arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], leading: int = 0) -> dict[str, Any]:
    """The same back; `shapes` are torch's."""
    found = {}
    for name, x in apart(arrays, shapes, leading).items():
        lies = turned(name, np.empty(shapes[name])).shape
        found[name] = np.ascontiguousarray(turned(name, x.reshape(*x.shape[:leading], *lies)))
    return found


def section(state: Mapping[str, Any], key: str) -> dict[str, Any]:
    """One memory of each parameter that has it."""
    return {name: memory[key] for name, memory in state.items() if key in memory}


def algorithms(args: argparse.Namespace) -> tuple[PowerSGD, PowerSGD]:
    """In torch, in Flax."""
    options = {"half_step": args.half_step, "start_step": args.start_step}
    return PowerSGD(args.rank, **options), PowerSGD(args.rank, **train_flax.VIEWS, **options)


def to_flax(saved: dict[str, Any], like: TrainState, args: argparse.Namespace, replicas: int = 1) -> TrainState:
    """What `train_torch.py` saved, as the state of `train_flax.py` in global form.

    Args:
        saved: the content of a checkpoint.
        like: a state of the same model and optimizer, as it is before training.
        args: the flags of the training.
        replicas: there are from now on.
    """
    _, there = algorithms(args)
    shapes = parameter_shapes(like.params)
    moments = saved["optimizer"]["state"]

    def tree(arrays: dict[str, Any]) -> Any:
        return unflatten_dict({n: jnp.asarray(x) for n, x in as_in_flax(arrays, shapes).items()}, sep="/")

    # The error lies as the parameter does. Factors stay as they are: with `VIEWS`, Flax compresses the matrices that torch has.
    memory = saved["compressor"]
    factors = {key: joined(section(memory["tensors"], key)) for key in ("q", "p")}
    errors = as_in_flax(section(memory["local"], "error"), shapes, leading=1)
    moved = memory | {
        "algorithm": repr(there),
        "tensors": {n: {key: x[n] for key, x in factors.items() if n in x} for n in factors["q"]},
        "local": {n: {"error": x} for n, x in errors.items()},
    }
    average, clip, (adam, decay, rate) = like.opt_state
    count = jnp.asarray(saved["step"], jnp.int32)
    mu, nu = (tree({n: moments[i][key] for i, n in enumerate(saved["model"])}) for key in ("exp_avg", "exp_avg_sq"))
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
        like: "model" and "optimizer" of the same model in torch: their `state_dict`s before training.
        args: the flags of the training.
    """
    here, there = algorithms(args)
    average, _, (adam, *_) = state.opt_state
    shapes = {name: tuple(x.shape) for name, x in like["model"].items()}

    def tensors(tree: Any) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(x) for name, x in as_in_torch(flatten_dict(tree, sep="/"), shapes).items()}

    mu, nu = tensors(adam.mu), tensors(adam.nu)
    step = torch.tensor(float(adam.count))
    moments = {i: {"step": step.clone(), "exp_avg": mu[n], "exp_avg_sq": nu[n]} for i, n in enumerate(shapes)}
    memory = to_portable(average, there, errors="all")
    factors = {key: apart(section(memory["tensors"], key), shapes) for key in ("q", "p")}
    errors = as_in_torch(section(memory["local"], "error"), shapes, leading=1)
    portable = memory | {
        "algorithm": repr(here),
        "shared": {key: torch.tensor(x) for key, x in memory["shared"].items()},
        "tensors": {n: {key: torch.tensor(x[n]) for key, x in factors.items() if n in x} for n in factors["q"]},
        "local": {n: {"error": torch.tensor(x)} for n, x in errors.items()},
    }
    optimizer = {"state": moments, "param_groups": like["optimizer"]["param_groups"]}
    return {"step": int(state.step), "model": tensors(state.params), "optimizer": optimizer, "compressor": portable}


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
