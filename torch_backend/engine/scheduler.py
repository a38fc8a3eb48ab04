"""Programs at work on this rank: the engine under everything that runs an algorithm.

    step = Step(collectives)
    running = step.start(algorithm.step(ops, gradients, state, 0))    # its first message has left
    step.finish()
    averages, state = running.result

Hooks, wrappers, sharded optimizers and local SGD differ only in when they start programs and when
they wait. What is sent, and in which order, is a function of the order of the programs alone:
nothing is launched because a message happened to come back first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import group_by
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import (
    AT_REST,
    Collective,
    Fusable,
    Program,
    Request,
    cannot_answer,
    parted,
)
from gradwire.torch_backend.engine.collectives import Collectives, Pending
from gradwire.torch_backend.engine.questions import Arrived, Asked, Question
from gradwire.torch_backend.ops.workspace import Scratch

T = TypeVar("T")

#: (gradients of owned pieces, whether the step counts: a boolean scalar or None) of each program →
#: what the optimizer makes of them.
Optimize = Callable[[Sequence[tuple[dict[str, Tensor], Tensor | None]]], list[dict[str, Tensor]]]


#: On a device programs go on from what has arrived in so many batches: launches are what they cost,
#: and what a batch sends travels while the next one computes.
BATCHES = 3


class Running(Generic[T]):
    """A program, as far as it has come: what it has sent is `pending`, a `question` waits until all
    programs of the step have come so far, and a request is `held` until those of its batch have.
    `holds`: it stops at a request that is answered here or sent, and does not perform it yet."""

    __slots__ = ("_stack", "_step", "ended", "held", "holds", "pending", "question", "result")

    def __init__(self, step: Step, program: Program[T]) -> None:
        self._step = step
        # a branch runs on top of the program that asked for it
        self._stack: list[Program[Any]] = [program]
        self.pending: Pending | None = None
        self.question: Question | None = None
        self.held: Request | None = None
        self.holds = False
        self.ended = False
        self.result: T

    def advance(self, answers: Any) -> None:
        """Run until the program waits for others, has ended, or holds a request. One that was held
        is performed first."""
        with AT_REST:
            self._advance(answers)

    def _advance(self, answers: Any) -> None:
        self.pending = self.question = None
        request, self.held = self.held, None
        step, stack = self._step, self._stack
        perform = step.perform if step.fuses else step.collectives.perform
        while True:
            try:
                request = request or stack[-1].send(answers)
            except StopIteration as stop:
                del stack[-1]
                if not stack:
                    self.result, self.ended = stop.value, True
                    return
                answers = (stop.value,)
                continue
            if (
                self.holds
                and isinstance(request, Request)
                and (request.local or isinstance(request, Collective))
            ):
                self.held = request
                return
            asked, request = request, None
            answer = perform(asked)
            if isinstance(answer, tuple):
                answers = answer
            elif isinstance(answer, Pending):
                self.pending = answer
                return
            elif isinstance(answer, Question):
                if answer.asked is Asked.UPDATE and self._step.optimize is None:
                    raise cannot_answer("the torch driver, which has no optimizer,", asked)
                if answer.asked is not Asked.UPDATE or not self._step.update_at_once:
                    self.question = answer
                    return
                answers = self._step.answers(Asked.UPDATE, [answer.value])[0]
            elif isinstance(answer, Arrived):
                answers = answer.watched
                self._step.watch(answers)
            else:
                stack.append(answer)
                answers = None

    def receive(self) -> None:
        """Wait for the messages, and go on."""
        self._step.receive([self])

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
        near: groups of the ranks of a node. What they send each other is soon there, so a program
            goes on from it when the next one has started.
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
        self._launches_cost = in_flight is None and not collectives.ops.host_knows
        #: Whether launches cost more than what they compute, and programs of one step do it
        #: together.
        self.fuses = self._launches_cost
        #: Requests about memory in this step, and answers to them and to those to come; and such
        #: requests of steps before, by the first of them.
        self._about_memory: list[Fusable[Tensor]] = []
        self._answered: dict[Hashable, Any] = {}
        self._foreseen: dict[Hashable, list[Fusable[Tensor]]] = {}

    def begin(self, *, apart: bool = False) -> None:
        """Begin anew. A step that never came to its end is given up.

        Args:
            apart: each program computes by itself whatever it costs, as one that is replayed: what
                many compute together a device may round otherwise.
        """
        self.abandon()
        self.fuses = self._launches_cost and not apart
        self.programs = []
        self._watched = []
        self._answered = {}
        if self._about_memory:
            first = _keys_of(self._about_memory[0])
            others = [each for each in self._foreseen.items() if each[0] != first]
            # Half-steps alternate between two. What is held for longer may be memory that somebody
            # has replaced.
            self._foreseen, self._about_memory = (
                dict([*others[-1:], (first, self._about_memory)]),
                [],
            )
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
        """Receive the messages of one round, after which those of the next are on their way; or
        answer what concerns all. False: all programs have ended."""
        waiting = [running for running in self.programs if not running.ended]
        sent = [running for running in waiting if running.pending is not None]
        fuses = (
            self.fuses and len(sent) > BATCHES and all(type(running) is Running for running in sent)
        )
        some = -(-len(sent) // BATCHES) if fuses else 1
        for start in range(0, len(sent), some):
            if fuses:
                self.receive(sent[start : start + some])
            else:
                sent[start].receive()
        if waiting and not sent:
            self._answer(waiting)
        return bool(waiting)

    def receive(self, batch: Sequence[Running[Any]]) -> None:
        """Wait for the messages of some programs, and go on with these: what they compute alike is
        computed at once."""
        arrived: list[tuple[Any, ...]] = []
        watched: list[Tensor] = []
        for running in batch:
            if running.pending is not None:
                arrived.append(running.pending.wait(self.collectives.times))
                watched += running.pending.watched
        self.watch(watched)
        if len(batch) == 1:
            batch[0].advance(arrived[0])
            return
        for running, answers in zip(batch, arrived, strict=True):
            running.holds = True
            running.advance(answers)
        while local := [
            running for running in batch if running.held is not None and running.held.local
        ]:
            requests: list[Any] = [running.held for running in local]
            for members in group_by(range(len(local)), [each.key() for each in requests]):
                own = [requests[i] for i in members]
                for i, answers in zip(members, self._answers_to(own), strict=True):
                    local[i].held = None
                    local[i].advance(answers)
        for running in batch:
            running.holds = False
            if running.held is not None:
                running.advance(None)

    def _answers_to(self, requests: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The answers to local requests of one key."""
        if isinstance(requests[0], Fusable):
            return parted(requests, type(requests[0]).fuse(requests).answer())
        return [each.answer() for each in requests]

    def perform(self, request: Any) -> Any:
        """What `Collectives` answer. A local request about memory is answered for all programs of
        the step when the first of them asks: for those that have asked in a step that began so."""
        if not (isinstance(request, Fusable) and request.lasting):
            return self.collectives.perform(request)
        keys = _keys_of(request)
        if not self._about_memory:
            self._compute_ahead(
                [each for each in self._foreseen.get(keys, ()) if each.key() == request.key()]
            )
        self._about_memory.append(request)
        known = [self._answered.get(key) for key in keys]
        return request.answer() if any(each is None for each in known) else tuple(known)

    def _compute_ahead(self, requests: Sequence[Fusable[Tensor]]) -> None:
        if len(requests) > 1:
            keys = [key for each in requests for key in _keys_of(each)]
            self._answered = dict(zip(keys, type(requests[0]).fuse(requests).answer(), strict=True))

    def watch(self, arrays: Sequence[Tensor]) -> None:
        """Note whether what has arrived is finite."""
        if arrays:
            looked_at = list(arrays)
            for i, x in enumerate(arrays):
                if x.itemsize == 1:
                    looked_at[i] = x.half()
            self._watched += self.collectives.ops.are_finite(looked_at)

    def note(self, flags: Sequence[Tensor]) -> None:
        """That all these are to be true, as what is watched is to be finite."""
        self._watched += flags

    def finite(self) -> Tensor | None:
        """Whether all was, that was watched: a boolean scalar; None if nothing was."""
        if len(self._watched) > 1:
            self._watched = [torch.cat([flags.view(-1) for flags in self._watched]).all()]
        elif self._watched and self._watched[0].ndim:
            self._watched = [self._watched[0].all()]
        return self._watched[0] if self._watched else None

    def _answer(self, waiting: Sequence[Running[Any]]) -> None:
        questions = [running.question for running in waiting]
        asked = min(question.asked for question in questions if question is not None)
        who = [
            running
            for running, question in zip(waiting, questions, strict=True)
            if question and question.asked is asked
        ]
        answers = self.answers(
            asked, [running.question.value for running in who if running.question]
        )
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
            answer = (
                torch.ones((), dtype=torch.bool, device=collectives.ops.device)
                if finite is None
                else finite
            )
        return [(answer,)] * len(values)

    def _receive_earlier(self, started: Sequence[Running[Any]]) -> None:
        """All but the last few, which have their messages on their way together."""
        if self._in_flight is not None:
            for running in started[: len(started) - self._in_flight + 1]:
                if running.pending is not None:
                    running.receive()


def run_alone(
    collectives: Collectives,
    program: Program[T],
    make_step: Callable[[Collectives], Step] | None = None,
) -> T:
    """What a program returns that is all of a step, of this kind. Its arrays may lie in messages:
    copy what is to last."""
    # Messages are not kept: programs that run now and then would hold on to the size of the model
    # in between.
    collectives.scratch = Scratch()
    step = (make_step or Step)(collectives)
    try:
        running = step.start(program)
        step.finish()
    finally:
        step.abandon()
        collectives.scratch = Scratch()
    return running.result


def _keys_of(request: Fusable[Tensor]) -> tuple[Hashable, ...]:
    """What is asked about each array: by tensors that are alive."""
    fields = [each for name in request.per_array if (each := getattr(request, name))]
    return tuple((request.key(), *map(id, own)) for own in zip(*fields, strict=True))
