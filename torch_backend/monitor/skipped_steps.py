"""Steps that were skipped since an average was not finite: counted where they happen."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradwire.core.state.skipped_steps import IN_A_ROW, RunOfSkips


class SkippedSteps:
    """The count of one driver, kept where its gradients are. On a device the host looks at it after every tenth step, at what had arrived by then:
    nothing is launched but a copy of the number, and nobody waits.

    Args:
        what: the `repr` of the algorithm.
        device: of the gradients.
        rank: see `RunOfSkips`.
        seen_by_host: it may look at them without waiting.
    """

    def __init__(self, what: str, device: torch.device, rank: int, *, seen_by_host: bool) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._run = RunOfSkips(what, rank)
        self._seen_by_host = seen_by_host
        self._arrived = None if device.type == "cpu" else torch.Event(device)
        self._copy: tuple[int, Tensor] | None = None
        self._names: list[str] = []

    def examine(self, steps: int, gradients: Mapping[str, Tensor]) -> None:
        """To be called with gradients of this rank, after so many steps. They are looked at if this would be the tenth step in a row, on the CPU alone: on a
        device the host would wait."""
        if self._seen_by_host and self._run.nearly(steps):
            self._names += [name for name, x in gradients.items() if not x.isfinite().all()]

    def add(self, finite: Tensor) -> None:
        """A step has ended, and was skipped if it is not `finite`: a boolean scalar. Also while a CUDA graph is captured."""
        self.count += ~finite

    def look(self, steps: int) -> None:
        """To be called after a step that is not captured, with the number of all steps so far."""
        if self._seen_by_host:
            self._run.seen(steps, int(self.count), self._names)
            self._names = []
            return
        if steps % IN_A_ROW:
            return
        if self._copy is None:
            pinned = self._arrived is not None
            self._copy = steps, torch.empty((), dtype=torch.int64, device="cpu", pin_memory=pinned)
        elif self._arrived is None or self._arrived.query():
            self._run.seen(self._copy[0], int(self._copy[1]))
        else:
            return
        self._copy = steps, self._copy[1]
        self._copy[1].copy_(self.count, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(torch.accelerator.current_stream(self.count.device))

    def continue_from(self, other: SkippedSteps) -> None:
        """Count on from another algorithm's."""
        self.count = other.count

    def restart(self) -> None:
        """Steps have been given another number."""
        self._run.restart()
        self._copy = None
