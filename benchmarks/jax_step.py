"""What compression costs in JAX, in one process: time of a step beside plain `pmean` and the four matrix products it cannot do without, what XLA
needs to compile it, and its memory by XLA's own analysis.

    python benchmarks/jax_step.py                 # writes benchmarks/results/jax_step.json and prints a table
    python benchmarks/jax_step.py --layers 1 --vocabulary 200 --repeats 1 --compile-layers 0 --output /tmp/jax_step.json

A step is what a transformation does to given gradients of a GPT, under `jax.pmap`, gradients and state donated. Subjects take turns; medians.
"""

from __future__ import annotations

import argparse
import json
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
from measuring import interleaved
from shapes import gpt

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
    began = time.perf_counter()
    lowered = jax.pmap(function, AXIS, donate_argnums=donated).lower(*arguments)
    traced = time.perf_counter()
    program = lowered.compile()
    memory = program.memory_analysis()
    given = sum(x.nbytes // x.shape[0] for x in jax.tree.leaves([arguments[i] for i in donated]))
    facts = {
        "trace_s": traced - began,
        "compile_s": time.perf_counter() - traced,
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


def products(rank: int, shapes: Shapes, given: Any, gradient_bytes: int) -> Compiled:
    """What PowerSGD must multiply, with the kernels it has and factors that need no work: P = M Q, Q = Mᵀ P, M - P Qᵀ and P Qᵀ, for
    M = gradient + error."""
    large = {n: s for n, s in shapes.items() if len(s) > 1}
    ops = JaxOps()

    def four(gradients: Any, errors: Any, factors: Any) -> tuple[Any, Any]:
        new, left = dict(gradients), {}
        for name in large:
            x = gradients[name] + errors[name]
            p = ops.matmul(factors[name], x.mT)
            q = ops.matmul(p, x)
            left[name] = ops.subtract_product(x, p, q)
            new[name] = ops.matmul(p.mT, q * 0.5)
        return new, left

    # Small enough that steps upon steps do not overflow.
    factors = jax.pmap(lambda _: {n: jnp.full((rank, s[1]), 1e-3 / s[1]) for n, s in large.items()})(
        np.zeros(devices())
    )
    errors = {n: x for n, x in given().items() if n in large}
    return compiled(four, (given(), errors, factors), gradient_bytes)


def passes(given: Any, gradient_bytes: int) -> Compiled:
    """Read and write every gradient once: two of the passes over memory that PowerSGD needs at least."""
    return compiled(lambda g: (jax.tree.map(lambda x: x * 0.999, g),), (given(),), gradient_bytes)


def devices() -> int:
    return jax.local_device_count()


def gradients(shapes: Shapes) -> Callable[[], dict[str, jax.Array]]:
    """Makes gradients of these shapes, anew each time, on their devices."""
    keys = jax.random.split(jax.random.key(0), devices())

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        flat = jax.random.normal(key, (sum(int(np.prod(s)) for s in shapes.values()),))
        ends = np.cumsum([int(np.prod(s)) for s in shapes.values()])[:-1]
        return {n: x.reshape(s) for (n, s), x in zip(shapes.items(), jnp.split(flat, ends), strict=True)}

    drawn = jax.pmap(draw, AXIS)
    return lambda: drawn(keys)


def measure(shapes: Shapes, ranks: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row for each subject."""
    size = sum(int(np.prod(s)) for s in shapes.values()) * 4
    given = gradients(shapes)
    subjects = {"pmean": transformed(leafwise(), shapes, given, size)}
    subjects["all_reduce_mean"] = transformed(all_reduce_mean(axis_name=AXIS), shapes, given, size)
    for rank in ranks:
        subjects[f"PowerSGD, rank {rank}"] = transformed(power_sgd(rank, axis_name=AXIS), shapes, given, size)
        subjects[f"four products, rank {rank}"] = products(rank, shapes, given, size)
    subjects["two passes"] = passes(given, size)
    seconds = interleaved({name: s.step for name, s in subjects.items()}, repeats)
    times = {name: statistics.median(taken) * 1e3 for name, taken in seconds.items()}
    rows = []
    for name, subject in subjects.items():
        row = {"subject": name, "step_ms": times[name], **subject.facts}
        if name.startswith("PowerSGD"):
            row["over_pmean_ms"] = times[name] - times["pmean"]
            row["floor_products_ms"] = times[name.replace("PowerSGD", "four products")]
            row["floor_passes_ms"] = times["two passes"] * PASSES / 2
            row["over_pmean_to_products"] = row["over_pmean_ms"] / row["floor_products_ms"]
        rows.append(row)
    return rows


def compile_many(layers: int) -> dict[str, Any]:
    """Trace and compile a step for a narrow GPT: the work of a compiler depends on the number of matrices and not on their sizes."""
    shapes = gpt(layers=layers, width=64, vocabulary=500, context=64)
    size = sum(int(np.prod(s)) for s in shapes.values()) * 4
    given = gradients(shapes)
    facts: dict[str, Any] = {"tensors": len(shapes), "matrices": sum(len(s) > 1 for s in shapes.values())}
    for name, tx in (("pmean", leafwise()), ("PowerSGD, rank 4", power_sgd(4, axis_name=AXIS))):
        began = time.process_time()
        facts[name] = transformed(tx, shapes, given, size).facts | {"cpu_s": time.process_time() - began}
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
    elements = sum(int(np.prod(s)) for s in shapes.values())
    print(f"GPT of {elements / 1e6:.1f} million parameters on {device.device_kind}")
    rows = measure(shapes, args.ranks, args.repeats)
    for r in rows:
        over = f"  {r['over_pmean_to_products']:5.2f} of the products above pmean" if "over_pmean_ms" in r else ""
        print(
            f"{r['subject']:<24}  {r['step_ms']:8.1f} ms  temporary {r['temporary_gradients']:5.2f} gradients"
            f"  reused {r['donated_and_reused']:4.2f} of what is donated  compiled in {r['compile_s']:5.1f} s{over}",
            flush=True,
        )
    result = {
        "command": " ".join(["python benchmarks/jax_step.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {device.device_kind}, jax {jax.__version__}",
        "parameters": elements,
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
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
