"""`gradwire doctor`: prints each row as it ends, then a sentence for each fault."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.cli.models import BadArgument, require_folder
from gradwire.cli.tables import say
from gradwire.core.simulate.doctor.report import (
    FAULT,
    NO_TIME,
    NOTE,
    OK,
    SKIPPED,
    Report,
    Row,
)
from gradwire.core.text.wording import many
from gradwire.doctoring import doctor

#: Facts of a machine that a reader wants to see first.
SHOWN = (
    "torch",
    "jax",
    "gpu",
    "device",
    "driver",
    "nccl",
    "cuda",
    "platform",
    "gradwire",
    "python",
)


def run_doctor(
    algorithms: Sequence[Any] | None, output: Path, *, quick: bool, as_json: bool
) -> int:
    """Check, print, and return the exit status: 1 if anything is wrong. Raises BadArgument."""
    require_folder("--output", output)
    try:
        report = doctor(algorithms, quick=quick, output=output, show=_unsaid if as_json else _show)
    except (TypeError, RuntimeError) as error:
        raise BadArgument(str(error)) from error
    first = os.environ.get("RANK", "0") == "0"
    if first and as_json:
        print(report.to_json())
    elif first:
        _conclude(report, output)
    return 1 if report.faults else 0


def _show(row: Row) -> None:
    say(str(row))


def _unsaid(row: Row) -> None:
    pass


def _conclude(report: Report, output: Path) -> None:
    for facts in {str(_main(each)): _main(each) for each in report.machine}.values():
        say("machine " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    counts = Counter(row.verdict for row in report.rows)
    say(
        ", ".join(
            f"{counts[verdict]} {verdict}"
            for verdict in (OK, FAULT, NOTE, SKIPPED)
            if counts[verdict]
        )
    )
    for row in report.faults:
        say(f"WRONG HERE: {row.part}, {row.check}: {row.detail}")
    if report.faults:
        say(f"Do not train with what is wrong here. {output} has all of it, for a report.")
    elif not counts[OK]:
        say(f"Nothing was looked at. {output} says why.")
    elif late := sum(row.detail == NO_TIME for row in report.rows):
        checks = many(late, "check")
        say(f"Nothing is wrong of what was looked at; no time was left for {checks}, see {output}.")
    else:
        say(f"Nothing is wrong here. {output} has all of it.")


def _main(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: facts[name] for name in SHOWN if facts.get(name) is not None}
