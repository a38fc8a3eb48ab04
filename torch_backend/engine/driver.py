"""The torch driver: runs an algorithm over gradients that arrive group by group, with the collectives in one order on all ranks.

Nothing here is launched from a callback. A group's first message goes out when the group is complete; everything after it happens
when the last gradients have arrived, group by group, round by round; but with two levels a group goes on between nodes when the next one
is complete. So the order of collectives is a function of the order of the groups alone: it cannot depend on which message happened to come
back first. On CUDA all of it is stream work and the host never waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol import reduce_max
from gradwire.core.state.checkpoint import StateMismatch
from gradwire.core.text.name_patterns import chosen
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.cuda_graphs import capturing, refuse_capture, require_capturable
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.groups.same_state import require_same_state
from gradwire.torch_backend.engine.groups.whereabouts import Whereabouts
from gradwire.torch_backend.engine.scheduler import Running, Step
from gradwire.torch_backend.engine.unused_parameters import Usage
from gradwire.torch_backend.monitor.fidelity import Measurement
from gradwire.torch_backend.monitor.profiler import span
from gradwire.torch_backend.monitor.report import Progress, Watcher, norm_of
from gradwire.torch_backend.monitor.skipped_steps import SkippedSteps
from gradwire.torch_backend.monitor.stats import Stats
from gradwire.torch_backend.ops.full_precision import plain_arithmetic
from gradwire.torch_backend.ops.kernels import TorchOps, dtype_name
from gradwire.torch_backend.ops.workspace import Scratch
from gradwire.torch_backend.state.loss_scale import require_all_ranks
from gradwire.torch_backend.state.memory import Memory, Replicated, factors_side_by_side
from gradwire.torch_backend.torch_internals import foreach_copy_

#: A group of buckets is closed when its payload reaches this many bytes: enough for bandwidth to matter more than latency.
MESSAGE_BYTES = 1 << 20
#: The same on an accelerator, where every group costs some hundred kernels. Few groups, but more than one where compressed gradients are some MiB, since the
#: messages of a single one would leave when the backward pass is over.
MESSAGE_BYTES_ON_DEVICE = 4 << 20
#: So many bytes inside a node count like one between nodes: about as much faster is the network there. Without them a model
#: whose factors are few would begin to average inside its nodes when the backward pass is over.
INSIDE = 32


def specs_of(parameters: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Shape and dtype by name."""
    return {name: Spec(tuple(p.shape), dtype_name(p.dtype)) for name, p in parameters.items()}


@dataclass(slots=True)
class _Group:
    """Some gradients of a step, and the program that averages them."""

    gradients: dict[str, Tensor]
    running: Running[tuple[dict[str, Tensor], State[Tensor]]]
    usage: Usage | None


class Driver:
    """An algorithm at work on one rank. Raises ValueError for whatever the algorithm refuses, by name.

    Args:
        algorithm: what to run.
        specs: parameter name → shape and dtype, of all parameters it may meet.
        device: of the gradients.
        process_group: whose ranks are the replicas; or groups of them as well, if the algorithm averages in groups.
        message_bytes: payload at which a group is closed; 0 makes every call of `add` a group of its own. None: 1 MiB; 4 MiB for compressed
            steps on an accelerator.
        grad_scaler: the loss scaler in whose units gradients come; memory of them follows its scale. None: they are not scaled, or by a
            constant.
        divided: gradients come multiplied by `gradwire.torch_backend.engine.collectives.share`, which saves a pass over them where they have to be
            copied anyway. Only for an algorithm that sends them as they are, and computes nothing.

    Attributes:
        measurement: while it is there, it compares each step with a full average. There on all ranks, or on none.
        discarding: while it is true, steps leave no trace in the memory and are not counted. Equal on all ranks.
        obstacle: why this rank cannot take the first step, where no registration has told the others; "" if it can.
        memory: of the algorithm, and how many steps are finished.
        weighted: replicas count by their weights.
        weight: what this one counts for, a scalar on the device.
        skipped: steps in which some rank's gradient held inf or NaN.
        dense_elements: of all gradients that came to this driver, and to those it has continued from.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        specs: Mapping[str, Spec],
        device: torch.device,
        process_group: dist.ProcessGroup | ProcessGroups,
        message_bytes: int | None = None,
        *,
        grad_scaler: torch.amp.GradScaler | None = None,
        divided: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self.specs = dict(specs)
        self.ops = TorchOps(device)
        self.groups = process_group if isinstance(process_group, ProcessGroups) else ProcessGroups(process_group)
        self.process_group = self.groups.whole
        self.message_bytes = message_bytes
        self.divided = divided
        self.weighted = bool(getattr(algorithm, "weighted", False))
        self.weight = torch.ones((), dtype=torch.float32, device=device)
        replicas = self.process_group.size()
        self._dry = dry_run(algorithm, self.specs, replicas)
        state = factors_side_by_side(algorithm.init(self.ops, self.specs), apart=algorithm.per_replica)
        self.memory = Memory(algorithm, state, self._placement(), grad_scaler)
        self.collectives = Collectives(self.groups, self.ops, divided=divided)
        self.collectives.sent = self.memory.sent
        self.collectives.foreseen.note(state.shared)
        self.collectives.levels = levels = levels_of(algorithm)
        near = None if levels is None else levels.near(replicas)
        self._step = Step(self.collectives, unscaled=lambda norm: self.memory.scale.unscaled(norm), near=near)
        #: Of which parameters some rank has memory.
        self._remembered = frozenset(self._dry.memory.tensors)
        self._payloads: dict[tuple[bool, tuple[str, ...]], int] = {}
        self._dense_sizes: dict[tuple[str, ...], tuple[int, int]] = {}
        self._open: dict[str, Tensor] = {}
        self._open_payload = 0
        self._groups: list[_Group] = []
        self._unused: set[str] | None = None
        self.discarding = False
        self.obstacle = ""
        self.measurement: Measurement | None = None
        self._captured = False
        self._shared_before: dict[str, Tensor] = {}
        self.dense_elements = 0
        rank, knows = self.process_group.rank(), self.ops.host_knows
        self.skipped = SkippedSteps(repr(algorithm), device, rank, seen_by_host=knows)
        self.watch = Watcher(repr(algorithm), algorithm.start_step, self.collectives.times, self.process_group)
        self._meeting = self.memory.placement.meetings[0]
        self.collectives.whereabouts = Whereabouts(self._meeting, repr(algorithm), self.memory, self.collectives)
        self._compared = False

    def _placement(self) -> Replicated:
        """Of the memory."""
        return Replicated(self.groups, self.ops.device)

    def add(
        self, gradients: Mapping[str, Tensor], *, first: bool, last: bool, unused: Collection[str] | None = None
    ) -> None:
        """Take some of this step's gradients; after the last ones, finish the step.

        Args:
            gradients: name → gradient, overwritten with the average by the time the last ones have been added.
            first: these begin a step. What a step that never came to its end has left behind is dropped.
            last: these end it.
            unused: names of parameters that took no part in this rank's forward pass (their gradients are zero), or None if nobody
                keeps count. A parameter that no rank used keeps its memory: its average would never reach an optimizer.
        """
        if first:
            self._captured = capturing()
            if self._captured and self.measurement is not None:
                refuse_capture("handle.measured(), which compares a step with a full average,")
            if self._captured:
                self._prepare_capture(unused is not None)
            if not self._compared:  # once: on the host, and with no message
                loaded = self.memory.loaded
                require_same_state(self._meeting, self.memory.steps, repr(self.algorithm), loaded, self.obstacle)
                self._compared = True
            self._begin()
            if self.measurement is not None:
                self.measurement.begin(self.weight if self.weighted else None)
            if self._captured:  # what is noted now would be noted once, and every replay is a step
                self.watch.times.skip()
            elif not self.discarding:
                self._begin_step()
        self._open.update(gradients)
        worth = self._worth_a_message()  # 0 makes each call a group, whose bytes need not be counted
        if worth and not last:
            self._open_payload += self._payload(gradients)
        if unused is not None:
            self._unused = (self._unused or set()) | set(unused)
        rescales = first and self.memory.scale.scaler is not None and not self.discarding
        launches = last or self._open_payload >= worth
        if not rescales and not launches:
            return
        times = self.watch.times
        start = times.now()
        with self._own_arithmetic():
            if rescales:
                self.memory.scale.follow(self.memory.errors())
            if launches and (self._open or not self._groups):  # the last may add nothing
                with span(self.algorithm, "send"):
                    self._launch(self._open)
                self._open, self._open_payload = {}, 0
            if last:
                with span(self.algorithm, "finish"):
                    self._step.finish()
                    self._commit()
            times.worked(start)
        if last and not self.discarding and not self._captured:
            self._end_step()

    @contextmanager
    def _own_arithmetic(self) -> Iterator[None]:
        if self.divided:  # nothing is computed, so nothing has to be kept from the user's settings
            yield
            return
        with torch.no_grad(), plain_arithmetic(self.ops.device), self.ops.scratch(self.collectives.scratch):
            yield

    def _prepare_capture(self, usage: bool) -> None:
        """Raises RuntimeError for a step that a CUDA graph cannot repeat. Memory for the step is the graph's own from now on: it stays as long
        as the graph does, whatever later steps ask for."""
        scaled = self.memory.scale.scaler is not None
        require_capturable(self._dry, self.memory.steps, grad_scaler=scaled, usage=usage)
        self.collectives.scratch = Scratch()

    def _begin(self) -> None:
        self._step.begin()
        self._groups, self._open, self._unused = [], {}, None
        self._open_payload = 0

    def abandon(self) -> None:
        """Give up a step that never came to its end."""
        self._step.abandon()

    def _worth_a_message(self) -> int:
        if self.message_bytes is not None:
            return self.message_bytes
        compresses = self._remembered and self.memory.steps >= self.algorithm.start_step
        return MESSAGE_BYTES_ON_DEVICE if compresses and self.ops.device.type != "cpu" else MESSAGE_BYTES

    def _payload(self, gradients: Mapping[str, Tensor]) -> int:
        """Bytes that these send between nodes, and those inside in the same unit, see `INSIDE`. What a group sends is the sum over its parts, which is quicker than asking
        about all of them each time."""
        key = self.memory.steps >= self.algorithm.start_step, tuple(gradients)
        if key not in self._payloads:
            sent = self._dry.only(gradients).at(self.memory.steps).traffic
            between = sent.far_bytes(self._dry.algorithm)
            self._payloads[key] = between + (sent.nbytes - between) // INSIDE
        return self._payloads[key]

    def _count_dense(self, gradients: Mapping[str, Tensor]) -> None:
        names = tuple(gradients)
        if names not in self._dense_sizes:
            specs = [self.specs[name] for name in names]
            self._dense_sizes[names] = sum(spec.nbytes for spec in specs), sum(spec.size for spec in specs)
        nbytes, elements = self._dense_sizes[names]
        self.memory.sent.dense_bytes += nbytes
        self.dense_elements += elements

    def _launch(self, gradients: dict[str, Tensor]) -> None:
        # A gradient in channels_last strides is taken in its logical order, so that memory means the same on every backend.
        # In the order of the model where there is memory, not of arrival: then a model that is one group sums in the same order before and
        # after buckets are rebuilt, and a run that is resumed has the same bits on any number of ranks.
        order = [name for name in self.specs if name in gradients] if self._remembered else gradients
        donated = {name: gradients[name].contiguous() for name in order}
        state = self.memory.state.of(donated)
        usage = None
        if self.discarding:
            state = self._to_be_dropped(state)
        elif self._unused is not None and (remembered := [name for name in order if name in self._remembered]):
            usage = Usage(self.ops, self._unused, state, remembered, weighted=self.weighted)
        if self.measurement is not None:
            self.measurement.take(donated, state.tensors)
        if not (self.discarding or self._captured):
            self.skipped.examine(self.memory.steps, donated)
        weight = (self.weight,) if self.weighted else ()
        program = self.algorithm.step(self.ops, donated, state, self.memory.steps, *weight)
        running = self._step.start(program if usage is None else usage.sent_with(program))
        self._groups.append(_Group(gradients, running, usage))

    def _to_be_dropped(self, state: State[Tensor]) -> State[Tensor]:
        """The state for a step that leaves no trace: factors as they are, and no errors, in memory of their own."""
        if not self._groups:
            self._shared_before = {key: x.clone() for key, x in state.shared.items()}
        errors = self.algorithm.per_replica
        tensors = {
            name: {key: torch.zeros_like(x) if key in errors else x.clone() for key, x in memory.items()}
            for name, memory in state.tensors.items()
        }
        return State(state.shared, tensors)

    def _commit(self) -> None:
        for group in self._groups:
            averages, state = group.running.result
            if not self.discarding:
                if group.usage is not None:
                    group.usage.keep_unused(state, self.memory.state)
                self.memory.keep(state)
            self._count_dense(group.gradients)
            # After the memory: that may be what an average is now written over.
            given: list[Tensor] = []
            averaged: list[Tensor] = []
            for name, gradient in group.gradients.items():
                average = averages[name]
                if average is not gradient and (
                    average.data_ptr() != gradient.data_ptr() or average.stride() != gradient.stride()
                ):
                    given.append(gradient)
                    averaged.append(average)
            if given:
                foreach_copy_(given, averaged)
        if self.discarding:
            for key, x in self._shared_before.items():  # in place: the host foresees these very scalars
                self.memory.state.shared[key].copy_(x)
        else:
            finite = self._step.finite()
            self.memory.steps += 1
            if finite is not None:
                self.skipped.add(finite)
                if not self._captured:
                    self.skipped.look(self.memory.steps)
            self.collectives.foreseen.note(self.memory.state.shared)
        if self.measurement is not None:
            averages = {name: x for group in self._groups for name, x in group.gradients.items()}
            self.measurement.compare(averages, self.memory.steps)
        self._begin()

    def _begin_step(self) -> None:
        """A step begins, and is not being captured."""
        self.watch.times.begin()

    def _end_step(self) -> None:
        """The step has ended, and is not being captured: it is looked at."""
        sent = self.memory.sent
        now = Progress(self.memory.steps, sent.between, sent.dense_bytes)
        self.watch.end_step(now, self.memory.errors, self.memory.scale.value)

    def send_usage(self, used: Sequence[bool]) -> Running[Tensor]:
        """Tell all ranks which parameters this one has used: on its way, for each whether some rank has."""
        usage = self.ops.from_host(used, torch.uint8)
        return Step(self.collectives).start(reduce_max(usage, out=usage, watched=False))

    def stats(self) -> Stats:
        """Totals so far. On CUDA this waits for the device."""
        skipped = int(self.skipped.count)  # first: the times are of what the device has finished
        return self.watch.stats(self.memory.steps, skipped, self.memory.sent)

    def measure(self) -> Measurement:
        """Compare steps with a full average, from the next one on until `measurement` is None again. Every rank calls this."""
        require_all_ranks(self._meeting, "measured()", "local_error_norm()")
        self.measurement = Measurement(self.process_group, divided=self.divided)
        return self.measurement

    def local_error_norm(self) -> float:
        """2-norm of this rank's error memory over all tensors; 0.0 without any. On CUDA this waits for the device."""
        norm = norm_of(self.memory.errors())
        return 0.0 if norm is None else float(norm)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> StateMismatch:
        """Go on from a saved state in any form; see `gradwire.torch_backend.Handle.load_state_dict`."""
        found = self.memory.fit(state, strict)
        self.memory.take(found)
        self.collectives.foreseen.note(self.memory.state.shared)
        self.watch.restart()
        self.skipped.restart()
        self._compared = False
        return found.difference

    def successor(self, algorithm: Algorithm, groups: ProcessGroups, **options: Any) -> Driver:
        """A driver of another algorithm for the same gradients, with a memory of its own."""
        return Driver(algorithm, self.specs, self.ops.device, groups, **options)

    def continue_from(self, other: Driver) -> StateMismatch:
        """Take over the memory of a driver of another algorithm on the same parameters, as far as it fits, with its counts and its units.
        Returns what did not fit."""
        difference = self.memory.continue_from(other.memory)
        self.collectives.foreseen.note(self.memory.state.shared)
        self.skipped.continue_from(other.skipped)
        self.weight.copy_(other.weight)
        self.dense_elements = other.dense_elements
        self.watch.continue_from(other.watch)
        return difference

    def forget(self, names: str | Iterable[str] | None = None) -> None:
        """Set error memory to zero; see `gradwire.torch_backend.setup.handle.Handle.forget`."""
        for x in self.memory.errors(chosen("names", names, self.specs)):
            x.zero_()
