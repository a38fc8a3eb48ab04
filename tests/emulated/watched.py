"""What happened on the emulated accelerator, what went wrong, and where: records that ranks return
as they are.

watched = Watched()
assert watched.problems == []
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

import gradwire.core
import gradwire.torch_backend

#: Operations, fewer than a step has. The host runs ahead of the device by about a step, and does
#: not feel a wait for what was before.
LONG_AGO = 40
#: Where gradwire's code is.
OURS = tuple(
    f"{Path(str(room.__file__)).parent}/" for room in (gradwire.core, gradwire.torch_backend)
)
#: Kernels that add in any order on CUDA, so that ranks may differ in the last bit.
UNORDERED = {
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "scatter_reduce_",
    "index_add",
    "index_add_",
}
UNORDERED |= {"bincount", "histc", "cumsum"}
#: Kernels that make constants.
MAKES = {"fill_", "arange", "eye", "linspace", "full", "ones", "tril", "triu"}


@dataclass(frozen=True)
class Event:
    """Something that the device has seen, and who caused it: lines of gradwire, innermost last.
    Empty if none of it was running."""

    what: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Launched:
    """A collective as it was asked for: what has to be the same on all ranks, in the same order."""

    name: str
    numel: int
    dtype: torch.dtype


@dataclass
class Watched:
    """What the device has seen since the last `clear`."""

    #: Races, memory written while a message was on its way, memory used again while in use, kernels
    #: of gradwire that add in any order.
    problems: list[Event] = field(default_factory=list)
    #: Of the host for the device.
    waits: list[Event] = field(default_factory=list)
    #: Kernels of gradwire that make constants.
    made: list[Event] = field(default_factory=list)

    def clear(self) -> None:
        for events in (self.problems, self.waits, self.made):
            events.clear()

    def launched(self, name: str) -> None:
        """A kernel of `UNORDERED` or `MAKES`."""
        event = event_of(f"{name} adds in any order" if name in UNORDERED else name)
        if event.where:
            (self.problems if name in UNORDERED else self.made).append(event)

    def wait(self, why: str, since: int) -> None:
        """The host waits for something after which so many operations have been launched: after
        many, it has long come."""
        if since < LONG_AGO:
            self.waits.append(event_of(why))

    def own_waits(self) -> list[Event]:
        """Waits inside gradwire."""
        return [event for event in self.waits if event.where]


def event_of(what: str) -> Event:
    """What happens now, and which lines of gradwire are at it."""
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_stack(sys._getframe())]
    ours = [
        f"{'/'.join(file.split('/')[-2:])}:{line}" for file, line in frames if file.startswith(OURS)
    ]
    return Event(what, tuple(reversed(ours[:4])))
