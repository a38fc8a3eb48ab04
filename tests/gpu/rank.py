"""A rank of the tests of replays on a GPU, which stands in for the emulated accelerator: `python -m
tests.gpu.rank FOLDER`, in the environment of a rank."""

from __future__ import annotations

import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from gradwire.torch_backend.engine import cuda_graphs

DEVICE = torch.device("cuda", 0)


@cache
def _stream(number: int) -> Any:
    return torch.cuda.Stream(DEVICE) if number else torch.cuda.default_stream(DEVICE)


@contextmanager
def stream(number: int) -> Iterator[None]:
    """See `tests.emulated.device.stream`."""
    with torch.cuda.stream(_stream(number)):
        yield


def event() -> Any:
    """See `tests.emulated.device.event`."""
    here = torch.cuda.Event()
    here.record()
    return here


class Core:
    """What tests ask of the emulated accelerator."""

    def wait_for(self, waits: int, other: int) -> None:
        _stream(waits).wait_stream(_stream(other))

    def memory(self) -> tuple[int, int]:
        """The most bytes since this was asked for before, and those of now."""
        torch.cuda.synchronize(DEVICE)
        most, now = torch.cuda.max_memory_allocated(DEVICE), torch.cuda.memory_allocated(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        return most, now


class Unwatched:
    """Nobody sees what goes wrong between streams of a GPU, but for its results."""

    problems: ClassVar[list[Any]] = []

    def clear(self) -> None:
        pass


class Counted(cuda_graphs.CudaGraphs):
    """See `tests.emulated.graphs.EmulatedGraphs`."""

    fails_at: int | None = None
    captured = replayed = 0

    def __init__(self, device: torch.device = DEVICE) -> None:
        super().__init__(device)

    @contextmanager
    def capture(self) -> Iterator[Any]:
        with super().capture() as graph:
            yield _Replay(graph)
        number, Counted.captured = Counted.captured, Counted.captured + 1
        if number == Counted.fails_at:
            raise RuntimeError("a capture fails, as was asked for")


class _Replay:
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        Counted.replayed += 1
        self._graph.replay()


def with_graphs() -> None:
    """See `tests.emulated.graphs.with_graphs`."""
    cuda_graphs.MAKERS[DEVICE.type] = Counted


#: Module → what is in its place.
INSTEAD: dict[str, dict[str, Any]] = {
    "device": {
        "DEVICE": DEVICE,
        "core": Core(),
        "event": event,
        "stream": stream,
        "watched": Unwatched(),
    },
    "graphs": {"EmulatedGraphs": Counted, "with_graphs": with_graphs},
    "process_group": {"BACKEND": "nccl"},
}


def stand_in() -> None:
    """Let tests find a GPU where they look for the emulated accelerator, and few communicators,
    each of which takes a second."""
    for name, members in INSTEAD.items():
        module = ModuleType(f"tests.emulated.{name}")
        module.__dict__.update(members)
        sys.modules[module.__name__] = module
    new_group, made, turn = dist.new_group, {}, defaultdict[Any, int](int)

    def group_of(ranks: Any = None, *args: Any, backend: Any = None, **options: Any) -> Any:
        if backend != "nccl":
            return new_group(ranks, *args, backend=backend, **options)
        turn[key := tuple(ranks or ())] += 1  # twins have two, by turns
        of = key, turn[key] % 2
        if of not in made:
            made[of] = new_group(ranks, *args, backend=backend, **options)
        return made[of]

    dist.new_group = group_of


def main() -> None:
    torch.cuda.set_device(DEVICE)
    stand_in()
    importlib.import_module("tests.emulated.test_replays").cases.main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # communicators and graphs take their time to go, and nobody needs them to


if __name__ == "__main__":
    main()
