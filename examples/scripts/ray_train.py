"""Ray Train: two workers, each of which registers the hook on the DDP that Ray makes.

pip install 'ray[train]'
python examples/scripts/ray_train.py
"""

import argparse

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from gradwire import PowerSGD, WireDtype
from gradwire.torch_backend import register_comm_hook


def train(config: dict[str, int]) -> None:
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    ddp = prepare_model(model)
    handle = register_comm_hook(ddp, WireDtype(PowerSGD(16), "int8"))  # the line that is added
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    for step in range(config["steps"]):
        # Your data: here points, and in which of ten sectors each lies.
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(world * step + rank))
        y = torch.atan2(x[:, 0], x[:, 1]).add(3.1416).mul(10 / 6.2832).long().clamp(0, 9)
        loss = nn.functional.cross_entropy(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 25 == 0:
            ray.train.report({"loss": loss.item(), **handle.stats().scalars()})
    if rank == 0:
        print(handle)


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()
trainer = TorchTrainer(
    train, train_loop_config={"steps": args.steps}, scaling_config=ScalingConfig(num_workers=args.workers)
)
trainer.fit()
