"""DDP as most scripts have it: mixed precision, accumulation, clipping, a schedule, evaluation, TensorBoard, a resume.

torchrun --nproc-per-node=2 examples/scripts/ddp.py --steps 100
torchrun --nproc-per-node=2 examples/scripts/ddp.py --steps 200     # goes on from the 100
"""

import argparse
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import PowerSGD, WireDtype
from gradwire.torch_backend import register_comm_hook

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--checkpoint", type=Path, default="ddp.pt")
parser.add_argument("--tensorboard", metavar="FOLDER", help="needs the package tensorboard")
args = parser.parse_args()
cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
rank, world = dist.get_rank(), dist.get_world_size()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Your data: here points, and in which of ten sectors each lies."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed)).to(device)
    return x, torch.atan2(x[:, 0], x[:, 1]).add(3.1416).mul(10 / 6.2832).long().clamp(0, 9)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
scaler = torch.amp.GradScaler(device.type, enabled=cuda)
ddp = DistributedDataParallel(model)
handle = register_comm_hook(ddp, WireDtype(PowerSGD(16, start_step=10), "int8"), grad_scaler=scaler)  # the added line
parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
done = 0
if args.checkpoint.exists():  # which all nodes read from one place
    state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    for name, part in {**parts, "compressor": handle}.items():  # on any number of ranks
        part.load_state_dict(state[name])
    done = state["steps"]
for step in range(done, args.steps):
    for micro in range(2):  # two batches make a step: the first one's gradients stay on their rank
        ddp.require_backward_grad_sync = micro == 1
        x, y = batch(2 * world * step + 2 * rank + micro)
        with torch.autocast(device.type, dtype=torch.float16 if cuda else torch.bfloat16):
            loss = nn.functional.cross_entropy(ddp(x), y) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # gradients are the averages: all ranks clip alike
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()
    if (step + 1) % 50 == 0 or step + 1 == args.steps:
        x, y = batch(10**6 + rank)
        dist.all_reduce(right := (model(x).argmax(1) == y).float().mean() / world)
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"compressor": handle.gathered_state_dict("all"), "steps": step + 1}  # all ranks call it
        if rank == 0:
            torch.save(state, unfinished := args.checkpoint.with_suffix(".unfinished"))
            unfinished.replace(args.checkpoint)  # at no moment is there half a checkpoint under its name
            print(f"step {step + 1}: {right.item():.0%} of the held-out points are right", flush=True)
        if rank == 0 and args.tensorboard:
            with import_module("torch.utils.tensorboard").SummaryWriter(args.tensorboard) as writer:
                for name, value in handle.stats().scalars().items():
                    writer.add_scalar(f"gradwire/{name}", value, step + 1)
if rank == 0:
    print(handle)
dist.destroy_process_group()
