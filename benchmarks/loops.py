"""What a step of compression takes on a processor with the loops that numba compiles, and without
them: one process, on the gradients of a GPT of 25 million parameters in DDP's buckets.

    python benchmarks/loops.py                 # writes benchmarks/results/loops.json and the table in docs/performance.md
    python benchmarks/loops.py --layers 1 --vocabulary 1000 --repeats 2 --output /tmp/loops.json

Both take turns in one run, and torch's PowerSGD hook with them. Times are the least of all steps,
which other programs have disturbed least; and the median of the ratios of steps that followed each
other.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from compress import theirs
from given import drawn
from measuring import WARM_UP, save, write_part
from shapes import elements, gpt
from torch._C._distributed_c10d import HashStore

from gradwire import PowerSGD, Quantize, Sign, TopK
from gradwire.torch_backend.cpu import compiled
from gradwire.torch_backend.engine.driver import Driver, specs_of

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"


METHODS: dict[str, Any] = {
    "PowerSGD(1)": PowerSGD(1),
    "PowerSGD(4)": PowerSGD(4),
    "int8": Quantize("int8"),
    "int4": Quantize("int4"),
    "TopK(64)": TopK(64),
    "Sign": Sign(),
}


def subject(
    algorithm: Any, gradients: dict[str, torch.Tensor], *, loops: bool
) -> tuple[Callable[[], None], float]:
    """A step, and the seconds that registration took."""
    began = time.perf_counter()
    least, group = 0 if loops else sys.maxsize, dist.group.WORLD
    assert group is not None
    with mock.patch.object(compiled, "LEAST", least):
        driver = Driver(algorithm, specs_of(gradients), torch.device("cpu"), group)
    assert bool(driver.ops.loops) == loops, "numba is not installed"
    whole = torch.cat([x.view(-1) for x in reversed(gradients.values())])  # as in DDP's buckets
    parts = torch.split(whole, [x.numel() for x in reversed(gradients.values())])
    own = {
        name: part.view(x.shape)
        for (name, x), part in zip(reversed(gradients.items()), parts, strict=True)
    }

    def step() -> None:
        driver.add(own, first=True, last=True)

    return step, time.perf_counter() - began


def measured(
    name: str, threads: int, shapes: dict[str, tuple[int, ...]], repeats: int
) -> dict[str, Any]:
    """One method's row. Beside it, of PowerSGD, torch's hook of the same rank."""
    torch.set_num_threads(threads)
    gradients, algorithm = drawn(shapes), METHODS[name]
    made = {how: subject(algorithm, gradients, loops=how == "with") for how in ("without", "with")}
    steps: dict[str, Callable[[], None]] = {how: step for how, (step, _) in made.items()}
    if isinstance(algorithm, PowerSGD) and isinstance(algorithm.rank, int):
        hook = theirs(shapes, algorithm.rank)
        steps["torch's hook"] = lambda: hooked.append(hook.step(gradients))
    hooked: list[float] = []
    wall: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(WARM_UP + repeats):
        for how, step in steps.items():
            began, used = time.perf_counter(), time.process_time()
            step()
            if round_ >= WARM_UP:
                wall[how].append(time.perf_counter() - began)
                busy[how].append(time.process_time() - used)
    numbers = np.ones(elements(shapes), np.float32)
    place = np.empty_like(numbers)
    copies = []
    for _ in range(repeats):
        used = time.process_time()
        np.copyto(place, numbers)
        copies.append(time.process_time() - used)
    row: dict[str, Any] = {
        "method": name,
        "threads": threads,
        "registered_s": {how: seconds for how, (_, seconds) in made.items()},
        "copy_ms": min(copies) * 1e3,
    }
    if hooked:  # of the hook alone: DDP's copies of given gradients are no part of it
        wall["torch's hook"] = hooked[WARM_UP:]
        row["ratio_to_hook"] = min(wall["with"]) / min(wall["torch's hook"])
    for what, times in (("wall", wall), ("processor", busy)):
        row[what] = {
            how: {"least": min(x) * 1e3, "median": statistics.median(x) * 1e3}
            for how, x in times.items()
        }
        ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)]
        row[what] |= {
            "ratio": min(times["with"]) / min(times["without"]),
            "median_ratio": statistics.median(ratios),
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| method, threads | ms without | with | ratio: least, median | of torch's hook | copies of the gradient |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        wall, hook = row["wall"], row.get("ratio_to_hook")
        lines.append(
            f"| {row['method']}, {row['threads']} | {wall['without']['least']:.0f} | {wall['with']['least']:.0f} | "
            f"{wall['ratio']:.2f}, {wall['median_ratio']:.2f} | {'' if hook is None else f'{hook:.2f}'} | "
            f"{row['processor']['with']['least'] / row['copy_ms']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="what compresses"
    )
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads")
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--repeats", type=int, default=15, help="timed steps of each")
    p.add_argument("--output", type=Path, default=HERE / "results" / "loops.json")
    args = p.parse_args()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    rows = [measured(name, n, shapes, args.repeats) for name in args.methods for n in args.threads]
    print(table(rows))
    for row in rows:
        print(row)
    command = " ".join(["python benchmarks/loops.py", *sys.argv[1:]])
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    save(
        {"command": command, "machine": machine, "repeats": args.repeats, "rows": rows}, args.output
    )
    if args.output == p.get_default("output"):
        write_part(PAGE, "loops", table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
