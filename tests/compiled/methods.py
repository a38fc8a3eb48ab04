"""What a compiler makes of a step of each method, with averages of a model's gradients and an update by gradient descent: a line of JSON for each.

python -m tests.compiled.methods h100 1024 pmean "power_sgd(4)" "Quantize('int8')"
"""

import json
import re
import sys
import time

from tests.compiled import targets

#: A kernel, or a library's, that the host launches.
_LAUNCH = re.compile(r" = .* (fusion|custom-call|while|conditional|copy|all-[a-z-]*|async-start|sort|scatter|dot)\(")
#: A message, or where it begins.
_MESSAGE = re.compile(r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|send)(-start)?\(")


def compiled(target, width, name):
    """A row. The names in `name` are those of `gradwire` and of `gradwire.jax_backend`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import gradwire
    from gradwire import jax_backend

    mesh = targets.mesh(target)
    axis, replicas = "dcn", mesh.shape["dcn"]
    params = {
        "up": jax.ShapeDtypeStruct((width, 2 * width), jnp.float32),
        "down": jax.ShapeDtypeStruct((2 * width, width), jnp.float32),
        "bias": jax.ShapeDtypeStruct((width,), jnp.float32),
    }
    tx = None
    if name != "pmean":
        made = eval(name, vars(gradwire) | {"power_sgd": jax_backend.power_sgd})
        if callable(made) and not hasattr(made, "update"):
            made = made(axis_name=axis)
        tx = made if hasattr(made, "update") else jax_backend.average_gradients(made, axis_name=axis)

    def step(state, gradients):
        if mesh.shape["ici"] > 1:
            gradients = jax.lax.pmean(gradients, "ici")
        if tx is None:
            averages, after = jax.lax.pmean(gradients, axis), state["o"]
        else:
            averages, after = tx.update(gradients, state["o"], state["p"])
        return {"p": jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], averages), "o": after}

    start = {"p": params, "o": jax.eval_shape(tx.init, params) if tx else ()}
    state = jax_backend.abstract_state(start, replicas, mesh, axis)
    specs, rows = jax_backend.partition_specs(state, axis), P(("dcn", "ici"))
    gradients = {
        k: jax.ShapeDtypeStruct((mesh.size * x.shape[0], *x.shape[1:]), x.dtype, sharding=NamedSharding(mesh, rows))
        for k, x in params.items()
    }
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, rows), out_specs=specs, check_vma=False)
    lowered = jax.jit(mapped, donate_argnums=0).lower(state, gradients)
    began = time.process_time()
    program = lowered.compile()
    seconds = time.process_time() - began
    nbytes = sum(4 * int(np.prod(x.shape)) for x in params.values())
    text = program.as_text()
    entry = text[text.index("ENTRY") :].splitlines()
    cost = program.cost_analysis() or {}
    return {
        "target": target,
        "method": name,
        "compile_s": round(seconds, 1),
        "passes": round(cost["bytes accessed"] / nbytes, 1) if "bytes accessed" in cost else None,
        "temporary": round(program.memory_analysis().temp_size_in_bytes / nbytes, 2),
        "launches": sum(_LAUNCH.search(line) is not None for line in entry),
        "messages": sum(_MESSAGE.search(line) is not None for line in entry),
    }


if __name__ == "__main__":
    targets.prepare()
    for each in sys.argv[3:]:
        print(json.dumps(compiled(sys.argv[1], int(sys.argv[2]), each)), flush=True)
