"""Compression errors that no memory has a place for any more, as after a change of the algorithm:
they are added to the next gradients, once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from gradwire.torch_backend.ops.kernels import TorchOps


class Owed:
    """What is owed to the next gradients.

    Attributes:
        errors: by parameter, shaped as the algorithm before kept them.
    """

    def __init__(self) -> None:
        self.errors: dict[str, Tensor] = {}
        self._paid: list[str] = []

    def begin(self) -> None:
        """Begin a step. What has been added to the gradients of one that never ended is owed
        still."""
        self._paid = []

    @torch.no_grad()
    def pay(self, gradients: Mapping[str, Tensor], unused: Collection[str]) -> None:
        """Add what is owed to the gradients that take part in this step."""
        for name in self.errors.keys() & gradients.keys() - set(unused):
            gradient = gradients[name]
            gradient.add_(self.errors[name].reshape(gradient.shape))
            self._paid.append(name)

    def settle(self, ops: TorchOps, groups: Iterable[Mapping[str, Tensor]]) -> None:
        """Forget what has been added, unless the step is not finite, and no optimizer takes it.
        Once for each change of the algorithm, the host waits.

        Args:
            groups: the averages of the step, by parameter.
        """
        paid = [averages[name] for averages in groups for name in averages if name in self._paid]
        if paid and bool(ops.all_finite(*paid)):
            for name in self._paid:
                del self.errors[name]
