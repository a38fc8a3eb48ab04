"""A torch model whose backward pass hands over given gradients: what a benchmark trains when the
model is not what it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def drawn(
    shapes: dict[str, tuple[int, ...]], seed: int = 0, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Gradients of these shapes, of standard normal numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    return {n: torch.randn(s, generator=generator, device=device) for n, s in shapes.items()}


class GivenGradients(torch.nn.Module):
    """Every parameter times its gradient, in the order of the model."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict(
            {n: torch.nn.Parameter(torch.zeros(s)) for n, s in shapes.items()}
        )

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for name, weight in self.weights.items():
            total = total + self.term(weight, given[name])
        return total

    def term(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """A scalar whose derivative by `weight` is `gradient`."""
        # Not `(weight * gradient).sum()`, whose product is as large as the weight.
        return torch.dot(weight.view(-1), gradient.view(-1))


class HandedOver(GivenGradients):
    """The same without a single product: autograd is handed the gradients as they are, and all it
    does is to add them to `.grad`."""

    def term(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        hand_over: Callable[..., torch.Tensor] = _HandOver.apply
        return hand_over(weight, gradient)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None
