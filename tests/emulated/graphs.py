"""Graphs of the emulated accelerator, strict as CUDA's: what is captured is not run, memory comes
from a pool and is not kept, and neither the host nor another stream may come in between.

with_graphs() registers them with the engine, for the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from gradwire.torch_backend.engine import cuda_graphs
from tests.emulated.device import DEVICE, core, stream

#: Pools of all owners. Captures run on a stream of their own.
_pools = count(1)
CAPTURES = 9


class EmulatedGraphs:
    """See `gradwire.torch_backend.engine.cuda_graphs.Graphs`.

    Attributes:
        fails_at: the capture of this number, from 0, fails when it ends. None: none does.
        captured, replayed: so many have been.
    """

    fails_at: int | None = None
    captured = replayed = 0

    def __init__(self, device: Any = DEVICE) -> None:
        self._pool = next(_pools)
        weakref.finalize(self, core.drop, self._pool)

    @contextmanager
    def capture(self) -> Iterator[Any]:
        graph = Deferred()
        with stream(CAPTURES):
            core.begin_capture(self._pool)
            try:
                yield graph
            except BaseException:
                with suppress(RuntimeError):
                    core.end_capture()
                raise
            graph.captured = core.end_capture()
        number, EmulatedGraphs.captured = EmulatedGraphs.captured, EmulatedGraphs.captured + 1
        if number == EmulatedGraphs.fails_at:
            raise RuntimeError("a capture fails, as was asked for")

    @property
    def nbytes(self) -> int:
        return int(core.bytes_of(self._pool))


class Deferred:
    """A graph, as soon as its capture has ended."""

    captured: Any = None

    def replay(self) -> None:
        EmulatedGraphs.replayed += 1
        self.captured.replay()


def with_graphs() -> None:
    """The engine finds them for tensors of this device."""
    cuda_graphs.MAKERS[DEVICE.type] = EmulatedGraphs
