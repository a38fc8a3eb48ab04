"""Programs at work on this rank: the engine under everything that runs an algorithm.

    step = Step(collectives)
    running = step.start(algorithm.step(ops, gradients, state, 0))     # as far as its first message, which is on its way
    step.finish()
    averages, state = running.result

Hooks, wrappers, sharded optimizers and local SGD differ only in when they start programs and when they wait. What is sent, and in which
order, is a function of the order of the programs alone: nothing is launched because a message happened to come back first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Program, cannot_answer
from gradwire.torch_backend.engine.collectives import Collectives, Pending
from gradwire.torch_backend.engine.questions import Arrived, Asked, Question
from gradwire.torch_backend.ops.workspace import Scratch

T = TypeVar("T")

#: (gradients of owned pieces, whether the step counts: a boolean scalar or None) of each program → what the optimizer makes of them.
Optimize = Callable[[Sequence[tuple[dict[str, Tensor], Tensor | None]]], list[dict[str, Tensor]]]


class Running(Generic[T]):
    """A program, as far as it has come: what it has sent is `pending`, and a `question` waits until all programs of the step have come so far."""

    __slots__ = ("_stack", "_step", "ended", "pending", "question", "result")

    def __init__(self, step: Step, program: Program[T]) -> None:
        self._step = step
        self._stack: list[Program[Any]] = [program]  # a branch runs on top of the program that asked for it
        self.pending: Pending | None = None
        self.question: Question | None = None
        self.ended = False
        self.result: T

    def advance(self, answers: Any) -> None:
        """Run until the program waits for others, or has ended."""
        self.pending = self.question = None
        perform, stack = self._step.collectives.perform, self._stack
        while True:
            try:
                request = stack[-1].send(answers)
            except StopIteration as stop:
                del stack[-1]
                if not stack:
                    self.result, self.ended = stop.value, True
                    return
                answers = (stop.value,)
                continue
            answer = perform(request)
            if isinstance(answer, tuple):
                answers = answer
            elif isinstance(answer, Pending):
                self.pending = answer
                return
            elif isinstance(answer, Question):
                if answer.asked is Asked.UPDATE and self._step.optimize is None:
                    raise cannot_answer("the torch driver, which has no optimizer,", request)
                if answer.asked is not Asked.UPDATE or not self._step.update_at_once:
                    self.question = answer
                    return
                answers = self._step.answers(Asked.UPDATE, [answer.value])[0]
            elif isinstance(answer, Arrived):
                answers = answer.watched
                for x in answers:
                    self._step.watch(x)
            else:
                stack.append(answer)
                answers = None

    def receive(self) -> None:
        """Wait for the messages, and go on."""
        assert self.pending is not None
        answers = self.pending.wait(self._step.collectives.times)
        for x in self.pending.watched:
            self._step.watch(x)
        self.advance(answers)

    def close(self) -> None:
        """Give it up. What it has sent is still on its way, in memory that is used again."""
        if self.pending is not None:
            self.pending.settle()
            self.pending = None
        for program in reversed(self._stack):
            program.close()


class Step:
    """The programs of one step after the other, side by side, in order.

    Args:
        collectives: answers what does not concern all of them.
        unscaled: what is made of the norm of all their gradients.
        optimize: takes the optimizer's step. None: there is none.
        in_flight: so many of them may have messages on their way. None: all.
        near: groups of the ranks of a node. What they send each other is soon there, so a program goes on from it when the next one has started.
        update_at_once: each program's gradients are an optimizer's step of their own.
    """

    def __init__(
        self,
        collectives: Collectives,
        *,
        unscaled: Callable[[Tensor], Tensor] | None = None,
        optimize: Optimize | None = None,
        in_flight: int | None = None,
        near: Groups | None = None,
        update_at_once: bool = False,
    ) -> None:
        self.collectives = collectives
        self.update_at_once = update_at_once
        self.programs: list[Running[Any]] = []
        self._unscaled = unscaled
        self.optimize = optimize
        self._in_flight = in_flight
        self._near = near
        self._watched: list[Tensor] = []

    def begin(self) -> None:
        """Begin anew. A step that never came to its end is given up."""
        self.abandon()
        self.programs = []
        self._watched = []
        self.collectives.scratch.rewind()

    def abandon(self) -> None:
        """Give up a step that never came to its end."""
        for running in self.programs:
            running.close()

    def start(self, program: Program[T]) -> Running[T]:
        """Run a program until it waits for others."""
        return self.run(Running(self, program))

    def run(self, running: Running[T]) -> Running[T]:
        """The same, of a program of this step that has not begun."""
        self.programs.append(running)
        running.advance(None)
        self._receive_earlier(self.programs)
        if self._near is not None:
            for earlier in self.programs[:-1]:
                if earlier.pending is not None and earlier.pending.groups == self._near:
                    earlier.receive()
        return running

    def finish(self) -> None:
        """Run all programs to their end: round by round, in their order."""
        while self.advance():
            pass

    def advance(self) -> bool:
        """Receive the messages of one round, after which those of the next are on their way; or answer what concerns all. False: all programs have
        ended."""
        waiting = [running for running in self.programs if not running.ended]
        sent = [running for running in waiting if running.pending is not None]
        for running in sent:
            running.receive()
        if waiting and not sent:
            self._answer(waiting)
        return bool(waiting)

    def watch(self, x: Tensor) -> None:
        """Note whether what has arrived is finite."""
        self._watched.append(self.collectives.ops.all_finite(x if x.itemsize > 1 else x.half()))

    def note(self, flags: Sequence[Tensor]) -> None:
        """That all these are to be true, as what is watched is to be finite."""
        self._watched += flags

    def finite(self) -> Tensor | None:
        """Whether all was, that was watched: a boolean scalar; None if nothing was."""
        if len(self._watched) > 1:
            self._watched = [torch.stack(self._watched).all()]
        return self._watched[0] if self._watched else None

    def _answer(self, waiting: Sequence[Running[Any]]) -> None:
        questions = [running.question for running in waiting]
        asked = min(question.asked for question in questions if question is not None)
        who = [
            running
            for running, question in zip(waiting, questions, strict=True)
            if question and question.asked is asked
        ]
        answers = self.answers(asked, [running.question.value for running in who if running.question])
        for i, (running, answer) in enumerate(zip(who, answers, strict=True)):
            running.advance(answer)
            self._receive_earlier(who[: i + 1])

    def answers(self, asked: Asked, values: list[Any]) -> list[tuple[Any]]:
        """What these programs are answered, for what each of them has asked."""
        collectives = self.collectives
        if asked is Asked.UPDATE:
            assert self.optimize is not None
            return [(new,) for new in self.optimize(values)]
        if asked is Asked.NORM:
            norm = collectives.ops.norm_of_all(values)
            answer: Any = norm if self._unscaled is None else self._unscaled(norm)
        elif asked is Asked.SUM:
            answer = collectives.sum_of(values)
        else:
            finite = self.finite()
            answer = torch.ones((), dtype=torch.bool, device=collectives.ops.device) if finite is None else finite
        return [(answer,)] * len(values)

    def _receive_earlier(self, started: Sequence[Running[Any]]) -> None:
        """All but the last few, which have their messages on their way together."""
        if self._in_flight is not None:
            for running in started[: len(started) - self._in_flight + 1]:
                if running.pending is not None:
                    running.receive()


def run_alone(
    collectives: Collectives, program: Program[T], make_step: Callable[[Collectives], Step] | None = None
) -> T:
    """What a program returns that is all of a step, of this kind. Its arrays may lie in messages: copy what is to last."""
    # Messages are not kept: programs that run now and then would hold on to the size of the model in between.
    collectives.scratch = Scratch()
    step = (make_step or Step)(collectives)
    try:
        running = step.start(program)
        step.finish()
    finally:
        step.abandon()
        collectives.scratch = Scratch()
    return running.result
