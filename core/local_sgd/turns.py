"""The turns of a schedule, where the host tells a compiled program what is due: how many there are,
and whether the one that was told is that of the step."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.schedule import Turn


def all_turns(local: LocalSGD) -> list[Turn]:
    """Every turn that a step of this schedule takes, once each, in the order of the steps: so many
    programs are compiled."""
    # By the second cycle every fragment has been averaged before, and by the third whatever left
    # has arrived. What follows the steps in which something happens are all other steps, however
    # long a period is.
    due = local.steps_due(3)
    acting = {0, max(local.start_step - 1, 0), *due, *(step + local.overlap for step in due)}
    return list(dict.fromkeys(map(local.turn, sorted(acting | {step + 1 for step in acting}))))


def is_of_another_step(local: LocalSGD, turn: Turn, step: Any) -> Any:
    """Whether a turn that was told is not that of a step. Traced if `step`, an int or an int32
    scalar, is.

    Raises:
        TypeError: `turn` is none.
        ValueError: it is of another schedule.
    """
    if not isinstance(turn, Turn):
        raise TypeError(
            f"turn={turn!r} is no turn; give that of the step, tx.turn(n), or one after the other"
            " of tx.turns(state)"
        )
    fragments = range(local.fragments)
    unknown = sorted(turn.due - {(period, f) for period in local.periods for f in fragments})
    if unknown or not turn.arrives | turn.later <= {*fragments}:
        raise ValueError(
            f"turn={turn!r} is of another schedule than {local!r}; take it from the transformation"
            " that averages: tx.turn(n) or tx.turns(state)"
        )
    told = [
        np.array(turn.begins),
        *(np.array([(period, f) in turn.due for f in fragments]) for period in local.periods),
        np.array([f in turn.arrives for f in fragments]),
        np.array([f in turn.later for f in fragments]),
    ]
    wrong = [
        (is_so != was_told).any()
        for is_so, was_told in zip(_happens(local, step), told, strict=True)
    ]
    return functools.reduce(operator.or_, wrong)


def acts(local: LocalSGD, turn: Turn | None, step: Any) -> Any:
    """Whether something is averaged after a step, by its turn; where none was told, by its number,
    which may be traced."""
    if turn is not None:
        return bool(turn.due or turn.arrives)
    _, *happens, _ = _happens(local, step)
    return functools.reduce(operator.or_, [each.any() for each in happens])


def _happens(local: LocalSGD, step: Any) -> list[Any]:
    """What `Turn` says of a step: whether replicas part there, and (fragments,) for each period,
    for what arrives, and for what was averaged before."""
    due, arrives, later = local.happens(step, np.arange(local.fragments))
    return [step == local.start_step - 1, *due.values(), arrives, later]
