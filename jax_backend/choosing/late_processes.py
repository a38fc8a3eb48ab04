"""Which processes have not begun a step that others wait for.

A step of several processes waits in the middle of a compiled program, or for what it sends, and
nobody can ask who is missing there. So a thread of each process tells the coordination service how
many steps it has begun, at most ten times while others are patient, and names those that have begun
fewer.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from typing import Any

import jax

from gradwire.jax_backend.engine import barrier
from gradwire.jax_backend.jax_internals import coordination_client

_numbers = itertools.count()


class LateProcesses:
    """The steps that this process has begun, and which processes are late for them. Does nothing
    where one process is all there are. All processes make it, in the same order."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._place = f"gradwire/begun/{next(_numbers)}/"
        self._begun = 0
        self._result: Any = None
        self._thread: threading.Thread | None = None

    def begins(self) -> None:
        """A step begins here."""
        self._result = None
        self._begun += 1
        if self._thread is None and jax.process_count() > 1:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self),), daemon=True)
            self._thread.start()

    def returns(self, result: jax.Array | None) -> None:
        """The step has returned, and this is a part of its result, there or not; None: it has
        failed."""
        self._result = () if result is None else result

    def _waits(self) -> bool:
        """Whether the step that was begun last is not done."""
        result: Any = self._result
        if not isinstance(result, jax.Array):
            return result is None
        try:
            return not result.is_ready()  # type: ignore[attr-defined]
        except RuntimeError:
            return False  # given away, to what comes after it


def _watch(made: weakref.ref[LateProcesses]) -> None:
    told, began, said = 0, 0.0, 0.0
    while True:
        time.sleep(barrier.PATIENCE / 10)
        late, client = made(), coordination_client()
        if late is None or client is None:
            return
        try:
            if late._begun != told:
                told, began, said = late._begun, time.monotonic(), barrier.PATIENCE
                client.key_value_set(
                    f"{late._place}{jax.process_index()}", str(told), allow_overwrite=True
                )
            elif told and late._waits() and time.monotonic() - began >= said:
                found = {
                    key.rpartition("/")[2]: int(n)
                    for key, n in client.key_value_dir_get(late._place)
                }
                missing = [n for n in range(jax.process_count()) if found.get(str(n), 0) < told]
                if missing:
                    barrier.say_missing(late._caller, missing)
                    said *= 10
        except jax.errors.JaxRuntimeError:
            return  # the service has ended, and JAX says so itself
        del late
