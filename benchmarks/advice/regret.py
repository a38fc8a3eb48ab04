"""How good an answer is over many cells: the advice, uncompressed averages, or one method
everywhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

#: A second round may take so many times as long as the first, and a method as the fastest.
FAST = 1.10


def answer_at(row: dict[str, Any], loss: float | None) -> dict[str, Any]:
    """What was recommended in a cell where the loss may be higher by so much; None: by anything."""
    found: dict[str, Any] = next(each for each in row["answers"] if each["loss"] == loss)
    return found


def times_at(row: dict[str, Any], loss: float | None) -> dict[str, float]:
    """Milliseconds of a step with each method that may be recommended there."""
    allowed = answer_at(row, loss)["allowed"]
    return {m["algorithm"]: m["measured_ms"] for m in row["methods"] if m["algorithm"] in allowed}


def fastest_at(row: dict[str, Any], loss: float | None) -> str:
    """The method whose step was the shortest of those."""
    times = times_at(row, loss)
    return min(times, key=lambda method: times[method])


def to_fastest(row: dict[str, Any], loss: float | None) -> float:
    """How many times as long as with the fastest method a step takes with the recommended one."""
    times = times_at(row, loss)
    return times[answer_at(row, loss)["recommended"]] / min(times.values())


def steady(row: dict[str, Any], loss: float | None) -> bool:
    """Whether the second round took the time of the first, with the method that was recommended and
    with the fastest."""
    which = {answer_at(row, loss)["recommended"], fastest_at(row, loss)}
    return which <= same_in_both(row)


def same_in_both(row: dict[str, Any]) -> set[str]:
    """The methods that took the same time in both rounds, if they had two. A second round in which
    all methods took longer is of a machine that others use too: its times are divided by as
    much."""
    rounds = {m["algorithm"]: m["rounds_ms"] for m in row["methods"]}
    ratios = {name: of[1] / of[0] for name, of in rounds.items() if len(of) > 1}
    slower = statistics.median(ratios.values())
    other = {name for name, ratio in ratios.items() if not 1 / FAST <= ratio / slower <= FAST}
    return rounds.keys() - other


def limits_of(rows: list[dict[str, Any]]) -> list[float | None]:
    """By how much the loss may be higher, in all cells the same."""
    return [each["loss"] for each in rows[0]["answers"]] if rows else []


def answers(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float | None]]:
    """Cells with each of their limits."""
    return ((row, loss) for row in rows for loss in limits_of(rows))


def regrets(rows: list[dict[str, Any]], loss: float | None) -> dict[str, Any]:
    """How much longer a step takes than with the fastest allowed method, on average over cells and
    in the worst: with the advice; with uncompressed averages; and with the constant answer that
    does best on average, which nobody knows before all is measured."""
    taken = [times_at(row, loss) for row in rows]

    def of(answers: Sequence[str]) -> dict[str, float]:
        each = [
            times[answer] / min(times.values()) - 1
            for times, answer in zip(taken, answers, strict=True)
        ]
        return {"mean": statistics.mean(each), "worst": max(each)}

    constant = {name: of([name] * len(rows)) for name in set.intersection(*map(set, taken))}
    best = min(constant, key=lambda name: (constant[name]["mean"], name))
    return {
        "loss": loss,
        "cells": len(rows),
        "advice": of([answer_at(row, loss)["recommended"] for row in rows]),
        "plain": constant["plain"],
        "constant": {"answer": best, **constant[best]},
    }
