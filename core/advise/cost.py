"""What a method does in a step, as a backend has measured it on its device with messages that come back at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.core.buckets.assignment import assign_buckets, bucket_limits
from gradwire.core.ops import Spec
from gradwire.core.plan.traffic import Message


@dataclass(frozen=True)
class Round:
    """Something is computed, messages are sent, and before they are waited for something else is computed. Times in seconds."""

    compute: float
    messages: tuple[Message, ...] = ()
    meanwhile: float = 0.0


@dataclass(frozen=True)
class Group:
    """Gradients that are averaged by one program.

    Attributes:
        ready: bytes of gradients that backward has made when this group is complete.
        rounds: what the program does; the last round sends nothing.
    """

    ready: int
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class Cost:
    """A method on one replica.

    Attributes:
        steps: the groups of each step of a cycle.
        every: all of it happens once in so many steps: 1, but for local SGD.
        overlaps: whether messages may travel while backward goes on.
        memory_bytes: what the method keeps from step to step, beside parameters and gradients.
    """

    steps: tuple[tuple[Group, ...], ...]
    every: int = 1
    overlaps: bool = True
    memory_bytes: int = 0

    @property
    def compute(self) -> float:
        """Seconds of a step in which the method computes, on average."""
        total = sum(r.compute + r.meanwhile for step in self.steps for group in step for r in group.rounds)
        return total / len(self.steps) / self.every

    @property
    def messages(self) -> list[Message]:
        """All of a cycle."""
        return [message for step in self.steps for group in step for r in group.rounds for message in r.messages]

    def per_step(self, total: float) -> float:
        """What is summed over a cycle, for one step on average."""
        return total / len(self.steps) / self.every


def ddp_buckets(specs: Mapping[str, Spec]) -> list[list[str]]:
    """The buckets in which DDP hands gradients over: in reverse order of the parameters, 1 MiB and then 25 MiB each."""
    names = list(specs)[::-1]
    assigned = assign_buckets(
        [specs[n].nbytes for n in names], bucket_limits(25, 1), keys=[specs[n].dtype for n in names]
    )
    return [[names[i] for i in bucket] for bucket in assigned]
