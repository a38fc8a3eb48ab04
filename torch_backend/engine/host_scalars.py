"""Scalars and flags of the device that the host will ask for: copied at the end of a step, so that
the next one does not wait for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Foreseen:
    """Copies of some scalars on the host.

    Args:
        device: where the scalars are. On the CPU nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._arrived = None if device.type == "cpu" else torch.Event(device)
        self._coming = False

    def note(self, scalars: Mapping[str, Tensor]) -> None:
        """Begin to copy these. Copies of others are forgotten."""
        if self._arrived is None or not scalars:
            return
        if [(x.shape, x.dtype) for x in scalars.values()] != [
            (copy.shape, copy.dtype) for _, copy in self._copies
        ]:
            self._copies = [
                (x, torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True))
                for x in scalars.values()
            ]
        else:
            self._copies = [
                (x, copy) for x, (_, copy) in zip(scalars.values(), self._copies, strict=True)
            ]
        for x, copy in self._copies:
            copy.copy_(x, non_blocking=True)
        self._arrived.record(torch.accelerator.current_stream(self._device))
        self._coming = True

    def value(self, scalar: Tensor) -> Tensor:
        """`scalar` on the host if it was noted, else itself. Waits until the copy has arrived,
        which after a step's time it has."""
        for x, copy in self._copies:
            if x is scalar and self._arrived is not None:
                if self._coming:
                    self._arrived.synchronize()
                    self._coming = False
                return copy
        return scalar
