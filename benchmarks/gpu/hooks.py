"""The hook alone: gradwire's beside torch's `powerSGD_hook`, on buckets as DDP makes them, no model and no DDP round it.

Timed from an idle device to an idle device, so where kernels are short it is launching that takes the time: `host_ms` is when the last call of
the hook returned, `busy_ms` what the kernels took. Whole steps, where launching overlaps with the backward pass, are in `steps.py`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from dry import PretendedGroup, buckets_of
from shapes import elements, gpt
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from gpu.launches import launches
from gpu.target import GIB, Target
from gradwire import Algorithm, AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.torch_backend.ddp.hook import CommHook
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.ops.fused import available as fused_on

#: MiB of a bucket: DDP's default, and all in one.
CAPS = {"25 MiB": 25.0, "one": 100_000.0}
#: Over the gradient: gradient + error (3), M Q, Mᵀ P, M - P Qᵀ into the error (2), P Qᵀ.
PASSES = 8
#: And what is made by torch's hook, and by gradwire's where its kernels in Triton do not run: M - P Qᵀ is written where M was, and then chosen or the old error (3).
PASSES_APART = 11
Row = dict[str, Any]
Hook = Callable[[Any], Any]


def hook_rows(target: Target, ranks: list[int], bandwidth: float) -> Iterator[tuple[str, Callable[[], Row]]]:
    """What is measured, the most important first: a name, and a function that measures it."""
    plans = [("float32", "25 MiB"), ("bfloat16", "25 MiB"), ("float32", "one")]
    rank_4, others = [r for r in ranks if r == 4], [r for r in ranks if r != 4]
    for chosen in (rank_4, others):
        for dtype, cap in plans:
            for size in reversed(target.sizes):
                for rank in chosen:
                    name = f"{size}, rank {rank}, {dtype}, buckets: {cap}"
                    yield name, partial(_compared, target, size, rank, dtype, cap, bandwidth)


def method_rows(target: Target, bandwidth: float) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Other methods on the smallest model, beside a copy of its gradients."""
    size = next(iter(target.sizes))
    for algorithm in (WireDtype(AllReduce(), "int8"), Quantize("int8"), TopK(64), Sign()):
        yield f"{size}, {algorithm!r}", partial(_one_method, target, size, algorithm, bandwidth)


def _one_method(target: Target, size: str, algorithm: Algorithm, bandwidth: float) -> Row:
    shapes = gpt(*target.sizes[size])
    copy_ms = 2 * 4 * elements(shapes) / bandwidth * 1e3
    found = _measured(target, partial(_ours, algorithm=algorithm), shapes, 0, torch.float32, CAPS["25 MiB"])
    return {"size": size, "algorithm": repr(algorithm), "copies": found["compress_ms"] / copy_ms, "gradwire": found}


def _compared(target: Target, size: str, rank: int, dtype: str, cap: str, bandwidth: float) -> Row:
    shapes = gpt(*target.sizes[size])
    nbytes = elements(shapes) * getattr(torch, dtype).itemsize
    floor = PASSES * nbytes / bandwidth * 1e3
    row: Row = {
        "size": size,
        "rank": rank,
        "dtype": dtype,
        "buckets": cap,
        "gradient_gib": nbytes / GIB,
        "floor_ms": floor,
    }
    makers: dict[str, Callable[..., Hook]] = {"gradwire": _ours, "torch": _theirs}
    if (dtype, cap) == ("float32", "25 MiB"):
        makers["torch, same shapes batched"] = _theirs_batched
    for name, make in makers.items():
        row[name] = _measured(target, make, shapes, rank, getattr(torch, dtype), CAPS[cap])
        row[name]["of_bandwidth"] = floor / row[name]["compress_ms"]
        passes = PASSES if name == "gradwire" and fused_on(target.device) else PASSES_APART
        row[name]["passes"] = passes
        row[name]["of_bandwidth_with_passes"] = passes / PASSES * row[name]["of_bandwidth"]
        gc.collect()
    row["ratio"] = row["gradwire"]["compress_ms"] / row["torch"]["compress_ms"]
    return row


def _measured(
    target: Target,
    make: Callable[..., Hook],
    shapes: dict[str, tuple[int, ...]],
    rank: int,
    dtype: torch.dtype,
    cap: float,
) -> Row:
    # Only gradients are there; parameters are asked for their names and shapes.
    parameters = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    buckets = buckets_of(parameters, cap, target.device)
    for bucket in buckets:
        bucket.buffer().normal_()
    before = target.allocated()
    hook = make(target, parameters, rank)
    host: list[float] = []

    def run() -> None:
        began = time.perf_counter()
        futures = [hook(bucket) for bucket in buckets]
        host.append(time.perf_counter() - began)
        for future in futures:
            future.wait()

    seconds = target.seconds(run)
    kept, peak = target.allocated() - before, target.peak_of(run)
    return {
        "compress_ms": statistics.median(seconds) * 1e3,
        "host_ms": statistics.median(host[-len(seconds) :]) * 1e3,
        "hook_calls": len(buckets),
        "kept_gib": kept / GIB,
        "peak_gib": None if peak is None else peak / GIB,
    } | launches(target, run)


def _group(target: Target) -> Any:
    """One process; on the CPU without messages, since torch's hook does not get along with Gloo and several buckets."""
    return PretendedGroup() if target.tiny else dist.group.WORLD


def _ours(target: Target, parameters: dict[str, torch.Tensor], rank: int, algorithm: Algorithm | None = None) -> Hook:
    group: Any = _group(target) if algorithm is None else dist.group.WORLD
    driver = Driver(algorithm or PowerSGD(rank), specs_of(parameters), target.device, group)
    handle = CommHook(driver, parameters, None)
    return lambda bucket: handle.hook(None, bucket)


def _theirs(target: Target, parameters: dict[str, torch.Tensor], rank: int, **options: Any) -> Hook:
    # Its lower limit for the start is 2: these steps belong to the warm-up.
    state = torchs.PowerSGDState(_group(target), matrix_approximation_rank=rank, start_powerSGD_iter=2, **options)
    return lambda bucket: torchs.powerSGD_hook(state, bucket)


def _theirs_batched(target: Target, parameters: dict[str, torch.Tensor], rank: int) -> Hook:
    return _theirs(target, parameters, rank, batch_tensors_with_same_shape=True)
