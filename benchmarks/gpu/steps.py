"""Whole training steps of a GPT under DDP on ranks that share a GPU and talk by NCCL's sockets:
forward, backward, the hook, AdamW; under autocast to bfloat16, with gradients in float32.

Subjects take turns, plain DDP among them, in lots that fit into memory. Ratios are medians over
rounds. Rows of a lot are told after some rounds already: when time is up, only the rounds since
then are lost.
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
from gradwire.core.plan.dry_run import dry_run
from gradwire.torch_backend import bf16_compress_hook, register_comm_hook
from gradwire.torch_backend.engine.driver import specs_of
from gradwire.torch_backend.setup.handle import Handle

BATCH, LENGTH = 8, 512
#: DDP rebuilds its buckets after the first step, and torch's hook begins with two dense ones.
WARM_UP = 5
#: Rounds that are timed, and after how many rows are told.
ROUNDS, TOLD_AFTER = 30, 10
PLAIN = "DDP"
ALONE = "no messages at all"
#: After an algorithm: its steps are replayed; nothing but its messages is sent.
REPLAYED, MESSAGES = ", replayed", ", its messages alone"
FEW, CODED = PowerSGD(4), WireDtype(PowerSGD(16), "int8")
Row = dict[str, Any]
Hook = Callable[[DistributedDataParallel], object]


def _ours(algorithm: Algorithm, *, replay: bool = False) -> tuple[str, Hook]:
    def register(ddp: DistributedDataParallel) -> Handle:
        handle = register_comm_hook(ddp, algorithm)
        handle.replay = replay
        return handle

    return f"{algorithm!r}{REPLAYED if replay else ''}", register


def _messages_of(algorithm: Algorithm) -> tuple[str, Hook]:
    """As many all-reduces of as many bytes in all, one after the other when the last bucket has
    come, and nothing computed."""

    def register(ddp: DistributedDataParallel) -> None:
        specs = specs_of(dict(ddp.module.named_parameters()))
        (sent,) = dry_run(algorithm, specs, dist.get_world_size()).traffic
        device = next(ddp.parameters()).device
        each = torch.zeros(-(-sent.nbytes // (4 * sent.collectives)), device=device)

        # torch refuses annotations that are strings
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            for _ in range(sent.collectives if bucket.is_last() else 0):
                dist.all_reduce(each)
            done: Any = torch.futures.Future(devices=[] if device.type == "cpu" else [device])
            done.set_result(bucket.buffer())
            return done

        ddp.register_comm_hook(None, hook)

    return f"{algorithm!r}{MESSAGES}", register


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
        None,
        default_hooks.bf16_compress_hook if dist.get_backend() == "nccl" else bf16_compress_hook,
    )


#: What takes turns with plain DDP, the most important first.
LOTS: list[list[tuple[str, Hook]]] = [
    [(ALONE, _nothing), _ours(FEW), _ours(FEW, replay=True), _messages_of(FEW)],
    [(ALONE, _nothing), _ours(CODED), _ours(CODED, replay=True), _messages_of(CODED)],
    [("bf16_compress_hook", _bf16), _torchs(4)],
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
    made = {name: _step(target, register, name == ALONE) for name, register in lot}
    steps = {name: step for name, (step, _) in made.items()}
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
            yield [_row(name, taken, handle) for name, (_, handle) in made.items()]


def _row(name: str, taken: dict[str, list[float]], handle: object) -> Row:
    seconds = taken[name]
    ms = sorted(s * 1e3 for s in seconds)
    ratio = statistics.median(own / its for own, its in zip(seconds, taken[PLAIN], strict=True))
    quarter = len(ms) // 4
    spread = {"quarter_ms": ms[quarter], "three_quarters_ms": ms[-1 - quarter]}
    row = {
        "row": name,
        "step_ms": statistics.median(ms),
        **spread,
        "to_ddp": ratio,
        "rounds": len(ms),
    }
    if name.endswith(REPLAYED) and isinstance(handle, Handle):
        row["replayed_steps"] = handle.stats().replayed_steps
        messages = taken[name.removesuffix(REPLAYED) + MESSAGES]
        above = statistics.median(own - its for own, its in zip(seconds, messages, strict=True))
        row["above_messages_ms"] = above * 1e3
    return row


def _step(target: Target, register: Hook, alone: bool) -> tuple[Callable[[], None], object]:
    """A step, and what registering has returned."""
    torch.manual_seed(0)
    _, _, vocabulary, context = size = next(iter(target.sizes.values()))
    with target.device:
        model = GPT(*size)
        tokens = torch.randint(vocabulary, (2 if target.tiny else BATCH, min(LENGTH, context)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    registered = register(ddp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not target.tiny)

    def step() -> None:
        with ddp.no_sync() if alone else nullcontext():
            with torch.autocast(target.device.type, torch.bfloat16):
                loss = ddp(tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step, registered
