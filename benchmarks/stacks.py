"""What stacked layers cost to compile in JAX, as one batch: CPU seconds of a step of 32 stacked
layers beside those of one layer.

    python benchmarks/stacks.py                   # half a minute; writes benchmarks/results/stacks.json and prints a table
    python benchmarks/stacks.py --stacks 4 --width 16 --repeats 1 --output /tmp/stacks.json

A step is what `power_sgd` does to given gradients of Transformer layers under `jax.pmap`, on two
CPU devices. What is counted is tracing, lowering and compiling, in CPU seconds of this process and
its threads, so that other work on the machine counts for little. Subjects take turns; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from measuring import REPLICAS, save

from gradwire.jax_backend import power_sgd, replicate

AXIS = "data"
Shapes = dict[str, tuple[int, ...]]


def layer(width: int) -> Shapes:
    """One layer as Flax has it, eight heads."""
    heads = (8, width // 8)
    kernels: Shapes = {
        f"attention/{name}/kernel": (width, *heads) for name in ("query", "key", "value")
    }
    kernels |= {
        "attention/out/kernel": (*heads, width),
        "up/kernel": (width, 4 * width),
        "down/kernel": (4 * width, width),
    }
    return kernels | {
        "norm_1/scale": (width,),
        "norm_2/scale": (width,),
        "up/bias": (4 * width,),
        "down/bias": (width,),
    }


def subjects(width: int, stacks: list[int]) -> dict[str, tuple[Shapes, dict[str, Any]]]:
    one = layer(width)
    found: dict[str, tuple[Shapes, dict[str, Any]]] = {"one layer": (one, {})}
    for n in stacks:
        found[f"{n} stacked"] = (
            {name: (n, *shape) for name, shape in one.items()},
            {"stacked": {"*": 1}},
        )
    return found


def compile_step(shapes: Shapes, rank: int, options: dict[str, Any]) -> float:
    """CPU seconds."""
    jax.clear_caches()
    tx = power_sgd(rank, axis_name=AXIS, **options)
    gradients = {name: jnp.ones((REPLICAS, *shape)) for name, shape in shapes.items()}
    state = replicate(
        tx.init({name: jnp.zeros(shape) for name, shape in shapes.items()}), axis_name=AXIS
    )
    began = time.process_time()
    jax.pmap(tx.update, AXIS).lower(gradients, state).compile()
    return time.process_time() - began


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--stacks", type=int, nargs="+", default=[8, 32], help="numbers of layers")
    p.add_argument("--width", type=int, default=128)
    p.add_argument("--rank", type=int, default=4)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument(
        "--output", type=Path, default=Path(__file__).with_name("results") / "stacks.json"
    )
    args = p.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    seconds: dict[str, list[float]] = {}
    for repeat in range(1 + args.repeats):  # the first warms up
        for name, (shapes, options) in subjects(args.width, args.stacks).items():
            found = compile_step(shapes, args.rank, options)
            if repeat:
                seconds.setdefault(name, []).append(found)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rows = [
        {"subject": n, "cpu_s": s, "to_one_layer": s / medians["one layer"]}
        for n, s in medians.items()
    ]
    for row in rows:
        print(
            f"{row['subject']:>12}: {row['cpu_s']:6.2f} s of CPU time to compile, {row['to_one_layer']:4.2f} of one layer"
        )
    configuration = {
        "width": args.width,
        "rank": args.rank,
        "repeats": args.repeats,
        "jax": jax.__version__,
    }
    save({"configuration": configuration | {"cpus": os.cpu_count()}, "rows": rows}, args.output)


if __name__ == "__main__":
    main()
