"""A step of DiLoCo in which an average is taken that left before, compiled for an accelerator:
prints how many of its products stand beside the message.

python -m tests.compiled.overlap tpu
"""

import functools
import json
import sys

from tests.compiled import targets

#: Layers large enough that each is a message of its own, as the layers of a model are that is worth
#: it.
LAYERS, WIDTH, ROWS, OVERLAP, PERIOD = 8, 4096, 512, 2, 4

if __name__ == "__main__":
    targets.prepare()
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import gradwire
    from gradwire.jax_backend import (
        abstract_state,
        local_sgd,
        partition_specs,
        stack_replicas,
        this_replica,
    )
    from tests.compiled.schedule import SLICES, schedule

    target = sys.argv[1]
    mesh = targets.mesh(target)
    params = {f"h{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
    tx = local_sgd(optax.sgd(0.1), gradwire.diloco(PERIOD, overlap=OVERLAP), axis_name="dcn")

    def loss(p, x):
        for i in range(LAYERS):
            x = jnp.tanh(x @ p[f"h{i}"])
        return jnp.square(x).mean()

    def step(state, batch, turn):
        mine = this_replica(state)
        gradients = jax.lax.pmean(jax.grad(loss)(mine["params"], batch), "ici")
        params, opt_state = tx.step(gradients, (mine["params"], mine["opt_state"]), turn=turn)
        return stack_replicas({"params": params, "opt_state": opt_state})

    start = stack_replicas({"params": params, "opt_state": jax.eval_shape(tx.init, params)})
    state = abstract_state(start, mesh.shape["dcn"], mesh, "dcn")
    specs, rows = partition_specs(state, "dcn"), P(("dcn", "ici"))
    batch = jax.ShapeDtypeStruct(
        (mesh.size * ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, rows)
    )
    taken = functools.partial(step, turn=tx.turn(PERIOD - 1 + OVERLAP))
    mapped = jax.shard_map(
        taken, mesh=mesh, in_specs=(specs, rows), out_specs=specs, check_vma=False
    )
    found = schedule(jax.jit(mapped, donate_argnums=0).lower(state, batch).compile().as_text())
    beside = found.beside(SLICES if target == "tpu" else "{{0,1,2,3}}")
    print(json.dumps({"products": found.products, "beside": beside}))
