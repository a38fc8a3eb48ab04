"""What compression costs on one process: gradwire's PowerSGD hook against torch's, in the same run,
on the gradients of a GPT and of a ResNet-18.

    python benchmarks/compress.py                 # writes benchmarks/results/compress.json and prints a table
    python benchmarks/compress.py --layers 1 --vocabulary 1000 --repeats 3 --output /tmp/compress.json

The hooks run in DDP with one bucket (with more, torch's hook hangs on Gloo), one process,
interleaved; medians. Compress time is from the hook's call to the completion of its future. The
optimizer is not run: gradients are given.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from given import GivenGradients, drawn
from measuring import save
from shapes import elements, gpt, resnet18
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from gradwire import torch_backend

MIB = 1 << 20
#: Over the gradient: gradient + error (3), M Q, Mᵀ P, M - P Qᵀ (2), P Qᵀ.
PASSES = 8
#: Of a profile, that are named.
KERNELS = 5


class Subject:
    """A DDP module with one bucket and a timed hook. `step` runs one backward pass and returns the
    hook's seconds."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        state: Any,
        hook: Callable[[Any, Any], Any],
    ) -> None:
        self.ddp = DistributedDataParallel(
            GivenGradients(shapes), bucket_cap_mb=100_000, gradient_as_bucket_view=True
        )
        self.seconds = 0.0
        self.buckets = 0
        self.profiler: Any = None

        def timed(state: Any, bucket: Any) -> Any:
            self.buckets += 1
            began = time.perf_counter()
            with self.profiler or nullcontext():
                future = hook(state, bucket)
                future.wait()
            self.seconds = time.perf_counter() - began
            return future

        timed.__annotations__.clear()  # DDP wants the real classes or nothing
        self.ddp.register_comm_hook(state, timed)

    def step(self, gradients: dict[str, torch.Tensor]) -> float:
        self.ddp.zero_grad(set_to_none=False)
        self.buckets = 0
        self.ddp(gradients).backward()
        if self.buckets != 1:
            raise RuntimeError(f"{self.buckets} buckets instead of one")
        return self.seconds


def ours(shapes: dict[str, tuple[int, ...]], rank: int) -> Subject:
    """gradwire under torch's names."""
    state = torch_backend.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return Subject(shapes, state, torch_backend.powerSGD_hook)


def theirs(shapes: dict[str, tuple[int, ...]], rank: int) -> Subject:
    """torch's hook; its lower limit for the start is 2."""
    state = torchs.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return Subject(shapes, state, torchs.powerSGD_hook)


def measure(
    subject: Subject, gradients: dict[str, torch.Tensor]
) -> tuple[int, int, int, dict[str, float]]:
    """Bytes allocated in all, bytes at the peak, all-reduces of one step's hook, and the
    milliseconds of the kernels that take most."""
    original, calls = dist.all_reduce, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    subject.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    try:
        subject.step(gradients)
    finally:
        dist.all_reduce = original
    allocated = live = peak = 0
    for event in subject.profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            allocated += max(event.nbytes(), 0)
            peak = max(peak, live)
    busy = {
        e.key: e.self_cpu_time_total / 1e3
        for e in subject.profiler.key_averages()
        if e.key.startswith("aten::")
    }
    kernels = dict(sorted(busy.items(), key=lambda item: -item[1])[:KERNELS])
    return (
        allocated,
        peak,
        calls,
        kernels | {"everything else": sum(busy.values()) - sum(kernels.values())},
    )


def one_pass(numbers: int, repeats: int) -> float:
    """Milliseconds of reading or writing as many float32 numbers once: half of a copy."""
    source, target = torch.ones(numbers), torch.zeros(numbers)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3 / 2


def in_turns(
    subjects: dict[str, Subject], gradients: dict[str, torch.Tensor], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each subject's hook; the subjects take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for round_ in range(repeats + 4):
        for name, subject in subjects.items():
            taken = subject.step(gradients)
            if round_ >= 4:  # two dense steps, two to warm up
                seconds[name].append(taken)
    return seconds


def time_ratio(seconds: dict[str, list[float]]) -> float:
    """Median of the ratios of steps that followed each other."""
    return statistics.median(
        a / b for a, b in zip(seconds["gradwire"], seconds["torch"], strict=True)
    )


def compare(shapes: dict[str, tuple[int, ...]], rank: int, repeats: int) -> dict[str, Any]:
    gradients = drawn(shapes)
    subjects = {"gradwire": ours(shapes, rank), "torch": theirs(shapes, rank)}
    seconds = in_turns(subjects, gradients, repeats)
    row: dict[str, Any] = {"rank": rank}
    for name, subject in subjects.items():
        allocated, peak, calls, kernels = measure(subject, gradients)
        row[name] = {
            "compress_ms": statistics.median(seconds[name]) * 1e3,
            "allocated_mib": allocated / MIB,
            "peak_mib": peak / MIB,
            "collectives": calls,
            "kernels_ms": kernels,
        }
    row["floor_ms"] = PASSES * one_pass(elements(shapes), repeats)
    row["time_ratio"] = time_ratio(seconds)
    return row


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16], help="PowerSGD ranks")
    p.add_argument("--models", nargs="+", choices=["gpt", "resnet18"], default=["gpt", "resnet18"])
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--repeats", type=int, default=15, help="timed steps of each")
    p.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    p.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "compress.json"
    )
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    models = {"gpt": gpt(layers=args.layers, vocabulary=args.vocabulary), "resnet18": resnet18()}
    rows = []
    for model in args.models:
        shapes = models[model]
        parameters = elements(shapes)
        mib = parameters * 4 / MIB
        print(
            f"{model}, {parameters / 1e6:.1f} million parameters: {mib:.0f} MiB in one bucket, {args.threads} threads"
        )
        for rank in args.ranks:
            row = {"model": model, "parameters": parameters, "gradient_mib": mib} | compare(
                shapes, rank, args.repeats
            )
            rows.append(row)
            for name in ("gradwire", "torch"):
                r = row[name]
                print(
                    f"rank {rank:>2}  {name:<8}  {r['compress_ms']:7.1f} ms  allocated {r['allocated_mib']:7.2f} MiB"
                    f" ({r['allocated_mib'] * 24 / mib:6.2f} per 24 MiB)  peak {r['peak_mib']:7.2f} MiB  {r['collectives']} collectives"
                )
            print(
                f"rank {rank:>2}  time ratio gradwire / torch: {row['time_ratio']:.2f}; floor {row['floor_ms']:.1f} ms",
                flush=True,
            )
    result = {
        "command": " ".join(["python benchmarks/compress.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {args.threads} threads, Python {platform.python_version()}, torch {torch.__version__}",
        "repeats": args.repeats,
        "rows": rows,
    }
    save(result, args.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
