"""The programs of a step as graphs: they run once more, without a device and without messages, and
each stretch between two messages is captured.

recorder = Recorder.of(collectives)
step = RecordingStep(recorder, graphs, near)
recording = step.run(Recording(step, make_program))
step.finish()
recording.stretches              # a graph each, and the message that follows it
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Program
from gradwire.torch_backend.engine.collectives import Collectives, Pending
from gradwire.torch_backend.engine.cuda_graphs import Graph, Graphs
from gradwire.torch_backend.engine.questions import Asked, Question
from gradwire.torch_backend.engine.scheduler import Running, Step
from gradwire.torch_backend.monitor.stats import Sent
from gradwire.torch_backend.monitor.watcher import StepTimes

#: (averages, memory) of some gradients.
Averaged = tuple[dict[str, Tensor], State[Tensor]]


class Number:
    """The number of a step that is captured. It is compared on the host, which notes the answers,
    and computed with on the device.

    Args:
        steps: the number.
        on_device: where it is in each replay, an int32 scalar.

    Attributes:
        computed: something was computed with it.
    """

    __slots__ = ("_answers", "_on_device", "_steps", "computed")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, steps: int, on_device: Tensor) -> None:
        self._steps, self._on_device = steps, on_device
        self._answers: list[tuple[Callable[[Any, Any], Any], Any, Any]] = []
        self.computed = False

    def compares_like(self, steps: int) -> bool:
        """Whether another number would have been answered the same."""
        return all(compare(steps, other) == answer for compare, other, answer in self._answers)

    def _compare(self, compare: Callable[[Any, Any], Any], other: Any) -> Any:
        answer = compare(self._steps, other)
        self._answers.append((compare, other, answer))
        return answer

    def __eq__(self, other: object) -> Any:
        return self._compare(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compare(operator.ne, other)

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, other)

    def __add__(self, other: Any) -> Tensor:
        self.computed = True
        return torch.add(self._on_device, other)

    def __mul__(self, other: Any) -> Tensor:
        self.computed = True
        return torch.mul(self._on_device, other)

    __radd__, __rmul__ = __add__, __mul__


class Later:
    """Messages that a capture has met, launched in each replay."""

    __slots__ = ("_arguments", "_launch", "_works")

    def __init__(self, launch: Callable[..., list[Any]], *arguments: Any) -> None:
        self._launch, self._arguments = launch, arguments
        self._works: list[Any] = []

    def launch(self) -> None:
        """Launch them."""
        self._works = self._launch(*self._arguments)

    def wait(self) -> None:
        """Wait for them; for none, if they were not launched."""
        works, self._works = self._works, []
        for work in works:
            work.wait()


class Recorder(Collectives):
    """Collectives that send nothing: what is to be sent is noted, with what it counts."""

    @classmethod
    def of(cls, collectives: Collectives) -> Recorder:
        """One that answers as these do, with memory of its own."""
        made = cls.__new__(cls)
        made.__dict__ = dict(copy(collectives).__dict__)
        made.scratch, made.sent, made.beside = collectives.scratch.another(), Sent(), None
        made.times = StepTimes(collectives.ops.device)  # in which no step has begun
        made.send = lambda launch, *arguments: [Later(launch, *arguments)]
        return made

    def perform(self, request: Any) -> Any:
        before = astuple(self.sent)
        answer = super().perform(request)
        if isinstance(answer, Pending):
            answer.counts = tuple(
                now - then for now, then in zip(astuple(self.sent), before, strict=True)
            )
        return answer


@dataclass(slots=True)
class Stretch:
    """What lies between two messages, or questions.

    Attributes:
        graph: the work.
        compute_overlap: what is launched before the messages that it waits for have arrived, if
            anything is.
        flags: whether what arrived before it is finite.
        pending, question, ended: where the program is then.
        slot: where the answer is that it goes on with; None: messages.
    """

    graph: Graph
    compute_overlap: Graph | None
    flags: list[Tensor]
    pending: Pending | None
    question: Question | None
    ended: bool
    slot: Tensor | None


async def _made(make: Callable[[], Program[Averaged]]) -> Averaged:
    return await make()


class Recording(Running[Averaged]):
    """A program whose stretches are captured, and not run."""

    __slots__ = ("_recording", "stretches")

    def __init__(self, step: RecordingStep, make: Callable[[], Program[Averaged]]) -> None:
        super().__init__(step, _made(make))
        self._recording = step
        self.stretches: list[Stretch] = []

    def advance(self, answers: Any) -> None:
        slot = None if answers is None else answers[0]
        with self._stretch(slot=slot):
            super().advance(answers)

    def receive(self) -> None:
        assert self.pending is not None
        compute_overlap = None
        if self.pending.busy:
            with self._recording.graphs.capture() as compute_overlap:
                self.pending.compute_overlap()
        with self._stretch(compute_overlap):
            answers = self.pending.unpacked()
            self._recording.watch(self.pending.watched)
            super().advance(answers)

    @contextmanager
    def _stretch(
        self, compute_overlap: Graph | None = None, slot: Tensor | None = None
    ) -> Iterator[None]:
        known = len(self._recording.flags)
        with self._recording.graphs.capture() as graph:
            yield
        flags = self._recording.flags[known:]
        pending = None if self.pending is None else message_of(self.pending)
        self.stretches.append(
            Stretch(graph, compute_overlap, flags, pending, self.question, self.ended, slot)
        )


class RecordingStep(Step):
    """The programs of a step that is captured. What concerns all of them is answered with memory in
    which each replay finds its answer."""

    def __init__(self, collectives: Recorder, graphs: Graphs, near: Groups | None) -> None:
        super().__init__(collectives, near=near)
        self.fuses = False  # the graphs of each program are replayed by themselves
        self.graphs = graphs

    def finish(self) -> None:
        super().finish()
        # which have this step: together they would keep the memory of graphs until Python looks for
        # such cycles
        self.programs = []

    @property
    def flags(self) -> list[Tensor]:
        """Whether what has arrived so far is finite."""
        return self._watched

    def answers(self, asked: Asked, values: list[Any]) -> list[tuple[Any]]:
        with self.graphs.capture():  # for the sake of its shape: nobody replays it
            return super().answers(asked, values)


def message_of(pending: Pending) -> Pending:
    """What has to be kept of a request to send it again: not the arrays that were packed, whose
    memory serves what is captured later."""
    kept = Pending.__new__(Pending)
    kept.works, kept.watched, kept.nbytes, kept.counts = (
        pending.works,
        (),
        pending.nbytes,
        pending.counts,
    )
    kept.groups, kept.whereabouts, kept.said = pending.groups, pending.whereabouts, pending.said
    return kept
