"""Run under torchrun: every case through DDP hooks on Gloo, at the bucket sizes named. Rank r saves its traces in `{folder}/{rank}.pt`."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import CASES, SHAPES, STEPS, gradients
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch_backend import register_comm_hook

#: name → (DDP's bucket_cap_mb, group_bytes)
SETTINGS = {"one_bucket": (25.0, 1 << 20), "many_buckets": (0.002, 1 << 20), "many_groups": (0.002, 0)}


class GivenGradients(torch.nn.Module):
    """A loss whose gradient is what one likes: the sum of parameter times gradient."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(shape)))

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(getattr(self, name) * g).sum() for name, g in given.items()]).sum()


def run(case: str, cap: float, group_bytes: int) -> dict[str, Any]:
    module = GivenGradients()
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap)
    handle = register_comm_hook(ddp, CASES[case].algorithm, group_bytes=group_bytes)
    trace: dict[str, Any] = {"updates": [], "errors": [], "bytes": [], "collectives": []}
    for step in range(STEPS):
        before = handle.stats()
        module.zero_grad()
        given = {n: torch.from_numpy(g) for n, g in gradients(case, step, dist.get_rank()).items()}
        ddp(given).backward()
        memory = handle.state_dict()["tensors"]
        trace["updates"].append({n: p.grad.clone() for n, p in module.named_parameters()})
        trace["errors"].append({n: m["error"] for n, m in memory.items() if "error" in m})
        trace["bytes"].append(handle.stats().bytes_sent - before.bytes_sent)
        trace["collectives"].append(handle.stats().collectives - before.collectives)
    return trace


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    traces = {(case, name): run(case, *SETTINGS[name]) for case in CASES for name in sys.argv[2:]}
    torch.save(traces, Path(sys.argv[1]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
