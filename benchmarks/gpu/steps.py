"""Whole training steps of a GPT under DDP on ranks that share a GPU and talk by NCCL's sockets: forward, backward, the
hook, AdamW; under autocast to bfloat16, with gradients in float32.

Subjects take turns, plain DDP among them, in lots that fit into memory. Ratios are medians over rounds. Rows of a lot
are told after some rounds already: when time is up, only the rounds since then are lost.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from gpu.model import GPT
from gpu.target import Target
from gradwire import Algorithm, AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.torch_backend import bf16_compress_hook, register_comm_hook

BATCH, LENGTH = 8, 512
#: DDP rebuilds its buckets after the first step, and torch's hook begins with two dense ones.
WARM_UP = 5
#: Rounds that are timed, and after how many rows are told.
ROUNDS, TOLD_AFTER = 30, 10
PLAIN = "DDP"
ALONE = "no messages at all"
Row = dict[str, Any]
Hook = Callable[[DistributedDataParallel], object]


def _ours(algorithm: Algorithm) -> tuple[str, Hook]:
    return repr(algorithm), lambda ddp: register_comm_hook(ddp, algorithm)


def _torchs(rank: int) -> tuple[str, Hook]:
    def register(ddp: DistributedDataParallel) -> None:
        state = torchs.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, torchs.powerSGD_hook)

    return f"torch's powerSGD_hook, rank {rank}", register


def _nothing(ddp: DistributedDataParallel) -> None:
    pass


def _bf16(ddp: DistributedDataParallel) -> None:
    """torch's, which refuses Gloo."""
    ddp.register_comm_hook(
        None, default_hooks.bf16_compress_hook if dist.get_backend() == "nccl" else bf16_compress_hook
    )


#: What takes turns with plain DDP, the most important first.
LOTS: list[list[tuple[str, Hook]]] = [
    [(ALONE, _nothing), _ours(PowerSGD(4))],
    [("bf16_compress_hook", _bf16), _torchs(4), _ours(WireDtype(PowerSGD(16), "int8"))],
    [_ours(WireDtype(AllReduce(), "int8")), _ours(PowerSGD(32)), _torchs(32)],
    [_ours(Quantize("int8")), _ours(Sign()), _ours(TopK(64)), _ours(AllReduce())],
]


def step_rows(target: Target) -> Iterator[Any]:
    """The names of all rows, then rows, some of them again with more rounds."""
    yield [PLAIN, *(name for lot in LOTS for name, _ in lot)]
    for i, lot in enumerate(LOTS):
        for rows in _compared(target, [(PLAIN, _nothing), *lot]):
            yield from rows if i == 0 else rows[1:]
        gc.collect()  # a DDP module lies in a cycle of references, with all its buckets
        if not target.tiny:
            torch.cuda.empty_cache()


def _compared(target: Target, lot: list[tuple[str, Hook]]) -> Iterator[list[Row]]:
    steps = {name: _step(target, register, name == ALONE) for name, register in lot}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    rounds = 1 if target.tiny else ROUNDS
    for round_ in range(rounds + WARM_UP):
        for name in list(steps)[:: 1 if round_ % 2 else -1]:
            dist.barrier()
            target.settle()
            began = time.perf_counter()
            steps[name]()
            target.settle()
            if round_ >= WARM_UP:
                taken[name].append(time.perf_counter() - began)
        done = round_ + 1 - WARM_UP
        if done > 0 and (done % TOLD_AFTER == 0 or done == rounds):
            yield [_row(name, seconds, taken[PLAIN]) for name, seconds in taken.items()]


def _row(name: str, seconds: list[float], plain: list[float]) -> Row:
    ms = sorted(s * 1e3 for s in seconds)
    ratio = statistics.median(own / its for own, its in zip(seconds, plain, strict=True))
    quarter = len(ms) // 4
    spread = {"quarter_ms": ms[quarter], "three_quarters_ms": ms[-1 - quarter]}
    return {"row": name, "step_ms": statistics.median(ms), **spread, "to_ddp": ratio, "rounds": len(ms)}


def _step(target: Target, register: Hook, alone: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    _, _, vocabulary, context = size = next(iter(target.sizes.values()))
    with target.device:
        model = GPT(*size)
        tokens = torch.randint(vocabulary, (2 if target.tiny else BATCH, min(LENGTH, context)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    register(ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not target.tiny)

    def step() -> None:
        with ddp.no_sync() if alone else nullcontext():
            with torch.autocast(target.device.type, torch.bfloat16):
                loss = ddp(tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step
