"""Optimizers that a tool has wrapped: the one inside is what steps, and what can be hooked."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.torch_backend.torch_internals import takes_step_hooks

#: Wrappers that call the step of their `optimizer` when it is time to: of accelerate and of
#: Lightning.
WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer")


def is_wrapped(optimizer: object) -> bool:
    """Whether a tool has wrapped it."""
    return any(kind.__name__ in WRAPPERS for kind in type(optimizer).__mro__)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside; None stays None. Raises TypeError for what is no torch optimizer, or
    takes no step hooks."""
    while is_wrapped(optimizer):
        optimizer = optimizer.optimizer
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; give one of torch.optim, or None"
        )
    if not takes_step_hooks(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, which takes no step hooks; give the"
            " optimizer that it wraps, or None and call handle.step() after each step"
        )
    return optimizer
