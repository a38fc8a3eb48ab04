"""The bytes and messages of a step.

They are counted by running the algorithm itself, the very coroutine that the drivers run, on arrays that have a shape and no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.core.algorithm import near_in
from gradwire.core.ops import A, Ops
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Request


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
        return self.nbytes - sum(n for groups, _, n in self.by_groups if near_in(algorithm, groups))

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


class LevelBytes(NamedTuple):
    """Bytes of a step.

    Attributes:
        total: what a replica hands to the network, as `Traffic.nbytes`.
        within: with two levels, those of them that stay inside the node; else 0.
        between: with two levels, what all replicas of a node send to other nodes together, whose link they share; else `total`.
    """

    total: float
    within: float
    between: float


def bytes_by_level(kinds: Iterable[tuple[Traffic, int]], near: Groups | None) -> LevelBytes:
    """The mean over steps, so many of each kind. `near`: the replicas of each node; None: there is one level."""
    listed = list(kinds)
    times = sum(n for _, n in listed)
    total = sum(traffic.nbytes * n for traffic, n in listed) / times
    within = sum(traffic.in_groups(near)[1] * n for traffic, n in listed) / times
    return LevelBytes(total, within, (total - within) * (len(near[0]) if near else 1))


def traffic_of(ops: Ops[A], requests: Sequence[Request], world_size: int | None = None) -> Traffic:
    """The traffic of these requests."""
    return sum((counted(r.groups, r.payloads(ops, world_size)) for r in requests), Traffic(0, 0))


def counted(groups: Groups | None, payloads: Sequence[int]) -> Traffic:
    """The traffic of messages in some groups."""
    if not payloads:
        return Traffic(0, 0)
    n, nbytes = len(payloads), sum(payloads)
    return Traffic(n, nbytes, nbytes, by_groups=((groups, n, nbytes),)) if groups else Traffic(n, nbytes)


@dataclass(frozen=True)
class Message:
    """What replicas send each other at once.

    Attributes:
        nbytes: in the unit of `Traffic`, where a ring all-reduce counts its payload once.
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
