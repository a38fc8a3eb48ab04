"""Two processes that share the device, over Gloo: what a step takes where messages go through the host, each process with the whole model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from given import GivenGradients, drawn
from measuring import interleaved
from shapes import gpt
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from gpu.hooks import CAPS
from gpu.target import Target
from gradwire import PowerSGD
from gradwire.torch_backend import register_comm_hook


def shared(target: Target, repeats: int) -> list[dict[str, Any]]:
    """Steps of this process among those of the default group. Gradients are given: there is no model."""
    shapes = gpt(*next(iter(target.sizes.values())))
    given = drawn(shapes, device=target.device)

    def ddp(cap: str) -> DistributedDataParallel:
        model = GivenGradients(shapes).to(target.device)
        return DistributedDataParallel(model, bucket_cap_mb=CAPS[cap], gradient_as_bucket_view=True)

    # With more than one bucket torch's hook hangs on Gloo.
    models = {"DDP": ddp("25 MiB"), "torch's powerSGD_hook, rank 4": ddp("one"), "PowerSGD, rank 4": ddp("25 MiB")}
    state = torchs.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    models["torch's powerSGD_hook, rank 4"].register_comm_hook(state, torchs.powerSGD_hook)
    register_comm_hook(models["PowerSGD, rank 4"], PowerSGD(4))

    def step(model: DistributedDataParallel) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=False)
            model(given).backward()
            target.settle()
            dist.barrier()  # a step is over when the slower process is done

        return run

    seconds = interleaved({name: step(model) for name, model in models.items()}, repeats)
    return [
        {"subject": name, "processes": dist.get_world_size(), "step_ms": statistics.median(taken) * 1e3}
        for name, taken in seconds.items()
    ]
