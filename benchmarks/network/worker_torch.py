"""One host of the torch half of the network benchmark; started by `torchrun`. Prints its rows as the last line.

A step is the backward pass of a model that hands given gradients over, their averaging, and nothing else, but for subjects that are
optimizers (ZeRO, DiLoCo). The subjects take turns, one step each.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd
from torch.nn.parallel import DistributedDataParallel

import gradwire.torch_backend as gw
from gradwire import AllReduce, PowerSGD, WireDtype, diloco, plan

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import gpt

PERIOD = 10  # of DiLoCo
ONE_BUCKET = 1000.0  # MiB


@dataclass
class Subject:
    """Something to be measured. `step()` is one step, or `steps` of them; `planned` the bytes of one, payloads counted once."""

    name: str
    step: Callable[[], None]
    planned: float
    planned_collectives: float
    steps: int = 1


class Model(torch.nn.Module):
    """Every parameter times a given gradient, in the order of the model."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.zeros(s)) for n, s in shapes.items()})

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for name, weight in self.weights.items():
            total = total + torch.dot(weight.view(-1), given[name].view(-1))
        return total


def subjects(shapes: dict[str, tuple[int, ...]], given: dict[str, torch.Tensor], rank: int) -> list[Subject]:
    dense = plan(shapes, AllReduce(), bucket_cap_mb=25)

    def ddp(cap: float = 25) -> DistributedDataParallel:
        return DistributedDataParallel(Model(shapes), bucket_cap_mb=cap, gradient_as_bucket_view=True)

    def backward(model: torch.nn.Module) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=False)
            model(given).backward()

        return step

    def plain() -> Subject:
        return Subject("DDP", backward(ddp()), dense.wire_bytes, len(dense.buckets))

    def bf16() -> Subject:
        model = ddp()
        gw.register_comm_hook(model, WireDtype(AllReduce(), "bfloat16"))
        return Subject("bf16", backward(model), dense.wire_bytes / 2, len(dense.buckets))

    def torchs() -> Subject:
        model = ddp(ONE_BUCKET)  # with more than one it hangs on Gloo
        state = torch_powersgd.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, torch_powersgd.powerSGD_hook)
        expected = plan(shapes, PowerSGD(rank))
        return Subject(f"torch's powerSGD_hook, rank {rank}", backward(model), expected.wire_bytes, 3)

    def ours(name: str, algorithm: PowerSGD) -> Subject:
        model = ddp()
        gw.register_comm_hook(model, algorithm)
        expected = plan(shapes, algorithm)
        return Subject(name, backward(model), expected.wire_bytes, expected.collectives)

    def zero() -> Subject:
        model = ddp()
        optimizer = gw.ZeroOptimizer(model.module.weights.items(), torch.optim.AdamW, lr=1e-3)
        model.register_comm_hook(None, gw.hook_with_zero_step(gw.allreduce_hook, model, optimizer))
        return Subject("ZeRO + AdamW", backward(model), dense.wire_bytes, 2 * len(dense.buckets))

    def local() -> Subject:
        model = ddp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gw.local_sgd(model, optimizer, diloco(PERIOD))

        def steps() -> None:
            for _ in range(PERIOD):
                optimizer.zero_grad()
                model(given).backward()
                optimizer.step()

        return Subject(f"DiLoCo + AdamW, every {PERIOD} steps", steps, dense.wire_bytes / PERIOD, 1 / PERIOD, PERIOD)

    return [
        plain(),
        bf16(),
        torchs(),
        ours(f"PowerSGD, rank {rank}", PowerSGD(rank)),
        ours(f"PowerSGD, rank {rank}, half-step", PowerSGD(rank, half_step=True)),
        zero(),
        local(),
    ]


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def measure(subject: Subject) -> tuple[float, float]:
    """Seconds and bytes on this host's interface, per step."""
    dist.barrier()
    bytes_before, began = sent_bytes(), time.perf_counter()
    subject.step()
    dist.barrier()  # a step is over when the slowest host is done
    return (time.perf_counter() - began) / subject.steps, (sent_bytes() - bytes_before) / subject.steps


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--layers", type=int, required=True)
    p.add_argument("--vocabulary", type=int, required=True)
    p.add_argument("--rank", type=int, required=True)
    p.add_argument("--repeats", type=int, required=True)
    p.add_argument("--rate", type=float, required=True, help="bytes per second of a link")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = gpt(layers=args.layers, vocabulary=args.vocabulary)
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = {n: torch.randn(s, generator=generator) for n, s in shapes.items()}
    found = subjects(shapes, given, args.rank)
    seconds: dict[str, list[float]] = {s.name: [] for s in found}
    sent: dict[str, list[float]] = {s.name: [] for s in found}
    for round_ in range(3 + args.repeats):  # DDP makes its buckets, and torch's hook begins, in the first
        for subject in found:
            took, nbytes = measure(subject)
            if round_ >= 3:
                seconds[subject.name].append(took)
                sent[subject.name].append(nbytes)
    world = dist.get_world_size()
    rows: list[dict[str, Any]] = []
    for subject in found:
        on_links = subject.planned * 2 * (world - 1) / world
        rows.append(
            {
                "subject": subject.name,
                "step_ms": statistics.median(seconds[subject.name]) * 1e3,
                "wire_bytes": statistics.mean(sent[subject.name]),
                "planned_wire_bytes": on_links,
                "wire_ms": 0.0 if math.isinf(args.rate) else on_links / args.rate * 1e3,
                "collectives": subject.planned_collectives,
                "ratio_to_plain": statistics.median(
                    a / b for a, b in zip(seconds[subject.name], seconds["DDP"], strict=True)
                ),
            }
        )
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
