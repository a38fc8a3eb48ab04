"""What a step of compression takes on a processor with the loops that numba compiles, and without them: one process, on the gradients of a GPT of 25 million
parameters in DDP's buckets.

    python benchmarks/loops.py                 # writes benchmarks/results/loops.json and the table in docs/performance.md
    python benchmarks/loops.py --layers 1 --vocabulary 1000 --repeats 2 --output /tmp/loops.json

Both take turns in one run. Times are the least of all steps, which other programs have disturbed least; and the median of the ratios of steps that followed
each other.
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
from given import drawn
from measuring import WARM_UP, save, write_part
from shapes import elements, gpt
from torch._C._distributed_c10d import HashStore

from gradwire import PowerSGD
from gradwire.torch_backend.cpu import compiled
from gradwire.torch_backend.engine.driver import Driver, specs_of

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"


def subject(algorithm: Any, gradients: dict[str, torch.Tensor], *, loops: bool) -> tuple[Callable[[], None], float]:
    """A step, and the seconds that registration took."""
    began = time.perf_counter()
    least, group = 0 if loops else sys.maxsize, dist.group.WORLD
    assert group is not None
    with mock.patch.object(compiled, "LEAST", least):
        driver = Driver(algorithm, specs_of(gradients), torch.device("cpu"), group)
    assert bool(driver.ops.loops) == loops, "numba is not installed"
    own = {name: x.clone() for name, x in gradients.items()}

    def step() -> None:
        driver.add(own, first=True, last=True)

    return step, time.perf_counter() - began


def measured(rank: int, threads: int, shapes: dict[str, tuple[int, ...]], repeats: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    gradients = drawn(shapes)
    steps = {
        "without": subject(PowerSGD(rank), gradients, loops=False),
        "with": subject(PowerSGD(rank), gradients, loops=True),
    }
    wall: dict[str, list[float]] = {name: [] for name in steps}
    busy: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(WARM_UP + repeats):
        for name, (step, _) in steps.items():
            began, used = time.perf_counter(), time.process_time()
            step()
            if round_ >= WARM_UP:
                wall[name].append(time.perf_counter() - began)
                busy[name].append(time.process_time() - used)
    numbers = np.ones(elements(shapes), np.float32)
    place = np.empty_like(numbers)
    copies = []
    for _ in range(repeats):
        used = time.process_time()
        np.copyto(place, numbers)
        copies.append(time.process_time() - used)
    row: dict[str, Any] = {
        "rank": rank,
        "threads": threads,
        "registered_s": steps["with"][1],
        "copy_ms": min(copies) * 1e3,
    }
    for name, times in (("wall", wall), ("processor", busy)):
        row[name] = {how: min(x) * 1e3 for how, x in times.items()}
        ratios = [a / b for a, b in zip(times["with"], times["without"], strict=True)]
        row[name] |= {"ratio": min(times["with"]) / min(times["without"]), "median_ratio": statistics.median(ratios)}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| rank, threads | processor's ms, without | with | ratio | copies of the gradient |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        used = row["processor"]
        lines.append(
            f"| {row['rank']}, {row['threads']} | {used['without']:.0f} | {used['with']:.0f} | {used['ratio']:.2f} | "
            f"{used['with'] / row['copy_ms']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 4], help="PowerSGD ranks")
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="torch threads")
    p.add_argument("--layers", type=int, default=6, help="of the GPT; 6 make 25 million parameters")
    p.add_argument("--vocabulary", type=int, default=12_000, help="of the GPT")
    p.add_argument("--repeats", type=int, default=15, help="timed steps of each")
    p.add_argument("--output", type=Path, default=HERE / "results" / "loops.json")
    args = p.parse_args()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    rows = [measured(rank, n, shapes, args.repeats) for rank in args.ranks for n in args.threads]
    print(table(rows))
    for row in rows:
        print(row)
    command = " ".join(["python benchmarks/loops.py", *sys.argv[1:]])
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    save({"command": command, "machine": machine, "repeats": args.repeats, "rows": rows}, args.output)
    if args.output == p.get_default("output"):
        write_part(PAGE, "loops", table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
