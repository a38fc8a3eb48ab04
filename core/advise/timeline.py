"""The time of a step: backward makes gradients, the processor compresses them, and the network carries what is sent, one message after the other.

What is computed delays all that is computed after it; a message delays what waits for it, and the messages behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.core.advise.cost import Cost, Group
from gradwire.core.advise.probe import ALL, BETWEEN, WITHIN, Probe
from gradwire.core.plan.traffic import Message

#: What a training step spends before backward, where nobody has measured it: a forward pass has half the products of a backward pass.
FORWARD = 1 / 3

#: How a training step is timed: steps before the clock starts, at least and at most as many under it, as long as they take less than so many seconds.
WARM_UP, LEAST, MOST, LONG = 2, 3, 20, 3.0


class NoStep(ValueError):
    """A function that was to do a training step does something else."""


def require_step(returned: object) -> None:
    """Raise NoStep for what a function returns that builds a model."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(returned).__mro__]
    if ("torch", "Module") in kinds or ("flax", "Module") in kinds:
        raise NoStep(
            f"it returned a {type(returned).__name__}, so it builds a model; give a function that does a training step: forward, backward and optimizer"
        )


@dataclass(frozen=True)
class Compute:
    """A step of one replica that sends nothing.

    Attributes:
        seconds: all of it.
        arrivals: when gradients are ready: (seconds since the step began, bytes made by then), by rising seconds. (): evenly, after a third of the step, until its end.
    """

    seconds: float
    arrivals: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(
                f"step_seconds={self.seconds} must be more than 0: the time of a step of one replica alone"
            )

    def ready(self, nbytes: int, total: int) -> float:
        """When so many bytes of gradients are there, of so many in all."""
        if not self.arrivals:
            return self.seconds * (FORWARD + (1 - FORWARD) * nbytes / total)
        times, made = zip(*self.arrivals, strict=True)
        # Parameters that take part twice, or are tied, may count differently: the last gradient is the last.
        return float(np.interp(nbytes * made[-1] / total, made, times))


@dataclass(frozen=True)
class StepTime:
    """A predicted step, in seconds. `hidden` and `exposed` are the parts of communication that cost no time, and that do."""

    compute: float
    compression: float
    exposed: float
    hidden: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.compression + self.exposed


def predict(cost: Cost, compute: Compute, probe: Probe, total_bytes: int) -> StepTime:
    """The step of a method on average over its cycle."""
    wire = cost.per_step(sum(seconds_of(message, probe) for message in cost.messages))
    if cost.every > 1 or not cost.overlaps:
        wait = 0.0
        for step in cost.steps:
            wait += _exposed(step, Compute(compute.seconds, ((compute.seconds, total_bytes),)), probe, total_bytes)
        exposed = cost.per_step(wait)
    else:
        exposed = cost.per_step(sum(_exposed(step, compute, probe, total_bytes) for step in cost.steps))
    hidden = max(0.0, wire - exposed) * _overlap(cost, probe)
    return StepTime(compute.seconds, cost.compute, max(0.0, wire - hidden), hidden)


def seconds_of(message: Message, probe: Probe) -> float:
    """How long a message takes."""
    name = ALL
    if message.groups is not None:
        name = WITHIN if message.within(max(1, probe.replicas // probe.nodes)) else BETWEEN
    return probe.level(name).seconds(message.nbytes, exchange=message.exchange)


def _overlap(cost: Cost, probe: Probe) -> float:
    """Of what could hide, what does: as measured for the slowest level that is used."""
    return probe.level(ALL if any(m.groups is None for m in cost.messages) else BETWEEN).overlap


def _exposed(groups: Sequence[Group], compute: Compute, probe: Probe, total: int) -> float:
    """Seconds by which a step is longer than all that is computed in it, if messages took no processor."""
    line = _Line(probe)
    now = 0.0
    delay = 0.0
    for group in groups:
        now = compute.ready(group.ready, total) + delay + group.rounds[0].compute
        delay += group.rounds[0].compute
        line.send(group, 0, now)
    # The last gradient may be followed by nothing, or by the rest of backward.
    now = max(now, compute.ready(total, total) + delay)
    computed = delay
    for number in range(1, max(len(group.rounds) for group in groups)):
        for group in groups:
            if number < len(group.rounds):
                before, this = group.rounds[number - 1], group.rounds[number]
                now = max(now + before.meanwhile, line.arrived(group)) + this.compute
                computed += before.meanwhile + this.compute
                line.send(group, number, now)
    return now - compute.ready(total, total) - computed


class _Line:
    """A network that carries one message at a time, in the order in which they are sent."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._free = 0.0
        self._arrived: dict[int, float] = {}

    def send(self, group: Group, number: int, now: float) -> None:
        for message in group.rounds[number].messages:
            self._free = max(self._free, now) + seconds_of(message, self._probe)
        self._arrived[id(group)] = self._free if group.rounds[number].messages else now

    def arrived(self, group: Group) -> float:
        return self._arrived[id(group)]
