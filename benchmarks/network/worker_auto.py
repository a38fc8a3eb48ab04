"""One host of the trainings of benchmarks/auto.py on shaped links; started by `torchrun`. Prints
its seconds and choices as the last line.

A step hands given gradients over, and averages them.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import Auto, Spec
from gradwire.core.advise.choosing.methods import methods_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from given import HandedOver, drawn
from shapes import gpt


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--method", required=True, help="Auto, or the number of one of its methods")
    p.add_argument("--steps", type=int, required=True)
    p.add_argument(
        "--late",
        type=float,
        required=True,
        help="seconds by which the last rank comes late, in each second step",
    )
    for option in ("--layers", "--width", "--vocabulary"):
        p.add_argument(option, type=int, required=True)
    p.add_argument(
        "--progress", type=Path, required=True, help="where rank 0 writes which step has come"
    )
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes, rank = gpt(args.layers, args.width, args.vocabulary), dist.get_rank()
    specs = {name: Spec(shape, "float32") for name, shape in shapes.items()}
    methods = methods_of(Auto(), specs, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    algorithm = Auto() if args.method == "Auto" else methods[int(args.method)]
    given = drawn(shapes, seed=rank)
    ddp = DistributedDataParallel(HandedOver(shapes), gradient_as_bucket_view=True)
    handle = gw.register_comm_hook(ddp, algorithm)
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
        found = {"method": repr(algorithm), "seconds": seconds, "choices": choices}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
