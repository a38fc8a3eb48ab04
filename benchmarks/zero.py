"""What sharding the optimizer's state costs and saves: step time and peak memory against DDP +
AdamW and torch's `ZeroRedundancyOptimizer`.

    python benchmarks/zero.py                    # writes benchmarks/results/zero.json
    python benchmarks/zero.py --layers 1 --vocabulary 200 --repeats 1 --output /tmp/zero.json

Two processes on Gloo, a GPT of 25 million parameters. A step is the backward pass of a model that
does little but hand gradients over, their averaging, and the update. For the time all subjects take
turns within one run; ratios are medians of the ratios of steps that followed each other. For the
memory each has a run of its own: the peak of a process beyond what it held before, when it had
trained a model of one matrix.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measuring import interleaved, on_ranks, save
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
    p.add_argument(
        "--subjects", nargs="+", default=SUBJECTS, choices=SUBJECTS, help="besides DDP with AdamW"
    )
    p.add_argument("--output", type=Path, default=HERE / "results" / "zero.json")
    return p.parse_args()


def stepper(
    subject: str, shapes: dict[str, tuple[int, ...]], given: dict[str, Any]
) -> Callable[[], None]:
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
        optimizer = zero = gw.ZeroOptimizer(
            named, torch.optim.AdamW, average_gradients=averaging, lr=1e-3
        )
        if isinstance(model, DistributedDataParallel) and subject.startswith("hook"):
            model.register_comm_hook(None, getattr(gw, subject)(gw.allreduce_hook, model, zero))

    def step() -> None:
        model(given).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def times(
    subjects: list[str], shapes: dict[str, tuple[int, ...]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of steps, by subject. Every rank calls this."""
    import torch.distributed as dist
    from given import drawn

    given = drawn(shapes, seed=dist.get_rank())
    return interleaved({s: stepper(s, shapes, given) for s in subjects}, repeats)


def peak(subject: str, shapes: dict[str, tuple[int, ...]]) -> float:
    """MiB at the peak. What is imported and loaded when a tiny model has been trained does not
    count. Every rank calls this."""
    import torch.distributed as dist
    from given import drawn

    given = drawn(shapes, seed=dist.get_rank())
    tiny: dict[str, tuple[int, ...]] = {"weight": (8, 8)}
    _steps(stepper(subject, tiny, drawn(tiny)))
    before = peak_bytes()
    _steps(stepper(subject, shapes, given))
    return (peak_bytes() - before) / MIB


def _steps(step: Callable[[], None]) -> None:
    for _ in range(4):
        step()


def main() -> None:
    args = parse()
    subjects = [REFERENCE, *(s for s in args.subjects if s != REFERENCE)]
    shapes = gpt(args.layers, vocabulary=args.vocabulary)
    seconds = on_ranks(times, subjects, shapes, args.repeats)
    rows = []
    for subject in subjects:
        row = {
            "subject": subject,
            "step_ms": statistics.median(seconds[subject]) * 1e3,
            "ratio_to_ddp": statistics.median(
                a / b for a, b in zip(seconds[subject], seconds[REFERENCE], strict=True)
            ),
            "peak_mib": on_ranks(peak, subject, shapes),
        }
        rows.append(row)
        print(
            f"{subject:<34}  {row['step_ms']:8.1f} ms  {row['ratio_to_ddp']:6.3f} of DDP + AdamW"
            f"  {row['peak_mib']:7.1f} MiB at the peak"
        )
    result = {
        "command": " ".join(["python benchmarks/zero.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}",
        "parameters_mib": 4 * elements(shapes) / MIB,
        "repeats": args.repeats,
        "rows": rows,
    }
    save(result, args.output)


if __name__ == "__main__":
    main()
