"""CUDA graphs: what a user may capture (`torch.cuda.graph`), and what is refused because a graph
repeats kernels and not Python; and graphs of our own.

A captured step is replayed with the memory it was captured with: gradients, error and factors, all
updated in place. What the host knows stands still: the number of the step, a schedule, the loss
scale, which parameters took part. A step that rests on any of it would go on with what was true at
capture, unnoticed; so it is refused in the first captured backward pass.

What lies between two messages of a step is captured and replayed by the engine itself
(`gradwire.torch_backend.engine.replays`), which knows when the host would decide something else:

    graphs = graphs_for(device)              # None: the device has none, as the CPU
    with graphs.capture() as graph:
        ...                                  # launched, and not run
    graph.replay()
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar, Protocol

import torch

from gradwire.core.plan.dry_run import DryRun
from gradwire.torch_backend.torch_internals import end_allocation

OUTSIDE = (
    "Leave it out of the graph: capture the forward pass alone (torch.cuda.make_graphed_callables"
    " before DDP wraps the model)"
)


def capturable(device: torch.device) -> bool:
    """Whether a CUDA graph may hold what is launched on this device."""
    return device.type != "cpu"


def capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def refuse_capture(what: str | Callable[[], str]) -> None:
    """Raise RuntimeError if a graph is being captured, for something that rests on the host in
    every step: `what` and why, or what puts it into words."""
    if capturing():
        said = what if isinstance(what, str) else what()
        raise RuntimeError(f"{said} cannot be captured in a CUDA graph. {OUTSIDE}")


def require_capturable(
    dry: DryRun,
    steps: int,
    *,
    grad_scaler: bool,
    usage: bool,
) -> None:
    """Raise RuntimeError, naming the option and the fix, unless every replay of a step after so
    many is a step. Nothing is computed.

    `grad_scaler`: memory follows the scale of a loss scaler. `usage`: parameters that took no part
    in the forward pass are told apart.
    """
    algorithm = dry.algorithm
    if steps <= algorithm.start_step:
        raise RuntimeError(
            f"{algorithm!r} is captured in a CUDA graph as step {steps}, and memory that lasts is"
            f" made in the first one that is not dense: take at least {algorithm.start_step + 1}"
            " steps before the capture (torch asks for 11 of DDP)"
        )
    if algorithm.cycle > 1:
        raise RuntimeError(
            f"{algorithm!r} alternates between {algorithm.cycle} kinds of step, and the host has to"
            " know whose turn it is; a CUDA graph repeats one. Leave half_step out, or do not"
            " capture the backward pass"
        )
    if grad_scaler:
        raise RuntimeError(
            "grad_scaler= lets memory follow the loss scale, which the host reads; a CUDA graph"
            " would keep the scale of its capture. Train in bfloat16 without a GradScaler, or do"
            " not capture the backward pass"
        )
    if usage:
        raise RuntimeError(
            "find_unused_parameters=True tells parameters apart by what the host has seen; a CUDA"
            " graph would repeat what it saw at capture. Leave it out, since a graph always uses"
            " the same parameters, or do not capture the backward pass"
        )
    if dry.cycle[0].by_number:
        raise RuntimeError(
            f"{algorithm!r} does something else in each step, by the step's number"
            " (warm_start=False draws a matrix anew), and a CUDA graph repeats one. Use"
            " warm_start=True, or do not capture the backward pass"
        )


class Graph(Protocol):
    """Work that has been captured."""

    def replay(self) -> None:
        """Launch it on the current stream, on the memory it was captured with."""


class Graphs(Protocol):
    """The graphs of one owner on one device, which share one pool of memory and are never at work
    at the same time."""

    def capture(self) -> AbstractContextManager[Graph]:
        """What is launched within is captured and not run. Raises RuntimeError where that cannot
        be."""

    @property
    def nbytes(self) -> int:
        """The bytes of the pool."""


class CudaGraphs:
    """`Graphs` on CUDA. A capture may begin in autograd's thread while a watchdog asks for events
    in another, so it minds its own thread alone; and it is not `torch.cuda.graph`, which waits for
    the device, collects garbage and empties caches.

    Args:
        device: where the work is.
    """

    #: CUDA has ended these, and torch has not: allocators may go on asking them whether they
    #: capture.
    _broken: ClassVar[list[Any]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        #: Those of the pool. torch gives up a pool with its last graph, and refuses it from then
        #: on.
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        # The default stream cannot be captured.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            # A stretch may launch nothing.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            try:
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                yield graph
            except BaseException:
                # the stream is let go, and the first error is the one to tell
                with suppress(RuntimeError):
                    self._end(graph)
                raise
            self._end(graph)
        self._alive.add(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. What waits for the device breaks it; then torch raises before it has told
        its allocator, which from then on would give nothing back that another stream has used."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._broken.append(graph)
            end_allocation(self._device, self._pool)
            raise

    @property
    def nbytes(self) -> int:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(each["total_size"] for each in segments if each["segment_pool_id"] == self._pool)


#: What makes the graphs of a device, by its type.
MAKERS: dict[str, Callable[[torch.device], Graphs]] = {"cuda": CudaGraphs}


def has_graphs(device: torch.device) -> bool:
    """Whether a device has graphs."""
    return device.type in MAKERS


def graphs_for(device: torch.device) -> Graphs | None:
    """Graphs for one owner; None where there are none."""
    make = MAKERS.get(device.type)
    return None if make is None else make(device)
