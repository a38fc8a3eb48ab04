"""Run on each rank: trains in torch, and saves rank r's losses and bytes in `{folder}/{rank}.pt`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import MOMENTUM, RANK, RATE, STEPS, batch, weights

from gradwire import PowerSGD
from gradwire.torch_backend import register_comm_hook


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in weights().items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(value)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = torch.nn.functional.linear(x, getattr(self, f"weight{i}"), getattr(self, f"bias{i}"))
            x = torch.tanh(x) if i < 2 else x
        return x


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = Model()
    ddp = DistributedDataParallel(model)
    handle = register_comm_hook(ddp, PowerSGD(RANK))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        x, y = map(torch.from_numpy, batch(step, rank))
        loss = (ddp(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save({"losses": losses, "stats": handle.stats().compression_ratio}, Path(sys.argv[1]) / f"{rank}.pt")
    dist.destroy_process_group()
