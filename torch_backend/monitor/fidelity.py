"""How far the averages of a step are from those that a full average would have given: on request,
for it costs a full average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithms.compressor import ERROR


@dataclass
class Approximation:
    """What compression made of the gradients of one step, all ranks together.

    The averages are compared with the mean of what the ranks put in: gradients, and the errors of
    the steps before. Error feedback sends that later, so a relative error of 0.9 is no 0.9 of the
    gradient lost; it says how long gradients take to arrive.

    Attributes:
        step: how many steps had been finished after it; None until a step has been measured.
        relative_error: 2-norm of the difference over that of the mean; 0.0 for an exact average,
            1.0 if nothing was sent.
        by_parameter: the same for each parameter.
    """

    step: int | None = None
    relative_error: float | None = None
    by_parameter: dict[str, float] = field(default_factory=dict)


class Measurement:
    """Takes notes of one step for an `Approximation`. Takes the memory of another gradient.

    Nothing that goes wrong here ends a step: it is kept as the `failure`, and ranks go on with
    equal messages.

    Args:
        group: of the replicas.
        divided: gradients come divided by their number.

    Attributes:
        found: what is known so far.
        failure: why a step could not be compared; "" if all could.
    """

    def __init__(self, group: dist.ProcessGroup, *, divided: bool = False) -> None:
        self.found = Approximation()
        self.failure = ""
        self._group = group
        self._share: float | Tensor = 1.0 if divided else 1.0 / dist.get_world_size(group)
        self.begin()

    def begin(self, weight: Tensor | None = None) -> None:
        """A step begins, in which this replica counts for so much, all for the same without."""
        self._given: dict[str, Tensor] = {}
        self._fails = False
        if weight is not None:
            dist.all_reduce(total := weight.clone(), group=self._group)
            self._share = weight / total

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._given, self._fails = {}, True
            self.failure = f"{type(error).__name__}: {error}"

    def take(
        self, gradients: Mapping[str, Tensor], memory: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """These go in now, with their errors."""
        with self._noting_failures():
            for name, gradient in () if self._fails else gradients.items():
                x = _wide(gradient.detach())
                if (error := memory.get(name, {}).get(ERROR)) is not None:
                    x.add_(error)
                x.mul_(self._share)
                if isinstance(self._share, Tensor):  # whatever an absent replica has
                    x = torch.where(self._share > 0, x, 0.0)
                self._given[name] = x

    def compare(self, averages: Mapping[str, Tensor], step: int) -> None:
        """Compare gradients with what has become of them, on all ranks."""
        fails = torch.tensor(
            self._fails, dtype=torch.int32, device=next(iter(averages.values())).device
        )
        dist.all_reduce(fails, dist.ReduceOp.MAX, group=self._group)
        if fails.item():
            self.failure = self.failure or "it went wrong on another rank"
            return
        for x in self._given.values():
            dist.all_reduce(x, group=self._group)
        with self._noting_failures():
            pairs = ((averages[name] - x, x) for name, x in self._given.items())
            squares = (
                torch.stack([x.double().square().sum() for pair in pairs for x in pair])
                .cpu()
                .view(-1, 2)
            )
            self.found.by_parameter = {
                name: _ratio(*each)
                for name, each in zip(self._given, squares.tolist(), strict=True)
            }
            self.found.relative_error = _ratio(*squares.sum(0).tolist())
            self.found.step = step


def _wide(x: Tensor) -> Tensor:
    """A copy in float32, or in its dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


def _ratio(difference: float, whole: float) -> float:
    return float((difference / whole) ** 0.5) if whole else float(difference > 0)
