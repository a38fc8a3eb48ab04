"""What compression costs on a GPU: gradwire's PowerSGD beside torch's hook, plain DDP and the device's memory bandwidth, in torch and in JAX.

    make bench-gpu                           # at most eight minutes; writes benchmarks/results/gpu.json part by part
    python benchmarks/gpu                    # the same; parts that are in the file are not measured again
    python benchmarks/gpu --only hook steps --fresh
    python benchmarks/gpu --tiny --output /tmp/gpu.json

GPTs of 125 million and 1.3 billion parameters, ranks 1, 4 and 32, float32 and bfloat16, DDP's default buckets and one bucket, one process (NCCL)
unless it says otherwise. Parts, in this order, each with a limit of time (`parts.py`):

- numbers: whether the device computes what NumPy does: orthonormal factors of gradients of few rows, the kernels in Triton.
- products: what PowerSGD multiplies, for the embedding alone and a layer alone, against the bandwidth of a copy.
- hook: time of the hook alone, which launching bounds; kernels, their time, waits of the host, memory.
- methods: codes, TopK and Sign likewise.
- steps: whole training steps under DDP with gradwire's hook, torch's, `bf16_compress_hook` and none.
- graph: a step in a CUDA graph. compiled: a model compiled with graphs of its own.
- gloo: two processes that share the device.
- jax: `benchmarks/jax_step.py`, power_sgd beside pmean, and what compiling takes.

Without a GPU, or with --tiny, sizes are tiny, everything is on the CPU, and the figures mean nothing: it only shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from measuring import save  # noqa: E402

from gpu.graphs import captured, compiled  # noqa: E402
from gpu.parts import BUDGETS, one_process, run_part  # noqa: E402
from gpu.report import goals, show  # noqa: E402
from gpu.target import Target, machine  # noqa: E402
from gpu.together import shared  # noqa: E402

#: Seconds for everything.
ALL = 460.0
RESULTS = HERE.parent / "results" / "gpu.json"


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python benchmarks/gpu",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--only", nargs="+", default=list(BUDGETS), choices=list(BUDGETS), help="these parts")
    p.add_argument("--fresh", action="store_true", help="measure parts that are in the file again")
    p.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 32], help="PowerSGD ranks")
    p.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU, as where there is no GPU")
    p.add_argument("--output", type=Path, help="benchmarks/results/gpu.json; where sizes are tiny, none")
    p.add_argument("--worker", choices=["graph", "compiled", "gloo"], help=argparse.SUPPRESS)
    return p.parse_args()


def work(part: str, target: Target) -> None:
    """A process of a part, which prints what it finds."""
    found: Any
    if part == "gloo" and "RANK" in os.environ:
        dist.init_process_group("gloo")
        found = shared(target, repeats=3)
        dist.destroy_process_group()
    else:
        with one_process(target):
            found = shared(target, repeats=1) if part == "gloo" else (captured if part == "graph" else compiled)(target)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)


def begun(output: Path | None, target: Target, on: str, *, fresh: bool, only: list[str]) -> dict[str, Any]:
    """What the file holds already and is not to be measured again. Exits if that is of another machine."""
    result: dict[str, Any] = {"command": "make bench-gpu", "machine": on, "tiny": target.tiny, "parts": {}}
    if output is None or not output.exists():
        return result
    before: dict[str, Any] = json.loads(output.read_text())
    if before.get("machine") != on or before.get("tiny") != target.tiny:
        if fresh:
            return result
        raise SystemExit(
            f"{output} was measured on {before.get('machine')}, and this is {on}: --fresh begins anew, --output elsewhere"
        )
    again = set(only) if fresh else set()
    kept = {name: part for name, part in before["parts"].items() if name not in again and not _failed(part)}
    return before | {"parts": kept}


def _failed(part: dict[str, Any]) -> bool:
    """Nothing of it could be measured: worth another try."""
    return all("error" in row for row in part["rows"])


def main() -> None:
    started = time.monotonic()
    args = parse()
    target = Target(args.tiny)
    if args.worker:
        work(args.worker, target)
        return
    on = machine(target)
    output: Path | None = args.output or (None if target.tiny else RESULTS)
    print(on)
    if target.tiny:
        torch.set_num_threads(1)
        print(f"{'--tiny' if args.tiny else 'no GPU'}: tiny sizes on the CPU; the figures mean nothing")
        args.ranks = args.ranks[:1]
    result = begun(output, target, on, fresh=args.fresh, only=args.only)
    bandwidth = target.copy_bandwidth()
    result["copy_gb_per_s"] = bandwidth / 1e9
    print(f"a copy reads and writes {bandwidth / 1e9:,.0f} GB/s")
    for name in BUDGETS:
        if name in args.only and name not in result["parts"]:
            left = ALL - (time.monotonic() - started)
            if left <= 0:
                print(f"{name}: no time was left; run the command again, it goes on from here")
                continue
            result["parts"][name] = run_part(
                name, target, args.ranks, bandwidth, left if target.tiny else min(BUDGETS[name], left)
            )
            result["goals"] = goals(result["parts"])
            if output:
                save(result, output)
        if name in result["parts"]:
            show(name, result["parts"][name])
    for goal in goals(result["parts"]):
        print(f"{'reached' if goal['reached'] else 'MISSED '}  {goal['goal']}: {goal['figure']:.2f}")


if __name__ == "__main__":
    main()
