"""Two ranks that leave right after their last message, forked from one process: `python leaving.py
FOLDER`.

A long switch interval makes what a busy machine does once in a thousand times happen most of the
time: a thread of Gloo waits for the interpreter's lock when the interpreter shuts down.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from gradwire import AllReduce, PowerSGD
from gradwire.torch_backend import DataParallel
from tests.torch.models import mlp


def leave(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    options = {"bucket_cap_mb": 0.001, "first_bucket_mb": 0.001, "find_unused_parameters": True}
    models = [
        DataParallel(mlp(16, 16, 16, 16, 16), algorithm, **options)
        for algorithm in (PowerSGD(1), AllReduce())
    ]
    sys.setswitchinterval(20)  # whoever waits for the lock goes on waiting
    for model in models:
        model(torch.randn(8, 16)).sum().backward()
    end = time.monotonic() + 0.05
    while time.monotonic() < end:  # without giving the lock away
        pass
    sys.exit(0)  # without destroy_process_group


if __name__ == "__main__":
    children = []
    for rank in range(2):
        if (child := os.fork()) == 0:
            leave(rank, f"{sys.argv[1]}/store")
        children.append(child)
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
