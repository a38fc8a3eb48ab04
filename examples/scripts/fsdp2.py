"""FSDP2 inside a node, compressed averages between nodes, and a checkpoint for any number of both.

torchrun --nproc-per-node=4 examples/scripts/fsdp2.py --replicas 2 --steps 50
torchrun --nproc-per-node=2 examples/scripts/fsdp2.py --replicas 1 --steps 100   # goes on from the 50
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire import PowerSGD, WireDtype
from gradwire.torch_backend import compress_replicas

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int, default=2, help="nodes; the ranks of a node shard the model")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--checkpoint", type=Path, default="fsdp2")
args = parser.parse_args()

cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh(device.type, (args.replicas, world // args.replicas), mesh_dim_names=("replicate", "shard"))

torch.manual_seed(0)  # the same weights in every replica: nobody copies them
layers = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(256, 128), *layers, nn.Linear(128, 256)).to(device)
for layer in layers:
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
handle = compress_replicas(model, WireDtype(PowerSGD(16), "int8"), mesh["replicate"])  # the line that is added
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

if args.checkpoint.exists():
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments, "compressor": handle.sharded_state}
    dcp.load(state, checkpoint_id=args.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

for step in range(handle.stats().steps, args.steps):
    # Your data: here words of one letter, so that the next letter is known.
    words = torch.randint(0, 256, (16, 1), generator=torch.Generator().manual_seed(world * step + rank))
    tokens = words.expand(16, 33).to(device)
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 25 == 0 and rank == 0:
        print(f"step {step + 1}  loss {loss.item():.3f}", flush=True)

weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": moments, "compressor": handle.sharded_state}, checkpoint_id=args.checkpoint)
if rank == 0:
    print(handle)
dist.destroy_process_group()
