"""What a training loop says of its next steps, by name, until it says something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.core.algorithm import Algorithm
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol.settings import require_settings


class Settings(dict[str, Tensor]):
    """Name → scalar of float32 on the device: a captured graph goes by what is there when it is
    replayed.

    Args:
        asked: name → default, of what the algorithm asks for.
        device: of the scalars.
    """

    def __init__(self, asked: Mapping[str, float], device: torch.device) -> None:
        super().__init__()
        #: Of which the loop has said something: the others are as the algorithm has them by
        #: default.
        self.said: set[str] = set()
        self._device = device
        for name, x in asked.items():
            self[name] = torch.tensor(x, dtype=torch.float32, device=device)

    def say(self, given: Mapping[str, Any], algorithm: object) -> None:
        """Take over what the loop says. Raises ValueError for what the algorithm does not ask for,
        and TypeError or ValueError for no number; nothing has been changed then."""
        require_settings(algorithm, given, self)
        numbers = {name: float(value) for name, value in given.items()}
        for name, number in numbers.items():
            if name in self:
                self[name].fill_(number)
            else:  # of what nobody can look into
                self[name] = torch.tensor(number, dtype=torch.float32, device=self._device)
        self.said.update(numbers)

    def continue_from(self, other: Settings) -> None:
        """Take over what was said to another algorithm, where this one asks for it too."""
        for name in self.keys() & other.said:
            self[name].copy_(other[name])
            self.said.add(name)


def asked_by(
    algorithm: Algorithm | None, specs: Mapping[str, Spec], replicas: int
) -> dict[str, float]:
    """The settings that an algorithm asks for, with their defaults. Raises ValueError for one with
    two defaults."""
    return {} if algorithm is None else dry_run(algorithm, specs, replicas).settings
