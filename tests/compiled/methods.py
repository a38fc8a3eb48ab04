"""What a compiler makes of a step of each method, with averages of a model's gradients and an
update by gradient descent: a line of JSON for each.

python -m tests.compiled.methods h100 pair pmean "PowerSGD(4)" "Quantize('int8')" "diloco(4)"
"""

from __future__ import annotations

import json
import math
import re
import sys
import time

from tests.compiled import hbm, targets

#: A kernel, or a library's, that the host launches.
_LAUNCH = re.compile(
    r" = .* (fusion|custom-call|while|conditional|copy|all-[a-z-]*|async-start|sort|scatter|dot)\("
)
#: A message, or where it begins; and one that the program waits for at once.
_MESSAGE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|send)(-start)?\("
)
_WAITING = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(")
_DONE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|send)-done\("
)
#: What is moved between the devices of a slice other than as a sum.
_MOVED = re.compile(
    r" = \(*(?P<type>\w+)\[(?P<shape>[\d,]*)\].* (all-gather|all-to-all|collective-permute)(-start)?\("
)
#: What a message between slices sends: its type, and the program's name for it.
_SEND = re.compile(r" = \((?P<type>\w+)\[(?P<shape>[\d,]*)\].*\) send\(")


def pair() -> dict[str, tuple[int, ...]]:
    """Two matrices and a vector."""
    return {"up": (512, 1024), "down": (1024, 512), "bias": (512,)}


def eight(width: int = 2048) -> dict[str, tuple[int, ...]]:
    """Eight square matrices, together too large for a TPU's fast memory."""
    return {f"w{i}": (width, width) for i in range(8)}


def fifty(width: int = 256) -> dict[str, tuple[int, ...]]:
    """The 50 matrices, of three shapes for the most part, and the vectors of a GPT of 12 layers."""
    layer = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    vectors = {"norm": (width,), "bias": (4 * width,)}
    shapes = {f"h{i}/{name}": shape for i in range(12) for name, shape in (layer | vectors).items()}
    return shapes | {"wte": (8 * width, width), "wpe": (2 * width, width)}


def layers(width: int = 256) -> dict[str, tuple[int, ...]]:
    """Matrices of two shapes, of each as many as four replicas can share evenly."""
    return {
        f"h{i}/{name}": (width, n * width)
        for i in range(4)
        for name, n in (("out", 1), ("up", 2), ("gate", 2))
    }


def stacked(width: int = 256) -> dict[str, tuple[int, ...]]:
    """The model of `fifty` with its layers stacked, as `nn.scan` has them: matrices and vectors of
    all layers in one array."""
    shapes = {name: shape for name, shape in fifty(width).items() if not name.startswith("h")}
    layer = {name: shape for name, shape in fifty(width).items() if name.startswith("h0/")}
    return shapes | {name.replace("h0/", "h/"): (12, *shape) for name, shape in layer.items()}


def divided() -> dict[str, tuple[int, ...]]:
    """The model of `stacked`, each array divided by its longest axis among the devices of a slice,
    which is left to the compiler."""
    return stacked()


MODELS = {
    "pair": pair,
    "stacked": stacked,
    "divided": divided,
    "eight": eight,
    "fifty": fifty,
    "layers": layers,
}


#: What is no algorithm: averages, and optimizers, as they are and divided.
PLAIN = ("pmean", "muon", "zero1", "zero1 of muon")


def compiled(target, model, name):
    """A row. `name` is an expression with the names of `gradwire`, or one of `PLAIN`."""
    import gradwire

    params = model()
    made = None if name in PLAIN else eval(name, vars(gradwire))
    nodes = isinstance(made, gradwire.TwoLevel)
    lower = _lowered_divided if model is divided else _lowered
    lowered = lower(targets.mesh(target, nodes), params, name, made)
    began = time.process_time()
    program = lowered.compile()
    seconds = time.process_time() - began
    nbytes = sum(4 * math.prod(shape) for shape in params.values())
    text = program.as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    cost = program.cost_analysis() or {}
    sent = [found for line in entry if (found := _SEND.search(line))]
    moved = [found for line in text.splitlines() if (found := _MOVED.search(line))]
    return {
        "target": target,
        "method": name,
        "compile_s": round(seconds, 1),
        "flops": cost.get("flops"),
        "passes": round(cost["bytes accessed"] / nbytes, 1) if "bytes accessed" in cost else None,
        "hbm": round(hbm.nbytes(text) / nbytes, 1),
        "temporary": round(program.memory_analysis().temp_size_in_bytes / nbytes, 2),
        "launches": sum(_LAUNCH.search(line) is not None for line in entry),
        "messages": sum(_MESSAGE.search(line) is not None for line in entry),
        "waiting": sum(_WAITING.search(line) is not None for line in entry),
        "sent": sum(map(_nbytes, sent)),
        "moved": max(map(_nbytes, moved), default=0),
        "beside": _beside(entry),
    }


def _beside(entry):
    """How many kernels are launched while a message is on its way."""
    open_, beside = 0, 0
    for line in entry:
        if _DONE.search(line):
            open_ -= 1
        elif _MESSAGE.search(line):
            open_ += _WAITING.search(line) is None
        else:
            beside += open_ > 0 and _LAUNCH.search(line) is not None
    return beside


def _nbytes(found):
    return hbm.size(found["type"], found["shape"])


def _lowered(mesh, shapes, name, made):
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import gradwire
    from gradwire import jax_backend as gw

    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in shapes.items()}
    two_levels = isinstance(made, gradwire.TwoLevel)
    axis, replicas = (("dcn", "ici"), mesh.size) if two_levels else ("dcn", mesh.shape["dcn"])
    tx, start = None, {"params": params, "own": ()}
    muon = optax.contrib.muon(0.1)
    if name == "muon":
        tx = optax.chain(gw.all_reduce_mean(axis_name=axis), muon)
    elif name == "zero1":
        tx = gw.zero1(optax.sgd(0.1), axis_name=axis, replicas=replicas)
    elif name == "zero1 of muon":
        tx = gw.zero1(muon, axis_name=axis, replicas=replicas, shard="parameter")
    elif isinstance(made, gradwire.LocalSGD):
        tx = gw.local_sgd(optax.sgd(0.1), made, axis_name=axis)
    elif made is not None:
        tx = gw.average_gradients(made, axis_name=axis)
    if tx is not None:
        start["own"] = jax.eval_shape(tx.init, params)

    def gradient_descent(state, gradients):
        if tx is None:
            averages, own = jax.lax.pmean(gradients, axis), state["own"]
        else:
            averages, own = tx.update(gradients, state["own"], state["params"])
        factor = 1.0 if name in PLAIN[1:] else -0.1
        return {
            "params": jax.tree.map(lambda p, g: p + factor * g, state["params"], averages),
            "own": own,
        }

    def with_an_average(state, gradients):
        mine = gw.this_replica(state)
        turn = tx.turn(made.period - 1)
        params, own = tx.step(gradients, (mine["params"], mine["own"]), turn=turn)
        return gw.stack_replicas({"params": params, "own": own})

    local = isinstance(made, gradwire.LocalSGD)

    def step(state, gradients):
        if mesh.shape["ici"] > 1 and not two_levels:
            gradients = jax.lax.pmean(gradients, "ici")
        return (with_an_average if local else gradient_descent)(state, gradients)

    state = gw.abstract_state(gw.stack_replicas(start) if local else start, replicas, mesh, axis)
    specs, rows = gw.partition_specs(state, axis), P(("dcn", "ici"))
    gradients = {
        key: jax.ShapeDtypeStruct(
            (mesh.size * x.shape[0], *x.shape[1:]), x.dtype, sharding=NamedSharding(mesh, rows)
        )
        for key, x in params.items()
    }
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, rows), out_specs=specs, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0).lower(state, gradients)


def _lowered_divided(mesh, shapes, name, made):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import gradwire
    from gradwire import jax_backend as gw

    lies = {
        key: [None if i != shape.index(max(shape)) else "ici" for i in range(len(shape))]
        for key, shape in shapes.items()
    }
    params = {
        key: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*lies[key])))
        for key, shape in shapes.items()
    }
    tx = gw.average_gradients(gradwire.AllReduce() if made is None else made, axis_name="dcn")
    start = {"params": params, "own": jax.eval_shape(tx.init, params)}
    state = gw.abstract_state(start, mesh.shape["dcn"], mesh, "dcn", params=params)

    def step(state, gradients):
        averages, own = tx.update(
            jax.tree.map(lambda x: x[0], gradients), state["own"], state["params"]
        )
        return {
            "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], averages),
            "own": own,
        }

    gradients = {
        key: jax.ShapeDtypeStruct(
            (mesh.shape["dcn"], *x.shape),
            x.dtype,
            sharding=NamedSharding(mesh, P("dcn", *lies[key])),
        )
        for key, x in params.items()
    }
    specs = gw.partition_specs(state, "dcn")
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P("dcn")),
        out_specs=specs,
        axis_names={"dcn"},
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0).lower(state, gradients)


if __name__ == "__main__":
    targets.prepare()
    for each in sys.argv[3:]:
        print(json.dumps(compiled(sys.argv[1], MODELS[sys.argv[2]], each)), flush=True)
