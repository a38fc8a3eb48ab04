"""One host of the trainings of benchmarks/auto.py on shaped links; started by `torchrun`. Prints
its seconds and choices as the last line.

A step hands given gradients over, and averages them.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, Auto, WireDtype

sys.path.insert(0, str(Path(__file__).parents[1]))
from given import HandedOver, drawn
from shapes import gpt

METHODS: dict[str, Any] = {
    "Auto": Auto(),
    "plain": AllReduce(),
    **{d: WireDtype(AllReduce(), d) for d in ("int8", "bfloat16")},
}


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--method", choices=METHODS, required=True)
    p.add_argument("--steps", type=int, required=True)
    p.add_argument(
        "--late",
        type=float,
        required=True,
        help="seconds by which the last rank comes late, in each second step",
    )
    for option in ("--layers", "--vocabulary"):
        p.add_argument(option, type=int, required=True)
    p.add_argument(
        "--progress", type=Path, required=True, help="where rank 0 writes which step has come"
    )
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes, rank = gpt(layers=args.layers, vocabulary=args.vocabulary), dist.get_rank()
    given = drawn(shapes, seed=rank)
    ddp = DistributedDataParallel(HandedOver(shapes), gradient_as_bucket_view=True)
    handle = gw.register_comm_hook(ddp, METHODS[args.method])
    dist.barrier()
    began = time.perf_counter()
    for step in range(args.steps):
        if rank == 0:
            args.progress.write_text(str(step))
        if rank == dist.get_world_size() - 1 and step % 2:
            time.sleep(args.late)
        ddp.zero_grad(set_to_none=False)
        ddp(given).backward()
    dist.barrier()
    seconds = time.perf_counter() - began
    choices = handle.stats().choices
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"seconds": seconds, "choices": choices}), flush=True)


if __name__ == "__main__":
    main()
