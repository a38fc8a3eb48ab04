"""Averages that are on their way while training goes on: local SGD with `overlap`, or `eager`.

A message leaves after one step of the optimizer and is taken after a later one. What it is made of
stays in the memory until then. So whatever is dropped here, by an exception or since the process
has ended, is sent again by who goes on from the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gradwire.core.algorithm import State, Stepped
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.protocol.settings import with_settings
from gradwire.torch_backend.engine.collectives import Collectives
from gradwire.torch_backend.engine.groups.process_groups import ProcessGroups
from gradwire.torch_backend.engine.questions import Asked
from gradwire.torch_backend.engine.scheduler import Running, Step
from gradwire.torch_backend.ops.kernels import TorchOps


@dataclass
class _Message:
    """A fragment's message, which has left after step `left`, and has come so many `rounds` far."""

    left: int
    step: Step
    running: Running[Stepped[Tensor]]
    rounds: int = 0

    @property
    def asks_if_finite(self) -> bool:
        question = self.running.question
        return question is not None and question.asked is Asked.FINITE


class InFlight:
    """The messages of one rank. All ranks start and receive them after the same steps, in the order
    of the fragments.

    Args:
        local: of which averages are taken later.
        specs: of all parameters.
        groups: of messages that nothing else waits behind.
        ops: kernels.
        make_step: what makes a step in which parameters are averaged.
        beside: what else averages parameters, with which what is sent and waited for is counted.

    Attributes:
        lost: fragments whose message has failed since the last look.
    """

    def __init__(
        self,
        local: LocalSGD,
        specs: Mapping[str, Spec],
        groups: ProcessGroups,
        ops: TorchOps,
        make_step: Callable[[Collectives], Step],
        beside: Collectives,
    ) -> None:
        self._local, self._specs, self._groups, self._ops = local, specs, groups, ops
        self._make_step, self._beside = make_step, beside
        self._replicas = groups.whole.size()
        self._period = local.levels(self._replicas)[0].period
        self._late = self._period if local.eager else local.overlap
        # Messages of several dtypes count for more rounds than they are: then they are received
        # earlier than they would have to be.
        traffic = dry_run(local._algorithm, local.kept(specs), self._replicas).traffic
        self._rounds = max(step.collectives for step in traffic)
        self._on_their_way: dict[int, _Message] = {}
        self.lost: set[int] = set()

    def __len__(self) -> int:
        """How many are on their way."""
        return len(self._on_their_way)

    def leave(self, step: int, state: State[Tensor], settings: Mapping[str, Tensor]) -> None:
        """Send what leaves after this step. `state` is the memory after it; `settings` are those of
        now, whatever is said while it is on its way."""
        settings = {name: x.clone() for name, x in settings.items()}
        for fragment in self._local.leaving(step, self._replicas):
            collectives = Collectives(self._groups, self._ops)
            collectives.sent, collectives.times = self._beside.sent, self._beside.times
            collectives.whereabouts, collectives.levels = (
                self._beside.whereabouts,
                self._beside.levels,
            )
            collectives.beside = self._beside
            index = self._local.round(step, self._period, fragment)
            program = with_settings(
                self._local.message(self._ops, self._specs, state, fragment, index), settings
            )
            own = self._make_step(collectives)
            self._on_their_way[fragment] = _Message(step, own, own.start(program))

    def advance(self, step: int) -> None:
        """Receive the rounds that have had their share of the time, so that the next ones travel
        meanwhile. What a program writes to memory it does when it has asked whether all was finite,
        and that it is told when its message is taken, however many rounds that has."""
        for fragment, message in list(self._on_their_way.items()):
            due = int((step - message.left) * self._rounds / self._late)
            while message.rounds < due and not message.running.ended and not message.asks_if_finite:
                self._or_lost(fragment, message.step.advance)
                message.rounds += 1

    def arrived(self, step: int) -> dict[int, Stepped[Tensor]]:
        """What is taken after this step, by fragment. Waits for it."""
        taken = [
            f for f, message in self._on_their_way.items() if step - message.left >= self._late
        ]
        found = {}
        for fragment in taken:
            message = self._on_their_way[fragment]
            self._or_lost(fragment, message.step.finish)
            del self._on_their_way[fragment]
            found[fragment] = message.running.result
        return found

    def _or_lost(self, fragment: int, receive: Callable[[], object]) -> None:
        """Receive something of a message. One that fails is given up, so that the steps to come do
        not wait for it."""
        try:
            receive()
        except BaseException:
            self.lost.add(fragment)
            self._on_their_way.pop(fragment).step.abandon()
            raise

    def drop(self) -> None:
        """Wait for what is on its way, and forget it. What it is made of stays in the memory."""
        while self._on_their_way:
            self._on_their_way.popitem()[1].step.abandon()

    def close(self) -> None:
        """The same, for good: the process groups go too. To be called on all ranks."""
        self.drop()
        self._groups.destroy()
