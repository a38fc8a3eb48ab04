"""One host of the trainings of benchmarks/auto.py on shaped links, by `Auto` and by each of its
methods; started by `torchrun`. Prints the mean of their seconds and what was chosen as the last line.

A step hands given gradients over, and averages them. The trainings take turns, some steps each, so
that all see the same hours of a machine that is not always as fast.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
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

VOCABULARY = 1000
#: Steps of a turn at most.
TURN = 20


def turns(steps: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Of each turn its first step and the first after it; links change between two of them."""
    bounds = sorted({*range(0, steps, TURN), *cuts, steps})
    return list(pairwise(bounds))


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, required=True)
    p.add_argument(
        "--late",
        type=float,
        required=True,
        help="seconds by which the last rank comes late, in each second step",
    )
    for option in ("--layers", "--width"):
        p.add_argument(option, type=int, required=True)
    p.add_argument(
        "--seconds", type=float, default=120, help="all are trained again until they took so long"
    )
    p.add_argument("--cuts", type=int, nargs="*", default=[], help="steps at which links change")
    p.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="where rank 0 writes that a cut has come, and waits",
    )
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes, rank = gpt(args.layers, args.width, VOCABULARY), dist.get_rank()
    specs = {name: Spec(shape, "float32") for name, shape in shapes.items()}
    methods = methods_of(Auto(), specs, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    given = drawn(shapes, seed=rank)
    late = args.late if rank == dist.get_world_size() - 1 else 0.0

    def train(ddp: DistributedDataParallel, step: int) -> None:
        if step % 2:
            time.sleep(late)
        ddp.zero_grad(set_to_none=False)
        ddp(given).backward()

    choices = []

    def train_all() -> list[float]:
        """Seconds of each training."""
        trainings = []
        for algorithm in (Auto(), *methods):
            ddp = DistributedDataParallel(HandedOver(shapes), gradient_as_bucket_view=True)
            trainings.append((ddp, gw.register_comm_hook(ddp, algorithm)))
        seconds = [0.0] * len(trainings)
        for number, (first, end) in enumerate(turns(args.steps, args.cuts)):
            if rank == 0 and first in args.cuts:
                wait_for_links(args.folder, first)
            dist.barrier()
            began = time.perf_counter()
            for place in range(len(trainings)):
                which = (number + place) % len(trainings)
                for step in range(first, end):
                    train(trainings[which][0], step)
                dist.barrier()
                now = time.perf_counter()
                seconds[which] += now - began
                began = now
        choices.append(trainings[0][1].stats().choices)
        return seconds

    found, more = [train_all()], [True]
    while more[0]:
        more = [sum(map(sum, found)) < args.seconds]
        dist.broadcast_object_list(more)
        if more[0]:
            found.append(train_all())
    dist.destroy_process_group()
    if rank == 0:
        names = ["Auto()", *map(repr, methods)]
        means = (sum(each) / len(found) for each in zip(*found, strict=True))
        told = {"seconds": dict(zip(names, means, strict=True)), "all": found, "choices": choices}
        print(json.dumps(told), flush=True)


def wait_for_links(folder: Path, step: int) -> None:
    """Say that this step comes, until somebody has changed the links and taken that away."""
    cut, part = folder / "cut", folder / "part"
    part.write_text(str(step))
    part.rename(cut)
    while cut.exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
