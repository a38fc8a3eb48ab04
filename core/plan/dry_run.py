"""What an algorithm will ask for and send, found out before anything runs: its own coroutines, over arrays that have a shape and no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradwire.core.algorithm import Algorithm, State, on_replica
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps, abstract_arrays
from gradwire.core.ops import Spec
from gradwire.core.plan.memory import state_bytes
from gradwire.core.plan.traffic import DryRun, dry_run, memory_of, place_of
from gradwire.core.programs import Groups, Request
from gradwire.core.requests import require_partition


def _runs(
    algorithm: Algorithm, specs: Mapping[str, Spec], state: State[AbstractArray], world_size: int | None
) -> Iterator[DryRun]:
    gradients = abstract_arrays(specs)
    start = algorithm.start_step
    for step, phase in [*([(0, 0)] if start else []), *((start, phase) for phase in range(algorithm.cycle))]:
        program = algorithm.step(AbstractOps(), dict(gradients), memory_of(algorithm, state, gradients), step)
        yield dry_run(program, phase, world_size=world_size, place=place_of(algorithm))


def partitions(requests: Sequence[Request], replicas: int) -> list[Groups]:
    """The groups in which requests average, in the order in which they come, each once. Raises ValueError for groups that are no
    partition of so many replicas."""
    found: list[Groups] = []
    for request in requests:
        if request.groups is not None and request.groups not in found:
            require_partition(request.groups, replicas)
            found.append(request.groups)
    return found


@dataclass(frozen=True)
class Summary:
    """A plan in one line: `PowerSGD(rank=4): 26 of 74 tensors, 101.3 MB → 1.2 MB (87×), 2 messages; error memory 99.0 MB`.

    Attributes:
        algorithm: its `repr`.
        compressed, tensors: how many tensors have factors or a memory, of how many.
        dense_bytes, wire_bytes: of an uncompressed step, and of one after the start, on average over a cycle; see `Plan.wire_bytes`.
        messages: of such a step, for a model whose gradients come all at once.
        error_bytes: of what each replica remembers for itself.
        start_step: the first step that is compressed.
    """

    algorithm: str
    compressed: int
    tensors: int
    dense_bytes: int
    wire_bytes: float
    messages: float
    error_bytes: int
    start_step: int

    def __str__(self) -> str:
        ratio = self.dense_bytes / self.wire_bytes if self.wire_bytes else 1.0
        fewer = f"{ratio:.1f}" if ratio < 10 else f"{ratio:,.0f}"
        of = f"{self.compressed} of {self.tensors}" if self.compressed else f"{self.tensors}"
        return "".join(
            [
                f"{self.algorithm}: {of} tensors, {size_of(self.dense_bytes)} → {size_of(self.wire_bytes)} ({fewer}×), ",
                f"{self.messages:g} message{'' if self.messages == 1 else 's'}",
                f" from step {self.start_step} on" if self.start_step else "",
                f"; error memory {size_of(self.error_bytes)}" if self.error_bytes else "",
            ]
        )


def try_out(
    algorithm: Algorithm, specs: Mapping[str, Spec], world_size: int | None = None
) -> tuple[list[Request], Summary]:
    """What the steps of any algorithm ask for: the first, if that is dense, and each in a cycle from `start_step` on. And what it does.

    `world_size` None: not known, which is an error where the requests depend on it.

    Raises:
        ValueError: what the algorithm's `init` refuses, by name.
        UnknownRequest: it asks for something that no driver knows.
        Exception: whatever comes of an algorithm that is written for the tensors of one framework.
    """
    compresses = len(algorithm.init(AbstractOps(), specs).tensors)
    algorithm = on_replica(algorithm, specs, 0, world_size)
    state = algorithm.init(AbstractOps(), specs)
    runs = list(_runs(algorithm, specs, state, world_size))
    compressed = [run.traffic for run in runs[-algorithm.cycle :]]
    found = Summary(
        repr(algorithm),
        compresses,
        len(specs),
        sum(spec.nbytes for spec in specs.values()),
        sum(step.far_bytes(algorithm) for step in compressed) / len(compressed),
        sum(step.collectives for step in compressed) / len(compressed),
        state_bytes(state, algorithm.per_replica),
        algorithm.start_step,
    )
    return [request for run in runs for request in run.requests], found


def summary(algorithm: Algorithm, specs: Mapping[str, Spec], world_size: int | None = None) -> Summary:
    """What an algorithm does with these parameters. Raises as `try_out` does."""
    return try_out(algorithm, specs, world_size)[1]


def size_of(nbytes: float) -> str:
    """Bytes as one reads them, in powers of 1000: "101.3 MB"."""
    for unit, worth in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= worth:
            return f"{nbytes / worth:,.1f} {unit}"
    return f"{nbytes:.0f} bytes"
