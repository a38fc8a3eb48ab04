"""Counts that need no rank: what the host dispatches in a step, and the bytes of its plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from dry import Kernels, gradwire_step, on_a_device

from gradwire import plan
from gradwire.core.algorithm import Algorithm
from scale.curves import Curve
from scale.subjects import GATHERED, METHODS, methods, shapes

#: Of matrices: what fills up the last share of each replica is little beside them, also with
#: thousands of replicas.
WIDTH = 512

#: The first steps make memory.
STEPS = 3
#: How often a plan is made, of no more than so many tensors.
PLANNED, MANY = 3, 10_000


def operations(algorithm: Algorithm, ranks: int, tensors: int) -> int:
    """How many operations of torch the hook dispatches in a step on a device with Triton, views
    too; nothing is computed."""
    with on_a_device(fused=True):
        step = gradwire_step(shapes(tensors, WIDTH), algorithm, replicas=ranks)
    for _ in range(STEPS):
        with Kernels() as seen:
            step.run()
    found: int = seen.operations
    return found


def of_ranks(ranks: Sequence[int], tensors: int, said: Callable[[str], None]) -> list[Curve]:
    """Operations and planned bytes of a step, against the number of ranks."""
    curves = []
    sent = {
        name: {
            n: plan(shapes(tensors, WIDTH), methods(n)[name], world_size=n).wire_bytes
            for n in ranks
        }
        for name in methods(ranks[0])
    }
    for name in methods(ranks[0]):
        said(f"imagined ranks: {name}")
        counts = {n: float(operations(methods(n)[name], n, tensors)) for n in ranks}
        curves.append(Curve("ranks", name, "operations of a step", counts))
        grows = name in GATHERED
        outgrown = plan(
            shapes(tensors, WIDTH), methods(ranks[0])[name], world_size=ranks[0]
        ).outgrown_at
        more = {n: sent[name][n] > sent["int8"][n] for n in ranks}
        right = all(more[n] == (outgrown is not None and n >= outgrown) for n in ranks)
        curves.append(
            Curve(
                "ranks", name, "bytes of a step", sent[name], gathered=grows, outgrown_right=right
            )
        )
    return curves


def of_plans(tensors: Sequence[int], said: Callable[[str], None], ranks: int = 8) -> list[Curve]:
    """Processor seconds of a plan, against the number of tensors, to which it should be
    proportional."""
    curves = []
    for name, algorithm in METHODS.items():
        seconds = {}
        for n in tensors:
            took = []
            for again in range(PLANNED if n <= MANY else 1):
                # of other names, so that nothing is remembered
                given = {f"{again}.{key}": shape for key, shape in shapes(n).items()}
                began = time.process_time()
                plan(given, algorithm, world_size=ranks)
                took.append(time.process_time() - began)
            seconds[n] = statistics.median(took)
            said(f"a plan of {n:,} tensors: {name}")
        curves.append(Curve("tensors", name, "seconds of a plan", seconds, peer=1.0))
    return curves
