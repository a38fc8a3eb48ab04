"""What a worker of the network benchmark does in either framework: options, rounds in which
subjects take turns, rows."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Ends the name of a subject that sends nothing: what its step costs without a network.
ALONE = "each host alone"
#: What a slow link wants: more messages, which travel while the next group is computed.
SMALL_GROUPS = "groups of 128 KiB"
#: The name of `WireDtype(PowerSGD(16), "int8")`, which pages recommend.
RECOMMENDED = "PowerSGD, rank 16, int8"
#: That of `WireDtype(PowerSGD(4), "int8")`, which sends least of what Muon makes up for.
LEAST = "PowerSGD, rank 4, int8"


@dataclass
class Subject:
    """Something to be measured. `step()` is one step, or `steps` of them; `planned` the bytes of
    one, payloads counted once."""

    name: str
    step: Callable[[], None]
    planned: float
    planned_collectives: float
    steps: int = 1


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser()
    for option in ("--layers", "--vocabulary", "--rank", "--repeats"):
        p.add_argument(option, type=int, required=True)
    p.add_argument("--rate", type=float, required=True, help="bytes per second of a link")
    return p


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def rows(
    subjects: Sequence[Subject],
    measure: Callable[[Subject], tuple[float, float]],
    args: argparse.Namespace,
    *,
    hosts: int,
    warm_up: int,
) -> list[dict[str, Any]]:
    """Let the subjects take turns, one step each, for `warm_up` rounds and those that count. The
    first subject is what others are compared with. `measure` gives seconds, and bytes on this
    host's interface, per step."""
    found: dict[str, list[tuple[float, float]]] = {s.name: [] for s in subjects}
    for round_ in range(warm_up + args.repeats):
        for subject in subjects:
            measured = measure(subject)
            if round_ >= warm_up:
                found[subject.name].append(measured)
    plain = [took for took, _ in found[subjects[0].name]]
    result = []
    for subject in subjects:
        seconds, sent = zip(*found[subject.name], strict=True)
        on_links = subject.planned * 2 * (hosts - 1) / hosts
        result.append(
            {
                "subject": subject.name,
                "step_ms": statistics.median(seconds) * 1e3,
                "wire_bytes": statistics.mean(sent),
                "planned_wire_bytes": on_links,
                "wire_ms": on_links / args.rate * 1e3,
                "collectives": subject.planned_collectives,
                "ratio_to_plain": statistics.median(
                    a / b for a, b in zip(seconds, plain, strict=True)
                ),
            }
        )
    return result
