"""The hook alone, on buckets as DDP makes them, no model and no DDP round it: eager, and the same
calls in a CUDA graph. torch's `powerSGD_hook` is beside PowerSGD.

One process, so nothing travels. Timed from an idle device to an idle device, so where kernels are
short it is launching that takes the time: `host_ms` is when the last call of the hook returned,
`busy_ms` what the kernels took, `graph_ms` what a replay of all of it takes, messages included,
`replayed` what a step takes that gradwire replays. Whole steps, where launching overlaps with the
backward pass, are in `steps.py`.
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
from dry import PretendedBucket, PretendedGroup, buckets_of
from shapes import elements, gpt
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

from gpu.launches import launches
from gpu.target import GIB, WARM_UP, Target, error_of
from gradwire import Algorithm, AllReduce, PowerSGD, Quantize, Sign, TopK, WireDtype
from gradwire.torch_backend.ddp.hook import CommHook
from gradwire.torch_backend.engine.driver import Driver, specs_of
from gradwire.torch_backend.engine.replays import EQUAL
from gradwire.torch_backend.ops.fused import available as fused_on

#: MiB of a bucket: DDP's default.
CAP = 25.0
#: Over the gradient: gradient + error (3), M Q, Mᵀ P, M - P Qᵀ into the error (2), P Qᵀ.
PASSES = 8
#: And what is made by torch's hook, and by gradwire's where its kernels in Triton do not run: M - P
#: Qᵀ is written where M was, and then chosen or the old error (3).
PASSES_APART = 11
#: Calls of everything before a capture.
BEFORE_CAPTURE = 12
#: Replayed steps that are timed, each beside an eager one.
PAIRS = 30
Row = dict[str, Any]
Hook = Callable[[Any], Any]
SMALL, LARGE = "125M", "1.3B"
#: Size, algorithm, dtype of the gradients; the most important first.
SUBJECTS: list[tuple[str, Algorithm, str]] = [
    (LARGE, PowerSGD(4), "float32"),
    (SMALL, PowerSGD(4), "float32"),
    (SMALL, WireDtype(AllReduce(), "int8"), "float32"),
    (SMALL, WireDtype(PowerSGD(16), "int8"), "float32"),
    (SMALL, PowerSGD(32), "float32"),
    (LARGE, PowerSGD(32), "float32"),
    (SMALL, Quantize("int8"), "float32"),
    (SMALL, Sign(), "float32"),
    (LARGE, WireDtype(AllReduce(), "int8"), "float32"),
    (LARGE, PowerSGD(32), "bfloat16"),
    (SMALL, TopK(64), "float32"),
    (SMALL, AllReduce(), "float32"),
]


def hook_rows(target: Target, bandwidth: float) -> Iterator[tuple[str, Callable[[], Row]]]:
    """What is measured, the most important first: a name, and a function that measures it."""
    for size, algorithm, dtype in SUBJECTS:
        yield (
            f"{size}, {algorithm!r}, {dtype}",
            partial(_row, target, size, algorithm, getattr(torch, dtype), bandwidth),
        )


def _row(
    target: Target, size: str, algorithm: Algorithm, dtype: torch.dtype, bandwidth: float
) -> Row:
    shapes = gpt(*target.sizes.get(size, next(iter(target.sizes.values()))))
    nbytes = elements(shapes) * dtype.itemsize
    row: Row = {
        "size": size,
        "algorithm": repr(algorithm),
        "dtype": str(dtype).removeprefix("torch."),
    }
    row |= {"gradient_gib": nbytes / GIB, "copy_ms": 2 * nbytes / bandwidth * 1e3}
    row["gradwire"] = _measured(target, partial(_ours, algorithm), shapes, dtype, captured=True)
    gc.collect()
    row["replayed"] = _replayed(target, algorithm, shapes, dtype)
    gc.collect()
    if isinstance(algorithm, PowerSGD):
        rank = algorithm.rank
        assert isinstance(rank, int)
        row["torch"] = _measured(target, partial(_torchs, rank), shapes, dtype, captured=False)
        row["ratio"] = row["gradwire"]["ms"] / row["torch"]["ms"]
        for name, passes in (
            ("gradwire", PASSES if fused_on(target.device) else PASSES_APART),
            ("torch", PASSES_APART),
        ):
            row[name]["of_bandwidth"] = PASSES * nbytes / bandwidth * 1e3 / row[name]["ms"]
            row[name]["passes"] = passes
    return row


def _measured(
    target: Target,
    make: Callable[[Target, dict[str, torch.Tensor]], Hook],
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    *,
    captured: bool,
) -> Row:
    parameters, buckets = _given(target, shapes, dtype)
    before = target.allocated()
    hook = make(target, parameters)
    host: list[float] = []

    def run() -> None:
        began = time.perf_counter()
        futures = [hook(bucket) for bucket in buckets]
        host.append(time.perf_counter() - began)
        for future in futures:
            future.wait()

    seconds = target.seconds(run)
    kept, peak = target.allocated() - before, target.peak_of(run)
    row = {
        "ms": statistics.median(seconds) * 1e3,
        "host_ms": statistics.median(host[-len(seconds) :]) * 1e3,
        "hook_calls": len(buckets),
        "kept_gib": kept / GIB,
        "peak_gib": None if peak is None else peak / GIB,
    } | launches(target, run)
    if captured:
        row |= _captured(target, hook, buckets)
    return row


def _given(
    target: Target, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], list[PretendedBucket]]:
    """Parameters, which are asked for their names and shapes alone, and buckets of gradients."""
    parameters = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }
    buckets = buckets_of(parameters, CAP, target.device)
    for bucket in buckets:
        bucket.buffer().normal_()
    return parameters, buckets


def _replayed(
    target: Target, algorithm: Algorithm, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> Row:
    """Eager steps and replayed ones, which take turns. On the CPU all are eager."""
    parameters, buckets = _given(target, shapes, dtype)
    handles = {replay: _handle(algorithm, target, parameters) for replay in (False, True)}
    for replay, handle in handles.items():
        handle.replay = replay
    hooks: dict[bool, Hook] = {
        replay: partial(handle.hook, None) for replay, handle in handles.items()
    }
    taken: dict[bool, list[float]] = {replay: [] for replay in handles}
    host: list[float] = []
    for step in range(1 + EQUAL if target.tiny else PAIRS + WARM_UP + EQUAL):
        for replay, hook in hooks.items():
            target.settle()
            began = time.perf_counter()
            futures = [hook(bucket) for bucket in buckets]
            called = time.perf_counter()
            for future in futures:
                future.wait()
            target.settle()
            if step >= (EQUAL if target.tiny else WARM_UP + EQUAL):
                taken[replay].append(time.perf_counter() - began)
                host += [called - began] if replay else []
    stats = handles[True].stats()
    return {
        "ms": statistics.median(taken[True]) * 1e3,
        "eager_ms": statistics.median(taken[False]) * 1e3,
        "host_ms": statistics.median(host) * 1e3,
        "pairs": len(host),
        "messages": stats.collectives // stats.steps,
        "replayed_steps": stats.replayed_steps,
        "graph_gib": stats.graph_bytes / GIB,
        "obstacle": handles[True]._driver.replays.obstacle,
    }


def _captured(target: Target, hook: Hook, buckets: list[PretendedBucket]) -> Row:
    """The calls of a step in a CUDA graph. On the CPU nothing is captured, and the calls are
    made."""

    def calls() -> None:
        for bucket in buckets:
            hook(bucket)

    if target.tiny:
        return {"graph_ms": statistics.median(target.seconds(calls)) * 1e3}
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(BEFORE_CAPTURE):
                calls()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            calls()
        return {"graph_ms": statistics.median(target.seconds(graph.replay)) * 1e3}
    except RuntimeError as error:
        return {"graph_ms": None, "graph_error": error_of(error)}


def _ours(algorithm: Algorithm, target: Target, parameters: dict[str, torch.Tensor]) -> Hook:
    handle = _handle(algorithm, target, parameters)
    handle.replay = False
    return partial(handle.hook, None)


def _handle(algorithm: Algorithm, target: Target, parameters: dict[str, torch.Tensor]) -> CommHook:
    group = dist.group.WORLD
    assert group is not None
    return CommHook(Driver(algorithm, specs_of(parameters), target.device, group), parameters, None)


def _torchs(rank: int, target: Target, parameters: dict[str, torch.Tensor]) -> Hook:
    # Without messages on the CPU, since torch's hook does not get along with Gloo and several
    # buckets. Its lower limit for the start is 2: these steps belong to the warm-up.
    group = PretendedGroup() if target.tiny else dist.group.WORLD
    state = torchs.PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return lambda bucket: torchs.powerSGD_hook(state, bucket)
