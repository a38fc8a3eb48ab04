"""Steps that are replayed: what lies between two messages of a program is captured once as a graph
of the device, and launched as a whole from then on.

    eager, eager, eager     steps whose host decides the same: their key
    capture                 the programs of the next such step run once more, without a device and
                            without messages: each stretch between two of them
                            becomes a graph, each message is noted
    replay, replay, …       a graph, a message, a graph, … while the key is the same

A stretch is of one group, since no message is to wait for another group's. The ends of all groups,
between which there is no message, are one graph.

A key is all that the host decides: which gradients, in which groups, where they lie, where memory
lies, the phase of the algorithm. What the device decides (whether a step is finite, a weight, a
setting) is in its memory, which graphs read. Where an algorithm computes with the number of the
step, that is a scalar of the device too. So a replayed step comes to the bits of an eager one, and
sends the same messages: each rank replays or not by itself.

A capture runs nothing and sends nothing, so one that fails has changed nothing: its key stays
eager. If a gradient lies elsewhere in the middle of a step, the groups before it are replayed and
the others are not: what concerns all programs of a step is answered by the engine in either case.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import AT_REST, Program
from gradwire.torch_backend.engine.collectives import Collectives, Pending
from gradwire.torch_backend.engine.cuda_graphs import Graph, Graphs, graphs_for
from gradwire.torch_backend.engine.scheduler import Running, Step
from gradwire.torch_backend.engine.stretches import (
    Averaged,
    Number,
    Recorder,
    Recording,
    RecordingStep,
    Stretch,
)
from gradwire.torch_backend.monitor.stats import Sent
from gradwire.torch_backend.ops.kernels import TorchOps
from gradwire.torch_backend.ops.workspace import Scratch
from gradwire.torch_backend.state.memory import Memory

logger = logging.getLogger("gradwire")

#: Steps of one key before it is captured: buckets are rebuilt after the first, and constants are
#: made.
EQUAL = 3
#: Kinds of step that are kept at a time.
SETS = 4
#: Eligible steps in a row, none of which had a key that was known, after which nobody looks for
#: keys any more.
TRIES = 20
#: Keys that are remembered.
KNOWN = 8
#: So many steps have gone by a set before it makes place for another: not fewer than `KNOWN`, or
#: kinds that take turns would be captured in turns.
MISSES = 8
#: Steps that are replayed for each capture, on average: a capture takes the host as long as a step.
WORTH = 2

GroupKey = tuple[Any, ...]


def addresses(state: State[Tensor]) -> tuple[int, ...]:
    """The addresses of memory."""
    own = [x.data_ptr() for memory in state.tensors.values() for x in memory.values()]
    return (*own, *[x.data_ptr() for x in state.shared.values()])


def key_of(gradients: Mapping[str, Tensor]) -> GroupKey:
    """Which gradients these are, and where they lie."""
    return (
        *gradients,
        *[x.data_ptr() for x in gradients.values()],
        *[x.stride() for x in gradients.values()],
    )


class Captured(Protocol):
    """The driver whose steps are captured: `gradwire.torch_backend.engine.step.GradientStep`."""

    algorithm: Algorithm
    memory: Memory
    collectives: Collectives
    ops: TorchOps

    def arithmetic(self, scratch: Scratch) -> AbstractContextManager[None]:
        """See `GradientStep`."""

    def program_of(self, gradients: Mapping[str, Tensor], number: Any) -> Program[Averaged]:
        """See `GradientStep`."""

    def end_of(self, groups: Sequence[tuple[Mapping[str, Tensor], Averaged]]) -> None:
        """See `GradientStep`."""


@dataclass(slots=True)
class Tape:
    """A group's program, stretch by stretch, and its end, for steps in which other groups are not
    replayed."""

    key: GroupKey
    stretches: list[Stretch]
    ending: Graph


@dataclass(slots=True)
class Set:
    """The groups of one kind of step, and the end of all of them. `filled`: which answers are in
    slots. `missed`: steps since it was replayed last."""

    kind: Any
    tapes: list[Tape]
    ending: Graph
    number: Number
    missed: int = 0
    filled: dict[int, Tensor] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[GroupKey, ...]:
        """The keys of its groups, in their order."""
        return tuple(tape.key for tape in self.tapes)

    def serves(self, kind: Any, steps: int) -> bool:
        """Whether it is of this kind, after so many steps."""
        return bool(self.kind == kind) and self.number.compares_like(steps)


class Replaying(Running[Averaged]):
    """A program that is replayed."""

    __slots__ = ("_set", "_stretches")

    def __init__(self, step: Step, of: Set, tape: Tape) -> None:
        self._step, self._stack = step, []
        self.pending, self.question, self.ended = None, None, False
        self._set, self._stretches = of, iter(tape.stretches)

    def advance(self, answers: Any) -> None:
        stretch = next(self._stretches)
        if stretch.slot is not None and self._set.filled.get(id(stretch.slot)) is not answers[0]:
            stretch.slot.copy_(answers[0])
            self._set.filled[id(stretch.slot)] = answers[0]
        self._launch(stretch)

    def receive(self) -> None:
        assert self.pending is not None
        stretch = next(self._stretches)
        if stretch.compute_overlap is not None:
            stretch.compute_overlap.replay()
        self.pending.arrive(self._step.collectives.times)
        self._launch(stretch)

    def _launch(self, stretch: Stretch) -> None:
        stretch.graph.replay()
        self._step.note(stretch.flags)
        self.pending, self.question, self.ended = stretch.pending, stretch.question, stretch.ended
        if self.pending is not None:
            send(self.pending, self._step.collectives)


def send(pending: Pending, collectives: Collectives) -> None:
    """Launch messages that were noted in a capture, and count them."""
    pending.launched = collectives.times.now()
    for work in pending.works:
        work.launch()
    for name, n in zip(SENT, pending.counts, strict=True):
        if n:
            setattr(collectives.sent, name, getattr(collectives.sent, name) + n)
    collectives.note(pending.said)


SENT = [f.name for f in fields(Sent)]


class Replays:
    """Which steps of an owner are replayed, and which are captured.

    Args:
        owner: of the steps.
        near: see `gradwire.torch_backend.engine.scheduler.Step`.

    Attributes:
        wanted: steps may be replayed.
        given_up: they were wanted, and too few were like another.
        replayed: so many have been, as a whole.
        obstacle: why the last capture that failed did; "" if none has.
    """

    def __init__(self, owner: Captured, near: Groups | None) -> None:
        self.wanted = self.given_up = False
        self.replayed = 0
        self.obstacle = ""
        self._captures = 0
        self._owner, self._near = owner, near
        self._graphs: Graphs | None = None
        self._sets: list[Set] = []
        self._known: Counter[Any] = Counter()
        self._failed: set[Any] = set()
        self._unknown = 0
        self._number: Tensor | None = None
        self._forget_step()

    def _forget_step(self) -> None:
        self._kind: Any = None
        self._set: Set | None = None
        self._groups: list[Mapping[str, Tensor]] = []
        self._keys: list[GroupKey] = []

    @property
    def nbytes(self) -> int:
        """The bytes of the graphs' memory."""
        return self._graphs.nbytes if self._graphs is not None and self._sets else 0

    def begin(self, eligible: bool) -> None:
        """A step begins. `eligible`: what the host decides in it is in its key."""
        self._forget_step()
        if self.wanted and eligible:
            self._kind = self._kind_of_next()

    def _kind_of_next(self) -> Any:
        """What the host knows of the next step before its gradients come."""
        memory, collectives = self._owner.memory, self._owner.collectives
        foreseen, shared = collectives.foreseen, memory.state.shared.values()
        phase = tuple(x.item() if foreseen is None else foreseen.value(x).item() for x in shared)
        whole = collectives.groups.whole
        return (
            phase,
            addresses(memory.state),
            id(whole),
            whole.size(),
            torch.are_deterministic_algorithms_enabled(),
        )

    def start(
        self, step: Step, gradients: Mapping[str, Tensor]
    ) -> tuple[Running[Averaged], Tape] | None:
        """Start the program of the next group by a replay: the program, and where it is from. None:
        it is not replayed."""
        if self._kind is None:
            return None
        key, place = key_of(gradients), len(self._keys)
        self._keys.append(key)
        self._groups.append(gradients)
        if not place:
            self._set = self._found(key)
        of = self._set
        if of is None or place >= len(of.tapes) or of.tapes[place].key != key:
            self._set = None  # the groups so far go on as they have begun
            return None
        tape = of.tapes[place]
        return step.run(Replaying(step, of, tape)), tape

    def finish(self, tapes: Sequence[Tape]) -> None:
        """All programs of a step have ended, these among them: launch what their end is."""
        of = self._set
        for each in tapes if of is None or len(of.tapes) > len(tapes) else [of]:
            each.ending.replay()

    def _found(self, key: GroupKey) -> Set | None:
        """The set that a step of this kind begins, whose first group has this key. Of several that
        which was replayed last: later groups may lie elsewhere now."""
        steps = self._owner.memory.steps
        begun = [
            each
            for each in self._sets
            if each.serves(self._kind, steps) and each.tapes[0].key == key
        ]
        found = min(begun, key=lambda each: each.missed, default=None)
        for each in self._sets:
            each.missed += 1
        if found is not None:
            found.filled.clear()
            if found.number.computed:
                assert self._number is not None
                self._number.fill_(steps)
        return found

    def end(self) -> None:
        """A step has ended. Steps like it are captured if there have been some."""
        kind, keys, groups, whole = self._kind, tuple(self._keys), self._groups, self._set
        self._forget_step()
        if kind is None or not keys:
            return
        if whole is not None and len(keys) == len(whole.tapes):
            whole.missed = self._unknown = 0
            self.replayed += 1
        elif not self._note((kind, keys)):
            return
        if any(
            n >= EQUAL and known[1] == keys and known not in self._failed
            for known, n in self._known.items()
        ):
            # Which need not be this one: its turn has come for the gradients that are here.
            following = self._kind_of_next()
            enough = self._known[following, keys] >= EQUAL and (following, keys) not in self._failed
            if enough and not self._has(following, keys) and self._has_place():
                if self._captures >= SETS and self.replayed < WORTH * self._captures:
                    self._give_up()
                else:
                    self._capture(following, keys, groups)

    def _note(self, key: Any) -> bool:
        """That a step was eager. False, once and for all, if none is ever like another."""
        self._known[key] += 1
        self._unknown = self._unknown + 1 if self._known[key] == 1 else 0
        if self._unknown >= TRIES:
            self._give_up()
            return False
        for old in list(self._known)[:-KNOWN]:
            del self._known[old]
        return True

    def _give_up(self) -> None:
        logger.info(
            "%r: steps are not replayed, since gradients lie elsewhere in each of them, or soon."
            " Gradients stay where they are with zero_grad(set_to_none=False), or in DDP's buckets",
            self._owner.algorithm,
        )
        self.wanted, self.given_up, self._unknown = False, True, 0
        self._known.clear()
        self._sets.clear()

    def _has(self, kind: Any, keys: tuple[GroupKey, ...]) -> bool:
        """Whether there is a set of these: another with the same first group has been taken for
        it."""
        return any(
            each.serves(kind, self._owner.memory.steps) and each.keys == keys for each in self._sets
        )

    def _has_place(self) -> bool:
        self._sets = [each for each in self._sets if each.missed < MISSES]
        return len(self._sets) < SETS

    def _capture(
        self, kind: Any, keys: tuple[GroupKey, ...], groups: Sequence[Mapping[str, Tensor]]
    ) -> None:
        owner = self._owner
        recorder = Recorder.of(owner.collectives)
        step: RecordingStep | None = None
        try:
            if self._number is None:
                self._number = torch.zeros((), dtype=torch.int32, device=owner.ops.device)
            number = Number(owner.memory.steps, self._number)
            if self._graphs is None:
                self._graphs = graphs_for(owner.ops.device)
            if self._graphs is None:
                self.wanted = False
                return
            step = RecordingStep(recorder, self._graphs, self._near)
            with owner.arithmetic(recorder.scratch), owner.ops.captured(), AT_REST:
                captured = self._captured(step, keys, groups, number)
        except Exception as error:
            # nothing was run and nothing was sent: the next step is eager, as this one was
            self._failed.add((kind, keys))
            self.obstacle = str(error)
            logger.info(
                "%r: steps of one kind stay eager, since a capture failed: %s",
                owner.algorithm,
                error,
            )
            if step is not None:
                step.abandon()
            return
        del self._known[kind, keys]
        self._captures += 1
        self._sets.append(Set(kind, *captured, number))
        owner.collectives.scratch = Scratch()  # replays do not ask for it

    def _captured(
        self,
        step: RecordingStep,
        keys: Sequence[GroupKey],
        groups: Sequence[Mapping[str, Tensor]],
        number: Number,
    ) -> tuple[list[Tape], Graph]:
        programs = []
        for gradients in groups:
            make = lambda own=gradients: self._owner.program_of(own, number)  # noqa: E731
            programs.append(Recording(step, make))
            step.run(programs[-1])
        step.finish()
        ends = [
            (gradients, program.result) for gradients, program in zip(groups, programs, strict=True)
        ]
        tapes = [
            Tape(key, program.stretches, self._ending(step, [end]))
            for key, program, end in zip(keys, programs, ends, strict=True)
        ]
        return tapes, tapes[0].ending if len(tapes) == 1 else self._ending(step, ends)

    def _ending(
        self, step: RecordingStep, ends: Sequence[tuple[Mapping[str, Tensor], Averaged]]
    ) -> Graph:
        with step.graphs.capture() as ending:
            self._owner.end_of(ends)
        return ending
