"""The place at which each rank is: told to the store in the background, and read when a message
does not come.

A message that waits for a rank says nothing of it: Gloo gives up after half an hour, or hears that
a connection was closed. So a thread of each process writes down once a second how far its drivers
have come, of many ranks less often. Training neither sends anything for that nor waits for it.
After a failure one rank reads what all have written, and the others read what it says.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from itertools import count
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from gradwire.core.text.wording import some
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.engine.groups.shared_keys import found_by_one, read_all

#: Seconds between two notes of a rank; of more ranks than `OFTEN` so many times as much.
INTERVAL, SELDOM = 1.0, 10
OFTEN = 256
#: A rank that has left no note for so many intervals is not heard of.
SILENT = 3
#: Characters of an algorithm's `repr` in a note.
SHOWN = 200
#: Seconds for which a report serves those that fail later.
RECENT = 60.0


class Whereabouts:
    """Those of one driver, on all ranks. To be made on all of them, with the meeting of the same
    driver.

    Args:
        meeting: knows the store that the ranks share. None: ranks alone need not be found.
        what: the `repr` of the algorithm. A note has its beginning: it may name every rank.
        memory: the `Memory` of the driver, which counts steps.
        collectives: its `Collectives`, which count messages and know what was asked for last.

    Attributes:
        waits: this rank waits for a message.
    """

    def __init__(self, meeting: Meeting, what: str, memory: Any, collectives: Any) -> None:
        self._meeting, self._what = meeting, what if len(what) <= SHOWN else f"{what[:SHOWN]}…"
        self.waits = False
        self._reports = 0
        # What they belong to may go while the thread looks.
        self._memory, self._collectives = weakref.ref(memory), weakref.ref(collectives)
        if meeting.store is not None:
            _watch(self)

    def note(self, *, left: bool = False) -> None:
        """Write down where this rank is. Where there is no store any more, nothing is written, nor
        tried again."""
        store = self._meeting.store
        if store is None or (place := self._place(left)) is None:
            return
        # The store may take its time, and what the place was read from may go meanwhile.
        try:
            store.set(self._key(self._meeting.rank), json.dumps(place))
        except Exception:
            _forget(self)

    def _place(self, left: bool) -> dict[str, Any] | None:
        """What there is to note; None once the driver is gone."""
        memory, collectives = self._memory(), self._collectives()
        if memory is None or collectives is None:
            return None
        return {
            "what": self._what,
            "step": memory.steps,
            "messages": collectives.sent.collectives,
            "asked": collectives.asked,
            "last": collectives.last,
            "waits": self.waits,
            "doing": self._meeting.doing,
            "left": left,
            "time": time.time(),
        }

    def named(self, error: RuntimeError) -> RuntimeError:
        """The same error, with where each rank was. Waits until those that live have said so."""
        if self._meeting.store is None:
            return error
        self.note()
        time.sleep(1.5 * self._intervals * INTERVAL)
        return type(error)(f"{self.shared_report()}. {error}")

    def due(self, interval: int) -> bool:
        """Whether this rank writes a note in the interval of this number."""
        return (interval + self._meeting.rank) % self._intervals == 0

    @property
    def _intervals(self) -> int:
        return 1 if self._meeting.size <= OFTEN else SELDOM

    def shared_report(self) -> str:
        """The report of whichever rank was the first to ask for one, in a failure of the last
        minute."""
        store = self._meeting.store
        assert store is not None
        try:
            for number in count(self._reports):
                self._reports = number + 1
                key = f"{self._meeting.name}/report/{number}"
                made, report = json.loads(
                    found_by_one(store, key, self._meeting.rank, self._dated_report)
                )
                if abs(time.time() - made) < RECENT:
                    return str(report)
        except Exception as error:
            return _unknown(error)
        raise AssertionError

    def _dated_report(self) -> str:
        return json.dumps([time.time(), self.report()])

    def report(self) -> str:
        """The whereabouts of all ranks, as far as they have said."""
        try:
            notes = self._notes()
        except Exception as error:
            return _unknown(error)
        said: dict[str, list[int]] = {}
        for rank, note in enumerate(notes):
            said.setdefault(_words(note, SILENT * self._intervals * INTERVAL), []).append(rank)
        found = "; ".join(f"{_listed(ranks)}{words}" for words, ranks in said.items())
        known = [note for note in notes if note is not None]
        alike = {(note["step"], note["messages"]) for note in known}
        if len(alike) == 1 and len({note["asked"] for note in known}) > 1:
            found += "; they have asked for different messages"
        return f"a message of {self._what} has not come: {found}"

    def _notes(self) -> list[dict[str, Any] | None]:
        store = self._meeting.store
        assert store is not None
        notes = read_all(store, [self._key(rank) for rank in range(self._meeting.size)])
        return [None if note is None else json.loads(note) for note in notes]

    def _key(self, rank: int) -> str:
        return f"{self._meeting.name}/whereabouts/{rank}"


def _unknown(error: Exception) -> str:
    return (
        f"where the ranks are is not known: their store cannot be read ({error}), as when the rank"
        " has left that keeps it"
    )


def _listed(ranks: list[int]) -> str:
    return f"ranks [{some(ranks, 8)}]" if len(ranks) > 1 else f"rank {ranks[0]}"


def _words(note: dict[str, Any] | None, longest: float) -> str:
    """The words of a note. A rank that has written none for longer than this is not heard of."""
    if note is None:
        return " (never heard of)"
    sent, silent = note["messages"], time.time() - note["time"]
    place = f"{note['step']} steps of {note['what']} done, {sent} messages sent"
    if note["waits"]:
        place = (
            f"in step {note['step'] + 1} of {note['what']}, waiting for message {sent}, a"
            f" {note['last']}"
        )
    if note["doing"]:
        place += f", come to {note['doing']}"
    if note["left"]:
        return f" (left): {place}"
    return f" (not heard of for {silent:.0f} s): {place}" if silent > longest else f": {place}"


_lock = threading.Lock()
_watched: weakref.WeakSet[Whereabouts] = weakref.WeakSet()
_thread: threading.Thread | None = None
_stopped = threading.Event()


def _watch(one: Whereabouts) -> None:
    """Watch from now on. The thread is one for all of a process, and a process that was forked from
    it has to start its own."""
    global _thread
    with _lock:
        _watched.add(one)
        if _thread is None or not _thread.is_alive():
            _stopped.clear()
            _thread = threading.Thread(target=_note_all, name="gradwire-whereabouts", daemon=True)
            _thread.start()
            # Also at the end of a process of `multiprocessing`, which runs no `atexit`; and not in
            # those that are forked from this one. A thread that comes back from the store while the
            # interpreter shuts down would end the process with a signal.
            Finalize(None, _leave, exitpriority=0)


def _forget(one: Whereabouts) -> None:
    with _lock:
        _watched.discard(one)


def _all() -> list[Whereabouts]:
    with _lock:
        return list(_watched)


def _note_all() -> None:
    for interval in count():
        if _stopped.wait(INTERVAL):
            return
        # A group that was destroyed needs no messages, and its store may go.
        for one in _all() if dist.is_initialized() else ():
            if one.due(interval):
                one.note()


def _leave() -> None:
    _stopped.set()
    if _thread is not None:
        _thread.join(2 * INTERVAL)
    for one in _all() if dist.is_initialized() else ():
        one.note(left=True)
