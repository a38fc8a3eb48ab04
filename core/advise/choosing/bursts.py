"""What bursts add to a step of each of several methods, in the long run."""

from __future__ import annotations

from statistics import fmean


class Bursts:
    """Bursts of one network: some steps in a row that take longer by themselves.

    A burst costs each method something else, and it is only known what it costs the one at work. So
    each method is thought to lose nothing until one has hit it, and then as often as bursts come as
    much as it has lost on average: who has been hit waits until as much time as that is gone, as in
    the ski-rental problem, and no choice between two costs more than twice the best one (Karlin,
    Manasse, Rudolph, Sleator 1988, "Competitive snoopy caching").

    Examples:
        >>> from gradwire.core.advise.choosing.bursts import Bursts
        >>> bursts = Bursts()
        >>> bursts.watched(100)
        >>> bursts.ended(0, 40.0)
        >>> bursts.watched(100)
        >>> bursts.per_step(0), bursts.per_step(1)
        (0.2, 0.0)
    """

    def __init__(self) -> None:
        self.count = self._steps = 0
        self._cost: dict[int, list[float]] = {}

    def watched(self, steps: int) -> None:
        """So many steps more have been seen, of any method."""
        self._steps += steps

    def ended(self, method: int, seconds: float) -> None:
        """One has hit a method, and all its steps together have taken so much longer than usual."""
        self.count += 1
        self._cost.setdefault(method, []).append(seconds)

    def per_step(self, method: int) -> float:
        """Seconds that bursts add to a step of it."""
        return self.count / self._steps * fmean(self._cost[method]) if method in self._cost else 0.0
