"""Whole training steps of a GPT under DDP in one process: forward, backward, the hook, SGD. Launching overlaps with the backward pass
here, as far as it can; what the hook adds is the difference to plain DDP.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from dry import PretendedGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from gpu.hooks import CAPS
from gpu.model import GPT
from gpu.target import GIB, Target
from gradwire import PowerSGD
from gradwire.torch_backend import bf16_compress_hook, register_comm_hook

#: Sequences and tokens of each: little work beside the gradients, so that what the hook adds can be seen.
BATCH, LENGTH = 2, 512
#: DDP rebuilds its buckets after the first step, and torch's hook begins with two dense ones.
WARM_UP = 4
Row = dict[str, Any]


def step_rows(target: Target, ranks: list[int]) -> Iterator[tuple[str, Callable[[], Row]]]:
    """One row for all hooks of a model, in one kind of buckets."""
    for cap in CAPS:
        for dtype in ("float32", "bfloat16"):
            for size in target.sizes:
                yield f"{size}, {dtype}, buckets: {cap}", partial(_compared, target, size, dtype, cap, ranks)


def _compared(target: Target, size: str, dtype: str, cap: str, ranks: list[int]) -> Row:
    torch.manual_seed(0)
    with target.device:
        model = GPT(*target.sizes[size]).to(getattr(torch, dtype))
        _, _, vocabulary, context = target.sizes[size]
        tokens = torch.randint(vocabulary, (BATCH, min(LENGTH, context)))
    row: Row = {"size": size, "dtype": dtype, "buckets": cap, "subjects": {}}
    hooks: dict[str, Callable[[DistributedDataParallel], None]] = {
        "DDP": lambda ddp: None,
        "bf16_compress_hook": partial(_bf16, target),
    }
    for rank in sorted(ranks, key=lambda r: r != 4):
        hooks[f"gradwire, rank {rank}"] = partial(_ours, rank)
        hooks[f"torch, rank {rank}"] = partial(_theirs, target, rank)
    for name, register in hooks.items():
        found = _measured(target, model, tokens, cap, register)
        plain = row["subjects"].get("DDP", found)
        row["subjects"][name] = found | {"over_ddp_ms": found["step_ms"] - plain["step_ms"]}
        model.zero_grad(set_to_none=True)  # gradients are views of the buckets
        gc.collect()  # a DDP module lies in a cycle of references, with all its buckets
    for rank in ranks:
        ours, theirs = (row["subjects"][f"{who}, rank {rank}"]["over_ddp_ms"] for who in ("gradwire", "torch"))
        row[f"added_ratio, rank {rank}"] = ours / theirs if theirs > 0 else None
    return row


def _measured(
    target: Target, model: GPT, tokens: torch.Tensor, cap: str, register: Callable[[DistributedDataParallel], None]
) -> Row:
    options = {} if cap == "25 MiB" else {"bucket_cap_mb": CAPS[cap]}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)  # type: ignore[arg-type]
    register(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        ddp(tokens).backward()
        optimizer.step()

    seconds = target.seconds(step, most=6, warm_up=WARM_UP)
    peak = target.peak_of(step)
    return {"step_ms": statistics.median(seconds) * 1e3, "peak_gib": None if peak is None else peak / GIB}


def _ours(rank: int, ddp: DistributedDataParallel) -> None:
    register_comm_hook(ddp, PowerSGD(rank))


def _theirs(target: Target, rank: int, ddp: DistributedDataParallel) -> None:
    group = PretendedGroup() if target.tiny else None  # with Gloo it hangs
    ddp.register_comm_hook(
        torchs.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2), torchs.powerSGD_hook
    )


def _bf16(target: Target, ddp: DistributedDataParallel) -> None:
    """torch's, which refuses Gloo."""
    ddp.register_comm_hook(None, bf16_compress_hook if target.tiny else default_hooks.bf16_compress_hook)
