"""The messages of a step, one by one, for whoever wants to know how long each takes.

for message in step_messages(PowerSGD(4), specs, world_size=8)[0]: print(message.nbytes)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.core.algorithm import Algorithm, on_replica
from gradwire.core.kernels.abstract import AbstractOps, abstract_arrays
from gradwire.core.ops import Spec
from gradwire.core.plan.traffic import DryRun, place_of
from gradwire.core.programs import Groups, Program, Request, run


@dataclass(frozen=True)
class Message:
    """What replicas send each other at once.

    Attributes:
        nbytes: in the unit of `gradwire.core.plan.traffic.Traffic`, where a ring all-reduce counts its payload once.
        exchange: whether replicas hand each other parts (all-to-all, gather, half of an all-reduce). Otherwise it is an all-reduce.
        groups: in which groups of replicas it stays. None: all of them.
    """

    nbytes: int
    exchange: bool
    groups: Groups | None = None

    def within(self, size: int) -> bool:
        """Whether it stays among replicas that are on one node, where each node has so many, in order."""
        return self.groups is not None and within_nodes(self.groups, size)


def within_nodes(groups: Groups, size: int) -> bool:
    """Whether all members of each group are on one node, where each node has so many replicas, in order."""
    return all(len({member // size for member in members}) == 1 for members in groups)


def step_messages(
    algorithm: Algorithm, specs: Mapping[str, Spec], world_size: int | None = None
) -> list[list[Message]]:
    """Those of each step of a cycle on the first replica, once the algorithm has started. Raises what its `init` raises."""
    ops = AbstractOps()
    algorithm = on_replica(algorithm, specs, 0, world_size)
    state = algorithm.init(ops, specs)
    found = []
    for phase in range(algorithm.cycle):
        gradients = abstract_arrays(specs)
        program = algorithm.step(ops, gradients, state.of(gradients), algorithm.start_step)
        found.append(program_messages(program, phase, world_size, place_of(algorithm)))
    return found


def program_messages(
    program: Program[Any], phase: int = 0, world_size: int | None = None, place: int = 0
) -> list[Message]:
    """What a program over `AbstractArray`s sends, as the replica of some place in its group. Of a branch on data, both sides."""
    recorder = _Recorder(phase, world_size, place)
    run(program, recorder.answer)
    return recorder.messages


class _Recorder(DryRun):
    def __init__(self, phase: int, world_size: int | None, place: int) -> None:
        super().__init__(phase, world_size, place)
        self.messages: list[Message] = []

    def answer(self, request: Request) -> tuple[Any, ...]:
        answers = super().answer(request)
        payloads = request.payloads(AbstractOps(), self.world_size)
        self.messages += [Message(nbytes, request.exchanges, request.groups) for nbytes in payloads]
        return answers
