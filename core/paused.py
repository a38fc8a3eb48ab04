"""A program that waits where it asks whether the step is finite, until others know as well.

    paused = Paused(algorithm.step(ops, gradients, state, step))
    await paused.until_it_asks()             # all messages; nothing is stored yet
    averages, after = await paused.resumed(finite)

Whoever shares a step among replicas that compute different parts of it can let them agree in between. Nobody has to keep what was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps, abstract_arrays
from gradwire.core.ops import Spec
from gradwire.core.plan.traffic import DryRun
from gradwire.core.programs import Program, Request, ask, run

T = TypeVar("T")


class Paused(Generic[T]):
    """A program in two halves, of which the first ends where it asks for what `settles` a step, or with the program."""

    def __init__(self, program: Program[T]) -> None:
        self._program = program
        self._results: list[T] = []

    async def until_it_asks(self) -> None:
        """The first half."""
        await self._run(None)

    async def resumed(self, finite: Any) -> T:
        """The second half, with this answer. Returns what the program returns."""
        while not self._results:
            await self._run((finite,))
        return self._results[0]

    async def _run(self, answers: Any) -> None:
        while True:
            try:
                request = self._program.send(answers)
            except StopIteration as stop:
                self._results.append(stop.value)
                return
            if request.settles:
                return
            answers = await ask(request)


def stores_last(algorithm: Algorithm, specs: Mapping[str, Spec]) -> bool:
    """Whether steps send all that they have to send, then ask once whether the step is finite, and store nothing before. False for an algorithm that
    cannot be tried without data."""
    try:
        state = algorithm.init(AbstractOps(), specs)
        start = algorithm.start_step
        tries = [*([(0, 0)] if start else []), *((start, phase) for phase in range(algorithm.cycle))]
        return all(_stores_last(algorithm, specs, state, *each) for each in tries)
    except Exception:  # it is written for the arrays of one framework
        return False


def _stores_last(
    algorithm: Algorithm, specs: Mapping[str, Spec], state: State[AbstractArray], step: int, phase: int
) -> bool:
    dry, asked = DryRun(phase, 2), list[Request]()

    def answer(request: Request) -> tuple[Any, ...]:
        asked.append(request)
        return dry.answer(request)

    gradients = abstract_arrays(specs)
    _, after = run(algorithm.step(AbstractOps(), gradients, state.of(gradients), step), answer)
    questions = [i for i, request in enumerate(asked) if request.settles]
    if not questions:
        return _is(after, state)
    alone = len(questions) == sum(request.settles for request in dry.requests) == 1
    return alone and not any(request.payloads(AbstractOps(), 2) for request in asked[questions[0] :])


def _is(after: State[Any], before: State[Any]) -> bool:
    """Whether it is the same memory, and not only as large."""
    same = all(x is before.shared.get(key) for key, x in after.shared.items())
    return same and all(
        x is before.tensors.get(name, {}).get(key) for name, own in after.tensors.items() for key, x in own.items()
    )
