"""How far the averages of a step are from those that a full average would have given: on request, for it costs a full average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithms.compressor import ERROR


@dataclass
class Approximation:
    """What compression made of the gradients of one step, all ranks together.

    The averages are compared with the mean of what the ranks put in: gradients, and what was left out before. Error feedback sends that later, so
    a relative error of 0.9 is no 0.9 of the gradient lost; it says how long gradients take to arrive.

    Attributes:
        step: how many steps had been finished after it; None until a step has been measured.
        relative_error: 2-norm of the difference over that of the mean; 0.0 for an exact average, 1.0 if nothing was sent.
        by_parameter: the same for each parameter.
    """

    step: int | None = None
    relative_error: float | None = None
    by_parameter: dict[str, float] = field(default_factory=dict)


class Measurement:
    """Takes notes of one step for an `Approximation`. Takes the memory of another gradient.

    Args:
        group: of the replicas.
        divided: gradients come divided by their number.
    """

    def __init__(self, group: dist.ProcessGroup, *, divided: bool = False) -> None:
        self.found = Approximation()
        self._group = group
        self._share = 1.0 if divided else 1.0 / dist.get_world_size(group)
        self._given: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A step begins."""
        self._given = {}

    def take(self, gradients: Mapping[str, Tensor], memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        """These go in now, with what was left out of them."""
        for name, gradient in gradients.items():
            error = memory.get(name, {}).get(ERROR)
            x = gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
            self._given[name] = x if error is None else x.add_(error)

    def compare(self, averages: Mapping[str, Tensor], step: int) -> None:
        """With what has come out of it, on all ranks."""
        squares: list[Tensor] = []
        for name, x in self._given.items():
            dist.all_reduce(x.mul_(self._share), group=self._group)
            squares += [(averages[name] - x).double().square().sum(), x.double().square().sum()]
        off = torch.stack(squares).cpu().view(-1, 2)
        self.found.step = step
        self.found.relative_error = _ratio(*off.sum(0).tolist())
        self.found.by_parameter = {name: _ratio(*pair) for name, pair in zip(self._given, off.tolist(), strict=True)}
        self._given = {}


def _ratio(difference: float, whole: float) -> float:
    return float((difference / whole) ** 0.5) if whole else float(difference > 0)
