"""A site of `nat.py`: three averages by DiLoCo with a peer that the lighthouse names, and what
became of it in one line."""

import os
import re
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo

import gradwire
from gradwire.torch_backend import elastic

LIMIT = timedelta(seconds=8)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
try:
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=LIMIT,
        connect_timeout=LIMIT,
        quorum_timeout=timedelta(seconds=40),
        max_retries=1,
        replica_id=socket.gethostname(),
        lighthouse_addr=sys.argv[1],
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    handle = elastic(
        model, optimizer, gradwire.diloco(5, compressor=gradwire.PowerSGD(rank=4)), manager
    )
    while handle.rounds < 4:
        x = torch.randn(64, 64)
        (model(x) - x.sort(dim=1).values).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{handle.rounds} rounds", flush=True)
except (RuntimeError, TimeoutError, OSError) as error:
    print("fails:", re.sub(r"\s+", " ", str(error))[:160], flush=True)
os._exit(0)
