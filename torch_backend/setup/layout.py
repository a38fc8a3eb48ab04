"""How a parameter lies in memory (channels_last, transposed), and what an optimizer is given beside
it."""

from __future__ import annotations

import torch
from torch import Tensor


def laid_out_like(parameter: Tensor, x: Tensor) -> Tensor:
    """`x` itself where it has another shape or lies as the parameter does; else a copy that does.

    torch's fused optimizers go through a parameter, its gradient and its moments in the order of
    memory, whatever their strides: of one that lies otherwise they take other elements, and say
    nothing.
    """
    if x.shape != parameter.shape or _order(x) == _order(parameter):
        return x
    return torch.empty_like(parameter, dtype=x.dtype, device=x.device).copy_(x)


def strides_of(parameter: Tensor) -> tuple[int, ...] | None:
    """Those with which a tensor of the parameter's shape lies as it does. None: contiguous."""
    if parameter.is_contiguous():
        return None
    return torch.empty_like(parameter, device="meta").stride()


def _order(x: Tensor) -> list[int]:
    """Strides, but those of axes of one element, which are never walked along."""
    return [step for n, step in zip(x.shape, x.stride(), strict=True) if n != 1]
