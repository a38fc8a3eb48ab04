"""One host of the JAX half of the network benchmark: `pmap` over one CPU device of each process.
Prints its rows as the last line.

A step is what a transformation does to given gradients. The subjects take turns, one step each.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from gradwire import AllReduce, PowerSGD, plan
from gradwire.jax_backend import all_reduce_mean, power_sgd, replicate, zero1

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import gpt
from subjects import Subject, parser, rows, sent_bytes

AXIS = "data"


def subjects(shapes: dict[str, tuple[int, ...]], given: Any, rank: int) -> list[Subject]:
    params = {n: jnp.zeros(s) for n, s in shapes.items()}
    dense = plan(shapes, AllReduce())

    def subject(
        name: str, tx: optax.GradientTransformation, planned: float, collectives: float
    ) -> Subject:
        state = replicate(tx.init(params), axis_name=AXIS)
        weights = replicate(params, axis_name=AXIS)
        update = jax.pmap(tx.update, axis_name=AXIS, donate_argnums=1)
        held = [state]

        def step() -> None:
            _, held[0] = jax.block_until_ready(update(given, held[0], weights))

        return Subject(name, step, planned, collectives)

    compressed, half = plan(shapes, PowerSGD(rank)), plan(shapes, PowerSGD(rank, half_step=True))
    replicas = jax.device_count()
    return [
        subject("pmean", all_reduce_mean(axis_name=AXIS), dense.wire_bytes, 1),
        subject(
            f"PowerSGD, rank {rank}",
            power_sgd(rank, axis_name=AXIS),
            compressed.wire_bytes,
            compressed.collectives,
        ),
        subject(
            f"PowerSGD, rank {rank}, half-step",
            power_sgd(rank, axis_name=AXIS, half_step=True),
            half.wire_bytes,
            half.collectives,
        ),
        subject(
            "ZeRO + AdamW",
            zero1(optax.adamw(1e-3), axis_name=AXIS, replicas=replicas),
            dense.wire_bytes,
            2,
        ),
    ]


def measure(subject: Subject) -> tuple[float, float]:
    """Seconds, and bytes on this host's interface, of a step."""
    multihost_utils.sync_global_devices("before")
    bytes_before, began = sent_bytes(), time.perf_counter()
    subject.step()
    took = time.perf_counter() - began
    multihost_utils.sync_global_devices("after")  # what this host's partner still waits for
    return took, sent_bytes() - bytes_before


def main() -> None:
    p = parser()
    p.add_argument("--host", type=int, required=True)
    p.add_argument("--hosts", type=int, required=True)
    args = p.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(coordinator, num_processes=args.hosts, process_id=args.host)
    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    random = np.random.default_rng(args.host)
    given = {
        n: jnp.asarray(random.standard_normal((1, *s), dtype=np.float32)) for n, s in shapes.items()
    }
    found = rows(subjects(shapes, given, args.rank), measure, args, hosts=args.hosts, warm_up=1)
    if args.host == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
