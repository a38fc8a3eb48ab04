"""How long a training step of one replica takes in torch, and when in it the gradients are ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradwire.core.advise.timeline import LEAST, LONG, MOST, WARM_UP, Compute, require_step


def step_compute(train_step: Callable[[], Any]) -> Compute:
    """Run a step some times: forward, backward and the optimizer, with nothing sent.

    When each gradient is ready is seen by hooks on the parameters that the step's optimizer has. On CUDA gradients are there later than their hooks
    run on the host, so they are taken to come evenly.

    Args:
        train_step: one step on this device, of a model that is not wrapped for data-parallel training; or is, with a group of one rank.

    Raises:
        NoStep: it builds a model.
        Exception: whatever the step raises.
    """
    parameters: dict[int, Tensor] = {}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            parameters.update({id(p): p for p in group["params"] if p.requires_grad})

    hook = register_optimizer_step_pre_hook(note)
    try:
        for _ in range(WARM_UP):
            require_step(train_step())
    finally:
        hook.remove()
    on_device = torch.cuda.is_available() and any(p.is_cuda for p in parameters.values())
    made: list[tuple[float, int]] = []
    watching: list[RemovableHandle] = []
    runs: list[tuple[float, list[tuple[float, int]]]] = []

    def arrived(p: Tensor) -> None:
        made.append((time.perf_counter(), p.nbytes))

    try:
        for p in () if on_device else parameters.values():
            watching.append(p.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call] # noqa: PERF401  (removed if one fails)
        began = time.perf_counter()
        while len(runs) < LEAST or (len(runs) < MOST and time.perf_counter() - began < LONG):
            made.clear()
            start = time.perf_counter()
            train_step()
            if on_device:
                torch.cuda.synchronize()
            runs.append((time.perf_counter() - start, [(now - start, n) for now, n in made]))
    finally:
        for handle in watching:
            handle.remove()
    seconds = median(took for took, _ in runs)
    took, seen = min(runs, key=lambda run: abs(run[0] - seconds))
    arrivals, total = [], 0
    for now, nbytes in seen:
        total += nbytes
        arrivals.append((now * seconds / took, total))
    return Compute(seconds, tuple(arrivals))
