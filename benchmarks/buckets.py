"""What the size of a bucket costs: step time and memory on two replicas, torch and JAX; and
`DataParallel` against DDP.

    python benchmarks/buckets.py                 # writes benchmarks/results/buckets.json and docs/buckets.png
    python benchmarks/buckets.py --layers 1 --vocabulary 200 --sizes 0.25 1 --repeats 1 --output /tmp/b.json --picture /tmp/b.png

torch runs in two processes on Gloo, JAX under `pmap` on two CPU devices of a process of its own. In
torch a step is the backward pass of a model that hands over given gradients, and their average. In
JAX it is a training step of the GPT itself: the gradients of anything simpler XLA computes inside
the average, and then measures something else. The subjects of one framework and, in torch, of one
size take turns within one run, and medians are reported; the ratio of `DataParallel` to DDP is the
median of the ratios of steps that followed each other. Memory is what a step takes beyond
parameters and gradients as a user sees them: in torch the gradients and buckets themselves, in JAX
the temporary buffers that XLA plans.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import REPLICAS, interleaved, last_line, on_ranks, save
from shapes import elements, gpt

MIB = 1 << 20
#: Per replica and step in JAX.
TOKENS = 64
HERE = Path(__file__).parent


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument(
        "--sizes", type=float, nargs="+", default=[0.25, 1, 4, 25, 100], help="of buckets, in MiB"
    )
    p.add_argument("--repeats", type=int, default=9, help="timed steps of each")
    p.add_argument("--output", type=Path, default=HERE / "results" / "buckets.json")
    p.add_argument(
        "--picture", default=str(HERE.parent / "docs" / "buckets.png"), help="'' draws none"
    )
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p.parse_args()


def torch_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows. Every rank calls this."""
    import torch
    import torch.distributed as dist
    from given import GivenGradients, drawn
    from torch.nn.parallel import DistributedDataParallel

    from gradwire.torch_backend import DataParallel

    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    given = drawn(shapes, seed=dist.get_rank())
    wrappers: dict[str, Callable[[GivenGradients, float], torch.nn.Module]] = {
        "DistributedDataParallel": lambda m, cap: DistributedDataParallel(
            m, bucket_cap_mb=cap, gradient_as_bucket_view=True
        ),
        "DataParallel": lambda m, cap: DataParallel(m, bucket_cap_mb=cap, first_bucket_mb=cap),
    }
    rows = []
    for cap in args.sizes:
        steps: dict[str, Callable[[], None]] = {}
        models = {}
        for name, wrap in wrappers.items():
            wrapped = wrap(GivenGradients(shapes), cap)
            models[name] = wrapped

            def step(wrapped: torch.nn.Module = wrapped) -> None:
                wrapped.zero_grad(set_to_none=True)
                wrapped(given).backward()

            steps[name] = step
        seconds = interleaved(steps, args.repeats)
        ours = models["DataParallel"]
        assert isinstance(ours, DataParallel)
        for name, wrapped in models.items():
            # Gradients are views of the buckets in both: each storage counts once.
            storages = {
                p.grad.untyped_storage() for p in wrapped.parameters() if p.grad is not None
            }
            row = {
                "backend": "torch",
                "subject": name,
                "bucket_mib": cap,
                "messages": len(ours.buckets()),
                "step_ms": statistics.median(seconds[name]) * 1e3,
                "memory_mib": sum({s.data_ptr(): s.nbytes() for s in storages}.values()) / MIB,
            }
            if name == "DataParallel":
                pairs = zip(seconds[name], seconds["DistributedDataParallel"], strict=True)
                row["ratio_to_ddp"] = statistics.median(a / b for a, b in pairs)
            rows.append(row)
        del models, steps, ours, wrapped
    return rows


def jax_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Two CPU devices: training steps of the GPT, from tokens to averages, with plain `pmean` and
    with each size."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax_gpt import initial, loss

    from gradwire.jax_backend import all_reduce_mean, collective_traffic

    vocabulary = args.vocabulary
    params = initial(gpt(layers=args.layers, vocabulary=vocabulary))
    tokens = jax.random.randint(jax.random.key(1), (REPLICAS, 1, TOKENS + 1), 0, vocabulary)
    everywhere = jax.pmap(lambda _: params, axis_name="data")(jnp.arange(REPLICAS))

    def compiled(
        name: str, average: Callable[[Any], Any], cap: float | None
    ) -> tuple[Callable[[], None], dict[str, Any]]:
        def step(params: Any, tokens: Any) -> Any:
            return jax.tree.map(
                lambda p, g: p - 0.01 * g, params, average(jax.grad(loss)(params, tokens))
            )

        sent = collective_traffic(step, params, tokens[0], axis_env=[("data", REPLICAS)])
        run = jax.pmap(step, axis_name="data").lower(everywhere, tokens).compile()
        facts = {
            "backend": "jax",
            "subject": name,
            "bucket_mib": cap,
            "messages": len(sent),
            "memory_mib": run.memory_analysis().temp_size_in_bytes / MIB,
        }
        return lambda: jax.block_until_ready(run(everywhere, tokens)), facts

    def mean(cap: float | None) -> Callable[[Any], Any]:
        tx = all_reduce_mean(axis_name="data", bucket_bytes=None if cap is None else int(cap * MIB))
        state = tx.init(params)
        return lambda gradients: tx.update(gradients, state)[0]

    plain = "pmean", lambda g: jax.tree.map(lambda x: lax.pmean(x, "data"), g), None
    subjects = [plain, *(("all_reduce_mean", mean(cap), cap) for cap in (*args.sizes, None))]
    steps = {f"{name} {cap}": compiled(name, average, cap) for name, average, cap in subjects}
    seconds = interleaved({name: step for name, (step, _) in steps.items()}, args.repeats)
    rows = []
    for name, (_, facts) in steps.items():
        pairs = zip(seconds[name], seconds["pmean None"], strict=True)
        rows.append(
            facts
            | {
                "step_ms": statistics.median(seconds[name]) * 1e3,
                "ratio_to_pmean": statistics.median(a / b for a, b in pairs),
            }
        )
    return rows


def in_jax(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of this script as a worker, with two devices: the last line that it prints."""
    command = [
        str(Path(__file__)),
        "--worker",
        "--repeats",
        str(args.repeats),
        "--layers",
        str(args.layers),
    ]
    command += ["--vocabulary", str(args.vocabulary), "--sizes", *map(str, args.sizes)]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={REPLICAS}"
    rows: list[dict[str, Any]] = last_line(*command, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    sizes = sorted({r["bucket_mib"] for r in rows if r["bucket_mib"] is not None})
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True)
    for column, backend in enumerate(("torch", "jax")):
        for subject in dict.fromkeys(r["subject"] for r in rows if r["backend"] == backend):
            mine = [r for r in rows if r["subject"] == subject and r["bucket_mib"] is not None]
            whole = [r for r in rows if r["subject"] == subject and r["bucket_mib"] is None]
            for line, what in enumerate(("step_ms", "memory_mib")):
                (drawn,) = axes[line][column].plot(
                    [r["bucket_mib"] for r in mine], [r[what] for r in mine], "o-", label=subject
                )
                for r in whole:
                    label = f"{subject}, no buckets" if line == 0 else None
                    axes[line][column].axhline(
                        r[what], color=drawn.get_color(), linestyle=":", label=label
                    )
        axes[0][column].set_title(
            {"torch": "torch, 2 Gloo processes", "jax": "JAX, 2 CPU devices"}[backend]
        )
        axes[0][column].legend(fontsize=7)
        axes[1][column].set_xlabel("bucket size, MiB")
        for line in (0, 1):
            axes[line][column].set_xscale("log")
            axes[line][column].set_xticks(sizes, [f"{size:g}" for size in sizes])
            axes[line][column].minorticks_off()
            axes[line][column].set_ylim(bottom=0)
            axes[line][column].grid(alpha=0.3)
    axes[0][0].set_ylabel("step, ms")
    axes[1][0].set_ylabel("memory, MiB")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    args = parse()
    if args.worker:
        print(json.dumps(jax_rows(args)), flush=True)
        return
    rows = on_ranks(torch_rows, args) + in_jax(args)
    for r in rows:
        size = "none" if r["bucket_mib"] is None else f"{r['bucket_mib']:g}"
        ratio = f"  {r['ratio_to_ddp']:.3f} of DDP" if "ratio_to_ddp" in r else ""
        ratio += f"  {r['ratio_to_pmean']:.3f} of pmean" if "ratio_to_pmean" in r else ""
        print(
            f"{r['backend']:<5}  {r['subject']:<30}  {size:>5} MiB  {r['messages']:>3} buckets  {r['step_ms']:8.1f} ms"
            f"  {r['memory_mib']:7.1f} MiB{ratio}"
        )
    ratios = [r["ratio_to_ddp"] for r in rows if "ratio_to_ddp" in r]
    print(
        f"a DataParallel step is {statistics.median(ratios):.3f} of a DDP step (median over the sizes)"
    )
    result = {
        "command": " ".join(["python benchmarks/buckets.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}, jax {version('jax')}",
        "parameters": elements(gpt(args.layers, vocabulary=args.vocabulary)),
        "repeats": args.repeats,
        "data_parallel_to_ddp": statistics.median(ratios),
        "rows": rows,
    }
    save(result, args.output)
    if args.picture:
        draw(rows, Path(args.picture))


if __name__ == "__main__":
    main()
