"""One rank of the benchmark of two levels, several on each host; started by `torchrun`. Rank 0
prints the rows as the last line.

A step is the backward pass of a model that hands given gradients over, and their averaging. What
compressing costs is measured with nobody to send to, in time of the processor: ranks share cores
here.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, PowerSGD, TwoLevel, plan

sys.path.insert(0, str(Path(__file__).parents[1]))
from given import HandedOver, drawn
from shapes import gpt
from subjects import Subject, parser, rows, sent_bytes

WARM_UP = 3
#: Seconds that a message takes between hosts, and on loopback; bytes per second of loopback. For
#: the prediction.
LATENCY, WITHIN = 1e-4, (2e-5, 3e9)


def step_of(
    shapes: dict[str, tuple[int, ...]], algorithm: Any, group: dist.ProcessGroup | None = None
) -> Any:
    """One step of a model of these shapes, and the handle."""
    model = HandedOver(shapes)
    ddp = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=25, gradient_as_bucket_view=True
    )
    handle = None if algorithm is None else gw.register_comm_hook(ddp, algorithm)
    given = drawn(shapes, seed=dist.get_rank())

    def step() -> None:
        ddp.zero_grad(set_to_none=False)
        ddp(given).backward()

    return step, handle


def measure(subject: Subject) -> tuple[float, float]:
    """Seconds and bytes on this host's interface, per step."""
    dist.barrier()
    bytes_before, began = sent_bytes(), time.perf_counter()
    subject.step()
    dist.barrier()
    return time.perf_counter() - began, sent_bytes() - bytes_before


def cpu_ms(step: Any, repeats: int) -> float:
    """Of this process, per step."""
    for _ in range(WARM_UP):
        step()
    began = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - began) / repeats * 1e3


def main() -> None:
    args = parser().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, per_host = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = ranks // per_host
    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    flat, two = PowerSGD(args.rank), TwoLevel(PowerSGD(args.rank), per_host)
    planned = plan(shapes, two, world_size=ranks)
    near, far = planned.levels
    dense, one = plan(shapes, AllReduce()), plan(shapes, flat)
    # `rows` takes what one replica hands over, on a ring of the hosts.
    subjects = [
        Subject("DDP", step_of(shapes, None)[0], dense.wire_bytes, 1),
        Subject("one level", step_of(shapes, flat)[0], one.wire_bytes, one.collectives),
        Subject("two levels", step_of(shapes, two)[0], far.node_bytes, far.collectives),
        Subject(
            "two levels, dense",
            step_of(shapes, TwoLevel(AllReduce(), per_host))[0],
            dense.wire_bytes,
            dense.collectives,
        ),
    ]
    found = rows(subjects, measure, args, hosts=hosts, warm_up=WARM_UP)
    payloads = {"one level": one.wire_bytes, "two levels": far.node_bytes / per_host}
    for row in found:
        row["payload"] = payloads.get(row["subject"], dense.wire_bytes)
        row["predicted_ms"] = planned.seconds(ranks, LATENCY, args.rate, within=WITHIN) * 1e3
    by_itself = dist.new_subgroups(1)[0]
    took: list[Any] = [None] * ranks
    dist.all_gather_object(took, cpu_ms(step_of(shapes, flat, by_itself)[0], args.repeats))
    found.append({"subject": "compressing alone", "cpu_ms": max(took)})
    for row in found:
        row.setdefault("near_bytes", near.nbytes if row["subject"] == "two levels" else 0)
    dist.barrier()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
