"""The bytes and messages of a step.

They are counted by running the algorithm itself, the very coroutine that the drivers run, on arrays that have a shape and no data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gradwire.core.algorithm import Algorithm, State, parts_of
from gradwire.core.kernels.abstract import AbstractArray, AbstractOps
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.programs import Groups, Program, Request, cannot_answer, run
from gradwire.core.requests import group_size, require_partition

T = TypeVar("T")


@dataclass(frozen=True)
class Traffic:
    """What one replica hands to the collective library in one step. `nbytes` counts payloads once: a ring all-reduce of n bytes then
    sends 2(W-1)/W · n over each replica's link. What sends half of that counts n/2: a reduce-scatter or an all-gather of n bytes in all, a gather
    of n/W bytes from each replica, an all-to-all of n bytes on each replica.

    `subgroup_bytes` are those of `nbytes` that are averaged in groups of replicas, and so may never leave a machine.

    `by_groups` has the messages and bytes in each partition of the replicas: (groups, messages, bytes).

    `optional_bytes` are those of `nbytes` that may not be sent, where an algorithm branches on data (`branch` on an average): no plan knows
    which side it will take. All else is that of the side that sends more.

    Examples:
        >>> from gradwire import AllReduce, Simulator
        >>> replicas = Simulator(AllReduce(), {"w": (4, 2)}, replicas=3)
        >>> average = replicas.step([{"w": [[0.0, 1.0]] * 4}] * 3)
        >>> replicas.traffic.collectives, replicas.traffic.nbytes
        (1, 64)
    """

    collectives: int
    nbytes: int
    subgroup_bytes: int = 0
    optional_bytes: int = 0
    by_groups: tuple[tuple[Groups, int, int], ...] = ()

    def in_groups(self, groups: Groups | None) -> tuple[int, int]:
        """Messages and bytes in these groups of replicas. None: in no groups, (0, 0)."""
        return next(((n, nbytes) for own, n, nbytes in self.by_groups if own == groups), (0, 0))

    def far_bytes(self, algorithm: object) -> int:
        """The bytes without those that stay in nodes, if the algorithm has two levels."""
        parts = parts_of(algorithm)
        return self.nbytes - (0 if parts is None else self.in_groups(parts.groups)[1])

    def __add__(self, other: Traffic) -> Traffic:
        by_groups = {groups: (0, 0) for groups, *_ in (*self.by_groups, *other.by_groups)}
        for groups, n, nbytes in (*self.by_groups, *other.by_groups):
            by_groups[groups] = by_groups[groups][0] + n, by_groups[groups][1] + nbytes
        return Traffic(
            self.collectives + other.collectives,
            self.nbytes + other.nbytes,
            self.subgroup_bytes + other.subgroup_bytes,
            self.optional_bytes + other.optional_bytes,
            tuple((groups, n, nbytes) for groups, (n, nbytes) in by_groups.items()),
        )


def traffic(
    algorithm: Algorithm,
    specs: Mapping[str, Spec],
    state: State[AbstractArray],
    step: int,
    phase: int = 0,
    *,
    world_size: int | None = None,
) -> Traffic:
    """Traffic of one step for these tensors, which may be a part of the model."""
    gradients = {name: AbstractArray(spec.shape, spec.dtype) for name, spec in specs.items()}
    program = algorithm.step(AbstractOps(), gradients, memory_of(algorithm, state, gradients), step)
    return dry_run(program, phase, world_size=world_size, place=place_of(algorithm)).traffic


def memory_of(algorithm: object, state: State[A], gradients: Mapping[str, Any]) -> State[A]:
    """What a step on these gradients is given of the memory: their part, or all of it where it does not lie by parameter (`gradwire.core.one_program`)."""
    parts = parts_of(algorithm)
    return state if parts is not None and parts.place is None else state.of(gradients)


def place_of(algorithm: object) -> int:
    """Of the replica whose part of an algorithm this is, in its node; 0 for an algorithm that is not divided."""
    parts = parts_of(algorithm)
    return 0 if parts is None else int(parts.place or 0)


def cycle_traffic(
    algorithm: Algorithm, specs: Mapping[str, Spec], state: State[AbstractArray], world_size: int | None = None
) -> list[Traffic]:
    """That of each step of a cycle, once the algorithm has started."""
    start, phases = algorithm.start_step, range(algorithm.cycle)
    return [traffic(algorithm, specs, state, start, phase, world_size=world_size) for phase in phases]


def counted(ops: Ops[A], requests: Sequence[Request], world_size: int | None = None) -> Traffic:
    """The traffic of these requests."""
    total = Traffic(0, 0)
    for request in requests:
        sent = request.payloads(ops, world_size)
        within = ((request.groups, len(sent), sum(sent)),) if request.groups and sent else ()
        total += Traffic(len(sent), sum(sent), sum(sent) if request.groups else 0, by_groups=within)
    return total


def dry_run(program: Program[Any], phase: int = 0, *, world_size: int | None = None, place: int = 0) -> DryRun:
    """What a program of one step over `AbstractArray`s asks for, in this phase of its algorithm, and what of it is sent, found out in one run.
    `world_size` None: not known, which is an error where the traffic depends on it. `place`: of the replica in its group."""
    dry = DryRun(phase, world_size, place)
    run(program, dry.answer)
    return dry


class DryRun:
    """Answers on `AbstractArray`s, and takes down what was asked for.

    Attributes:
        requests: in order; of a branch on data, those of both sides.
        traffic: what is sent.
    """

    def __init__(self, phase: int, world_size: int | None, place: int = 0) -> None:
        self.place = place
        self.phase = phase
        self.world_size = world_size
        self.requests: list[Request] = []
        self.traffic = Traffic(0, 0)

    def answer(self, request: Request) -> tuple[Any, ...]:
        if not isinstance(request, Request):
            raise cannot_answer("a plan", request)
        self.requests.append(request)
        answers = request.abstract(self)
        self.traffic += counted(AbstractOps(), [request], self.world_size)
        return answers

    def replicas(self, groups: Groups | None) -> int:
        if groups is not None:
            require_partition(groups, self.world_size or sum(map(len, groups)))
        return group_size(groups, self.world_size)

    def one_side(self, predicate: Any, phase: tuple[Any, int] | None, side: Callable[[bool], Program[T]]) -> T:
        if phase is not None:
            return run(side(phase[1] == self.phase), self.answer)
        if not isinstance(predicate, AbstractArray):
            return run(side(bool(predicate)), self.answer)
        before = self.traffic
        sides: list[tuple[Traffic, T]] = []
        for truth in (True, False):
            self.traffic = Traffic(0, 0)
            result = run(side(truth), self.answer)
            sides.append((self.traffic, result))
        larger, result = max(sides, key=lambda sent: (sent[0].nbytes, sent[0].collectives))
        least = min(sent.nbytes - sent.optional_bytes for sent, _ in sides)
        self.traffic = before + replace(larger, optional_bytes=larger.nbytes - least)
        return result
