"""What crosses the links between nodes, and how long that takes: the α-β model.

    links = Links(replicas=16, near=nodes_of(16, 2))
    links.nbytes(traffic), links.seconds(traffic, latency=5e-5, bandwidth=1.25e9)

How often a byte crosses a link depends on how its message goes. In a ring one replica of a node
sends to the next node: W replicas send 2(W-1)/W of what an all-reduce is of over each link,
whatever the number of replicas in a node (Thakur et al. 2005, §4). Where each replica hands each
other one a part, all k of a node send to all others: k(W-k)/W of what an all-to-all is of.

A long all-reduce is fastest in a ring. A short one, all latency, is fastest in NCCL's double binary
trees: 2⌈log₂ N⌉ hops between N nodes, where a ring takes 2(N-1), for at most 2 bytes on a link for
each of its own (Sanders, Speck, Träff 2009). Each message is charged what is less. NCCL has trees
for all-reduces alone, and Gloo has none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.plan.steady import Times
from gradwire.core.plan.traffic import Part, Traffic
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.programs import Pattern

#: What carries messages: Gloo as gradwire uses it, of which the bytes were counted; NCCL by its
#: formulas, of which they were not.
Library = Literal["gloo", "nccl"]
#: Patterns that go in a ring. In all others each replica sends directly to each other one.
RINGS: dict[Library, tuple[Pattern, ...]] = {
    "gloo": ("all_reduce",),
    "nccl": ("all_reduce", "reduce_scatter", "all_gather"),
}
#: How a message goes: round a ring; up and down two trees; from each replica to each other.
Way = Literal["ring", "tree", "direct"]


class Cost(NamedTuple):
    """What messages of one kind cost, gone one way: hops between nodes, one after the other, and
    bytes that leave a node, of several the one that sends most."""

    way: Way
    hops: int
    nbytes: float

    def seconds(self, latency: float, bandwidth: Times) -> Times:
        """α-β time over each of these links: α for each hop, and each byte once, (links,)."""
        return self.hops * latency + self.nbytes / bandwidth


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
        """Bytes that leave a node, of several the one that sends most, where no message goes in
        trees, which are for short ones."""
        return sum(self.costs(part)[0].nbytes for part in traffic.all_parts)

    def hops(self, traffic: Traffic, latency: float, bandwidth: float) -> dict[Way, int]:
        """The hops between nodes for which `seconds` charges α, by the way of their messages. What
        stays on a node takes none."""
        link, found = np.array([bandwidth]), Counter[Way]()
        for part in traffic.all_parts:
            least = min(self.costs(part), key=lambda cost: cost.seconds(latency, link)[0])
            found[least.way] += least.hops
        return {way: hops for way, hops in found.items() if hops}

    def seconds(self, traffic: Traffic, latency: float, bandwidth: float) -> float:
        """α-β time of messages one after the other, over a link of `bandwidth` bytes per second in
        each direction, of each message the way that takes least."""
        waits, sends = self.seconds_over(traffic, latency, np.array([bandwidth]))
        return float((waits + sends)[0])

    def seconds_over(
        self, traffic: Traffic, latency: float, bandwidths: Times
    ) -> tuple[Times, Times]:
        """The same over each of several links: what hops take and what bytes take, (links,)
        each."""
        waits, sends = np.zeros_like(bandwidths), np.zeros_like(bandwidths)
        for part in traffic.all_parts:
            first, *others = self.costs(part)
            hops, nbytes = (
                np.full_like(bandwidths, first.hops),
                np.full_like(bandwidths, first.nbytes),
            )
            for cost in others:
                less = cost.seconds(latency, bandwidths) < hops * latency + nbytes / bandwidths
                hops, nbytes = np.where(less, cost.hops, hops), np.where(less, cost.nbytes, nbytes)
            waits, sends = waits + hops * latency, sends + nbytes / bandwidths
        return waits, sends

    def costs(self, part: Part) -> tuple[Cost, ...]:
        """What these messages cost, each way that they may go: first a ring or directly, then
        trees, where the library has them."""
        ring = part.pattern in RINGS[self.library]
        if self.near is None:
            size = self.replicas if part.groups is None else max(map(len, part.groups))
            crossing = _Crossing(2 * (size - 1) / size, size - 1, size, 1)
        else:
            crossing = _crossing(
                part.pattern, part.groups or (tuple(range(self.replicas)),), self.near, self.library
            )
        both = part.pattern == "all_reduce"
        hops = part.collectives * (2 if both else 1) * crossing.hops
        first = Cost("ring" if ring else "direct", hops, part.nbytes * crossing.times)
        if not (both and hops and self.library == "nccl"):
            return (first,)
        deep = 2 * (crossing.nodes - 1).bit_length()
        return first, Cost("tree", part.collectives * deep, 2.0 * crossing.sharing * part.nbytes)


def links_of(algorithm: object, replicas: int, nodes: int | None, library: Library) -> Links:
    """The links between so many nodes. `nodes` None: those of an algorithm with two levels; of any
    other one each replica is a node.

    Raises:
        ValueError: nodes, or those of the algorithm, of different sizes.
    """
    if nodes is not None:
        return Links(
            replicas, consecutive(replicas, nodes) if 1 < nodes < replicas else None, library
        )
    levels = levels_of(algorithm)
    near = None if levels is None else levels.near(replicas)
    return Links(replicas, near if near is not None and 1 < len(near) < replicas else None, library)


def consecutive(replicas: int, nodes: int) -> Groups:
    """The replicas of each node, one after the other. Raises ValueError if there are not equally
    many on each."""
    each, rest = divmod(replicas, nodes)
    if rest:
        raise ValueError(
            f"nodes={nodes}: {replicas} replicas cannot be divided among so many; use a divisor of"
            f" {replicas}"
        )
    return tuple(tuple(range(first, first + each)) for first in range(0, replicas, each))


class _Crossing(NamedTuple):
    """How messages of a pattern, in groups of replicas, cross between nodes: how often each byte of
    a `Traffic` leaves a node, of which a ring all-reduce of n bytes counts n and any other message
    half of what it is of; hops one way; nodes of the widest group; groups that share a node's
    link."""

    times: float
    hops: int
    nodes: int
    sharing: int


@lru_cache(maxsize=256)
def _crossing(pattern: Pattern, groups: Groups, near: Groups, library: Library) -> _Crossing:
    node = {replica: number for number, members in enumerate(near) for replica in members}
    leaving: dict[int, float] = defaultdict(float)
    sharing, hops, nodes = Counter[int](), 0, 1
    for members in groups:
        size = len(members)
        places = [node[member] for member in sorted(members)]
        # NCCL arranges a ring so that it leaves each node once. Gloo's goes by the numbers of the
        # ranks.
        edges = Counter(a for a, b in zip(places, [*places[1:], places[0]], strict=True) if a != b)
        ring, here = pattern in RINGS[library], Counter(places)
        for number, own in here.items():
            times = min(edges[number], 1) if library == "nccl" else edges[number]
            leaving[number] += 2 / size * (times * (size - 1) if ring else own * (size - own))
        if len(here) == 1:
            continue
        sharing.update(list(here))
        nodes = max(nodes, len(here))
        # A part of a message goes all the way round but for one hop; directly a replica sends to
        # each of the others that are elsewhere.
        round_ring = len(here) if library == "nccl" else edges.total()
        hops = max(hops, min(round_ring, size - 1) if ring else size - min(here.values()))
    return _Crossing(
        max(leaving.values(), default=0.0), hops, nodes, max(sharing.values(), default=0)
    )
