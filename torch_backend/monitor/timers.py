"""Where the time of steps goes, on one rank: noted in each step, and read when somebody asks.

    times = StepTimes(device)
    times.begin()                    # the first gradients of a step have come
    start = times.now()
    ...                              # compress, send, wait
    times.worked(start)
    times.end()
    times.read()                     # Times(steps=1, step_seconds=…, compress_seconds=…, wait_seconds=…, bytes_per_second=…)

On the CPU a note is the time of day. On a device it is an event on its current stream: the host waits for nothing, and only `read` looks at the
events, at those that have happened. Nothing is launched. Notes are those of the last steps, so reading costs the same at any time of a run.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

#: Figures are of so many steps.
LAST = 50
#: A step that takes so many times the usual, beside averaging, holds a pause: an evaluation, a checkpoint.
PAUSE = 10.0

#: Seconds on the CPU, an event on a device; None while nothing is noted.
Moment = Any


@dataclass(frozen=True)
class Times:
    """Averages over some steps; see `gradwire.torch_backend.Stats` for what is what.

    Attributes:
        steps: over so many.
        step_seconds: from the first gradients of a step to those of the next; 0.0 if no two steps followed each other.
        compress_seconds, wait_seconds: of a step.
        bytes_per_second: of the message that was quickest from its launch to its arrival: payload over time, so latency is in it.
    """

    steps: int = 0
    step_seconds: float = 0.0
    compress_seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_per_second: float = 0.0


@dataclass(slots=True)
class _Noted:
    """Of one step."""

    begin: Moment
    follows: bool  # the step before was noted too
    work: list[tuple[Moment, Moment]] = field(default_factory=list)
    messages: list[tuple[int, Moment, Moment, Moment]] = field(default_factory=list)


class StepTimes:
    """Notes of the last steps of one rank.

    Args:
        device: where the work is done.
        cycle: steps after which averages repeat. Figures are of whole cycles.
    """

    def __init__(self, device: torch.device, cycle: int = 1) -> None:
        self._device = device
        self._on_host = device.type in ("cpu", "meta")  # which have no streams
        self._steps: deque[_Noted] = deque(maxlen=whole_cycles(LAST, cycle))
        self._open: _Noted | None = None
        self._follows = False

    def begin(self) -> None:
        """A step begins. One that never came to its end is forgotten."""
        self._open = _Noted(None, self._follows)
        self._open.begin = self.now()
        self._follows = False

    def skip(self) -> None:
        """Note nothing until the next step begins, for instance because a CUDA graph captures this one."""
        self._open, self._follows = None, False

    def now(self) -> Moment:
        """This moment; on a device, when its current stream comes here."""
        if self._on_host:
            return perf_counter()
        if self._open is None:
            return None
        event = torch.Event(self._device, enable_timing=True)
        # Of the tensors' device, which need not be the current one.
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def worked(self, start: Moment) -> None:
        """From `start` until now averaging has taken the stream, or this thread."""
        if self._open is not None and start is not None:
            self._open.work.append((start, self.now()))

    def waited(self, nbytes: int, launched: Moment, start: Moment) -> None:
        """From `start` until now a message was waited for, which was launched then."""
        if self._open is not None and launched is not None and start is not None:
            self._open.messages.append((nbytes, launched, start, self.now()))

    def end(self) -> None:
        """The step has come to its end."""
        if self._open is not None:
            self._steps.append(self._open)
            self._open, self._follows = None, True

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def read(self) -> Times:
        """Averages over the last steps, 50 at most, or a whole cycle. On a device they are of those that it has finished: nobody waits."""
        steps = [noted for noted in self._steps if self._reached(noted.work[-1][1] if noted.work else noted.begin)]
        if not steps:
            return Times()
        works = [sum(self._seconds(*pair) for pair in noted.work) for noted in steps]
        messages = [message for noted in steps for message in noted.messages]
        wait = sum(self._seconds(start, arrived) for _, _, start, arrived in messages)
        rates = [nbytes / max(self._seconds(launched, arrived), 1e-9) for nbytes, launched, _, arrived in messages]
        # In full, and what training itself takes of it: a step that averages parameters now and then may take many times as long.
        following = [*steps[1:], self._open if len(steps) == len(self._steps) else None]
        whole = [
            (self._seconds(a.begin, b.begin), worked)
            for a, b, worked in zip(steps, following, works, strict=True)
            if b is not None and b.follows and self._reached(b.begin)
        ]
        usual = PAUSE * statistics.median(seconds - worked for seconds, worked in whole) if whole else 0.0
        between = [seconds for seconds, worked in whole if seconds - worked <= usual]
        return Times(
            len(steps),
            statistics.fmean(between) if between else 0.0,
            max(sum(works) - wait, 0.0) / len(steps),
            wait / len(steps),
            max(rates, default=0.0),
        )

    def _seconds(self, start: Moment, end: Moment) -> float:
        return float(end - start) if self._on_host else float(start.elapsed_time(end)) / 1000

    def _reached(self, moment: Moment) -> bool:
        return self._on_host or bool(moment.query())


def whole_cycles(steps: int, cycle: int) -> int:
    """So many steps or more, up to the end of a cycle."""
    return -(-steps // cycle) * cycle
