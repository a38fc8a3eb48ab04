"""How long a period of training takes, once each takes as long as the one before: what is on its
way when a period ends holds up the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]

#: Of a step's time, that of the forward pass: backward has twice as many products.
FORWARD = 1 / 3
#: Periods after which nobody waits any longer for all to be alike. Two may take turns, where a
#: message lasts from one to the next.
MOST, TURNS = 48, (1, 2)


@dataclass(frozen=True)
class Sent:
    """What leaves in the backward pass of a step, one message for each layer, when that has come to
    it.

    Attributes:
        seconds: that each layer's message takes the link, for each of several links; by layer.
        late: the forward pass of a layer waits for its message so many steps later than the next.
    """

    seconds: Mapping[int, Times]
    late: int = 0


def period_seconds(
    layers: Sequence[float], sent: Mapping[int, Sequence[Sent]], period: int
) -> Times:
    """How long a period takes over each of several links.

    Args:
        layers: seconds of each layer, of which a third is its forward pass.
        sent: what leaves after which steps of a period, numbered from 1. The link carries one
            message after the other.
        period: steps.

    Returns:
        (links,) or (1,) if nothing is sent; at least the time in which all is computed, and at
        least that of all messages.
    """
    alone = period * math.fsum(layers)
    each = [
        seconds for leaving in sent.values() for one in leaving for seconds in one.seconds.values()
    ]
    busy: Times = np.maximum(sum(each, np.zeros(1)), alone)
    # The steps in which something leaves, or is waited for.
    events = sorted(
        {
            *sent,
            *((step + one.late) % period + 1 for step, leaving in sent.items() for one in leaving),
        }
    )
    now, link = np.zeros_like(busy), np.zeros_like(busy)
    waiting: dict[int, dict[int, Times]] = {}
    ends, states = [now], [np.zeros((0, len(busy)))]
    for n in range(MOST):
        done = 0
        for step in events:
            now = now + (step - done - 1) * math.fsum(layers)
            now = _forward(layers, waiting.pop(n * period + step, {}), now)
            now, link = _backward(layers, sent.get(step, ()), now, link, waiting, n * period + step)
            done = step
        now = now + (period - done) * math.fsum(layers)
        ends.append(now)
        arrivals = [t for _, own in sorted(waiting.items()) for _, t in sorted(own.items())]
        states.append(np.stack([np.maximum(t - now, 0) for t in (link, *arrivals)]))
        for turn in TURNS:
            before = states[-1 - turn] if n >= turn else states[0]
            if (
                before.shape == states[-1].shape
                and np.abs(states[-1] - before).max() <= 1e-9 * alone
            ):
                took: Times = np.maximum((ends[-1] - ends[-1 - turn]) / turn, busy)
                return took
    half = MOST // 2
    took = np.maximum((ends[-1] - ends[half]) / (MOST - half), busy)
    return took


def _forward(layers: Sequence[float], arrivals: Mapping[int, Times], now: Times) -> Times:
    come = 0
    for layer in sorted(arrivals):
        now = np.maximum(now + FORWARD * math.fsum(layers[come:layer]), arrivals[layer])
        come = layer
    return now + FORWARD * math.fsum(layers[come:])


def _backward(
    layers: Sequence[float],
    leaving: Sequence[Sent],
    now: Times,
    link: Times,
    waiting: dict[int, dict[int, Times]],
    step: int,
) -> tuple[Times, Times]:
    come = len(layers)
    for layer in sorted({layer for one in leaving for layer in one.seconds}, reverse=True):
        now, come = now + (1 - FORWARD) * math.fsum(layers[layer:come]), layer
        for one in leaving:
            if layer in one.seconds:
                link = np.maximum(link, now) + one.seconds[layer]
                due = waiting.setdefault(step + 1 + one.late, {})
                due[layer] = np.maximum(due[layer], link) if layer in due else link
    return now + (1 - FORWARD) * math.fsum(layers[:come]), link
