"""A run is watched: where its time goes, how the error develops, and one line in the log about whether compression pays."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.plan.dry_run import size_of
from gradwire.core.units import time_of
from gradwire.torch_backend.step_times import StepTimes, Times, whole_cycles
from gradwire.torch_backend.verdict import verdict

logger = logging.getLogger("gradwire")

#: The line is logged after so many compressed steps.
REPORT_AFTER = 100
#: Steps between two looks at the error, each a pass over it.
NORM_EVERY = 100
#: So many looks are kept.
NORMS = 20


class Progress(NamedTuple):
    """Where a run stands. Bytes are totals."""

    steps: int
    bytes_sent: int
    dense_bytes: int


class Watcher:
    """What a driver notes of its steps. Nothing is sent, and on a device the host waits for nothing.

    Args:
        what: the `repr` of the algorithm.
        start_step: its first step that compresses.
        times: where its collectives note their times.
        group: of the replicas, whose first rank logs.
        cycle: steps after which what is sent repeats; the line is about whole cycles.
        work: what is done beside waiting, as the line calls it.

    Attributes:
        relative_error: of the step that was measured last.
        before: times of steps that averaged in full, if there were any before `start_step`.
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
        self.relative_error: float | None = None
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
                self.before = self.times.read()
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

    def error_norms(self) -> tuple[tuple[int, float], ...]:
        """Steps, and the 2-norm of the error after them. On a device the host waits for it."""
        return tuple((step, float(norm)) for step, norm in self._norms)

    def _report(self, since: Progress, now: Progress) -> None:
        steps = now.steps - since.steps
        sent, dense = (now.bytes_sent - since.bytes_sent) / steps, (now.dense_bytes - since.dense_bytes) / steps
        if self._group.rank() != 0 or self._group.size() == 1 or sent >= dense:
            return
        times = self.times.read()
        loss = verdict(times, sent, dense, self.before)
        level = logging.WARNING if loss else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(level, "%s", report(self._what, now, sent, dense, times, loss, self._work))


def report(
    what: str, now: Progress, sent: float, dense: float, times: Times, loss: str, work: str = "compressing"
) -> str:
    """What is logged after some steps.

    Args:
        what: the algorithm.
        now: totals.
        sent, dense: bytes of a step as they are sent, and in full.
        times: of a step.
        loss: why it costs more than it saves; "" if it does not.
        work: what is done beside waiting.
    """
    saved = size_of(max(now.dense_bytes - now.bytes_sent, 0))
    fewer = f"{dense / sent:.1f}×" if sent else "nothing is sent"
    parts = [f"{what}: {saved} saved in {now.steps} steps ({fewer} now)"]
    if times.step_seconds:
        spent = [
            f"{time_of(seconds)} {doing} ({seconds / times.step_seconds:.0%})"
            for seconds, doing in (
                (times.compress_seconds, work),
                (times.wait_seconds, "waiting for messages"),
            )
        ]
        parts.append(f"a step takes {time_of(times.step_seconds)}, of which {spent[0]} and {spent[1]}")
    if loss:
        parts.append(f"it costs more than it saves: {loss}. Plain DDP, or AllReduce(), is quicker here")
    elif times.step_seconds:
        longest = time_of(times.compress_seconds + times.wait_seconds)
        parts.append(f"it pays if sending {size_of(dense)} in full would hold a step up for more than {longest}")
    return "; ".join(parts)


def norm_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """2-norm of all of them together, on their device; None of none."""
    if not tensors:
        return None
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).float() for x in tensors]
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return whole
