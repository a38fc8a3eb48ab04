"""Whether compression costs more than it saves, from the times and bytes of some steps."""

from __future__ import annotations

from gradwire.core.plan.dry_run import size_of
from gradwire.core.units import time_of
from gradwire.torch_backend.step_times import Times

#: Steps that two kinds of step are compared by, at least.
ENOUGH = 20
#: A step that takes so many times as long is slower, and not by chance.
SLOWER = 1.05
#: What is spent is more than what is saved if it is so many times as much: links are not always as quick.
CLEARLY = 1.25
#: A smaller share of a step is not worth a word.
SHARE = 0.02


def verdict(now: Times, sent: float, dense: float, before: Times | None = None) -> str:
    """Why compression costs more than it saves, in a sentence; "" if it does not, or if nobody can tell.

    If steps `before` averaged in full (`start_step`), steps are compared: compression costs more if a step takes 5 % longer now.

    Otherwise the saving has an upper bound. The quickest message shows what the link can do: so many bytes in the time from its launch to its
    arrival, and larger messages only do better, since latency is part of that time. At that rate `dense` bytes take so long, and they hold a
    step up no longer, for DDP sends them during the backward pass. Compression costs more if compressing and waiting take 25 % longer than that.
    A link on which latency counts is quicker than its small messages show: then compression may cost more than it saves, and this is silent.

    Args:
        now: of steps that compress.
        sent, dense: bytes of such a step as they are sent, and in full.
        before: of steps that average in full, if there were any.
    """
    spent = now.compress_seconds + now.wait_seconds
    if not now.steps or not now.step_seconds or spent < SHARE * now.step_seconds:
        return ""
    if before is not None and min(now.steps, before.steps) >= ENOUGH and before.step_seconds:
        if now.step_seconds < SLOWER * before.step_seconds:
            return ""
        return f"a step took {time_of(before.step_seconds)} when gradients were averaged in full, and takes {time_of(now.step_seconds)}"
    rate = max(now.bytes_per_second, before.bytes_per_second if before is not None else 0.0)
    if not rate or sent >= dense or spent < CLEARLY * dense / rate:
        return ""
    return (
        f"at the rate of the quickest message, {size_of(rate)} per second, the {size_of(dense)} of a step would take {time_of(dense / rate)} "
        f"in full, and compressing and waiting take {time_of(spent)}"
    )
