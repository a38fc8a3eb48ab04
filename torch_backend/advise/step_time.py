"""How long a training step of one replica takes in torch, and when in it the gradients are
ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradwire.core.advise.timeline import Compute
from gradwire.core.advise.timing import STEPS, WARM_UP, repeated, require_step


def step_compute(train_step: Callable[[], Any]) -> Compute:
    """Run a step some times: forward, backward and the optimizer, with nothing sent.

    When each gradient is ready is seen by hooks on the parameters that the step's optimizer has. On
    CUDA gradients are there later than their hooks run on the host, so they are taken to come
    evenly.

    Args:
        train_step: one step on this device, of a model that is not wrapped for data-parallel
            training; or is, with a group of one rank.

    Raises:
        NoStep: it builds a model.
        Exception: whatever the step raises.
    """
    parameters: dict[int, Tensor] = {}
    made: dict[int, tuple[float, int]] = {}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            parameters.update({id(p): p for p in group["params"] if p.requires_grad})

    def arrived(p: Tensor) -> None:
        made.pop(id(p), None)  # of several backward passes the last makes the gradient
        made[id(p)] = time.perf_counter(), p.nbytes

    def once() -> tuple[float, list[tuple[float, int]]]:
        made.clear()
        start = time.perf_counter()
        train_step()
        if on_device:
            torch.cuda.synchronize()
        return time.perf_counter() - start, [(now - start, n) for now, n in made.values()]

    with ExitStack() as hooks:
        hooks.callback(register_optimizer_step_pre_hook(note).remove)
        for _ in range(WARM_UP):
            require_step(train_step())
    on_device = torch.cuda.is_available() and any(p.is_cuda for p in parameters.values())
    with ExitStack() as hooks:
        for p in () if on_device else parameters.values():
            hooks.callback(p.register_post_accumulate_grad_hook(arrived).remove)  # type: ignore[no-untyped-call]
        runs = repeated(once, *STEPS)
    seconds = median(took for took, _ in runs)
    took, seen = min(runs, key=lambda run: abs(run[0] - seconds))
    times = [now * seconds / took for now, _ in seen]
    return Compute(
        seconds, tuple(zip(times, accumulate(nbytes for _, nbytes in seen), strict=True))
    )
