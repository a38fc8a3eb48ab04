"""Averages in JAX beside `pmean`: the step of `benchmarks/jax_step.py` on the gradients of a GPT,
on the one device of this process, or on those of two processes that share one.

A part of `benchmarks/gpu`, which starts it. Each subject takes turns with `pmean`, and is told
before the next one is compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1]))
from jax_step import AXIS, PMEAN, compiled, timed, transformations
from shapes import gpt

from gpu.children import tell
from gradwire import Algorithm, AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.jax_backend import average_gradients

SIZE, TINY = (12, 768, 50_257, 1024), (1, 64, 200, 16)
ROUNDS = 30


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--worker")
    p.add_argument("--tiny", action="store_true")
    args = p.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.config.update("jax_platforms", "cpu" if args.tiny else "cuda")
    if size > 1:
        coordinator = f"127.0.0.1:{os.environ['BENCH_PORT']}"
        jax.distributed.initialize(
            coordinator, num_processes=size, process_id=rank, local_device_ids=[0]
        )
    measure(rank, size, tiny=args.tiny)
    tell(None)


def measure(rank: int, size: int, *, tiny: bool) -> None:
    algorithms: list[Algorithm] = [
        PowerSGD(4),
        WireDtype(AllReduce(), "int8"),
        WireDtype(PowerSGD(16), "int8"),
    ]
    if size == 1 and not tiny:
        algorithms += [PowerSGD(32), Sign(), Quantize("int8"), TopK(64)]
    devices = [next(d for d in jax.devices() if d.process_index == i) for i in range(size)]
    mesh = jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    shapes = gpt(*(TINY if tiny else SIZE))
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    drawn = np.random.default_rng(rank)
    own = {n: drawn.standard_normal((1, *s), dtype=np.float32) for n, s in shapes.items()}
    kept = {
        n: jax.make_array_from_process_local_data(sharding, x, (size, *x.shape[1:]))
        for n, x in own.items()
    }
    copied = jax.jit(lambda tree: jax.tree.map(lax.optimization_barrier, tree))

    def given() -> Any:
        return copied(kept)  # since a step takes them

    def say(row: Any) -> None:
        if rank == 0:
            tell(row)

    say([PMEAN, *map(repr, algorithms)])
    plain = compiled(transformations([])[PMEAN], shapes, mesh, "sgd")
    rounds = 1 if tiny else ROUNDS
    for algorithm in algorithms:
        subject = compiled(average_gradients(algorithm, axis_name=AXIS), shapes, mesh, "sgd")
        timed({PMEAN: plain, repr(algorithm): subject}, given, rounds)
        if algorithm is algorithms[0]:
            say({"row": PMEAN, "rounds": rounds} | plain.facts)
        say({"row": repr(algorithm), "rounds": rounds} | subject.facts)
        del subject


if __name__ == "__main__":
    main()
