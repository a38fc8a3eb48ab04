"""What the notes of steps come to: averages over the last ones, read when somebody asks.

On the CPU a note is the time of day. On a device it is an event on its current stream, which only
those look at who read: at those that have happened.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: A step that takes so many times the usual, beside averaging, holds a pause: an evaluation, a
#: checkpoint.
PAUSE = 10.0

#: Seconds on the CPU, an event on a device; None while nothing is noted.
Moment = Any


@dataclass(frozen=True)
class Times:
    """Averages over some steps; see `gradwire.torch_backend.Stats` for what is what.

    Attributes:
        steps: over so many.
        step_seconds: from the first gradients of a step to those of the next; 0.0 if no two steps
            followed each other.
        compress_seconds, wait_seconds: of a step.
        bytes_per_second: of the message that was quickest from its launch to its arrival: payload
            over time, so latency is in it.
    """

    steps: int = 0
    step_seconds: float = 0.0
    compress_seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_per_second: float = 0.0


@dataclass(slots=True)
class Notes:
    """What is noted of one step.

    Attributes:
        begin: when its first gradients came.
        follows: the step before was noted too.
        work: from when to when averaging took the stream, or the thread.
        messages: payload bytes; when it was launched; from when to when it was waited for.
    """

    begin: Moment
    follows: bool
    work: list[tuple[Moment, Moment]] = field(default_factory=list)
    messages: list[tuple[int, Moment, Moment, Moment]] = field(default_factory=list)


def times_of(noted: Sequence[Notes], after: Notes | None) -> Times:
    """Averages over steps, of which those count that the device has finished: nobody waits.

    Args:
        noted: steps that have ended, in order.
        after: the one that has begun since; None: none has.
    """
    steps = [each for each in noted if _reached(each.work[-1][1] if each.work else each.begin)]
    if not steps:
        return Times()
    works = [sum(seconds_between(*pair) for pair in each.work) for each in steps]
    messages = [message for each in steps for message in each.messages]
    wait = sum(seconds_between(start, arrived) for _, _, start, arrived in messages)
    rates = [
        nbytes / max(seconds_between(launched, arrived), 1e-9)
        for nbytes, launched, _, arrived in messages
    ]
    # In full, and what training itself takes of it: a step that averages parameters now and then
    # may take many times as long.
    following = [*steps[1:], after if len(steps) == len(noted) else None]
    whole = [
        (seconds_between(a.begin, b.begin), worked)
        for a, b, worked in zip(steps, following, works, strict=True)
        if b is not None and b.follows and _reached(b.begin)
    ]
    usual = (
        PAUSE * statistics.median(seconds - worked for seconds, worked in whole) if whole else 0.0
    )
    between = [seconds for seconds, worked in whole if seconds - worked <= usual]
    return Times(
        len(steps),
        statistics.fmean(between) if between else 0.0,
        max(sum(works) - wait, 0.0) / len(steps),
        wait / len(steps),
        max(rates, default=0.0),
    )


def seconds_between(start: Moment, end: Moment) -> float:
    """The seconds from one moment to a later one; both have been reached."""
    return float(end - start) if isinstance(start, float) else float(start.elapsed_time(end)) / 1000


def _reached(moment: Moment) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def whole_cycles(steps: int, cycle: int) -> int:
    """The number of steps, raised to the end of a cycle."""
    return -(-steps // cycle) * cycle
