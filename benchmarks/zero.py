"""What sharding the optimizer's state costs and saves: step time and peak memory against DDP + AdamW and torch's `ZeroRedundancyOptimizer`.

    python benchmarks/zero.py                    # writes benchmarks/results/zero.json
    python benchmarks/zero.py --layers 1 --vocabulary 200 --repeats 1 --output /tmp/zero.json

Two processes on Gloo, a GPT of 25 million parameters. A step is the backward pass of a model that does little but hand gradients over, their
averaging, and the update. For the time all subjects take turns within one run; ratios are medians of the ratios of steps that followed each
other. For the memory each has a run of its own: the peak of a process beyond what it held before it wrapped the model.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import TORCHRUN, interleaved, last_line, save
from shapes import elements, gpt

MIB = 1 << 20
HERE = Path(__file__).parent
REFERENCE = "DDP + AdamW"
SUBJECTS = [
    REFERENCE,
    "torch's ZeroRedundancyOptimizer",
    "ZeroOptimizer",
    "ZeroOptimizer, average_gradients",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--repeats", type=int, default=9, help="timed steps of each")
    p.add_argument("--subjects", nargs="+", default=SUBJECTS, choices=SUBJECTS, help="besides DDP with AdamW")
    p.add_argument("--output", type=Path, default=HERE / "results" / "zero.json")
    p.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    return p.parse_args()


def stepper(subject: str, shapes: dict[str, tuple[int, ...]], given: dict[str, Any]) -> Callable[[], None]:
    """One step of a training of this kind."""
    import torch
    from given import GivenGradients
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    import gradwire.torch_backend as gw

    model: torch.nn.Module = GivenGradients(shapes)
    named = list(model.named_parameters())
    if subject != "ZeroOptimizer, average_gradients":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if subject == REFERENCE:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    elif subject == "torch's ZeroRedundancyOptimizer":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        averaging = not isinstance(model, DistributedDataParallel)
        optimizer = zero = gw.ZeroOptimizer(named, torch.optim.AdamW, average_gradients=averaging, lr=1e-3)
        if isinstance(model, DistributedDataParallel) and subject.startswith("hook"):
            model.register_comm_hook(None, getattr(gw, subject)(gw.allreduce_hook, model, zero))

    def step() -> None:
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """One of two processes. With several subjects their times; with one, its memory."""
    import torch
    import torch.distributed as dist
    from given import drawn

    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    given = drawn(shapes, seed=dist.get_rank())
    if len(args.worker) == 1:
        import gradwire.torch_backend  # noqa: F401

        before = peak_bytes()
        step = stepper(args.worker[0], shapes, given)
        for _ in range(4):
            step()
        found: dict[str, Any] = {"peak": peak_bytes() - before}
    else:
        found = {"seconds": interleaved({s: stepper(s, shapes, given) for s in args.worker}, args.repeats)}
    dist.destroy_process_group()
    return found


def launch(args: argparse.Namespace, subjects: list[str]) -> dict[str, Any]:
    """What rank 0 found: the last line that it prints."""
    command = [str(Path(__file__)), "--repeats", str(args.repeats), "--layers", str(args.layers)]
    command += ["--vocabulary", str(args.vocabulary), "--worker", *subjects]
    found: dict[str, Any] = last_line(*TORCHRUN, *command, OMP_NUM_THREADS="1")
    return found


def main() -> None:
    args = parse()
    if args.worker:
        found = worker(args)
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        return
    subjects = [REFERENCE, *(s for s in args.subjects if s != REFERENCE)]
    seconds = launch(args, subjects)["seconds"]
    shapes = gpt(args.layers, vocabulary=args.vocabulary)
    rows = []
    for subject in subjects:
        row = {
            "subject": subject,
            "step_ms": statistics.median(seconds[subject]) * 1e3,
            "ratio_to_ddp": statistics.median(a / b for a, b in zip(seconds[subject], seconds[REFERENCE], strict=True)),
            "peak_mib": launch(args, [subject])["peak"] / MIB,
        }
        rows.append(row)
        print(
            f"{subject:<34}  {row['step_ms']:8.1f} ms  {row['ratio_to_ddp']:6.3f} of DDP + AdamW"
            f"  {row['peak_mib']:7.1f} MiB at the peak"
        )
    import torch

    result = {
        "command": " ".join(["python benchmarks/zero.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "parameters_mib": 4 * elements(shapes) / MIB,
        "repeats": args.repeats,
        "rows": rows,
    }
    save(result, args.output)


if __name__ == "__main__":
    main()
