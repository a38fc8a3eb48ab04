"""A long run of two ranks, and many process groups: does anything grow? `make soak-long`.

    python -m tests.soak.long_run --steps 5000 --groups 200

Every step trains one model behind several front doors at once. Resident memory, file descriptors
and threads are read when a tenth of the steps is done, by which all memory is there, and in the
end. Then process groups are made, train a step and are destroyed, one after the other, and the same
is read.
"""

import argparse
import gc
import os
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gradwire import AllReduce, PowerSGD, Sign, TopK, WireDtype, diloco
from gradwire.torch_backend import Averager, DataParallel, local_sgd, register_comm_hook
from tests.launch import run_ranks

RANKS, WIDTH = 2, 32
#: What may be more in the end than after a tenth, in KiB of each rank: the allocator's arenas, of
#: which no step has its own.
KIB = 8 * 1024


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def doors(group):
    """What trains a step, of each front door; its optimizer and its averager. And the handle that
    has a process group of its own, until it is unregistered."""
    hooked = nn.parallel.DistributedDataParallel(model(), process_group=group)
    register_comm_hook(hooked, PowerSGD(2, half_step=True))
    wrapped = DataParallel(model(), TopK(8), process_group=group)
    plain, local, late = model(), model(), model()
    averager = Averager(WireDtype(AllReduce(), "int8"), dict(plain.named_parameters()), group)
    made = [(m, torch.optim.SGD(m.parameters(), lr=0.01), None) for m in (hooked, wrapped)]
    made += [(plain, torch.optim.SGD(plain.parameters(), lr=0.01), averager)]
    made += [(m, torch.optim.AdamW(m.parameters(), lr=0.001), None) for m in (local, late)]
    local_sgd(*made[3][:2], diloco(5, compressor=Sign()), process_group=group)
    overlapped = diloco(5, overlap=3, fragments=2, compressor=PowerSGD(2))
    return made, local_sgd(*made[4][:2], overlapped, process_group=group)


def step(made, number):
    x = torch.randn(
        4, WIDTH, generator=torch.Generator().manual_seed(number * RANKS + dist.get_rank())
    )
    for module, optimizer, averager in made:
        optimizer.zero_grad()
        module(x).square().mean().backward()
        if averager is not None:
            averager({name: p.grad for name, p in module.named_parameters()})
        optimizer.step()


def held():
    """KiB of memory, file descriptors, threads of Python and of the system."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "KiB": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "system threads": len(os.listdir("/proc/self/task")),
    }


def watched(what, times, work):
    """Do it so many times. What is held after a tenth, and in the end; says both, and what has
    grown too much."""
    start, before = time.monotonic(), held()
    for i in range(times):
        if i == max(1, times // 10):
            before = held()
        work(i)
    after = held()
    grown = [key for key in before if after[key] > before[key] + (KIB if key == "KiB" else 0)]
    figures = ", ".join(f"{key} {before[key]} → {after[key]}" for key in before)
    print(
        f"rank {dist.get_rank()}: {times} {what}: {figures} ({time.monotonic() - start:.0f} s)",
        flush=True,
    )
    return grown


def one_group(_):
    """A group that trains a step behind each door, and is gone."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    made, handle = doors(group)
    step(made, 0)
    handle.unregister()
    del made, handle
    gc.collect()
    dist.destroy_process_group(group)


def work(steps, groups):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made, handle = doors(None)
    grown = watched("steps", steps, partial(step, made))
    weights = torch.cat([p.detach().flatten() for module, *_ in made for p in module.parameters()])
    assert weights.isfinite().all()
    del made, handle
    grown += watched("process groups", groups, one_group)
    print(f"rank {dist.get_rank()}: nothing grows" if not grown else f"grown: {grown}", flush=True)
    dist.destroy_process_group()
    return bool(grown)


def main():
    parser = argparse.ArgumentParser(
        description="A long run of two ranks, and many process groups."
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--work", action="store_true", help="this is a rank")
    args = parser.parse_args()
    if args.work:
        sys.exit(work(args.steps, args.groups))
    arguments = "--work", f"--steps={args.steps}", f"--groups={args.groups}"
    print(run_ranks(Path(__file__), RANKS, *arguments, timeout=24 * 3600))


if __name__ == "__main__":
    main()
