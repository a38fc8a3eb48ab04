"""What leaves a node in a step, by the counter of its interface, beside what the plan says: two
hosts of one, two and four ranks each, on Gloo.

    python benchmarks/network/nodes.py                    # writes benchmarks/results/network-nodes.json
    python benchmarks/network/nodes.py --per-host 2 --output /tmp/n.json

Linux, as root; elsewhere it says so. Frames and messages have headers, which are counted too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab import PORT, Lab, obstacle
from subjects import sent_bytes

from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, TwoLevel, WireDtype, plan

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from measuring import save  # noqa: E402

SHAPES: dict[str, tuple[int, ...]] = {f"layer{i}": (1024, 1024) for i in range(4)}
#: A counter may show so many times what is planned.
MOST = 1.05
WARM_UP, STEPS = 3, 4
INT8 = WireDtype(AllReduce(), "int8")
ONE_LEVEL: list[Any] = [
    AllReduce(),
    WireDtype(AllReduce(), "bfloat16"),
    INT8,
    Quantize("int4"),
    PowerSGD(32),
]
ONE_LEVEL += [WireDtype(PowerSGD(32), "int8"), TopK(64), Sign()]


def methods(per_host: int) -> list[Any]:
    between: list[Any] = [AllReduce(), INT8, WireDtype(PowerSGD(32), "int8")]
    return ONE_LEVEL + [TwoLevel(method, per_host) for method in between if per_host > 1]


def worker() -> None:
    """One rank, started by torchrun. Rank 0 prints bytes per step of each method."""
    import torch
    import torch.distributed as dist
    from given import HandedOver, drawn
    from torch.nn.parallel import DistributedDataParallel

    import gradwire.torch_backend as gw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for method in methods(int(os.environ["LOCAL_WORLD_SIZE"])):
        ddp = DistributedDataParallel(HandedOver(SHAPES), gradient_as_bucket_view=True)
        gw.register_comm_hook(ddp, method)
        given = drawn(SHAPES, seed=dist.get_rank())
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                dist.barrier()
                before = sent_bytes()
                dist.barrier()
            ddp.zero_grad(set_to_none=False)
            ddp(given).backward()
        dist.barrier()
        found.append((sent_bytes() - before) / STEPS)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def rows(per_host: int) -> list[dict[str, Any]]:
    with Lab(2, None) as lab:

        def command(host: int) -> list[str]:
            return [
                *(
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    f"--node-rank={host}",
                ),
                *(
                    f"--nproc-per-node={per_host}",
                    f"--master-addr={lab.address(0)}",
                    f"--master-port={PORT}",
                ),
                *(f"--local-addr={lab.address(host)}", str(HERE / "nodes.py"), "--worker"),
            ]

        printed = lab.run(command)[0]
    found = []
    for method, measured in zip(
        methods(per_host), json.loads(printed.strip().splitlines()[-1]), strict=True
    ):
        planned = plan(SHAPES, method, world_size=2 * per_host).link_bytes(
            2 * per_host, nodes=2, library="gloo"
        )
        found.append(
            {
                "ranks": per_host,
                "method": repr(method),
                "left": measured,
                "plan": planned,
                "ratio": measured / planned,
            }
        )
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument(
        "--per-host", type=int, nargs="+", default=[1, 2, 4], help="ranks on each of two hosts"
    )
    p.add_argument("--output", type=Path, default=HERE.parent / "results" / "network-nodes.json")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        worker()
        return
    if why_not := obstacle():
        raise SystemExit(f"No hosts: {why_not}")
    found: list[dict[str, Any]] = []
    for per_host in args.per_host:
        for row in rows(per_host):
            print(
                f"2 × {row['ranks']}  {row['method']:<58} {row['left'] / 1e6:8.3f} MB left a node, {row['ratio']:.3f} of the plan",
                flush=True,
            )
            found.append(row)
    worst = max(row["ratio"] for row in found)
    print(f"at most {worst:.3f} of the plan (goal: at most {MOST})")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}"
    save({"machine": machine, "parameters": 4 << 20, "goal": MOST, "rows": found}, args.output)


if __name__ == "__main__":
    main()
