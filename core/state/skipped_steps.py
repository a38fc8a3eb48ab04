"""A run of steps that were skipped since an average was not finite is said aloud.

One now and then is a loss scaler at work. Ten in a row are no step at all: weights and memory stand
still, and nothing else would say so.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from gradwire.core.text.wording import some

logger = logging.getLogger("gradwire")

#: So many in a row are said.
IN_A_ROW = 10
#: Parameters that are named then.
NAMED = 3
#: So many averages in a row that were not finite are said. One is a batch that broke a replica,
#: which has gone back.
SAID_AFTER = 3
SKIPPED_AVERAGES = (
    "averages in a row were not finite: some replica's parameters held inf or NaN when its"
    " difference left. All have gone back to the outer parameters each time, and nothing is"
    " learned. Look at each replica's loss and gradients, at its learning rate, at what its"
    " optimizer remembers, and at its weight, if it has one: an average with a weight that is"
    " negative or not finite is not"
)


class RunOfSkips:
    """Says once that steps are skipped in a row; and again after one that was not.

    Args:
        what: the `repr` of the algorithm.
        rank: of the replicas. The first one says it, and others that know a parameter to name.
        in_a_row: so many are said.
        said: what is said of them, in place of what concerns steps.
    """

    def __init__(self, what: str, rank: int, in_a_row: int = IN_A_ROW, said: str = "") -> None:
        self._what, self._in_a_row, self._text = what, in_a_row, said
        self._rank = rank
        self._since: tuple[int, int] | None = (0, 0)
        self._said = False

    def nearly(self, steps: int) -> bool:
        """Whether the step after so many would be the tenth, if all were skipped since the last
        that was not."""
        return (
            not self._said
            and self._since is not None
            and steps + 1 - self._since[0] == self._in_a_row
        )

    def seen(self, steps: int, skipped: int, names: Collection[str] = ()) -> None:
        """Take note of totals, those of every step or of some. `names` of parameters whose
        gradients on this rank hold inf or NaN, if that is known."""
        if self._since is None or skipped - self._since[1] != steps - self._since[0]:
            self._since, self._said = (steps, skipped), False
        elif steps - self._since[0] >= self._in_a_row and not self._said:
            self._said = True
            if self._rank == 0 or names:
                self._say(names)

    def restart(self) -> None:
        """Steps have been given another number."""
        self._since, self._said = None, False

    def _say(self, names: Collection[str]) -> None:
        if self._text:
            logger.warning("%s: %d %s", self._what, self._in_a_row, self._text)
            return
        logger.warning(
            "%s: %d steps in a row were skipped, since an average of gradients held inf or NaN%s."
            " Memory stays as it was, and weights stand still, or are spoiled by an optimizer that"
            " takes such gradients. Look at each rank's gradients before they are averaged (a loss"
            " that is NaN, a learning rate too high, no clipping), and at the loss scale, if there"
            " is one that does not come down",
            self._what,
            self._in_a_row,
            f"; on rank {self._rank} that of {some(names, NAMED)} does" if names else "",
        )
