"""What compression costs in JAX, in one process: time of a step beside plain `pmean` and the four matrix products it cannot do without, what XLA
needs to compile it, and its memory by XLA's own analysis.

    python benchmarks/jax_step.py                 # writes benchmarks/results/jax_step.json and prints a table
    python benchmarks/jax_step.py --layers 1 --vocabulary 200 --repeats 1 --compile-layers 0 --output /tmp/jax_step.json

A step is what a transformation does to given gradients of a GPT, under `jax.pmap`, gradients and state donated. Subjects take turns; medians.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from measuring import interleaved, save
from shapes import elements, gpt

from gradwire.jax_backend import all_reduce_mean, power_sgd, replicate
from gradwire.jax_backend.ops import JaxOps

AXIS = "data"
PASSES = 8
Shapes = dict[str, tuple[int, ...]]


@dataclass
class Compiled:
    """A program, what it takes, and what making it took."""

    run: Any
    arguments: tuple[Any, ...]
    facts: dict[str, Any]

    def step(self) -> None:
        """One call, in which each argument but the last gives way to a result."""
        results = jax.block_until_ready(self.run(*self.arguments))
        self.arguments = (*results, *self.arguments[len(results) :])


def compiled(function: Callable[..., tuple[Any, ...]], arguments: tuple[Any, ...], gradient_bytes: int) -> Compiled:
    """Trace and compile for these arguments; those that there is a result for are donated."""
    donated = tuple(range(len(jax.eval_shape(lambda *a: jax.pmap(function, AXIS)(*a), *arguments))))
    began, cpu = time.perf_counter(), time.process_time()
    lowered = jax.pmap(function, AXIS, donate_argnums=donated).lower(*arguments)
    traced = time.perf_counter()
    program = lowered.compile()
    memory = program.memory_analysis()
    given = sum(x.nbytes // x.shape[0] for x in jax.tree.leaves([arguments[i] for i in donated]))
    facts = {
        "trace_s": traced - began,
        "compile_s": time.perf_counter() - traced,
        "cpu_s": time.process_time() - cpu,
        "temporary_gradients": memory.temp_size_in_bytes / gradient_bytes,
        "donated_and_reused": memory.alias_size_in_bytes / given,
    }
    return Compiled(program, arguments, facts)


def leafwise() -> optax.GradientTransformation:
    """Plain data-parallel training: `lax.pmean` of each gradient."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda g: lax.pmean(g, AXIS), updates), state

    return optax.GradientTransformation(lambda params: {}, update)


def transformed(tx: optax.GradientTransformation, shapes: Shapes, given: Any, gradient_bytes: int) -> Compiled:
    """Averages of one step are the gradients of the next; for time and memory any numbers do."""
    state = replicate(tx.init({n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}), axis_name=AXIS)
    return compiled(tx.update, (given(), state), gradient_bytes)


def products(rank: int, shapes: Shapes, given: Callable[[], dict[str, jax.Array]]) -> Callable[[], None]:
    """What PowerSGD must multiply, with the kernels it has and factors that need no work: P = M Q, Q = Mᵀ P, M - P Qᵀ and P Qᵀ. On the
    first device, each product a program of its own that writes in place, so that none pays for fresh memory."""
    ops = JaxOps()
    m = {n: x[0] for n, x in given().items() if len(shapes[n]) > 1}
    # Small enough that steps upon steps do not overflow.
    q = {n: jnp.full((rank, x.shape[1]), 1e-3 / x.shape[1]) for n, x in m.items()}
    rest, average = ({n: jnp.copy(x) for n, x in m.items()} for _ in range(2))
    left = jax.jit(lambda q, m: {n: ops.matmul(q[n], m[n].mT) for n in m})
    right = jax.jit(lambda p, m: {n: ops.matmul(p[n], m[n]) for n in m})
    # Of what it is written over, one reads all and the other nothing.
    subtract = jax.jit(lambda m, p, q: {n: ops.subtract_product(m[n], p[n], q[n]) for n in m}, donate_argnums=0)
    multiply = jax.jit(lambda old, p, q: {n: ops.matmul(p[n].mT, q[n]) for n in p}, donate_argnums=0, keep_unused=True)

    def step() -> None:
        nonlocal rest, average
        p = left(q, m)
        right(p, m)
        rest = subtract(rest, p, q)
        average = jax.block_until_ready(multiply(average, p, q))

    return step


def passes(given: Any, gradient_bytes: int) -> Compiled:
    """Read and write every gradient once: two of the passes over memory that PowerSGD needs at least."""
    return compiled(lambda g: (jax.tree.map(lambda x: x * 0.999, g),), (given(),), gradient_bytes)


def devices() -> int:
    return jax.local_device_count()


def gradients(shapes: Shapes) -> Callable[[], dict[str, jax.Array]]:
    """Makes gradients of these shapes, anew each time, on their devices."""
    random = np.random.default_rng(0)
    drawn: dict[str, Any] = {n: random.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}
    return lambda: replicate(drawn, axis_name=AXIS)


def measure(shapes: Shapes, ranks: list[int], repeats: int, *, half_step: bool) -> list[dict[str, Any]]:
    """A row for each subject."""
    size = elements(shapes) * 4
    given = gradients(shapes)
    subjects = {"pmean": transformed(leafwise(), shapes, given, size)}
    subjects["all_reduce_mean"] = transformed(all_reduce_mean(axis_name=AXIS), shapes, given, size)
    for rank in ranks:
        subjects[f"PowerSGD, rank {rank}"] = transformed(power_sgd(rank, axis_name=AXIS), shapes, given, size)
        if half_step:
            half = power_sgd(rank, axis_name=AXIS, half_step=True)
            subjects[f"half-step, rank {rank}"] = transformed(half, shapes, given, size)
    subjects["two passes"] = passes(given, size)
    steps = {name: s.step for name, s in subjects.items()}
    steps |= {f"four products, rank {rank}": products(rank, shapes, given) for rank in ranks}
    seconds = interleaved(steps, repeats)
    times = {name: statistics.median(taken) * 1e3 for name, taken in seconds.items()}
    rows = []
    for name, subject in subjects.items():
        row = {"subject": name, "step_ms": times[name], **subject.facts}
        if name.startswith("PowerSGD"):
            row["over_pmean_ms"] = times[name] - times["pmean"]
            row["floor_products_ms"] = times[name.replace("PowerSGD", "four products")]
            row["floor_passes_ms"] = times["two passes"] * PASSES / 2
            floor = seconds[name.replace("PowerSGD", "four products")]
            rounds = zip(seconds[name], seconds["pmean"], floor, strict=True)
            row["over_pmean_to_products"] = statistics.median((a - b) / c for a, b, c in rounds)
        rows.append(row)
    return rows


def compile_many(layers: int) -> dict[str, Any]:
    """Trace and compile a step for a narrow GPT: the work of a compiler depends on the number of matrices and not on their sizes."""
    shapes = gpt(layers=layers, width=64, vocabulary=500, context=64)
    size = elements(shapes) * 4
    given = gradients(shapes)
    facts: dict[str, Any] = {"tensors": len(shapes), "matrices": sum(len(s) > 1 for s in shapes.values())}
    for name, tx in (("pmean", leafwise()), ("PowerSGD, rank 4", power_sgd(4, axis_name=AXIS))):
        facts[name] = transformed(tx, shapes, given, size).facts
    return facts


def main() -> None:
    p = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--width", type=int, default=512, help="of the GPT")
    p.add_argument("--context", type=int, default=512, help="of the GPT")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16], help="PowerSGD ranks")
    p.add_argument("--repeats", type=int, default=15, help="timed steps of each")
    p.add_argument("--half-step", action=argparse.BooleanOptionalAction, default=True, help="half-steps as well")
    p.add_argument("--platform", default="cpu", help="of the device, as JAX calls it: cpu, cuda")
    p.add_argument("--compile-layers", type=int, default=50, help="of a narrow GPT that is only compiled; 0: none is")
    p.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "jax_step.json")
    args = p.parse_args()
    jax.config.update("jax_platforms", args.platform)
    try:
        device = jax.local_devices()[0]
    except RuntimeError as error:
        raise SystemExit(f"--platform {args.platform}: JAX finds no such device ({error})") from None
    shapes = gpt(args.layers, args.width, args.vocabulary, args.context)
    print(f"GPT of {elements(shapes) / 1e6:.1f} million parameters on {device.device_kind}")
    rows = measure(shapes, args.ranks, args.repeats, half_step=args.half_step)
    for r in rows:
        over = ""
        if "over_pmean_ms" in r:
            over = f"  above pmean {r['over_pmean_to_products']:5.2f} of the products ({r['floor_products_ms']:.1f} ms)"
        print(
            f"{r['subject']:<24}  {r['step_ms']:8.1f} ms  temporary {r['temporary_gradients']:5.2f} gradients"
            f"  reused {r['donated_and_reused']:4.2f} of what is donated  compiled in {r['compile_s']:5.1f} s{over}",
            flush=True,
        )
    result = {
        "command": " ".join(["python benchmarks/jax_step.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {device.device_kind}, jax {jax.__version__}",
        "parameters": elements(shapes),
        "repeats": args.repeats,
        "rows": rows,
    }
    if args.compile_layers:
        many = result["compile"] = compile_many(args.compile_layers)
        for name in ("pmean", "PowerSGD, rank 4"):
            print(
                f"{many['matrices']} matrices among {many['tensors']} tensors, {name}: traced in {many[name]['trace_s']:.1f} s,"
                f" compiled in {many[name]['compile_s']:.1f} s ({many[name]['cpu_s']:.1f} s of CPU time)"
            )
    save(result, args.output)


if __name__ == "__main__":
    main()
