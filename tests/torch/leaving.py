"""Pairs of ranks that leave right after their last message, forked from one process: `python leaving.py TIMES`.

A long switch interval makes what a busy machine does once in a thousand times happen most of the time: a thread of Gloo waits for the
interpreter's lock when the interpreter shuts down.
"""

import importlib
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD
from gradwire.torch_backend import DataParallel, register_comm_hook

FEATURES = 16


def train(kind: str) -> None:
    x = torch.randn(8, FEATURES)
    model = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(4)])
    if kind == "three DDPs":
        wrapped = []
        for rank in (1, 2, 3):
            ddp = DistributedDataParallel(nn.Linear(FEATURES, FEATURES))
            register_comm_hook(ddp, PowerSGD(rank=rank))
            wrapped.append(ddp)
        patiently()
        for ddp in wrapped:
            ddp(x).sum().backward()
    elif kind == "DataParallel":
        parallel = DataParallel(model, bucket_cap_mb=0.001, first_bucket_mb=0.001, find_unused_parameters=True)
        patiently()
        parallel(x).sum().backward()
    else:
        raise ValueError(kind)


def patiently() -> None:
    """Whoever waits for the lock goes on waiting."""
    sys.setswitchinterval(20)


def rank_of(kind: str, rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(kind)
    end = time.monotonic() + 0.05
    while time.monotonic() < end:  # without giving the lock away
        pass
    sys.exit(0)  # without destroy_process_group


def main() -> None:
    importlib.import_module("torch._dynamo")  # here once, and not by the first DDP of every child
    for kind in ("three DDPs", "DataParallel"):
        failed = sum(pair(kind) for _ in range(int(sys.argv[1])))
        assert failed == 0, f"{kind}: {failed} ranks did not leave well"


def pair(kind: str) -> int:
    """How many of two ranks failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            rank_of(kind, rank, port)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    main()
