"""Something that happens after every step of an optimizer, on every rank, also where a `GradScaler`
skips the step.

A scaler that finds inf in the gradients does not call `optimizer.step()` at all. Where gradients
differ between ranks one rank may skip and another not, and whatever the ranks do together after a
step would then hang. Optimizers may tell the scaler that they handle this themselves (by an
attribute that torch's fused ones have): it then always calls `step()`, with `optimizer.found_inf`
and `optimizer.grad_scale` set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gradwire.torch_backend.engine.torch_modes import uncompiled
from gradwire.torch_backend.torch_internals import SKIPS_BY_ITSELF, is_within_own_step

#: Those whose steps are followed.
_followed: WeakSet[torch.optim.Optimizer] = WeakSet()


def is_followed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something happens after each of its steps."""
    return optimizer in _followed


@contextmanager
def scaled_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Gradients are, within, what a step is to be made of: unscaled; or gone, if a scaler found
    inf, since a step without any gradient does nothing. Without a scaler they are as they were.
    After a step that raised nothing is put back: new gradients may have come."""
    held: list[tuple[Tensor, Tensor]] = []
    flags: Any = optimizer
    found_inf: Tensor | None = getattr(flags, "found_inf", None)
    scale: Tensor | None = getattr(flags, "grad_scale", None)
    if found_inf is not None:
        # The optimizer must not see what it cannot serve; the scaler deletes both afterwards.
        del flags.found_inf, flags.grad_scale
        with_gradient = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if found_inf.item():
            held = [(p, p.grad) for p in with_gradient]
            for p in with_gradient:
                p.grad = None
        elif scale is not None:  # None: the user has unscaled already
            for p in with_gradient:
                p.grad.mul_(scale.double().reciprocal().to(p.grad.device, torch.float32))
    yield
    for p, gradient in held:
        p.grad = gradient
    if found_inf is not None:
        flags.found_inf, flags.grad_scale = found_inf, scale


def step_on_every_rank(
    optimizer: torch.optim.Optimizer, before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Call `before` and `after` each step of the optimizer. One that leaves skipping to the scaler
    is made to skip by itself. Returns what leaves the optimizer as it was."""
    running = ExitStack()
    skips_by_itself = getattr(optimizer, SKIPS_BY_ITSELF, False)

    @uncompiled
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_within_own_step(optimizer):
            return
        before()
        running.pop_all()  # what is open is of a step that raised
        if not skips_by_itself:
            running.enter_context(scaled_gradients(optimizer))

    @uncompiled
    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_within_own_step(optimizer):
            return
        running.close()
        after()

    marked = vars(optimizer).get(SKIPS_BY_ITSELF)
    setattr(optimizer, SKIPS_BY_ITSELF, True)
    hooks = [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
    ]
    _followed.add(optimizer)

    def leave() -> None:
        _followed.discard(optimizer)
        for hook in hooks:
            hook.remove()
        if marked is None:
            delattr(optimizer, SKIPS_BY_ITSELF)
        else:
            setattr(optimizer, SKIPS_BY_ITSELF, marked)

    return leave
