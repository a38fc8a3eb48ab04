"""A run is watched: where its time goes, what it sends, how the error develops, and one line in the log about whether compression pays."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.plan.dry_run import size_of
from gradwire.core.text.units import time_of
from gradwire.torch_backend.monitor.stats import Sent, Stats
from gradwire.torch_backend.monitor.timers import StepTimes, Times, whole_cycles

logger = logging.getLogger("gradwire")

#: The line is logged after so many compressed steps.
REPORT_AFTER = 100
#: Steps between two looks at the error, each a pass over it, and how many looks are kept.
NORM_EVERY, NORMS = 100, 20
#: Steps in full that others are compared with, at least.
ENOUGH = 20
#: A step that takes so many times as long is longer, and not by chance; and links are not always as quick as their quickest message.
LONGER, SLOWER = 1.05, 1.25


class Progress(NamedTuple):
    """The counts of a run so far. Bytes are totals; with two levels those sent are between nodes."""

    steps: int
    bytes_sent: int
    dense_bytes: int


class Watcher:
    """What a handle knows of its steps. Nothing is sent, and on a device the host waits for nothing.

    Args:
        what: the `repr` of the algorithm.
        start_step: its first step that compresses.
        times: where its collectives note their times.
        group: of the replicas, whose first rank logs.
        cycle: steps after which what is sent repeats; the line is about whole cycles.
        work: what is done beside waiting, as the line calls it.

    Attributes:
        before: times of steps that averaged in full, if there were enough of them before `start_step`.
        logs: whether to say in the log what compression costs; not where messages go nowhere.
    """

    def __init__(
        self,
        what: str,
        start_step: int,
        times: StepTimes,
        group: dist.ProcessGroup,
        *,
        cycle: int = 1,
        work: str = "compressing",
    ) -> None:
        self.times = times
        self.before: Times | None = None
        self.logs = True
        self._what = what
        self._start_step = start_step
        self._group = group
        self._observed = whole_cycles(REPORT_AFTER - 1, cycle)
        self._work = work
        self._norms: deque[tuple[int, Tensor]] = deque(maxlen=NORMS)
        self._since: Progress | None = None

    def end_step(self, now: Progress, errors: Callable[[], Sequence[Tensor]], scale: float | Tensor) -> None:
        """A step has ended.

        Args:
            now: with this step.
            errors: gives the error memory.
            scale: its units.
        """
        self.times.end()
        if now.steps % NORM_EVERY == 0 and (norm := norm_of(errors())) is not None:
            self._norms.append((now.steps, norm / scale))
        if now.steps <= self._start_step:
            if now.steps == self._start_step:
                before = self.times.read()
                self.before = before if before.steps >= ENOUGH and before.step_seconds else None
                self.times.clear()
            self._since = None
        elif self._since is None:
            self._since = now
        elif now.steps - self._since.steps == self._observed:
            self._report(self._since, now)

    def restart(self) -> None:
        """Steps have been given another number."""
        self._since = None

    def continue_from(self, other: Watcher) -> None:
        """The error is the same, whatever algorithm goes on with it."""
        self._norms = other._norms

    def stats(self, steps: int, skipped_steps: int, sent: Sent) -> Stats:
        """What is known of so many steps. On a device the host waits for the norms of errors."""
        norms = tuple((step, float(norm)) for step, norm in self._norms)
        return Stats.of(self.times.read(), steps, skipped_steps, sent, norms)

    def _report(self, since: Progress, now: Progress) -> None:
        steps = now.steps - since.steps
        sent, dense = (now.bytes_sent - since.bytes_sent) / steps, (now.dense_bytes - since.dense_bytes) / steps
        if not self.logs or self._group.rank() != 0 or self._group.size() == 1 or sent >= dense:
            return
        times = self.times.read()
        loss = verdict(times, dense, self.before)
        level = logging.WARNING if loss else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s", self._line(now, sent, dense, times, loss))

    def _line(self, now: Progress, sent: float, dense: float, times: Times, loss: str) -> str:
        """What is logged after some steps, of which each sends so many bytes, of so many in full."""
        saved = size_of(max(now.dense_bytes - now.bytes_sent, 0))
        fewer = f"{dense / sent:.1f}×" if sent else "nothing is sent"
        line = f"{self._what}: {saved} saved in {now.steps} steps ({fewer} now)"
        if not times.step_seconds:
            return line
        work, wait = (
            f"{time_of(seconds)} {doing} ({seconds / times.step_seconds:.0%})"
            for seconds, doing in (
                (times.compress_seconds, self._work),
                (times.wait_seconds, "waiting for messages"),
            )
        )
        line += f"; a step takes {time_of(times.step_seconds)}, of which {work} and {wait}; "
        if loss:
            return f"{line}it costs more than it saves: {loss}. Plain DDP, or AllReduce(), is quicker here"
        longest = time_of(times.compress_seconds + times.wait_seconds)
        return f"{line}it pays if sending {size_of(dense)} in full would hold a step up for more than {longest}"


def verdict(now: Times, dense: float, before: Times | None = None) -> str:
    """Why compression costs more than it saves; "" if it does not, or if nobody can tell.

    It does if a step takes 5 % longer than one in full would take at most. That is what steps took `before` that averaged in full (`start_step`). If there
    were none, it is what remains of a step without compressing and waiting, and the time of `dense` bytes on the link: at the rate of the quickest
    message, less a fifth, which holds a step up no longer, for DDP sends them during the backward pass. Latency is part of that rate. Where it counts,
    larger messages are quicker than it shows: then compression may cost more than it saves, and this is silent.

    Args:
        now: of steps that compress.
        dense: bytes of such a step in full.
        before: of steps that average in full, if there were any.
    """
    if before is not None:
        full, said = before.step_seconds, "took {}, when gradients were averaged in full"
    elif now.bytes_per_second:
        on_the_link = SLOWER * dense / now.bytes_per_second
        full = now.step_seconds - now.compress_seconds - now.wait_seconds + on_the_link
        said = "would take at most {} in full, at the rate of the quickest message"
    else:
        return ""
    if now.step_seconds <= LONGER * full:
        return ""
    return f"a step {said.format(time_of(full))}"


def norm_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """2-norm of all of them together, on their device; None of none."""
    if not tensors:
        return None
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).float() for x in tensors]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
