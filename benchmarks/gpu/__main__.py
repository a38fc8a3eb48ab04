"""What compression costs on a GPU: gradwire beside plain DDP, torch's hooks and the device's memory
bandwidth, in torch and in JAX.

    make bench-gpu                           # at most eight minutes; writes benchmarks/results/gpu.json row by row
    python benchmarks/gpu --only hook steps --seconds 200
    python benchmarks/gpu --tiny --output /tmp/gpu.json

GPTs of 125 million and 1.3 billion parameters. Parts, in this order, each with a limit of time
(`parts.py`):

- steps: whole training steps under DDP on two ranks that share the GPU and talk by NCCL's sockets:
  no messages at all, DDP, torch's hooks, gradwire.
- hook: the hook alone, eager and in a CUDA graph; kernels, their time, waits of the host, memory.
- jax: averages beside `pmean` on one device, and what compiling takes. jax-steps: the same in two
  processes that share the GPU.
- doctor: whether all of that is right here, quickly.
- graph: a whole step in a CUDA graph. compiled: a model compiled with graphs of its own.
- products: what PowerSGD multiplies, for the embedding alone and a layer alone, against the
  bandwidth of a copy.

Without a GPU, or with --tiny, sizes are tiny, everything is on the CPU, and the figures mean
nothing: it only shows that the script runs. `gradwire doctor` asks the same of every algorithm.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measuring import save  # noqa: E402

from gpu.children import tell  # noqa: E402
from gpu.graphs import captured, compiled  # noqa: E402
from gpu.hooks import hook_rows  # noqa: E402
from gpu.parts import PARTS, run_part  # noqa: E402
from gpu.products import product_rows  # noqa: E402
from gpu.report import goals, show  # noqa: E402
from gpu.steps import step_rows  # noqa: E402
from gpu.target import Target, error_of, machine  # noqa: E402

RESULTS = HERE.parent / "results" / "gpu.json"
Row = dict[str, Any]


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python benchmarks/gpu",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument(
        "--only", nargs="+", default=list(PARTS), choices=list(PARTS), help="these parts"
    )
    p.add_argument("--seconds", type=float, default=460, help="for everything")
    p.add_argument(
        "--tiny", action="store_true", help="tiny sizes on the CPU, as where there is no GPU"
    )
    p.add_argument(
        "--output", type=Path, help="benchmarks/results/gpu.json; where sizes are tiny, none"
    )
    p.add_argument("--worker", choices=list(PARTS), help=argparse.SUPPRESS)
    return p.parse_args()


def work(part: str, target: Target) -> None:
    """A process of a part, of which the first tells rows."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if target.tiny:
        torch.set_num_threads(1)
    backend = "gloo" if target.tiny else "nccl"
    dist.init_process_group(
        backend, init_method=f"file://{os.environ['BENCH_STORE']}", rank=rank, world_size=size
    )
    for each in step_rows(target) if part == "steps" else alone(part, target):
        if rank == 0:
            tell(each)


def alone(part: str, target: Target) -> Iterator[Any]:
    """The names of all rows, then rows, of a part of one process."""
    rows: list[tuple[str, Callable[[], Row]]]
    if part in ("graph", "compiled"):
        rows = [(part, partial(captured if part == "graph" else compiled, target))]
    else:
        rows = list(
            (hook_rows if part == "hook" else product_rows)(target, target.copy_bandwidth())
        )
    yield [name for name, _ in rows]
    for name, measure in rows:
        try:
            yield {"row": name} | measure()
        except RuntimeError as error:  # out of memory, say, which the next need not be
            yield {"row": name, "error": error_of(error)}
        if not target.tiny:
            torch.cuda.empty_cache()


def begun(output: Path | None, target: Target, on: str) -> Row:
    """What the file holds of this machine; otherwise it begins anew."""
    if output is not None and output.exists():
        before: Row = json.loads(output.read_text())
        if before["machine"] == on and before["tiny"] == target.tiny:
            return before
    return {"command": "make bench-gpu", "machine": on, "tiny": target.tiny, "parts": {}}


def main() -> None:
    end = time.monotonic()
    args = parse()
    target = Target(args.tiny)
    if args.worker:
        work(args.worker, target)
        tell(None)
        return
    end += args.seconds
    on = machine(target)
    output: Path | None = args.output or (None if target.tiny else RESULTS)
    print(on)
    if target.tiny:
        print(
            f"{'--tiny' if args.tiny else 'no GPU'}: tiny sizes on the CPU; the figures mean nothing"
        )
    result = begun(output, target, on)
    result["copy_gb_per_s"] = target.copy_bandwidth() / 1e9
    print(f"a copy reads and writes {result['copy_gb_per_s']:,.0f} GB/s", flush=True)
    if not target.tiny:
        torch.cuda.empty_cache()  # for the processes of the parts
    for name in PARTS:
        if name not in args.only:
            continue
        left = end - time.monotonic()
        if left <= 0:
            print(f"{name}: no time was left")
            continue

        def keep(part: Row, name: str = name) -> None:
            result["parts"][name] = part
            result["goals"] = goals(result["parts"])
            if output:
                save(result, output)

        run_part(
            name, left if target.tiny else min(PARTS[name].seconds, left), keep, tiny=target.tiny
        )
        show(name, result["parts"][name])
    for goal in goals(result["parts"]):
        print(
            f"{'reached' if goal['reached'] else 'MISSED '}  {goal['goal']}: {goal['figure']:.2f}"
        )


if __name__ == "__main__":
    main()
