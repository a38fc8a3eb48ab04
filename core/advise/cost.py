"""What a method costs in a step on one replica: what it computes, measured by a backend, and what
it sends, known from its dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.core.advise.timeline import Group
from gradwire.core.algorithm import Algorithm
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.local_sgd import Leaving, leaving_in_cycle, memory_bytes
from gradwire.core.plan.traffic import Message


@dataclass(frozen=True)
class Cost:
    """A method on one replica.

    Attributes:
        steps: the groups of gradients of each step of a cycle; of local SGD one group for all
            averages of a period.
        every: all of it happens once in so many steps: 1, but for local SGD.
        overlaps: whether messages may travel while backward goes on.
        memory_bytes: what the method keeps from step to step, beside parameters and gradients.
        averages: of local SGD, what leaves in a cycle, of so many steps as `steps` and `every`
            make.
    """

    steps: tuple[tuple[Group, ...], ...]
    every: int = 1
    overlaps: bool = True
    memory_bytes: int = 0
    averages: tuple[Leaving, ...] = ()

    @property
    def compute(self) -> float:
        """Seconds of a step in which the method computes, on average."""
        return self.per_step(sum(group.compute for step in self.steps for group in step))

    @property
    def messages(self) -> list[Message]:
        """All of a cycle."""
        averaged = [message for each in self.averages for message in each.sent.messages]
        return averaged + [
            message for step in self.steps for group in step for message in group.messages
        ]

    def per_step(self, total: float) -> float:
        """What is summed over a cycle, for one step on average."""
        return total / len(self.steps) / self.every


def cost_of(
    algorithm: Algorithm | LocalSGD,
    specs: Mapping[str, Spec],
    replicas: int,
    seconds: Callable[[Mapping[str, Spec]], Iterable[float]],
    groups: Sequence[Iterable[str]] | None = None,
) -> Cost:
    """What a method costs, of which a backend measures one part.

    Args:
        algorithm: after its `start_step`.
        specs: of the parameters, in the order of the model.
        replicas: of how many this one is one.
        seconds: how long the method computes with these gradients, in each step of its cycle; of
            local SGD, in each average of its cycle.
        groups: names of the gradients that are averaged together, in the order in which backward
            makes them. None: all, once backward is over.

    Raises:
        ValueError: what the algorithm refuses, by name.
    """
    kept, ready = memory_bytes(algorithm, specs, replicas), 0
    if isinstance(algorithm, LocalSGD):
        length, averages = leaving_in_cycle(algorithm, specs, replicas)
        period = (Group(_bytes_of(specs), sum(seconds(specs))),)
        periods = (period,) * (length // algorithm.cycle)
        return Cost(
            periods, algorithm.cycle, overlaps=False, memory_bytes=kept, averages=tuple(averages)
        )
    dry = dry_run(algorithm, specs, replicas)
    cycle: list[list[Group]] = [[] for _ in range(algorithm.cycle)]
    known: dict[Any, list[float]] = {}
    for names in [specs] if groups is None else groups:
        part = dry.only(names)
        own, steps = part.specs, part.cycle
        ready += _bytes_of(own)
        kind = (
            tuple((tuple(spec.shape), spec.dtype) for spec in own.values()),
            tuple(step.messages for step in steps),
        )
        if kind not in known:
            known[kind] = list(seconds(own))
        for group, took, step in zip(cycle, known[kind], steps, strict=True):
            group.append(Group(ready, took, step.messages))
    return Cost(tuple(map(tuple, cycle)), overlaps=groups is not None, memory_bytes=kept)


def _bytes_of(specs: Mapping[str, Spec]) -> int:
    return sum(spec.nbytes for spec in specs.values())
