"""What crosses the links between nodes, and how long that takes: the α-β model.

    links = Links(replicas=16, near=nodes_of(16, 2))
    links.nbytes(traffic), links.seconds(traffic, latency=5e-5, bandwidth=1.25e9)

How often a byte crosses a link depends on how its message goes. In a ring one replica of a node sends to the next node: W replicas send 2(W-1)/W of what an
all-reduce is of over each link, whatever the number of replicas in a node (Thakur et al. 2005, §4). Where each replica hands each other one a part, all k of a
node send to all others: k(W-k)/W of what an all-to-all is of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.plan.traffic import Traffic
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Pattern

#: What carries messages: Gloo as gradwire uses it, of which the bytes were counted; NCCL by its formulas, of which they were not.
Library = Literal["gloo", "nccl"]
#: Patterns that go in a ring. In all others each replica sends directly to each other one.
RINGS: dict[Library, tuple[Pattern, ...]] = {
    "gloo": ("all_reduce",),
    "nccl": ("all_reduce", "reduce_scatter", "all_gather"),
}


@dataclass(frozen=True)
class Links:
    """Nodes that are joined by a link each, which the replicas of a node share.

    Attributes:
        replicas: how many there are, W.
        near: those of each node. None: each is a node of its own.
        library: what carries messages. It makes a difference where nodes have several replicas.
    """

    replicas: int
    near: Groups | None = None
    library: Library = "nccl"

    def nbytes(self, traffic: Traffic) -> float:
        """Bytes that leave a node, of several the one that sends most."""
        return sum(part.nbytes * self._crossing(part.pattern, part.groups) for part in traffic.all_parts)

    def hops(self, traffic: Traffic) -> int:
        """Hops one after the other, of messages that leave a node: 2(W-1) of a ring all-reduce of W replicas, half as many of any other message."""
        total = 0
        for part in traffic.all_parts:
            if self._crossing(part.pattern, part.groups):
                size = self.replicas if part.groups is None else max(map(len, part.groups))
                total += part.collectives * (2 if part.pattern == "all_reduce" else 1) * (size - 1)
        return total

    def seconds(self, traffic: Traffic, latency: float, bandwidth: float) -> float:
        """α-β time of messages one after the other: α for each hop, and each byte once over a link of `bandwidth` bytes per second in each direction."""
        return self.hops(traffic) * latency + self.nbytes(traffic) / bandwidth

    def _crossing(self, pattern: Pattern, groups: Groups | None) -> float:
        if self.near is None:
            size = self.replicas if groups is None else max(map(len, groups))
            return 2 * (size - 1) / size
        return _crossing(pattern, groups or (tuple(range(self.replicas)),), self.near, self.library)


def links_of(algorithm: object, replicas: int, nodes: int | None, library: Library) -> Links:
    """The links between so many nodes. `nodes` None: those of an algorithm with two levels; of any other one each replica is a node.

    Raises:
        ValueError: nodes, or those of the algorithm, of different sizes.
    """
    if nodes is not None:
        return Links(replicas, consecutive(replicas, nodes) if 1 < nodes < replicas else None, library)
    levels = levels_of(algorithm)
    near = None if levels is None else levels.near(replicas)
    return Links(replicas, near if near is not None and 1 < len(near) < replicas else None, library)


def consecutive(replicas: int, nodes: int) -> Groups:
    """The replicas of each node, one after the other. Raises ValueError if there are not equally many on each."""
    each, rest = divmod(replicas, nodes)
    if rest:
        raise ValueError(
            f"nodes={nodes}: {replicas} replicas cannot be divided among so many; use a divisor of {replicas}"
        )
    return tuple(tuple(range(first, first + each)) for first in range(0, replicas, each))


@lru_cache(maxsize=256)
def _crossing(pattern: Pattern, groups: Groups, near: Groups, library: Library) -> float:
    """Bytes that leave a node for each byte of a `Traffic`, of which a ring all-reduce of n bytes counts n and any other message half of what it is of."""
    node = {replica: number for number, members in enumerate(near) for replica in members}
    leaving: dict[int, float] = defaultdict(float)
    for members in groups:
        size = len(members)
        places = [node[member] for member in sorted(members)]
        # NCCL arranges a ring so that it leaves each node once. Gloo's goes by the numbers of the ranks.
        edges = Counter(a for a, b in zip(places, [*places[1:], places[0]], strict=True) if a != b)
        for number, here in Counter(places).items():
            times = min(edges[number], 1) if library == "nccl" else edges[number]
            ring = pattern in RINGS[library]
            leaving[number] += 2 / size * (times * (size - 1) if ring else here * (size - here))
    return max(leaving.values(), default=0.0)
