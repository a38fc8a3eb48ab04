"""JAX: equations, tracing and compiling of an update against the number of leaves, beside `pmean`:
a process for each subject.

python benchmarks/scale/leaves.py Quantize 100 400
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from measuring import last_line

from scale.curves import Curve, beside
from scale.subjects import METHODS, shapes

PEER = "pmean"
AXIS = "data"
#: How often a step is traced, from nothing.
TRACED = 3


def of_leaves(
    leaves: Sequence[int], compiled: Sequence[int], said: Callable[[str], None]
) -> list[Curve]:
    """Equations of the step with so many leaves; and processor seconds of tracing and compiling, of
    those that are `compiled`."""
    curves = []
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    for name in (PEER, *METHODS):
        found = last_line(
            __file__,
            name,
            *map(str, leaves),
            *(f"{n}!" for n in compiled),
            XLA_FLAGS=flags,
            JAX_PLATFORMS="cpu",
        )
        said(f"leaves: {name}")
        values: dict[str, dict[int, float]] = {}
        for each in found:
            for what in each["found"]:
                values.setdefault(what, {})[each["leaves"]] = each["found"][what]
        curves += [Curve("leaves", name, what, own) for what, own in values.items()]
    return beside(curves, PEER)


def equations(jaxpr: Any) -> int:
    """Of a program, those inside of others too."""
    inner = [value for eqn in jaxpr.eqns for each in eqn.params.values() for value in _listed(each)]
    return len(jaxpr.eqns) + sum(
        equations(getattr(x, "jaxpr", x)) for x in inner if hasattr(getattr(x, "jaxpr", x), "eqns")
    )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def made(name: str, leaves: int, compiles: bool) -> dict[str, float]:
    """What making the step of a subject takes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from gradwire.jax_backend import average_gradients, distribute, partition_specs

    mesh = jax.make_mesh((2,), (AXIS,))
    params = {n: jnp.zeros(shape) for n, shape in shapes(leaves).items()}
    own = PartitionSpec()
    if name == PEER:
        step, given, specs = (
            (lambda gradients, _: jax.tree.map(lambda x: jax.lax.pmean(x, AXIS), gradients)),
            (),
            own,
        )
    else:
        tx = average_gradients(METHODS[name], axis_name=AXIS)
        state = tx.init(params)
        specs = partition_specs(state, AXIS)
        given, step = distribute(state, mesh, AXIS), tx.update
    out = own if name == PEER else (own, specs)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(own, specs), out_specs=out, check_vma=False)
    found = {"equations": float(equations(jax.make_jaxpr(mapped)(params, given).jaxpr))}
    if compiles:
        seconds = []
        for _ in range(TRACED):
            jax.clear_caches()
            cpu = time.process_time()
            lowered = jax.jit(mapped).lower(params, given)
            traced = time.process_time()
            seconds.append(traced - cpu)
        lowered.compile()
        found |= {
            "seconds of tracing": statistics.median(seconds),
            "seconds of compiling": time.process_time() - traced,
        }
    return found


def main(name: str, *sizes: str) -> None:
    """Print what is found, as JSON. Sizes that are compiled end with "!"."""
    compiled = {int(n[:-1]) for n in sizes if n.endswith("!")}
    rows = [
        {"leaves": n, "found": made(name, n, n in compiled)}
        for n in sorted(compiled | {int(n) for n in sizes if not n.endswith("!")})
    ]
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
