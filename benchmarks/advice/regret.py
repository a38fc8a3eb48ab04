"""How good an answer is over many cells: the advice, uncompressed averages, or one method
everywhere."""

from __future__ import annotations

import statistics
from typing import Any


def regrets(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How much longer a step takes than the fastest method's, on average over cells and in the
    worst: with the advice; with uncompressed averages; and with the constant answer that does best
    on average, which nobody knows before all is measured."""
    taken = [{m["algorithm"]: m["measured_ms"] for m in row["methods"]} for row in rows]
    fastest = [min(times.values()) for times in taken]

    def of(answers: list[str]) -> dict[str, float]:
        each = [
            times[answer] / best - 1
            for times, answer, best in zip(taken, answers, fastest, strict=True)
        ]
        return {"mean": statistics.mean(each), "worst": max(each)}

    constant = {name: of([name] * len(rows)) for name in set.intersection(*map(set, taken))}
    best = min(constant, key=lambda name: (constant[name]["mean"], name))
    return {
        "cells": len(rows),
        "advice": of([row["recommended"] for row in rows]),
        "plain": constant["plain"],
        "constant": {"answer": best, **constant[best]},
    }
