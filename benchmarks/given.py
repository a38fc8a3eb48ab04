"""A torch model whose backward pass hands over given gradients: what a benchmark trains when the model is not what it measures."""

from __future__ import annotations

import torch

__all__ = ["GivenGradients"]


class GivenGradients(torch.nn.Module):
    """Every parameter times its gradient, in the order of the model."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.zeros(s)) for n, s in shapes.items()})

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for name, weight in self.weights.items():
            # Not `(weight * given).sum()`, whose product is as large as the weight.
            total = total + torch.dot(weight.view(-1), given[name].view(-1))
        return total
