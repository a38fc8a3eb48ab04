"""Steps that were skipped since an average was not finite: counted where they happen, and a run of them is said aloud.

One now and then is a loss scaler at work. Ten in a row are no step at all: weights and memory stand still, and nothing else would say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradwire.core.wording import some

logger = logging.getLogger("gradwire")

#: So many in a row are worth a word; and, on a device, from one look to the next.
IN_A_ROW = 10
#: Parameters that the word names.
NAMED = 3


class RunOfSkips:
    """Says once that steps are skipped in a row; and again after one that was not.

    Args:
        what: the `repr` of the algorithm.
        says: whether this rank does: all of them skip alike.
    """

    def __init__(self, what: str, *, says: bool) -> None:
        self._what = what
        self._says = says
        self._since: tuple[int, int] | None = (0, 0)
        self._said = False

    def seen(self, steps: int, skipped: int) -> bool:
        """Take note of totals, those of every step or of some. Whether a word is due."""
        if self._since is None or skipped - self._since[1] != steps - self._since[0]:
            self._since, self._said = (steps, skipped), False
        due = self._says and not self._said and steps - self._since[0] >= IN_A_ROW
        self._said |= due
        return due

    def restart(self) -> None:
        """Steps have been given another number."""
        self._since, self._said = None, False

    def say(self, averages: Mapping[str, Tensor]) -> None:
        """Log what is the matter. `averages` of the last step, where looking at them takes no waiting for a device."""
        names = [name for name, x in averages.items() if not x.isfinite().all()]
        # Those of factors are bad in all matrices at once, which tells nothing.
        where = f" (now in that of {some(names, NAMED)})" if 0 < len(names) < len(averages) else ""
        logger.warning(
            "%s: %d steps in a row were skipped, since an average of gradients held inf or NaN%s. Memory stays as it was, and weights stand still, or are "
            "spoiled by an optimizer that takes such gradients. Look at each rank's gradients before they are averaged (a loss that is NaN, a "
            "learning rate too high, no clipping), and at the loss scale, if there is one that does not come down",
            self._what,
            IN_A_ROW,
            where,
        )


class SkippedSteps:
    """The count of one driver, kept where its gradients are. On a device the host looks at it after every tenth step, at what had arrived by then:
    nothing is launched but a copy of the number, and nobody waits.

    Args:
        what: the `repr` of the algorithm.
        device: of the gradients.
        says: whether this rank logs.
    """

    def __init__(self, what: str, device: torch.device, *, says: bool) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self._run = RunOfSkips(what, says=says)
        self._arrived = None if device.type == "cpu" else torch.Event(device)
        self._copy: tuple[int, Tensor] | None = None

    def add(self, finite: Tensor) -> None:
        """A step has ended, and was skipped if it is not `finite`: a boolean scalar. Also while a CUDA graph is captured."""
        self.count += ~finite

    def look(self, steps: int, averages: Callable[[], Mapping[str, Tensor]]) -> None:
        """To be called after a step that is not captured, with the number of all steps so far, and what gives its averages by parameter."""
        if self._arrived is None:
            if self._run.seen(steps, int(self.count)):
                self._run.say(averages())
            return
        if steps % IN_A_ROW:
            return
        if self._copy is None:
            self._copy = steps, torch.empty((), dtype=torch.int64, pin_memory=True)
        elif not self._arrived.query():
            return
        elif self._run.seen(self._copy[0], int(self._copy[1])):
            self._run.say({})
        self._copy = steps, self._copy[1]
        self._copy[1].copy_(self.count, non_blocking=True)
        self._arrived.record()

    def continue_from(self, other: SkippedSteps) -> None:
        """Count on from another algorithm's."""
        self.count = other.count

    def restart(self) -> None:
        """Steps have been given another number."""
        self._run.restart()
        self._copy = None
