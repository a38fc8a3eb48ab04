"""A program that waits where it asks whether the step is finite, until others know as well.

    paused = Paused(algorithm.step(ops, gradients, state, step))
    await paused.until_it_asks()             # all messages; nothing is stored yet
    averages, after = await paused.resumed(finite)

Whoever shares a step among replicas that compute different parts of it can let them agree in between. Nobody has to keep what was before.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from gradwire.core.programs import Program, ask

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
