"""Optimizers whose state holds more weights than they show."""

from __future__ import annotations

from typing import Any

import torch


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose parameters are between what it steps, z, and the average of that (Defazio et al.
    2024)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    def train(self) -> None:
        self._move(1 - 0.9)

    def eval(self) -> None:
        self._move(1 - 1 / 0.9)

    @torch.no_grad()
    def _move(self, part: float) -> None:
        for p in self.param_groups[0]["params"]:
            p.lerp_(self.state[p]["z"], part)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["k"] += 1
        for p in group["params"]:
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z, 1 / group["k"])
            p.sub_(p.grad, alpha=group["lr"] * (1 - 0.9 * (1 - 1 / group["k"])))
            z.sub_(p.grad, alpha=group["lr"])
