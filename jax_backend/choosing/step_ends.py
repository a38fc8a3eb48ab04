"""When steps end: a thread waits for their results, and the host goes on."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.jax_backend.axes.outside_meshes import outside_meshes

logger = logging.getLogger("gradwire")


@dataclass
class _End:
    """When an array was there, as a thread has seen it."""

    array: Any
    known: threading.Event = field(default_factory=threading.Event)
    moment: float = 0.0

    def __call__(self) -> float:
        self.known.wait()
        return self.moment


class StepEnds:
    """A thread that waits for steps, so that nobody else does."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_End | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @outside_meshes
    def after(self, array: jax.Array) -> Callable[[], float]:
        """What gives the moment at which this array, a result of a step, was there. The array may
        be donated."""
        if self._thread is None:
            self._thread = threading.Thread(target=_wait, args=(self._queue,), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        end = _End(jnp.copy(array.addressable_shards[0].data))
        self._queue.put(end)
        return end


def _wait(queue: SimpleQueue[_End | None]) -> None:
    """Note the end of one after the other, until there is None."""
    while (end := queue.get()) is not None:
        try:
            end.array.block_until_ready()
        except Exception:
            logger.exception("Auto: a step has failed")  # whoever asks for its results is told
        end.moment, end.array = perf_counter(), None
        end.known.set()
