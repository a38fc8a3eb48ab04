"""What a run under chaos has to show, from what its replicas have written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median, stdev
from typing import Any

Lines = Sequence[dict[str, Any]]
#: (from when, until when, what happened, to whom), of `Arena`.
Events = Sequence[tuple[float, float, str, list[str]]]


def unequal_rounds(lines: Lines) -> list[int]:
    """Rounds after which replicas did not have the same bits."""
    seen = defaultdict(set)
    for line in taken(lines):
        seen[line["round"]].add(line["outer"])
    return [number for number, outer in seen.items() if len(outer) > 1]


def taken(lines: Lines) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == "vote" and line["taken"]]


def lost(lines: Lines, events: Events) -> dict[int, int]:
    """For each event, the most rounds that one survivor has lost by it. Whoever was frozen is none.

    A round that fails was disturbed by an event that was felt between the vote before and its own:
    a process that is killed from the signal to its end, a newcomer from its start to its first
    round that counts. Of several it is the first that has cost this survivor no round yet. Where
    there was none, the last event has cost one more.
    """
    joined: dict[str, float] = {}
    for line in taken(lines):
        joined.setdefault(line["name"], line["time"])
    until = [
        max(end, *(joined.get(name, end) for name in names)) if what.startswith("add") else end
        for _, end, what, names in events
    ]
    failed: dict[int, dict[str, int]] = {i: defaultdict(int) for i in range(len(events))}
    before: dict[str, float] = {}
    for line in (line for line in lines if line["event"] == "vote"):
        name, since = line["name"], before.get(line["name"], line["time"])
        before[name] = line["time"]
        earlier = [i for i, (begin, *_) in enumerate(events) if begin <= line["time"]]
        if not line["taken"] and earlier:
            felt = [i for i in earlier if until[i] > since] or earlier[-1:]
            cause = next((i for i in felt if name not in failed[i]), felt[0])
            failed[cause][name] += name not in events[cause][-1]
    return {i: max(found.values(), default=0) for i, found in failed.items()}


def seconds_to_next_round(lines: Lines, events: Events) -> dict[int, float]:
    """For each event, until a round has counted that began with its end or later: the second one."""
    times: dict[int, float] = {}
    for line in taken(lines):
        times.setdefault(line["round"], line["time"])
    found = {}
    for i, (_, end, *_) in enumerate(events):
        after = sorted(t for t in times.values() if t > end)
        found[i] = after[min(1, len(after) - 1)] - end if after else float("nan")
    return found


def healing(lines: Lines) -> dict[str, int]:
    """For each newcomer, the rounds from when it asked to the first that counted with it."""
    found, votes = {}, taken(lines)
    for asks in (line for line in lines if line["event"] == "asks"):
        before = max((v["round"] for v in votes if v["time"] < asks["time"]), default=0)
        first = min((v["round"] for v in votes if v["name"] == asks["name"]), default=None)
        if first is not None and before:
            found[asks["name"]] = first - before
    return found


def longest_pause(lines: Lines) -> float:
    """Seconds between two rounds, at most."""
    times = sorted(line["time"] for line in taken(lines))
    return max(b - a for a, b in pairwise(times))


def losses(lines: Lines) -> set[float]:
    return {line["loss"] for line in lines if line["event"] == "ends"}


def deviation(loss: float, undisturbed: Sequence[float]) -> float:
    """How far a loss is from the mean of undisturbed ones, in standard errors of this
    difference."""
    return (loss - mean(undisturbed)) / (stdev(undisturbed) * (1 + 1 / len(undisturbed)) ** 0.5)


def by_kind(lines: Lines, events: Events) -> dict[str, dict[str, float]]:
    """A row for each kind of event."""
    rounds, seconds, healed = (
        lost(lines, events),
        seconds_to_next_round(lines, events),
        healing(lines),
    )
    rows = {}
    for kind in dict.fromkeys(what for *_, what, _ in events):
        numbers = [i for i, (*_, what, _) in enumerate(events) if what == kind]
        mine = [
            healed[name]
            for i in numbers
            for name in events[i][-1]
            if kind.startswith("add") and name in healed
        ]
        rows[kind] = {
            "times": len(numbers),
            "rounds lost by a survivor, at most": max(rounds[i] for i in numbers),
            "seconds to the next round, median": round(median(seconds[i] for i in numbers), 2),
            "seconds to the next round, at most": round(max(seconds[i] for i in numbers), 2),
            **({"rounds to heal, at most": max(mine)} if mine else {}),
        }
    return rows
