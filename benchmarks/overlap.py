"""How much of the communication lies under the backward pass: two torch processes on Gloo, as the
profiler sees them.

    python benchmarks/overlap.py                 # writes benchmarks/results/overlap.json and overlap-trace.json.gz, and prints a table
    python benchmarks/overlap.py --layers 3 --width 64 --batch 8 --repeats 1 --output /tmp/overlap.json --trace ""

A chain of linear layers under DDP, several buckets, PowerSGD in groups of several sizes, and plain
averaging. A collective counts from its launch to its completion; the backward pass lasts until the
last parameter has its gradient. The trace, of one step of rank 0 in the smallest groups, opens in
chrome://tracing or ui.perfetto.dev: look for the rows of `gloo:all_reduce` below "backward".
"""

from __future__ import annotations

import argparse
import gzip
import os
import platform
import shutil
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import on_ranks, save
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from gradwire import Algorithm, AllReduce, PowerSGD
from gradwire.torch_backend import DataParallel, register_comm_hook

HERE = Path(__file__).parent
LAUNCH = "c10d::allreduce_"
COLLECTIVE = "gloo:all_reduce"
BACKWARD = "backward"
#: Marks the arrival of a gradient in the trace.
GRADIENT = "gradient complete"
Interval = tuple[float, float]

#: Wrapper, algorithm, bytes of payload that close a group (None: the default).
SUBJECTS: dict[str, tuple[str, Algorithm, int | None]] = {
    "DDP, PowerSGD rank 4, a group for each bucket": ("DDP", PowerSGD(4), 0),
    "DDP, PowerSGD rank 4, groups of 128 KiB": ("DDP", PowerSGD(4), 128 << 10),
    "DDP, PowerSGD rank 4, groups of 1 MiB (the default)": ("DDP", PowerSGD(4), None),
    "DataParallel, PowerSGD rank 4, a group for each bucket": ("DataParallel", PowerSGD(4), 0),
    "DDP, AllReduce": ("DDP", AllReduce(), None),
}


def wrapped(
    kind: str, algorithm: Algorithm, message_bytes: int | None, model: nn.Module, cap: float
) -> nn.Module:
    """The model, with buckets of `cap` MiB."""
    options: dict[str, Any] = {} if message_bytes is None else {"message_bytes": message_bytes}
    if kind == "DataParallel":
        return DataParallel(model, algorithm, bucket_cap_mb=cap, first_bucket_mb=cap, **options)
    ddp = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
    register_comm_hook(ddp, algorithm, **options)
    return ddp


def union(intervals: list[Interval]) -> list[Interval]:
    """The same moments in intervals that do not touch."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(events: Any) -> dict[str, float]:
    """Of one step, in milliseconds; the profiler counts in microseconds."""

    def of(name: str) -> list[Interval]:
        return [(e.time_range.start, e.time_range.end) for e in events if e.name == name]

    ((begin, step_end),) = of(BACKWARD)
    backward_end = max(start for start, _ in of(GRADIENT))
    sent = of(COLLECTIVE)
    everything = union(sent)
    under = [(a, min(b, backward_end)) for a, b in everything if a < backward_end]
    return {
        "collectives": len(sent),
        # By the thread of the backward pass; when Gloo's own begins with it is up to the machine.
        "launched_under_backward": sum(start < backward_end for start, _ in of(LAUNCH)),
        "backward_ms": (backward_end - begin) / 1e3,
        "after_backward_ms": (step_end - backward_end) / 1e3,
        "communication_ms": length(everything) / 1e3,
        "under_backward_ms": length(under) / 1e3,
    }


def measured(args: argparse.Namespace, trace: str) -> list[dict[str, Any]]:
    """The rows; rank 0 writes a file with the trace. Every rank calls this."""
    torch.manual_seed(dist.get_rank())
    x = torch.randn(args.batch, args.width)
    rows: list[dict[str, Any]] = []
    for name, (kind, algorithm, message_bytes) in SUBJECTS.items():
        layers = [
            layer
            for _ in range(args.layers)
            for layer in (nn.Linear(args.width, args.width), nn.Tanh())
        ]
        model = nn.Sequential(*layers)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda _: record_function(GRADIENT).__enter__().__exit__(None, None, None)
            )
        cap = 0.9 * args.width * args.width * 4 / (1 << 20)  # a bucket for each layer
        ddp = wrapped(kind, algorithm, message_bytes, model, cap)
        found = []
        for step in range(3 + args.repeats):
            loss = ddp(x).square().mean()
            dist.barrier()
            profiler = (
                profile(activities=[ProfilerActivity.CPU]) if step >= 3 else None
            )  # buckets are rebuilt after the first
            with profiler or nullcontext(), record_function(BACKWARD):
                loss.backward()
            if profiler:
                found.append(overlap(profiler.events()))
        if profiler and trace and not rows and dist.get_rank() == 0:
            profiler.export_chrome_trace(trace)
        rows.append(
            {"subject": name} | {key: statistics.median(f[key] for f in found) for key in found[0]}
        )
        rows[-1]["hidden"] = statistics.median(
            f["under_backward_ms"] / f["communication_ms"] for f in found
        )
    return rows


def alone(args: argparse.Namespace, trace: str) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return measured(args, trace)
    finally:
        dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--width", type=int, default=1024, help="of a layer")
    p.add_argument("--batch", type=int, default=256, help="of each process")
    p.add_argument("--repeats", type=int, default=10, help="profiled steps of each")
    p.add_argument("--output", type=Path, default=HERE / "results" / "overlap.json")
    p.add_argument(
        "--trace", default=str(HERE / "results" / "overlap-trace.json.gz"), help="'' writes none"
    )
    p.add_argument(
        "--alone", action="store_true", help="this process only, to see that the script runs"
    )
    args = p.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "9"  # it would say of each profile that it begins
    with tempfile.TemporaryDirectory() as folder:
        raw = str(Path(folder) / "trace.json") if args.trace else ""
        rows = alone(args, raw) if args.alone else on_ranks(measured, args, raw)
        if args.trace:
            with open(raw, "rb") as source, gzip.open(args.trace, "wb") as target:
                shutil.copyfileobj(source, target)
    for r in rows:
        print(
            f"{r['subject']:<56}  {r['collectives']:3.0f} collectives, {r['launched_under_backward']:3.0f} launched under backward"
            f"  communication {r['communication_ms']:7.2f} ms, {r['hidden']:4.0%} of it under backward ({r['backward_ms']:.1f} ms)"
            f"  then {r['after_backward_ms']:7.2f} ms",
            flush=True,
        )
    result = {
        "command": " ".join(["python benchmarks/overlap.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, Gloo on loopback",
        "layers": args.layers,
        "width": args.width,
        "batch": args.batch,
        "repeats": args.repeats,
        "rows": rows,
    }
    save(result, args.output)


if __name__ == "__main__":
    main()
