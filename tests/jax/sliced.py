"""Steps of replicas that are divided among the devices of a slice, compiled, with what they send.
As a script, `sliced.py` prints this as JSON for slices of four devices, which takes eight.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradwire
import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, Sign, TopK, WireDtype
from tests.jax.hlo import collectives

#: Sharded by rows, by columns, inside a stack, and not at all; large enough for the ways of large
#: arrays, and not.
SHAPES = {
    "a/up": (256, 512),
    "a/down": (512, 256),
    "a/bias": (512,),
    "b/up": (64, 256),
    "b/down": (256, 64),
    "b/scale": (64,),
    "stack": (2, 64, 128),
    "odd": (3,),
    "scalar": (),
}
SPECS = {
    "a/up": P("ici"),
    "a/down": P(None, "ici"),
    "b/up": P("ici"),
    "b/down": P(None, "ici"),
    "b/scale": P("ici"),
    "stack": P(None, "ici"),
}
#: By their longest axes, as most rules of FSDP have it, and as averages in codes are divided.
LONGEST = {
    "a/up": P(None, "ici"),
    "a/down": P("ici"),
    "b/up": P(None, "ici"),
    "b/down": P("ici"),
    "b/scale": P("ici"),
}
LONGEST["stack"] = P(None, None, "ici")
#: Where size and number of tensors prove nothing: compiling is what takes the time.
FEW = {n: SHAPES[n] for n in ("a/up", "a/bias", "b/down", "stack", "scalar")}
#: Over a slice nothing as large as this may be gathered.
MATRIX = 4 * 64 * 256


def power(**options):
    return PowerSGD(2, stacked={"stack": 1}, **options)


ALGORITHMS = {
    "power_sgd": power(),
    "half-step": power(half_step=True),
    "dense start": power(start_step=5),
    "mean": AllReduce(),
    "int8": WireDtype(AllReduce(), "int8"),
    "sign": Sign(),
    "tiles": TopK(0.05, per=(16, 16)),
    "diloco": AllReduce(),  # what is sent when parameters are averaged
}


#: By pieces of their longest axes.
IN_PIECES = ("int8", "sign", "tiles")


def mesh_of(devices, kind=AxisType.Auto):
    """Two slices of so many devices."""
    return jax.make_mesh(
        (2, devices), ("dcn", "ici"), axis_types=(kind, kind), devices=jax.devices()[: 2 * devices]
    )


def arrays(mesh, specs=SPECS, shapes=SHAPES):
    """Parameters where they belong."""
    ones = {n: np.ones(s, np.float32) for n, s in shapes.items()}
    return jax.device_put(ones, {n: NamedSharding(mesh, specs.get(n, P())) for n in shapes})


def shapes_of_gradients(mesh, specs=SPECS, shapes=SHAPES):
    """A row for each replica."""
    return {
        n: jax.ShapeDtypeStruct(
            (2, *s), jnp.float32, sharding=NamedSharding(mesh, P("dcn", *specs.get(n, P())))
        )
        for n, s in shapes.items()
    }


def step_and_state(kind, mesh, specs=SPECS, shapes=SHAPES):
    """A step that is given gradients and the state, and the state, distributed."""
    params = arrays(mesh, specs, shapes)
    if kind == "diloco":
        local = gw.diloco(optax.sgd(0.1), 4, axis_name="dcn")

        def average(g, state):
            return (), gw.stack_replicas(local.step(first(g), gw.this_replica(state)))

        return average, gw.distribute(gw.stack_replicas((params, local.init(params))), mesh, "dcn")
    tx = gw.average_gradients(ALGORITHMS[kind], axis_name="dcn")
    return lambda g, state: tx.update(first(g), state), gw.distribute(tx.init(params), mesh, "dcn")


def first(g):
    return jax.tree.map(lambda x: x[0], g)


def mapped(step, state, **options):
    """Manual over "dcn" alone."""
    specs = gw.partition_specs(state, "dcn")
    return jax.shard_map(
        step, in_specs=(P("dcn"), specs), out_specs=(P(), specs), axis_names={"dcn"}, **options
    )


def sent(kind, mesh, specs=None, shapes=SHAPES):
    specs = specs or (LONGEST if kind in IN_PIECES else SPECS)
    step, state = step_and_state(kind, mesh, specs, shapes)
    program = jax.jit(mapped(step, state, mesh=mesh, check_vma=False))
    return collectives(
        program.lower(shapes_of_gradients(mesh, specs, shapes), state).compile().as_text(), mesh
    )


def planned(kind, shapes=SHAPES):
    return gradwire.plan(shapes, ALGORITHMS[kind], world_size=2).steps[0]


def summary(found):
    """How often something crosses the slow axis, how many bytes of a slice, and the largest array
    that moves inside a slice other than as a sum."""
    slow = [c for c in found if "dcn" in c.axes]
    fast = [
        c.nbytes
        for c in found
        if "dcn" not in c.axes and c.kind not in ("all-reduce", "reduce-scatter")
    ]
    return {
        "count": len(slow),
        "bytes": sum(c.per_slice(2) for c in slow),
        "moved": max(fast, default=0),
    }


def main():
    mesh = mesh_of(4)
    found = {
        kind: summary(sent(kind, mesh)) for kind in ("power_sgd", "mean", "diloco", *IN_PIECES)
    }
    # Two axes for the compiler: parameters are sharded by rows and by columns at once.
    both = jax.make_mesh((2, 2, 2), ("dcn", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    specs = {
        n: P(*[None] * (len(s) - 2), "fsdp", "tensor") for n, s in SHAPES.items() if len(s) > 1
    }
    found["two axes"] = summary(sent("power_sgd", both, specs))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
