"""Run on each rank: every case through DDP hooks or `DataParallel` on Gloo, at the bucket sizes
named: `METHOD,SETTING` each.

Rank r saves its traces in `{folder}/{rank}.pt`.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from cases import METHODS, SHAPES, STEPS, gradients, saved
from given import GivenGradients
from launches import main
from torch.nn.parallel import DistributedDataParallel

from benchmarks.dry import on_a_device
from gradwire.torch_backend import DataParallel, register_comm_hook

#: name → (bucket_cap_mb, message_bytes)
SETTINGS = {
    "many_buckets": (0.002, 1 << 20),
    "many_groups": (0.002, 0),
    "data_parallel_buckets": (0.002, 0),
    "unseen": (0.002, 0),
}


def run(case, setting):
    with on_a_device() if setting == "unseen" else nullcontext():
        return trained(case, setting)


def states(case):
    """In which this rank begins the steps. One rank asks the oracle for all, each by turns."""
    ranks, own = range(dist.get_world_size()), [None]
    of = list(METHODS).index(case) % len(ranks)
    everyones = (
        [[saved(case, len(ranks), step, r) for step in range(STEPS)] for r in ranks]
        if (dist.get_rank() == of)
        else None
    )
    dist.scatter_object_list(own, everyones, src=of)
    return own[0]


def trained(case, setting):
    module = GivenGradients({name: torch.ones(shape) for name, shape in SHAPES.items()})
    algorithm = METHODS[case].algorithm
    cap, message_bytes = SETTINGS[setting]
    if setting == "data_parallel_buckets":
        caps = {"bucket_cap_mb": cap, "first_bucket_mb": cap}
        wrapped = DataParallel(module, algorithm, message_bytes=message_bytes, **caps)
        handle = wrapped.handle
    else:
        wrapped = DistributedDataParallel(module, bucket_cap_mb=cap)
        handle = register_comm_hook(wrapped, algorithm, message_bytes=message_bytes)
    state_dict, load = handle.rank_state_dict, handle.load_state_dict
    trace = {"updates": [], "memory": [], "bytes": [], "collectives": []}
    for step, begun in enumerate(states(case)):
        load(begun)
        before = handle.stats()
        module.zero_grad()
        given = {n: torch.from_numpy(g) for n, g in gradients(case, step, dist.get_rank()).items()}
        wrapped(given).backward()
        trace["updates"].append({n: p.grad.clone() for n, p in module.named_parameters()})
        trace["memory"].append(state_dict()["tensors"])
        trace["bytes"].append(handle.stats().bytes_sent - before.bytes_sent)
        trace["collectives"].append(handle.stats().collectives - before.collectives)
    return trace


if __name__ == "__main__":
    main(run)
