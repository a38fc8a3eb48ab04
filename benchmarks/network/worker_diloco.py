"""One host of the benchmark of overlap; started by `torchrun`. Rank 0 prints what a step takes as
the last line."""

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire import LocalSGD, diloco
from gradwire.torch_backend import local_sgd

ROWS = 256
#: Timed one after the other.
PERIODS = 3


def schedule(subject: str, period: int) -> LocalSGD | None:
    """What a subject does. A message of half a period has a little more than that to arrive in."""
    return {
        "alone": None,
        "waiting": diloco(period),
        "overlap": diloco(period, overlap=period // 2 + 3),
        "eager": diloco(period, eager=True),
    }[subject]


class Subject:
    """A model that trains."""

    def __init__(self, name: str, width: int, period: int) -> None:
        torch.manual_seed(0)
        self.period = period
        self.model = nn.Sequential(
            *(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh()))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(ROWS, width)
        local = schedule(name, period)
        self.handle = None if local is None else local_sgd(self.model, self.optimizer, local)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def seconds(self) -> float:
        """Of a step, in some periods after a first one. The link is empty before and after."""
        dist.barrier()
        for _ in range(self.period):
            self.step()
        began = time.perf_counter()
        for _ in range(PERIODS * self.period):
            self.step()
        took = time.perf_counter() - began
        if self.handle is not None:
            self.handle.reconfigure(self.handle.local)  # waits for what is on its way
        return took / (PERIODS * self.period)


def seconds_of_message(nbytes: int, times: int) -> float:
    """Of one all-reduce as large as the model, with both hosts otherwise idle."""
    message = torch.ones(nbytes // 4)
    found = []
    for _ in range(times + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(message)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])  # connections are made in the first


def trace(subject: Subject, path: str) -> None:
    """A period of it, after one that fills the link: a message leaves, travels and is taken."""
    for _ in range(subject.period + subject.period // 2):
        subject.step()
    if dist.get_rank() == 0:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(subject.period):
                subject.step()
        profile.export_chrome_trace(path)
    else:
        for _ in range(subject.period):
            subject.step()


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--width", type=int, required=True)
    p.add_argument("--period", type=int, required=True)
    p.add_argument("--repeats", type=int, required=True)
    p.add_argument("--subjects", nargs="+", default=[])
    p.add_argument("--message", type=int, default=0, help="time an all-reduce of so many bytes")
    p.add_argument("--trace", default="")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    subjects = {name: Subject(name, args.width, args.period) for name in args.subjects}
    for subject in subjects.values():  # the first messages leave
        subject.seconds()
    took: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(args.repeats):
        for name, subject in subjects.items():
            took[name].append(subject.seconds())
    if args.trace and "overlap" in subjects:
        trace(subjects["overlap"], args.trace)
    result: dict[str, Any] = {
        "step_ms": {name: 1e3 * statistics.median(seconds) for name, seconds in took.items()},
        "message_bytes": [
            sum(x.nbytes for x in subject.model.parameters()) for subject in subjects.values()
        ],
        "message_s": seconds_of_message(args.message, args.repeats) if args.message else None,
        "cores": os.cpu_count(),
    }
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
