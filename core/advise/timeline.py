"""The time of a step: backward makes gradients, the processor compresses them, and the network
carries what is sent, one message after the other.

What is computed delays all that is computed after it; a message delays what waits for it, and the
messages behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.core.advise.probe import ALL, BETWEEN, WITHIN, Probe
from gradwire.core.plan.local_sgd import Leaving
from gradwire.core.plan.steady import FORWARD, Sent, period_seconds
from gradwire.core.plan.traffic import Message
from gradwire.core.text.options import Positive, check_options


@dataclass(frozen=True)
class Group:
    """Gradients that are averaged together, in a step.

    Attributes:
        ready: bytes of gradients that backward has made when this group is complete.
        compute: seconds in which the method computes with them.
        messages: that are sent for them, each when the one before has arrived; those after the
            first when backward is over.
    """

    ready: int
    compute: float
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Compute:
    """A step of one replica that sends nothing. Raises ValueError for one that takes no time.

    Attributes:
        seconds: all of it.
        arrivals: when gradients are ready: (seconds since the step began, bytes made by then), by
            rising seconds. (): evenly, after a third of the step, until its end.
    """

    seconds: Positive
    arrivals: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        check_options(self)

    def ready(self, nbytes: int, total: int) -> float:
        """When so many bytes of gradients are there, of so many in all; of none, at the end."""
        if not total:
            return self.seconds
        if not self.arrivals:
            return self.seconds * (FORWARD + (1 - FORWARD) * nbytes / total)
        times, made = zip(*self.arrivals, strict=True)
        # Parameters that take part twice, or are tied, may count differently: the last gradient is
        # the last.
        return float(np.interp(nbytes * made[-1] / total, made, times))

    def at_once(self) -> Compute:
        """The same step, if all gradients came at its end."""
        return Compute(self.seconds, ((self.seconds, 1),))


def seconds_of(message: Message, probe: Probe) -> float:
    """How long a message takes, by the link of its level."""
    name = ALL
    if message.groups is not None:
        name = WITHIN if message.within(max(1, probe.replicas // probe.nodes)) else BETWEEN
    return probe.level(name).seconds(message.nbytes, exchange=message.pattern != "all_reduce")


def exposed(
    groups: Sequence[Group], compute: Compute, seconds: Callable[[Message], float], total: int
) -> float:
    """Seconds by which a step is longer than all that is computed in it, if messages took no
    processor.

    Args:
        groups: in the order in which they are complete.
        compute: the step alone.
        seconds: of a message.
        total: bytes of all gradients.
    """
    free = delay = 0.0
    arrived = [0.0] * len(groups)

    def send(i: int, number: int, now: float) -> None:
        nonlocal free
        arrived[i] = free = max(free, now) + seconds(groups[i].messages[number])

    for i, group in enumerate(groups):
        delay += group.compute
        if group.messages:
            send(i, 0, compute.ready(group.ready, total) + delay)
    # The last gradient may be followed by nothing, or by the rest of backward.
    now = computed = compute.ready(total, total) + delay
    for number in range(max((len(group.messages) for group in groups), default=0)):
        for i, group in enumerate(groups):
            if number < len(group.messages):
                now = max(now, arrived[i])
            if number + 1 < len(group.messages):
                send(i, number + 1, now)
    return now - computed


def waiting(
    averages: Sequence[Leaving], period: int, step: float, seconds: Callable[[Message], float]
) -> float:
    """Seconds by which a period of local SGD is longer than its steps, where each takes as long as
    the one before: what leaves after a step may travel for so many steps as it is late, and no
    longer than until it is its turn again.

    Args:
        averages: what leaves after which steps.
        period: steps after which all of it repeats.
        step: seconds of one alone.
        seconds: of a message.
    """
    sent: dict[int, list[Sent]] = {}
    for each in averages:
        took = np.array([sum(map(seconds, each.sent.messages))])
        sent.setdefault(each.step, []).append(Sent({0: took}, each.late))
    return float(period_seconds([step], sent, period)[0]) - period * step
