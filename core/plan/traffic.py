"""The bytes and messages of a step.

They are counted by running the algorithm itself, the very coroutine that the drivers run, on arrays
that have a shape and no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gradwire.core.algorithm import near_in
from gradwire.core.ops import A, Ops
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Pattern, Request


class Part(NamedTuple):
    """Messages that go alike among the same replicas, and their bytes. `groups` None: all
    replicas."""

    pattern: Pattern
    groups: Groups | None
    collectives: int
    nbytes: int


@dataclass(frozen=True)
class Traffic:
    """What one replica hands to the collective library in one step. `nbytes` counts payloads once:
    a ring all-reduce of n bytes then sends 2(W-1)/W · n over each replica's link. What sends half
    of that counts n/2: a reduce-scatter or an all-gather of n bytes in all, a gather of n/W bytes
    from each replica, an all-to-all of n bytes on each replica.

    `subgroup_bytes` are those of `nbytes` that are averaged in groups of replicas, and so may never
    leave a machine.

    `parts` are those messages that are no all-reduces of all replicas, by how they go and among
    whom: what crosses the links between nodes depends on it.

    `optional_bytes` are those of `nbytes` that may not be sent, where an algorithm branches on data
    (`branch` on an average): no plan knows which side it will take. All else is that of the side
    that sends more.

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
    parts: tuple[Part, ...] = field(default=(), compare=False)

    def in_groups(self, groups: Groups | None) -> tuple[int, int]:
        """Messages and bytes in these groups of replicas. None: in no groups, (0, 0)."""
        own = self.among(groups)
        return own.collectives, own.nbytes

    def among(self, groups: Groups | None) -> Traffic:
        """The messages in these groups of replicas. None: in no groups, nothing."""
        own = tuple(part for part in self.parts if groups is not None and part.groups == groups)
        n, nbytes = sum(part.collectives for part in own), sum(part.nbytes for part in own)
        return Traffic(n, nbytes, nbytes, parts=own)

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """`parts`, and what is left of messages and bytes: all-reduces of all replicas."""
        rest = [
            self.collectives - sum(p.collectives for p in self.parts),
            self.nbytes - sum(p.nbytes for p in self.parts),
        ]
        return (*self.parts, Part("all_reduce", None, *rest)) if any(rest) else self.parts

    def far_bytes(self, algorithm: object) -> int:
        """The bytes without those that stay in nodes, if the algorithm has two levels."""
        return self.nbytes - sum(
            part.nbytes for part in self.parts if part.groups and near_in(algorithm, part.groups)
        )

    def __add__(self, other: Traffic) -> Traffic:
        parts: dict[tuple[Pattern, Groups | None], tuple[int, int]] = {}
        for pattern, groups, n, nbytes in (*self.parts, *other.parts):
            before = parts.get((pattern, groups), (0, 0))
            parts[pattern, groups] = before[0] + n, before[1] + nbytes
        return Traffic(
            self.collectives + other.collectives,
            self.nbytes + other.nbytes,
            self.subgroup_bytes + other.subgroup_bytes,
            self.optional_bytes + other.optional_bytes,
            tuple(Part(*kind, *counts) for kind, counts in parts.items()),
        )


class LevelBytes(NamedTuple):
    """Bytes of a step.

    Attributes:
        total: what a replica hands to the network, as `Traffic.nbytes`.
        within: with two levels, those of them that stay inside the node; else 0.
        between: with two levels, what all replicas of a node send to other nodes together, whose
            link they share; else `total`.
    """

    total: float
    within: float
    between: float


def bytes_by_level(kinds: Iterable[tuple[Traffic, int]], near: Groups | None) -> LevelBytes:
    """The mean over steps, so many of each kind. `near`: the replicas of each node; None: there is
    one level."""
    listed = list(kinds)
    times = sum(n for _, n in listed)
    total = sum(traffic.nbytes * n for traffic, n in listed) / times
    within = sum(traffic.in_groups(near)[1] * n for traffic, n in listed) / times
    return LevelBytes(total, within, (total - within) * (len(near[0]) if near else 1))


def traffic_of(ops: Ops[A], requests: Sequence[Request], world_size: int | None = None) -> Traffic:
    """The traffic of these requests."""
    return sum((counted(r, r.payloads(ops, world_size)) for r in requests), Traffic(0, 0))


def counted(request: Request, payloads: Sequence[int]) -> Traffic:
    """The traffic of a request, in messages of so many bytes."""
    part = Part(request.pattern, request.groups, len(payloads), sum(payloads))
    if not payloads or part[:2] == ("all_reduce", None):
        return Traffic(part.collectives, part.nbytes)
    return Traffic(part.collectives, part.nbytes, part.nbytes if part.groups else 0, parts=(part,))


@dataclass(frozen=True)
class Message:
    """What replicas send each other at once.

    Attributes:
        nbytes: in the unit of `Traffic`, where a ring all-reduce counts its payload once.
        pattern: how it goes.
        groups: in which groups of replicas it stays. None: all of them.
    """

    nbytes: int
    pattern: Pattern = "all_reduce"
    groups: Groups | None = None

    def within(self, size: int) -> bool:
        """Whether it stays among replicas that are on one node, where each node has so many, in
        order."""
        return self.groups is not None and within_nodes(self.groups, size)


def within_nodes(groups: Groups, size: int) -> bool:
    """Whether all members of each group are on one node, where each node has so many replicas, in
    order."""
    return all(len({member // size for member in members}) == 1 for members in groups)
