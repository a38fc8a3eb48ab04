"""What an optimizer remembers of a parameter, when parameters are averaged: kept, averaged as well, or dropped."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.torch_backend.fsdp.layout import local_part
from gradwire.torch_backend.objects import gathered_by_all

#: A scalar parameter's moments look like it.
COUNTER = "step"


class Moments:
    """The moments of an optimizer: those tensors that it keeps for a parameter and that have its shape. Counters are left alone.

    Parameters are named, as the optimizer knows them; of a DTensor the local part is averaged. `what` is "keep", "average" or "reset".
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, Tensor],
        what: str,
        group: dist.ProcessGroup,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._what = what
        self._group = group
        self._keys: dict[str, torch.dtype | None] = {}

    def taken(self, due: set[str]) -> dict[str, dict[str, Tensor]]:
        """To be averaged, of the parameters that are: parameter → name of the moment → tensor. The same names and shapes on all ranks.

        A rank that has none yet (its optimizer skipped every step, or the parameter has received no gradient there) counts as zeros.
        """
        if self._what != "average" or self._optimizer is None:
            return {}
        if not self._keys:
            self._agree()
        stepped = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        return {
            name: {key: self._moment(p, key, dtype).detach().contiguous() for key, dtype in self._keys.items()}
            for name, p in self._parameters.items()
            if name in due and id(p) in stepped
        }

    def put(self, averages: Mapping[str, Mapping[str, Tensor]], averaged: set[str]) -> None:
        """Take the averages over, where there is something to replace; or drop the moments of the parameters that were `averaged`."""
        for name, moments in averages.items():
            mine = self._of(self._parameters[name])
            for key, value in moments.items():
                if key in mine:
                    mine[key].copy_(value)
        if self._what == "reset" and self._optimizer is not None:
            for name in averaged:
                self._optimizer.state.pop(self._parameters[name], None)

    def _moment(self, parameter: Tensor, key: str, dtype: torch.dtype | None) -> Tensor:
        mine = self._of(parameter)
        return mine[key] if key in mine else local_part(torch.zeros_like(parameter, dtype=dtype))

    def _of(self, parameter: Tensor) -> dict[str, Tensor]:
        assert self._optimizer is not None
        kept = self._optimizer.state.get(parameter, {})
        return {
            key: local_part(x)
            for key, x in kept.items()
            if isinstance(x, Tensor) and x.is_floating_point() and x.shape == parameter.shape and key != COUNTER
        }

    def _agree(self) -> None:
        """Which moments there are. An optimizer makes them in its first step, which ranks need not take at the same time."""
        mine: dict[str, torch.dtype | None] = {}
        for p in self._parameters.values():
            mine |= {key: None if x.dtype == p.dtype else x.dtype for key, x in self._of(p).items()}
        for theirs in gathered_by_all(mine, self._group, next(iter(self._parameters.values())).device):
            self._keys |= theirs
        self._keys = {key: self._keys[key] for key in sorted(self._keys)}
