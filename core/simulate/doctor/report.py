"""What a doctor has found: a row for each check, shown and saved as it ends.

report = Report(path=Path("doctor.json"), show=print)
section = Section("kernels, cuda:0", report.add, until=time.monotonic() + 60)
section.check("int8", lambda: check_codec("int8"))      # raises Fault
report.faults
"""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gradwire.core.state.files import is_written_through

#: Verdicts. A "note" is a fact that a reader should know: it is no fault.
OK, FAULT, NOTE, SKIPPED = "ok", "fault", "note", "skipped"
#: Why a check was skipped that might have found something.
NO_TIME = "no time was left"
#: Characters of what an exception says.
LONGEST = 600


class Fault(Exception):
    """A check has found something: the message says what, in one sentence."""


class LeftOut(Exception):
    """A check cannot be made here: the message says why."""


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        part: where it ran: "torch, 2 ranks, nccl, cuda".
        check: what was checked.
        verdict: "ok", "fault", "note" or "skipped".
        detail: what was found.
        seconds: how long it took.
    """

    part: str
    check: str
    verdict: str
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        said = f": {self.detail}" if self.detail else ""
        return f"{self.verdict:7} {self.part} · {self.check}{said}"


@dataclass
class Report:
    """All rows, and the machine on which they were found.

    Attributes:
        machine: versions, hardware and network, by name: a dictionary for each process.
        rows: in the order in which they ended.
        path: the JSON file that holds all of it after each row. None: none.
        show: is called with each row.
    """

    machine: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    path: Path | None = None
    show: Callable[[Row], object] = print
    _one_at_a_time: threading.Lock = field(
        default_factory=threading.Lock, repr=False, compare=False
    )

    def add(self, row: Row) -> None:
        """Keep a row, show it, and save everything so far. Threads may call it."""
        with self._one_at_a_time:
            self.rows.append(row)
            self.show(row)
            self.save()

    def add_machine(self, facts: Mapping[str, Any]) -> None:
        """Keep what a process runs on. Threads may call it."""
        with self._one_at_a_time:
            self.machine.append(dict(facts))

    @property
    def faults(self) -> list[Row]:
        """The rows that a user has to know before training."""
        return [row for row in self.rows if row.verdict == FAULT]

    def save(self) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        if self.path is not None and is_written_through(self.path):
            self.path.write_text(self.to_json())
        elif self.path is not None:
            beside = self.path.with_name(f"{self.path.name}.part")
            beside.write_text(self.to_json())
            beside.replace(self.path)

    def to_json(self) -> str:
        """All of it, for a report of a fault."""
        return json.dumps(
            {"machine": self.machine, "rows": [asdict(row) for row in self.rows]},
            indent=1,
            default=str,
        )


class Section:
    """Checks of one part, within a time.

    Args:
        part: see `Row`.
        say: takes each row.
        until: by `time.monotonic()`, when what is left is skipped.
        agree: makes of what this process thinks (there is time for more) what all of them do. None:
            this process decides.
    """

    def __init__(
        self,
        part: str,
        say: Callable[[Row], object],
        until: float,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self.part = part
        self._say = say
        self._until = until
        self._agree = agree or bool
        self.broken = False

    def check(self, name: str, call: Callable[[], str | None]) -> None:
        """Run a check, which returns a detail or raises. After an exception that is no `Fault` the
        section is `broken`: ranks may stand at different messages."""
        if self.broken or not self._agree(time.monotonic() < self._until):
            why = "a check before it was broken off" if self.broken else NO_TIME
            self._say(Row(self.part, name, SKIPPED, why))
            return
        began = time.monotonic()
        try:
            verdict, detail = OK, call() or ""
        except Fault as fault:
            verdict, detail = FAULT, str(fault)
        except LeftOut as why_not:
            verdict, detail = SKIPPED, str(why_not)
        except Exception as error:
            self.broken = True
            verdict, detail = FAULT, _said(error)
        self._say(Row(self.part, name, verdict, detail, round(time.monotonic() - began, 3)))


def unseen_row(part: str, hardware: str) -> Row:
    """The note where nobody has tried gradwire before."""
    said = f"nobody has reported yet what gradwire does on {hardware}: please send this report"
    return Row(part, "hardware", NOTE, said)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Package → version, of those that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def differing(machines: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Facts in which processes differ: of each fact, process → value."""
    names = dict.fromkeys(name for facts in machines.values() for name in facts)
    each = {
        name: {process: facts.get(name) for process, facts in machines.items()} for name in names
    }
    return {
        name: values
        for name, values in each.items()
        if len({str(value) for value in values.values()}) > 1
    }


def _said(error: Exception) -> str:
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "gradwire" in f.filename or "_backend" in f.filename
    ]
    where = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}{where}"
