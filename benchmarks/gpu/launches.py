"""What the profiler and the runtime's warnings say of a call: kernels, their time, and times that
the host waited for the device."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.target import Target

#: What the runtime calls a host that waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
#: Kernels that are named in a row.
NAMED = 6


def launches(target: Target, run: Callable[[], None]) -> dict[str, Any]:
    """Of one call, which should be warm. None for what only a GPU has.

    `busy_ms` is the time of its kernels, added up: what the device would take if nothing had to be
    launched.
    """
    if target.tiny:
        run()
        return {
            "kernels": None,
            "busy_ms": None,
            "host_waits": None,
            "host_waits_warned": None,
            "kernels_ms": {},
            "operations": {},
        }
    idle = _idle(target)
    events = _recorded(target, run)
    calls, kernels = sorted_out(events)
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:NAMED]
    return {
        "kernels": sum(n for n, _ in kernels.values()),
        "busy_ms": sum(us for _, us in kernels.values()) / 1e3,
        "host_waits": sum(max(0, calls[name] - idle[name]) for name in WAITS),
        "host_waits_warned": _warned(run),
        "kernels_ms": {name[:80]: us / 1e3 for name, (_, us) in longest},
        "operations": operations(events),
    }


@functools.cache
def _idle(target: Target) -> Counter[str]:
    """What is seen where nothing is done: the profiler waits for the device, too."""
    return sorted_out(_recorded(target, lambda: None))[0]


def _recorded(target: Target, run: Callable[[], None]) -> Any:
    """What the profiler sees of a call."""
    target.settle()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        target.settle()
    return profiler.events()


def operations(events: Any) -> dict[str, list[int]]:
    """Of the operations that launch kernels: calls, and the kernels of all of them. Where there is
    no GPU, `benchmarks/dry.py` counts by such a table."""
    found: dict[str, list[int]] = {}
    for event in events:
        if event.device_type.name == "CPU" and event.kernels:
            seen = found.setdefault(event.name, [0, 0])
            seen[0] += 1
            seen[1] += len(event.kernels)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def sorted_out(events: Any) -> tuple[Counter[str], dict[str, tuple[int, float]]]:
    """How often each thing was seen on the host, and each kernel's number and microseconds by name.
    On the device the profiler also shows ranges that somebody has named, `nccl:all_reduce`, and
    copies: no kernels."""
    calls: Counter[str] = Counter()
    kernels: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.device_type.name != "CUDA":
            calls[event.name] += 1
        elif not getattr(event, "is_user_annotation", False) and not event.name.startswith(
            ("Mem", "mem")
        ):
            number, us = kernels.get(event.name, (0, 0.0))
            kernels[event.name] = number + 1, us + event.time_range.elapsed_us()
    return calls, kernels


def _warned(run: Callable[[], None]) -> int:
    """Torch warns of its own calls that make the host wait."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Not the notice that it "does not yet detect all synchronizing operations", which comes once.
    return sum("called a synchronizing" in str(warning.message) for warning in heard)
