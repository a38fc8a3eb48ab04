"""Something that happens after every step of an optimizer, on every rank, also where a `GradScaler` skips the step.

A scaler that finds inf in the gradients does not call `optimizer.step()` at all. Where gradients differ between ranks one rank may skip
and another not, and whatever the ranks do together after a step would then hang. Optimizers may tell the scaler that they handle this
themselves (`_step_supports_amp_scaling`, as torch's fused ones do): it then always calls `step()`, with `optimizer.found_inf` and
`optimizer.grad_scale` set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["step_on_every_rank"]


def step_on_every_rank(optimizer: torch.optim.Optimizer, after: Callable[[], None]) -> None:
    """Call `after` after each step of the optimizer.

    An optimizer that leaves skipping to the scaler is made to skip by itself: a step without any gradient does nothing.
    """
    held: list[tuple[Tensor, Tensor]] = []

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        if found_inf is None:  # no scaler
            return
        with_gradient = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if found_inf.item():
            held.extend((p, p.grad) for p in with_gradient)
            for p in with_gradient:
                p.grad = None
            return
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # not unscaled yet
            for p in with_gradient:
                p.grad.mul_(scale.double().reciprocal().to(p.grad.device, torch.float32))

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p, gradient in held:
            p.grad = gradient
        held.clear()
        after()

    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.register_step_pre_hook(before_step)
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer.register_step_post_hook(after_step)
