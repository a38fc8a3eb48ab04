"""The line in the log about whether compression pays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from gradwire.core.plan.dry_run import size_of
from gradwire.core.text.units import time_of
from gradwire.torch_backend.monitor.timers import Times

logger = logging.getLogger("gradwire")

#: A step that takes so many times as long is longer, and not by chance; and links are not always as
#: quick as their quickest message.
LONGER, SLOWER = 1.05, 1.25


class Progress(NamedTuple):
    """The counts of a run so far. Bytes are totals; with two levels those sent are between
    nodes."""

    steps: int
    bytes_sent: int
    dense_bytes: int


def log_costs(
    what: str,
    since: Progress,
    now: Progress,
    read: Callable[[], Times],
    before: Times | None,
    work: str,
) -> None:
    """Log in one line what compression has saved and what it costs; as a warning where it costs
    more. Nothing where nothing was saved.

    Args:
        what: the `repr` of the algorithm.
        since, now: the steps that it is about.
        read: gives their times.
        before: see `verdict`.
        work: what is done beside waiting, as the line calls it.
    """
    steps = now.steps - since.steps
    sent, dense = (
        (now.bytes_sent - since.bytes_sent) / steps,
        (now.dense_bytes - since.dense_bytes) / steps,
    )
    if sent >= dense:
        return
    times = read()
    loss = verdict(times, dense, before)
    level = logging.WARNING if loss else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(level, "%s: %s", what, _line(now, sent, dense, times, loss, work))


def _line(now: Progress, sent: float, dense: float, times: Times, loss: str, work: str) -> str:
    """What is logged after some steps, of which each sends so many bytes, of so many in full."""
    saved = size_of(max(now.dense_bytes - now.bytes_sent, 0))
    fewer = f"{dense / sent:.1f}×" if sent else "nothing is sent"
    line = f"{saved} saved in {now.steps} steps ({fewer} now)"
    if not times.step_seconds:
        return line
    working, waiting = (
        f"{time_of(seconds)} {doing} ({seconds / times.step_seconds:.0%})"
        for seconds, doing in (
            (times.compress_seconds, work),
            (times.wait_seconds, "waiting for messages"),
        )
    )
    line += f"; a step takes {time_of(times.step_seconds)}, of which {working} and {waiting}; "
    if loss:
        return (
            f"{line}it costs more than it saves: {loss}. Plain DDP, or AllReduce(), is quicker here"
        )
    longest = time_of(times.compress_seconds + times.wait_seconds)
    return (
        f"{line}it pays if sending {size_of(dense)} in full would hold a step up for more than"
        f" {longest}"
    )


def verdict(now: Times, dense: float, before: Times | None = None) -> str:
    """Why compression costs more than it saves; "" if it does not, or if nobody can tell.

    It does if a step takes 5 % longer than one in full would take at most. That is what steps took
    `before` that averaged in full (`start_step`). If there were none, it is what remains of a step
    without compressing and waiting, and the time of `dense` bytes on the link: at the rate of the
    quickest message, less a fifth, which holds a step up no longer, for DDP sends them during the
    backward pass. Latency is part of that rate. Where it counts, larger messages are quicker than
    it shows: then compression may cost more than it saves, and this is silent.

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
