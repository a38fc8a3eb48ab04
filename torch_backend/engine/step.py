"""One step of averaging gradients on one rank, in the order in which it happens.

    begin       what a step that failed has left is dropped; what cannot be is refused, before
                anything is sent
    take        gradients come, some at a time, as the backward pass makes them
    group       those that have come are a group as soon as their compressed payload is worth a
                message
    send        the group's program starts, and its first message is on its way
    receive     when the last gradients have come: round by round, in the order of the groups,
                until all programs have ended
    commit      the memory becomes what the programs have made of it
    hand over   averages are written over the gradients
    report      whoever watches is told, by one event

`GradientStep.add` is that list. What a training may do without is a step that is there or not, and
costs nothing where it is not: a loss scale to follow, weights of replicas, unused parameters, a
step that is discarded, a comparison with the full average, a capture by a CUDA graph, a profiler
that looks on; and a group whose program is replayed (`gradwire.torch_backend.engine.replays`).

Nothing here is launched from a callback. A group's first message goes out when the group is
complete; everything after it happens when the last gradients have arrived, group by group, round by
round; but with two levels a group goes on between nodes when the next one is complete. So the order
of collectives is a function of the order of the groups alone: it cannot depend on which message
happened to come back first. On CUDA all of it is stream work and the host never waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import DryRun
from gradwire.core.protocol.programs import AT_REST, Program
from gradwire.core.protocol.settings import with_settings
from gradwire.torch_backend.cpu.compiled import Loops
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.cuda_graphs import capturing, refuse_capture, require_capturable
from gradwire.torch_backend.engine.groups.barrier import Meeting
from gradwire.torch_backend.engine.groups.same_state import require_same_state
from gradwire.torch_backend.engine.replays import Replays, Tape, addresses
from gradwire.torch_backend.engine.scheduler import Running, Step
from gradwire.torch_backend.engine.unused_parameters import Usage
from gradwire.torch_backend.monitor.fidelity import Measurement
from gradwire.torch_backend.monitor.profiler import span
from gradwire.torch_backend.monitor.report import Progress
from gradwire.torch_backend.monitor.watcher import SkippedSteps, StepEnded, Watcher
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import Scratch
from gradwire.torch_backend.state.memory import Memory
from gradwire.torch_backend.state.owed import Owed
from gradwire.torch_backend.state.settings import Settings
from gradwire.torch_backend.torch_internals import (
    foreach_copy_,
    operations_are_watched,
    profiler_runs,
)

#: A group of buckets is closed when its payload reaches this many bytes: enough for bandwidth to
#: matter more than latency.
MESSAGE_BYTES = 1 << 20
#: The same on an accelerator, where every group costs some hundred kernels. Few groups, but more
#: than one where compressed gradients are some MiB, since the messages of a single one would leave
#: when the backward pass is over.
MESSAGE_BYTES_ON_DEVICE = 4 << 20
#: So many bytes inside a node count like one between nodes: about as much faster is the network
#: there. Without them a model whose factors are few would begin to average inside its nodes when
#: the backward pass is over.
INSIDE = 32
NOTHING: AbstractContextManager[object] = nullcontext()


@dataclass(slots=True)
class Group:
    """Some gradients of a step, and the program that averages them. `tape`: what it is replayed
    from."""

    gradients: dict[str, Tensor]
    running: Running[tuple[dict[str, Tensor], State[Tensor]]]
    tape: Tape | None = None
    usage: Usage | None = None


class GradientStep:
    """The steps of one algorithm on one rank. `gradwire.torch_backend.engine.driver.Driver` makes
    its parts.

    Attributes:
        algorithm, specs, ops: what runs, on which parameters, with which kernels.
        message_bytes, divided: see `Driver`.
        memory: of the algorithm, and how many steps are finished.
        collectives: sends, and counts what is sent.
        watch: is told of each step.
        skipped: steps in which some rank's gradient held inf or NaN.
        weighted: replicas count by their weights.
        weight: what this one counts for, a scalar on the device.
        settings: what the algorithm asks for by name.
        measurement: while it is there, it compares each step with a full average. There on all
            ranks, or on none.
        discarding: while it is true, steps leave no trace in the memory and are not counted. Equal
            on all ranks.
        obstacle: why this rank cannot take the first step, where no registration has told the
            others; "" if it can.
        replays: steps of it that are replayed.
        owed: compression errors of an algorithm before, to be added to the next gradients.
        dense_elements: of all gradients that came to this driver, and to those it has continued
            from.
    """

    algorithm: Algorithm
    specs: dict[str, Spec]
    ops: TorchOps
    message_bytes: int | None
    divided: bool
    memory: Memory
    collectives: Collectives
    watch: Watcher
    skipped: SkippedSteps
    weighted: bool
    weight: Tensor
    settings: Settings
    measurement: Measurement | None = None
    discarding = False
    obstacle = ""
    dense_elements = 0

    replays: Replays
    _dry: DryRun
    _programs: Step
    _meeting: Meeting
    #: Of which parameters some rank has memory.
    _remembered: frozenset[str]
    #: Whether a CUDA graph may capture steps, and captures this one; whether ranks have compared
    #: what they go on from.
    _capturable: bool
    _captured = False
    _compared = False

    def __init__(self) -> None:
        self._open: dict[str, Tensor] = {}
        self._open_payload = 0
        self._groups: list[Group] = []
        self._unused: set[str] | None = None
        self.owed = Owed()
        self._shared_before: dict[str, Tensor] = {}
        self._payloads: dict[tuple[bool, tuple[str, ...]], int] = {}
        self._dense_sizes: dict[tuple[str, ...], tuple[int, int]] = {}

    def add(
        self,
        gradients: Mapping[str, Tensor],
        *,
        first: bool,
        last: bool,
        unused: Collection[str] | None = None,
    ) -> None:
        """Take some of this step's gradients; after the last ones, finish the step.

        Args:
            gradients: name → gradient, overwritten with the average by the time the last ones have
                been added.
            first: these begin a step. What a step that never came to its end has left behind is
                dropped.
            last: these end it.
            unused: names of parameters that took no part in this rank's forward pass (their
                gradients are zero), or None if nobody keeps count. A parameter that no rank used
                keeps its memory: its average would never reach an optimizer.
        """
        if first:
            self._begin(usage=unused is not None)
        self._take(gradients, unused)
        if not last and not self._is_a_group(gradients):
            return
        start = self.watch.times.now()
        with AT_REST, self._own_arithmetic():
            self._send()
            if last:
                self._receive()
                self._commit()
                self._hand_over()
            self.watch.times.worked(start)
        if last:
            self._report()
            if self.replays.wanted:
                self.replays.end()

    # --- begin

    def _begin(self, *, usage: bool) -> None:
        self._captured = self._capturable and capturing()
        if self._captured:
            self._prepare_capture(usage)
        if not self._compared:  # once: on the host, and with no message
            same_kernels = require_same_state(
                self._meeting,
                self.memory.steps,
                repr(self.algorithm),
                self.memory.loaded,
                self.obstacle,
                self.ops.loops.card,
            )
            if not (same_kernels or self.collectives.groups.in_one_process):
                self.ops.loops = Loops()
            self._compared = True
        self._clear()
        if self.measurement is not None:
            self.measurement.begin(self.weight if self.weighted else None)
        if self._captured:  # what is noted now would be noted once, and every replay is a step
            self.watch.times.skip()
        elif not self.discarding:
            self.watch.begin()
        if self.memory.scale.scaler is not None and not self.discarding:
            self._follow_scale()
        if self.replays.wanted:
            self.replays.begin(self._may_be_replayed(usage))

    def _may_be_replayed(self, usage: bool) -> bool:
        """Whether the host decides nothing in this step but what is in a key of `Replays`, and
        nobody looks at single operations."""
        decides = (
            usage
            or self.discarding
            or self.measurement is not None
            or self.memory.scale.scaler is not None
        )
        dense = self.divided or self.memory.steps < self.algorithm.start_step
        return not (
            self._captured or decides or dense or self.owed.errors or operations_are_watched()
        )

    def _clear(self) -> None:
        self._programs.begin(apart=self.replays.wanted or self.replays.given_up)
        self._groups, self._open, self._unused = [], {}, None
        self._open_payload = 0
        if self.owed.errors:
            self.owed.begin()

    def _prepare_capture(self, usage: bool) -> None:
        """Raises RuntimeError for a step that a CUDA graph cannot repeat. Memory for the step is
        the graph's own from now on: it stays as long as the graph does, whatever later steps ask
        for."""
        if self.measurement is not None:
            refuse_capture("handle.measured(), which compares a step with a full average,")
        scaled = self.memory.scale.scaler is not None
        require_capturable(self._dry, self.memory.steps, grad_scaler=scaled, usage=usage)
        self.collectives.scratch = Scratch()

    def _follow_scale(self) -> None:
        """Errors are in units of scaled gradients."""
        start = self.watch.times.now()
        with self._own_arithmetic():
            self.memory.scale.follow([*self.memory.errors(), *self.owed.errors.values()])
            self.watch.times.worked(start)

    def _own_arithmetic(self) -> AbstractContextManager[object]:
        if self.divided:  # nothing is computed, so nothing has to be kept from the user's settings
            return NOTHING
        return self.arithmetic(self.collectives.scratch)

    @contextmanager
    def arithmetic(self, scratch: Scratch) -> Iterator[None]:
        """Compute, within, by the algorithm's settings and not the user's; with this memory to work
        in."""
        with torch.no_grad(), plain_arithmetic(self.ops.device), self.ops.scratch(scratch):
            yield

    # --- take, group

    def _take(self, gradients: Mapping[str, Tensor], unused: Collection[str] | None) -> None:
        self._open.update(gradients)
        if unused is not None:
            self._unused = (self._unused or set()) | set(unused)
        if self.owed.errors and not self.discarding:
            self.owed.pay(gradients, self._unused or ())

    def _is_a_group(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether what is there is worth a message, with these, which came last."""
        worth = self._worth_a_message()
        if worth:  # 0 makes each call a group, whose bytes need not be counted
            self._open_payload += self._payload(gradients)
        return self._open_payload >= worth

    def _worth_a_message(self) -> int:
        if self.message_bytes is not None:
            return self.message_bytes
        compresses = self._remembered and self.memory.steps >= self.algorithm.start_step
        return (
            MESSAGE_BYTES_ON_DEVICE
            if compresses and self.ops.device.type != "cpu"
            else MESSAGE_BYTES
        )

    def _payload(self, gradients: Mapping[str, Tensor]) -> int:
        """Bytes that these send between nodes, and those inside in the same unit, see `INSIDE`.
        What a group sends is the sum over its parts, which is quicker than asking about all of them
        each time."""
        key = self.memory.steps >= self.algorithm.start_step, tuple(gradients)
        if key not in self._payloads:
            sent = self._dry.only(gradients).at(self.memory.steps).traffic
            between = sent.far_bytes(self._dry.algorithm)
            self._payloads[key] = between + (sent.nbytes - between) // INSIDE
        return self._payloads[key]

    # --- send

    def _send(self) -> None:
        """Start the program of a group. Whatever is there is one; and the last gradients may add
        nothing."""
        if not self._open and self._groups:
            return
        gradients, self._open, self._open_payload = self._open, {}, 0
        with self._span("send"):
            if (
                self.replays.wanted
                and (replayed := self.replays.start(self._programs, gradients)) is not None
            ):
                self._groups.append(Group(gradients, *replayed))
                return
            donated = self._donated(gradients)
            state = self.memory.state.of(donated)
            if self.discarding:
                state = self._to_be_dropped(state)
            usage = (
                self._usage_of(state, donated)
                if self._unused is not None and not self.discarding
                else None
            )
            if self.measurement is not None:
                self.measurement.take(donated, state.tensors)
            if self.skipped.examines and not self.discarding and not self._captured:
                self.skipped.examine(donated)
            program = self._program(donated, state, self.memory.steps)
            running = self._programs.start(program if usage is None else usage.sent_with(program))
            self._groups.append(Group(gradients, running, usage=usage))

    def _donated(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # A gradient in channels_last strides is taken in its logical order, so that memory means
        # the same on every backend. In the order of the model where there is memory, not of
        # arrival: then a model that is one group sums in the same order before and after buckets
        # are rebuilt, and a run that is resumed has the same bits on any number of ranks.
        order = (
            [name for name in self.specs if name in gradients] if self._remembered else gradients
        )
        return {name: gradients[name].contiguous() for name in order}

    def _program(
        self, donated: dict[str, Tensor], state: State[Tensor], number: Any
    ) -> Program[tuple[dict[str, Tensor], State[Tensor]]]:
        weight = (self.weight,) if self.weighted else ()
        program = self.algorithm.step(self.ops, donated, state, number, *weight)
        return with_settings(program, self.settings) if self.settings else program

    def program_of(
        self, gradients: Mapping[str, Tensor], number: Any
    ) -> Program[tuple[dict[str, Tensor], State[Tensor]]]:
        """The program of a group, in a step that leaves its traces and in which all parameters take
        part."""
        donated = self._donated(gradients)
        return self._program(donated, self.memory.state.of(donated), number)

    def end_of(
        self, groups: Sequence[tuple[Mapping[str, Tensor], tuple[dict[str, Tensor], State[Tensor]]]]
    ) -> None:
        """Launch what the end of groups is, of each its gradients and the result: memory, and
        averages over gradients. Raises RuntimeError if memory would lie elsewhere from now on."""
        memory = self.memory.state
        after = State(
            dict(memory.shared),
            {name: dict(own) for name, own in memory.tensors.items()},
            memory.model,
        )
        for _, (_, state) in groups:
            keep(state, after)
        if addresses(after) != addresses(memory):
            raise RuntimeError(f"memory of {self.algorithm!r} lies elsewhere after a step")
        gradients = {name: x for each, _ in groups for name, x in each.items()}
        write_over(
            gradients, {name: x for _, (averages, _) in groups for name, x in averages.items()}
        )

    def _usage_of(self, state: State[Tensor], order: Collection[str]) -> Usage | None:
        """What this rank did not use of a group, to be told with its first message."""
        remembered = [name for name in order if name in self._remembered]
        if self._unused is None or not remembered:
            return None
        return Usage(self.ops, self._unused, state, remembered, weighted=self.weighted)

    def _to_be_dropped(self, state: State[Tensor]) -> State[Tensor]:
        """The state for a step that leaves no trace: factors as they are, and no errors, in memory
        of their own."""
        if not self._groups:
            self._shared_before = {key: x.clone() for key, x in state.shared.items()}
        errors = self.algorithm.per_replica
        tensors = {
            name: {
                key: torch.zeros_like(x) if key in errors else x.clone()
                for key, x in memory.items()
            }
            for name, memory in state.tensors.items()
        }
        return State(state.shared, tensors, state.model)

    # --- receive, commit

    def _receive(self) -> None:
        with self._span("finish"):
            self._programs.finish()

    def _commit(self) -> None:
        if self.discarding:
            # in place: the host foresees these very scalars
            for key, x in self._shared_before.items():
                self.memory.state.shared[key].copy_(x)
            return
        if tapes := [group.tape for group in self._groups if group.tape is not None]:
            self.replays.finish(tapes)
        for group in self._groups:
            if group.tape is not None:
                continue
            state = group.running.result[1]
            if group.usage is not None:
                group.usage.keep_unused(state, self.memory.state)
            keep(state, self.memory.state)
        self.memory.steps += 1
        finite = self._programs.finite()
        if finite is not None:
            self.skipped.add(finite)
        self._foresee()

    def _foresee(self) -> None:
        """What the next step will ask the device for, the host has by then."""
        if self.collectives.foreseen is not None:
            self.collectives.foreseen.note(self.memory.state.shared)

    # --- hand over, report

    def _hand_over(self) -> None:
        """Write averages over gradients; after the memory, which may be what is now written
        over."""
        for group in self._groups:
            self._count_dense(group.gradients)
            if group.tape is None:
                write_over(group.gradients, group.running.result[0])
        if self.owed.errors:
            self.owed.settle(self.ops, [group.gradients for group in self._groups])
        if self.measurement is not None:
            gradients = {name: x for group in self._groups for name, x in group.gradients.items()}
            self.measurement.compare(gradients, self.memory.steps)
        self._clear()

    def _count_dense(self, gradients: Mapping[str, Tensor]) -> None:
        names = tuple(gradients)
        if names not in self._dense_sizes:
            specs = [self.specs[name] for name in names]
            self._dense_sizes[names] = (
                sum(spec.nbytes for spec in specs),
                sum(spec.size for spec in specs),
            )
        nbytes, elements = self._dense_sizes[names]
        self.memory.sent.dense_bytes += nbytes
        self.dense_elements += elements

    def _report(self) -> None:
        if not self.discarding and not self._captured:
            scale = self.memory.scale.value
            self.watch.step_ended(
                StepEnded(self.memory.steps, self._progress, self.memory.errors, scale)
            )

    def _progress(self) -> Progress:
        sent = self.memory.sent
        return Progress(self.memory.steps, sent.between, sent.dense_bytes)

    def _span(self, part: str) -> AbstractContextManager[object]:
        """A range in torch's profiler, while one runs."""
        return span(self.algorithm, part) if profiler_runs() else NOTHING


def write_over(gradients: Mapping[str, Tensor], averages: Mapping[str, Tensor]) -> None:
    """Write averages over gradients, where they do not lie there already."""
    given: list[Tensor] = []
    averaged: list[Tensor] = []
    for name, gradient in gradients.items():
        average = averages[name]
        if average is not gradient and (
            average.data_ptr() != gradient.data_ptr() or average.stride() != gradient.stride()
        ):
            given.append(gradient)
            averaged.append(average)
    if given:
        foreach_copy_(given, averaged)


def keep(after: State[Tensor], memory: State[Tensor]) -> None:
    """Take over into the memory what a program has made of it, or of some parameters' in it."""
    memory.shared.update(owned(after.shared, memory.shared))
    for name, new in after.tensors.items():
        old = memory.tensors[name]
        if [*new, *map(id, new.values())] != [*old, *map(id, old.values())]:  # of no tensor another
            memory.tensors[name] = owned(new, old)


def owned(new: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Memory after a step, where it was before. What a program returns may lie in a message, in a
    bucket or in scratch memory, all of which the next step writes over; only what it updated in
    place is there already. A CUDA graph goes on with the memory it was captured with."""
    moved = {
        key: x.clone()
        for key, x in new.items()
        if x is not old.get(key) and not (key in old and x.is_set_to(old[key]))
    }
    for key, x in moved.items():
        if key in old and (old[key].shape, old[key].dtype) == (x.shape, x.dtype):
            moved[key] = old[key].copy_(x)
    return {**new, **moved}
