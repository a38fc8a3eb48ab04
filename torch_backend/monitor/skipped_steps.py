"""Steps that were skipped since an average was not finite: counted where they happen, and a run of them is said aloud.

One now and then is a loss scaler at work. Ten in a row are no step at all: weights and memory stand still, and nothing else would say so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from gradwire.core.text.wording import some

logger = logging.getLogger("gradwire")

#: So many in a row are worth a word; and, on a device, from one look to the next.
IN_A_ROW = 10
#: Parameters that the word names.
NAMED = 3


class RunOfSkips:
    """Says once that steps are skipped in a row; and again after one that was not.

    Args:
        what: the `repr` of the algorithm.
        rank: of the replicas. The first one says it, and others that know a parameter to name.
    """

    def __init__(self, what: str, rank: int) -> None:
        self._what = what
        self._rank = rank
        self._since: tuple[int, int] | None = (0, 0)
        self._said = False

    def nearly(self, steps: int) -> bool:
        """Whether the step after so many would be the tenth, if all were skipped since the last that was not."""
        return not self._said and self._since is not None and steps + 1 - self._since[0] == IN_A_ROW

    def seen(self, steps: int, skipped: int, names: Collection[str] = ()) -> None:
        """Take note of totals, those of every step or of some. `names` of parameters whose gradients on this rank hold inf or NaN, if that is known."""
        if self._since is None or skipped - self._since[1] != steps - self._since[0]:
            self._since, self._said = (steps, skipped), False
        elif steps - self._since[0] >= IN_A_ROW and not self._said:
            self._said = True
            if self._rank == 0 or names:
                self._say(names)

    def restart(self) -> None:
        """Steps have been given another number."""
        self._since, self._said = None, False

    def _say(self, names: Collection[str]) -> None:
        logger.warning(
            "%s: %d steps in a row were skipped, since an average of gradients held inf or NaN%s. Memory stays as it was, and weights stand still, or are "
            "spoiled by an optimizer that takes such gradients. Look at each rank's gradients before they are averaged (a loss that is NaN, a "
            "learning rate too high, no clipping), and at the loss scale, if there is one that does not come down",
            self._what,
            IN_A_ROW,
            f"; on rank {self._rank} that of {some(names, NAMED)} does" if names else "",
        )


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
            self._copy = steps, torch.empty((), dtype=torch.int64, pin_memory=self._arrived is not None)
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
