"""What a step of PowerSGD and of codes asks of a device and of the host, counted without a device:
gradwire's hook and torch's on the gradients of a GPT.

    python benchmarks/kernels.py                 # some seconds; writes benchmarks/results/kernels.json and prints a table
    python benchmarks/kernels.py --ranks 4 --caps 25 --by-name --output ""
    python benchmarks/kernels.py --layers 1 --width 64 --vocabulary 200 --repeats 1 --output /tmp/kernels.json

Each row is a step in which everything is warm, of one rank of eight, with DDP's buckets of 25 MiB
or with one bucket. gradwire's hook is counted with its kernels in Triton and, as on a device on
which these do not run, without:

- kernels: those that operations would launch, all-reduces not counted; `benchmarks/dry.py` says
  what counts.
- passes: bytes that those kernels read and write, by the bytes of the gradients; what is exchanged,
  and copied to be, by all-reduces not counted.
- all-reduces, and their payload.
- host waits: numbers that the host reads, and calls of `torch.cuda.synchronize`.
- host: CPU time of the hook's calls without tensors. The calls into torch (operators, views,
  questions about a tensor) are recorded once, then answered from the record; the time of the same
  calls alone, answered likewise, is taken off. What is left is the Python of the hook, its futures
  and `dist.all_reduce` on a process group that does nothing; what torch itself takes to dispatch
  and launch comes on top. Least of some steps.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dry import MIB, Kernels, Step, gradwire_step, on_a_device, torch_step
from measuring import save
from shapes import elements, gpt
from torch.overrides import TorchFunctionMode

from gradwire import Algorithm, AllReduce, PowerSGD, Quantize, WireDtype
from gradwire.core.state.skipped_steps import IN_A_ROW

#: Steps before one is counted: torch's hook begins with two dense ones, and makes its factors in
#: the third.
WARM_UP = 4
#: A cap that puts everything into one bucket.
ONE_BUCKET = 100_000.0
#: gradwire's hook, and whether with the kernels in Triton.
OURS = {"gradwire": True, "gradwire without Triton": False}
CODES: list[Algorithm] = [WireDtype(AllReduce(), "int8"), Quantize("int8")]
Call = tuple[Any, Any, Any]


class Recorded(TorchFunctionMode):
    """Keeps the calls into torch, and what they returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls.append((func, args, kwargs))
        self.results.append(func(*args, **kwargs))
        return self.results[-1]


class Answered(TorchFunctionMode):
    """Answers the same calls, in the same order, without making them."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._next: Iterator[Any] = iter(results)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return next(self._next)

    def all_asked(self) -> bool:
        nothing = object()
        return next(self._next, nothing) is nothing


def seconds(run: Callable[[], None], results: list[Any]) -> float:
    """Of the CPU, where calls into torch are answered with `results`."""
    with Answered(results) as answered:
        began = time.thread_time()
        run()
        taken = time.thread_time() - began
    if not answered.all_asked():
        raise RuntimeError("this step made fewer calls into torch than the one that was recorded")
    return taken


def one_after_the_other(calls: list[Call]) -> Callable[[], None]:
    """A function that makes these calls and does nothing else: written out line by line, since a
    loop over them takes as long as some of them."""
    names: dict[str, Any] = {}

    def name(x: Any) -> str:
        names[f"x{len(names)}"] = x
        return f"x{len(names) - 1}"

    lines = []
    for func, args, kwargs in calls:
        if func.__name__ == "__get__":
            lines.append(f"{name(args[0])}.{func.__self__.__name__}")
        else:
            given = [*map(name, args), *(f"{key}={name(x)}" for key, x in kwargs.items())]
            lines.append(f"{name(func)}({', '.join(given)})")
    exec("def bare():\n " + "\n ".join(lines), names)
    bare: Callable[[], None] = names["bare"]
    return bare


def host_time(step: Step, repeats: int) -> tuple[float, int]:
    """Seconds of a step's Python without tensors, and how many calls into torch it makes."""
    with Kernels(), Recorded() as record:
        step.run()

    bare = one_after_the_other(record.calls)
    gc.collect()
    gc.disable()
    try:  # in turns, and the least of each: other processes only make it longer
        pairs = []
        for _ in range(repeats):
            # which looks at how many were skipped, and so makes other calls
            if (step.steps + 1) % IN_A_ROW == 0:
                with Kernels():
                    step.run()
            pairs.append((seconds(step.run, record.results), seconds(bare, record.results)))
    finally:
        gc.enable()
    whole, calls = (min(each) for each in zip(*pairs, strict=True))
    return whole - calls, len(record.calls)


def counted(step: Step) -> dict[str, Any]:
    """What a warm step asks of the device."""
    for _ in range(WARM_UP):
        with Kernels():
            step.run()
    group = step.group
    before = group.all_reduces, group.nbytes, step.synchronized
    with Kernels() as seen:
        step.run()
    gradients = sum(bucket.buffer().nbytes for bucket in step.buckets)
    return {
        "buckets": len(step.buckets),
        "kernels": seen.kernels,
        "passes": seen.nbytes / gradients,
        "all_reduces": group.all_reduces - before[0],
        "payload_mib": (group.nbytes - before[1]) / MIB,
        "host_waits": seen.waits + step.synchronized - before[2],
        "by_name": dict(seen.by_name.most_common()),
    }


def measured(step: Step, repeats: int) -> dict[str, Any]:
    """A row about one hook."""
    row = counted(step)
    seconds, calls = host_time(step, repeats)
    return row | {
        "host_ms": seconds * 1e3,
        "host_us_per_bucket": seconds * 1e6 / len(step.buckets),
        "torch_calls": calls,
    }


def gradwire(
    shapes: dict[str, tuple[int, ...]],
    algorithm: Algorithm,
    cap: float,
    dtype: torch.dtype,
    *,
    fused: bool,
) -> Step:
    with on_a_device(fused=fused):
        return gradwire_step(shapes, algorithm, cap, dtype)


def main() -> None:
    p = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument(
        "--layers",
        type=int,
        default=12,
        help="of the GPT; the defaults make 125 million parameters",
    )
    p.add_argument("--width", type=int, default=768, help="of the GPT")
    p.add_argument("--vocabulary", type=int, default=50_257, help="of the GPT")
    p.add_argument("--context", type=int, default=1024, help="of the GPT")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 32], help="PowerSGD ranks")
    p.add_argument(
        "--caps", type=float, nargs="+", default=[25, ONE_BUCKET], help="MiB of a bucket"
    )
    p.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the gradients"
    )
    p.add_argument("--repeats", type=int, default=50, help="timed steps of each")
    p.add_argument("--by-name", action="store_true", help="print the kernels of each row by name")
    p.add_argument(
        "--output",
        default=str(Path(__file__).parent / "results" / "kernels.json"),
        help="'' writes nothing",
    )
    args = p.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    shapes = gpt(args.layers, args.width, args.vocabulary, args.context)
    matrices = sum(len(shape) > 1 for shape in shapes.values())
    print(
        f"GPT of {elements(shapes) / 1e6:.0f} million parameters in {args.dtype}: {matrices} matrices, {len(shapes) - matrices} vectors"
    )
    rows = []
    for cap in args.caps:
        for rank in args.ranks:
            steps = {
                name: gradwire(shapes, PowerSGD(rank), cap, dtype, fused=fused)
                for name, fused in OURS.items()
            }
            for subject, step in (steps | {"torch": torch_step(shapes, rank, cap, dtype)}).items():
                row = {"subject": subject, "rank": rank, "cap_mib": cap} | measured(
                    step, args.repeats
                )
                rows.append(row)
                print(
                    f"rank {rank:>2}  {row['buckets']:>3} buckets  {subject:<24}  {row['kernels']:6} kernels  {row['passes']:5.2f} passes  {row['all_reduces']:3} all-reduces"
                    f" ({row['payload_mib']:6.2f} MiB)  {row['host_waits']:3} host waits  host {row['host_ms']:6.2f} ms,"
                    f" {row['host_us_per_bucket']:6.0f} µs per bucket, {row['torch_calls']} calls into torch",
                    flush=True,
                )
                if args.by_name:
                    print("   ", ", ".join(f"{name} {n}" for name, n in row["by_name"].items()))
    codes = []
    for algorithm in CODES:
        for subject, fused in OURS.items():
            row = {"algorithm": repr(algorithm), "subject": subject, "cap_mib": args.caps[0]}
            row |= counted(gradwire(shapes, algorithm, args.caps[0], dtype, fused=fused))
            codes.append(row)
            print(
                f"{row['algorithm']}  {subject:<24}  {row['kernels']:6} kernels  {row['passes']:5.2f} passes  {row['host_waits']:3} host waits"
            )
            if args.by_name:
                print("   ", ", ".join(f"{name} {n}" for name, n in row["by_name"].items()))
    if args.output:
        result = {
            "command": " ".join(["python benchmarks/kernels.py", *sys.argv[1:]]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}",
            "parameters": elements(shapes),
            "dtype": args.dtype,
            "repeats": args.repeats,
            "rows": rows,
            "codes": codes,
        }
        save(result, Path(args.output))


if __name__ == "__main__":
    main()
