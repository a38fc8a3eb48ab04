"""What averaging costs in JAX: time and temporary memory of a step beside plain `pmean`, and what
XLA needs to compile it.

    python benchmarks/jax_step.py                 # writes benchmarks/results/jax_step.json and prints a table
    python benchmarks/jax_step.py --layers 1 --vocabulary 200 --repeats 1 --compile-matrices 0 --compile-leaves --output /tmp/jax_step.json

A step takes given gradients of a GPT, averages them and updates the parameters, under
`jax.shard_map`, everything donated; on one device and on two, each in a process of its own.
Subjects take turns; ratios are medians over the rounds. Processor time is that of all threads: on a
busy machine it says more than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import WARM_UP, last_line, save
from shapes import elements, gpt

AXIS = "data"
PMEAN = "pmean"
#: Of leaves that are only compiled, in turn.
TEN = (
    (64, 64),
    (64, 128),
    (128, 64),
    (64, 192),
    (96, 96),
    (192, 64),
    (64, 256),
    (256, 64),
    (128, 96),
    (96, 128),
)
Shapes = dict[str, tuple[int, ...]]


@dataclass
class Subject:
    """A compiled step, what it takes, and what making it took."""

    run: Any
    state: Any
    facts: dict[str, Any]


def transformations(ranks: list[int]) -> dict[str, Any]:
    """Name → what averages the gradients."""
    import jax
    import optax
    from jax import lax

    from gradwire.jax_backend import all_reduce_mean, power_sgd

    plain = optax.stateless(lambda g, _: jax.tree.map(lambda x: lax.pmean(x, AXIS), g))
    subjects = {PMEAN: plain, "all_reduce_mean": all_reduce_mean(axis_name=AXIS)}
    subjects["all_reduce_mean, 4 MiB"] = all_reduce_mean(axis_name=AXIS, bucket_bytes=4 << 20)
    for rank in ranks:
        subjects[f"PowerSGD, rank {rank}"] = power_sgd(rank, axis_name=AXIS)
        subjects[f"half-step, rank {rank}"] = power_sgd(rank, axis_name=AXIS, half_step=True)
    return subjects


def methods() -> dict[str, Any]:
    """Name → what averages many leaves: a method of each kind."""
    from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
    from gradwire.core.algorithm import Algorithm
    from gradwire.jax_backend import average_gradients

    kinds: dict[str, Algorithm] = {
        "PowerSGD, rank 4": PowerSGD(4),
        "int8": WireDtype(AllReduce(), "int8"),
        "Quantize": Quantize("int8"),
        "TopK": TopK(64),
        "Sign": Sign(),
    }
    plain = {PMEAN: transformations([])[PMEAN]}
    return plain | {name: average_gradients(each, axis_name=AXIS) for name, each in kinds.items()}


def compiled(tx: Any, shapes: Shapes, mesh: Any, optimizer: str) -> Subject:
    """A step with an update behind it, traced and compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec

    from gradwire.jax_backend import distribute, partition_specs

    tx = optax.chain(tx, {"sgd": optax.sgd, "adam": optax.adam}[optimizer](1e-3))
    random = np.random.default_rng(0)
    params = {
        n: jnp.asarray(random.standard_normal(s, dtype=np.float32)) for n, s in shapes.items()
    }
    state = params, tx.init(params)
    specs = partition_specs(state, AXIS)
    state = distribute(state, mesh, AXIS)

    def step(state: Any, gradients: Any) -> Any:
        updates, new = tx.update(jax.tree.map(lambda x: x[0], gradients), state[1], state[0])
        return optax.apply_updates(state[0], updates), new

    own = PartitionSpec(AXIS)
    mapped = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, own), out_specs=specs, check_vma=False),
        donate_argnums=(0, 1),
    )
    gradients = {n: jax.ShapeDtypeStruct((mesh.size, *s), jnp.float32) for n, s in shapes.items()}
    began, cpu = time.perf_counter(), time.process_time()
    lowered = mapped.lower(state, gradients)
    traced = time.perf_counter()
    program = lowered.compile()
    text, memory = program.as_text() or "", program.memory_analysis()
    assert memory is not None  # XLA has it for every platform here
    facts = {
        "trace_s": traced - began,
        "compile_s": time.perf_counter() - traced,
        "cpu_s": time.process_time() - cpu,
        "temporary_gradients": memory.temp_size_in_bytes / (4 * elements(shapes)),
        "all_reduces": len(re.findall(r" all-reduce(?:-start)?\(", text)),
        "instructions": len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.MULTILINE)),
    }
    return Subject(program, state, facts)


def timed(subjects: dict[str, Subject], given: Callable[[], Any], repeats: int) -> None:
    """Adds `step_ms`, `cpu_ms` and their ratios to `pmean` to the facts of each subject. Gradients
    are made outside of the clock."""
    import jax

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for round_ in range(WARM_UP + repeats):
        for name in list(subjects)[:: 1 if round_ % 2 else -1]:
            subject = subjects[name]
            gradients = jax.block_until_ready(given())
            began, cpu = time.perf_counter(), time.process_time()
            subject.state = jax.block_until_ready(subject.run(subject.state, gradients))
            if round_ >= WARM_UP:
                taken[name].append((time.perf_counter() - began, time.process_time() - cpu))
    for name, subject in subjects.items():
        for i, what in enumerate(("step", "cpu")):
            subject.facts[f"{what}_ms"] = statistics.median(t[i] for t in taken[name]) * 1e3
            rounds = zip(taken[name], taken[PMEAN], strict=True)
            subject.facts[f"{what}_to_pmean"] = statistics.median(
                mine[i] / theirs[i] for mine, theirs in rounds
            )


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured on `args.worker` devices."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    warnings.filterwarnings(
        "ignore", message="Some donated buffers"
    )  # gradients, where no memory of the same shape takes their place
    jax.config.update("jax_platforms", args.platform)
    try:
        devices = jax.local_devices()[: args.worker]
    except RuntimeError as error:
        raise SystemExit(
            f"--platform {args.platform}: JAX finds no such device ({error})"
        ) from None
    if len(devices) < args.worker:
        raise SystemExit(f"--devices {args.worker}: JAX finds {len(devices)}")
    mesh = jax.make_mesh((args.worker,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    shapes = gpt(args.layers, args.width, args.vocabulary, args.context)
    random = np.random.default_rng(1)
    drawn = {
        n: random.standard_normal((args.worker, *s), dtype=np.float32) for n, s in shapes.items()
    }
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))

    named = transformations(args.ranks)
    subjects = {name: compiled(tx, shapes, mesh, args.optimizer) for name, tx in named.items()}
    timed(
        subjects, lambda: {n: jax.device_put(x, sharding) for n, x in drawn.items()}, args.repeats
    )
    common = {"devices": args.worker}
    rows = [common | {"subject": name} | subject.facts for name, subject in subjects.items()]
    many = []
    if args.compile_matrices:
        pairs = range(args.compile_matrices // 2)
        two: dict[str, tuple[int, ...]] = {
            f"{i}/{kind}": shape
            for i in pairs
            for kind, shape in (("a", (64, 64)), ("b", (64, 128)))
        }
        tried = transformations([4])
        many = [
            common | {"subject": n} | compiled(tx, two, mesh, "adam").facts
            for n, tx in tried.items()
        ]
    leaves = []
    for n in args.compile_leaves:
        of_ten: dict[str, tuple[int, ...]] = {f"{i:04}": TEN[i % len(TEN)] for i in range(n)}
        about = common | {"leaves": n}
        leaves += [
            about | {"subject": k} | compiled(tx, of_ten, mesh, "sgd").facts
            for k, tx in methods().items()
        ]
    return {
        "device": devices[0].device_kind,
        "jax": jax.__version__,
        "rows": rows,
        "compile": many,
        "leaves": leaves,
    }


def launch(args: argparse.Namespace, devices: int) -> dict[str, Any]:
    """Run this script as a worker on so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    result: dict[str, Any] = last_line(
        __file__, *sys.argv[1:], "--worker", str(devices), XLA_FLAGS=flags
    )
    return result


def main() -> None:
    p = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--width", type=int, default=512, help="of the GPT")
    p.add_argument("--context", type=int, default=512, help="of the GPT")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16], help="PowerSGD ranks")
    p.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="behind the average")
    p.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="numbers of devices")
    p.add_argument("--repeats", type=int, default=15, help="timed steps of each")
    p.add_argument("--platform", default="cpu", help="of the devices, as JAX calls it: cpu, cuda")
    p.add_argument(
        "--compile-matrices",
        type=int,
        default=300,
        help="of two shapes, which are only compiled; 0: none",
    )
    p.add_argument(
        "--compile-leaves",
        type=int,
        nargs="*",
        default=[100, 400, 1000],
        help="of ten shapes, which are only compiled",
    )
    p.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "jax_step.json"
    )
    p.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        print(json.dumps(worker(args)), flush=True)
        return
    results = [launch(args, n) for n in args.devices]
    shapes = gpt(args.layers, args.width, args.vocabulary, args.context)
    print(
        f"GPT of {elements(shapes) / 1e6:.1f} million parameters, {args.optimizer}, on {results[0]['device']}"
    )
    for r in (row for result in results for row in result["rows"]):
        print(
            f"{r['devices']} devices  {r['subject']:<24} {r['step_ms']:8.1f} ms ({r['step_to_pmean']:.2f} of pmean)"
            f"  processor {r['cpu_ms']:8.1f} ms ({r['cpu_to_pmean']:.2f})  temporary {r['temporary_gradients']:5.2f} gradients"
            f"  {r['all_reduces']} all-reduces  compiled in {r['cpu_s']:5.1f} s of processor time"
        )
    for r in (row for result in results for row in result["compile"]):
        print(
            f"{r['devices']} devices  {args.compile_matrices} matrices, adam, {r['subject']:<24} {r['cpu_s']:5.1f} s of processor time,"
            f" {r['instructions']} instructions"
        )
    for r in (row for result in results for row in result["leaves"]):
        print(
            f"{r['devices']} devices  {r['leaves']:5} leaves of ten shapes, {r['subject']:<24} {r['cpu_s']:5.1f} s of processor time,"
            f" {r['instructions']} instructions, temporary {r['temporary_gradients']:5.2f} gradients"
        )
    result = {
        "command": " ".join(["python benchmarks/jax_step.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {results[0]['device']}, jax {results[0]['jax']}",
        "parameters": elements(shapes),
        "optimizer": args.optimizer,
        "repeats": args.repeats,
        "rows": [row for r in results for row in r["rows"]],
        "compile": [row for r in results for row in r["compile"]],
        "leaves": [row for r in results for row in r["leaves"]],
    }
    save(result, args.output)


if __name__ == "__main__":
    main()
