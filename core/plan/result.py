"""What a plan says: bytes, messages, seconds and memory of a step, and the table that it prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradwire.core.algorithm import Algorithm, innermost
from gradwire.core.algorithms.two_level import levels_of
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.plan.links import Library, Links, Way, links_of
from gradwire.core.plan.local_sgd import LocalSteps
from gradwire.core.plan.traffic import Traffic
from gradwire.core.text.options import AtLeast1, Positive, Replicas, Seconds, checked


@dataclass(frozen=True)
class TensorPlan:
    """One tensor in a plan: `rank` is that of its factors, if it has any; `view` is how it is a
    batch of matrices, `12 × (512 | 2048)`, "-" for a vector, and "" where the algorithm has no
    views."""

    name: str
    shape: tuple[int, ...]
    compressed: bool
    rank: int | None
    dense_bytes: int
    wire_bytes: float
    view: str = ""


@dataclass(frozen=True)
class BucketPlan:
    """Tensors that travel together, in the order in which they lie in the bucket, and the bytes of
    their gradients."""

    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class LevelPlan:
    """One of two levels, in a step, on average over a cycle.

    Attributes:
        groups: how many groups of replicas there are.
        replicas: in each group.
        collectives: messages of a replica.
        nbytes: their bytes.
        node_bytes: those of all replicas of a node, which share its link to the others.
    """

    groups: int
    replicas: int
    collectives: float
    nbytes: float
    node_bytes: float


#: How messages go whose sizes depend on the number of replicas.
OF_ALL = ("all_gather", "all_to_all")


@dataclass(frozen=True)
class Plan:
    """What an algorithm sends per step, on average over its cycle, after its warm-up steps.

    Local SGD sends nothing in most steps: its cycle is a period of its averages (and of its
    compressor), and `peak_bytes` says what the largest of these steps sends.

    Examples:
        >>> from gradwire import PowerSGD, plan
        >>> of_two_tensors = plan({"w": (512, 512), "b": (512,)}, PowerSGD(rank=4))
        >>> planned = of_two_tensors
        >>> planned.wire_bytes, planned.collectives, round(planned.compression_ratio, 1)
        (18432, 2, 57.0)
        >>> [each.rank for each in of_two_tensors.tensors]
        [4, None]

    Attributes:
        tensors: one entry per parameter; bytes of a tensor sent by itself.
        steps: the traffic of each step of a cycle: a tuple, or of local SGD a sequence that is as
            long as its period.
        dense_bytes: what an uncompressed step sends.
        buckets: of the gradients, in the order in which they are sent; () if none were asked for.
        outgrown_at: from so many replicas on a step (of local SGD, an average) sends more than an
            average in 8 bits would, because what is gathered grows with their number. None: it does
            not.
        levels: of an algorithm with two, that within nodes and that between them; else ().
        memory_bytes: what the algorithm remembers of tensors on each replica: errors, factors; of
            local SGD its outer parameters and velocity too.
        world_size: for how many replicas it is made; None: nobody has said.
        notes: what to know besides numbers.
    """

    algorithm: Algorithm | LocalSGD
    tensors: tuple[TensorPlan, ...]
    steps: Sequence[Traffic]
    dense_bytes: int
    buckets: tuple[BucketPlan, ...] = ()
    outgrown_at: int | None = None
    levels: tuple[LevelPlan, ...] = ()
    memory_bytes: int = 0
    world_size: int | None = None

    @property
    def kinds(self) -> tuple[tuple[Traffic, int], ...]:
        """The traffic of each kind of step, and how many steps of a cycle are of it."""
        return kinds_of(self.steps)

    @property
    def wire_bytes(self) -> float:
        """Bytes that a replica sends per step, a float, the mean over a cycle; in the unit of
        `gradwire.Traffic`. At most so many where the algorithm branches on data, see
        `optional_bytes`."""
        return average((t.nbytes, n) for t, n in self.kinds)

    @property
    def collectives(self) -> float:
        """Messages per step, a float, the mean over a cycle: 2 for `PowerSGD`, 0.125 for
        `LocalSGD(8)`."""
        return average((t.collectives, n) for t, n in self.kinds)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest step of a cycle: what the network has to take at once, where local
        SGD averages."""
        return max(t.nbytes for t, _ in self.kinds)

    @property
    def subgroup_bytes(self) -> float:
        """Those of `wire_bytes` that are averaged in groups of replicas, and so may never leave a
        machine."""
        return average((t.subgroup_bytes, n) for t, n in self.kinds)

    @property
    def optional_bytes(self) -> float:
        """Those of `wire_bytes` that may not be sent: an algorithm that branches on an average
        takes one side or the other, by its data."""
        return average((t.optional_bytes, n) for t, n in self.kinds)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what numbers do not say: the price of half-steps, a gather that grows.
        Printed below the table."""
        own: tuple[str, ...] = getattr(innermost(self.algorithm), "notes", ())
        if self.outgrown_at is None:
            return own
        gathered = (
            f"A gather grows with the number of replicas: from {self.outgrown_at} on this sends"
            " more than an average in 8 bits would, WireDtype(AllReduce(), 'int8')."
        )
        return (*own, gathered)

    @property
    def compression_ratio(self) -> float:
        """`dense_bytes / wire_bytes`: how many times fewer bytes than uncompressed; with two
        levels, between nodes, for all replicas of a node together."""
        sent = self.levels[1].node_bytes if self.levels else self.wire_bytes
        return self.dense_bytes / sent if sent else 1.0

    @checked
    def link_bytes(
        self, world_size: Replicas, *, nodes: AtLeast1 | None = None, library: Library = "nccl"
    ) -> float:
        """Bytes that a node sends to the others per step, on average over a cycle: what its link
        carries in that direction. Arguments and what raises are those of `seconds`.

        Examples:
            >>> from gradwire import AllReduce, WireDtype, plan
            >>> # Two nodes of four replicas: all of a node send codes to all of the other.
            >>> for method in (AllReduce(), WireDtype(AllReduce(), "int8")):
            ...     planned = plan({"w": (1024, 1024)}, method, world_size=8)
            ...     print(round(planned.link_bytes(8, nodes=2, library="gloo")))
            7340032
            4325376
        """
        links = self._links(world_size, nodes, library)
        return average((links.nbytes(t), n) for t, n in self.kinds)

    @checked
    def seconds(
        self,
        world_size: Replicas,
        latency: Seconds,
        bandwidth: Positive,
        *,
        nodes: AtLeast1 | None = None,
        within: tuple[Seconds, Positive] | None = None,
        library: Library = "nccl",
    ) -> float:
        """Communication time of a step by the α-β model, one message after the other
        (`gradwire.core.plan.links`). `hops` says what latency is charged for.

        Args:
            world_size: W, for which the plan is made.
            latency: α, seconds per hop, between nodes. An all-reduce by NCCL goes round a ring or,
                where that takes less, up and down trees.
            bandwidth: 1/β, bytes per second of the link of a node, each direction, which its
                replicas share.
            nodes: on how many nodes they are, equally many on each, in order. 1: the link is that
                between the replicas of it. None: each replica is on a node of its own; of an
                algorithm with two levels these say.
            within: of an algorithm with two levels, latency and bandwidth of the links inside a
                node; None leaves out what these take.
            library: what carries messages, where a node has several replicas: bytes on its link are
                those that were counted of "gloo", and computed by the formulas of "nccl".

        Raises:
            ValueError: nobody, or a link that carries nothing; nodes of different sizes; `within`
                for an algorithm that has one level, or one node; or of an algorithm that has two,
                or gathers, another `world_size` than the plan is made for.
        """
        links = self._links(world_size, nodes, library)
        seconds = average((links.seconds(t, latency, bandwidth), n) for t, n in self.kinds)
        if within is None:
            return seconds
        levels = levels_of(self.algorithm)
        if levels is None or not self.levels:
            has = "has one level" if levels is None else f"has one node of {world_size} replicas"
            raise ValueError(f"within={within}, but {self.algorithm!r} {has}; leave it out")
        inside, near = Links(self.levels[0].replicas), levels.near(world_size)
        return seconds + average((inside.seconds(t.among(near), *within), n) for t, n in self.kinds)

    @checked
    def hops(
        self,
        world_size: Replicas,
        latency: Seconds,
        bandwidth: Positive,
        *,
        nodes: AtLeast1 | None = None,
        library: Library = "nccl",
    ) -> dict[Way, float]:
        """Hops between nodes for which `seconds` charges `latency` in a step, on average over a
        cycle: of messages that go round a "ring", of those that go up and down a "tree", and of
        those that each replica sends to each other one, "direct". Arguments and what raises are
        those of `seconds`.

        Examples:
            >>> from gradwire import AllReduce, PowerSGD, plan
            >>> for method in (AllReduce(), PowerSGD(rank=4)):
            ...     print(plan({"w": (4096, 4096)}, method).hops(64, 50e-6, 1.25e8))
            {'ring': 126}
            {'tree': 24}
        """
        links = self._links(world_size, nodes, library)
        found = [(links.hops(t, latency, bandwidth), n) for t, n in self.kinds]
        ways = dict.fromkeys(way for hops, _ in found for way in hops)
        return {way: average((hops.get(way, 0), n) for hops, n in found) for way in ways}

    def _links(self, world_size: int, nodes: int | None, library: Library) -> Links:
        if self.levels and world_size != (made := self.levels[0].groups * self.levels[0].replicas):
            raise ValueError(
                f"world_size={world_size}, but the plan is made for {self.levels[0].groups} nodes"
                f" of {self.levels[0].replicas} replicas, {made} in all"
            )
        grouped = [p.groups for traffic, _ in self.kinds for p in traffic.parts if p.groups]
        for made in {sum(map(len, groups)) for groups in grouped}:
            if made != world_size:
                raise ValueError(
                    f"world_size={world_size}, but the plan is made for groups of {made} replicas"
                    f" in all; make one for {world_size}: plan(…, world_size={world_size})"
                )
        gathers = any(p.pattern in OF_ALL for traffic, _ in self.kinds for p in traffic.parts)
        if gathers and self.world_size not in (None, world_size):
            raise ValueError(
                f"world_size={world_size}, but the plan is made for {self.world_size} replicas, and"
                f" what {self.algorithm!r} gathers grows with their number; make one for"
                f" {world_size}: plan(…, world_size={world_size})"
            )
        return links_of(self.algorithm, world_size, nodes, library)

    def __str__(self) -> str:
        return "\n".join([repr(self.algorithm), *_table(self), *_totals(self), *self.notes])


def kinds_of(steps: Sequence[Traffic]) -> tuple[tuple[Traffic, int], ...]:
    """Each kind of step among these, and how many are of it."""
    if isinstance(steps, LocalSteps):
        return steps.kinds
    kinds = Counter((step, step.parts) for step in steps)
    return tuple((step, n) for (step, _), n in kinds.items())


def average(counted: Iterable[tuple[float, int]]) -> float:
    """The average of numbers, each so many times."""
    kinds = list(counted)
    average = sum(number * times for number, times in kinds) / sum(times for _, times in kinds)
    return int(average) if math.isfinite(average) and average == int(average) else float(average)


def _table(plan: Plan) -> list[str]:
    """Lines in columns: one for each tensor. Nothing has a view where the algorithm knows none."""
    rows = [("tensor", "shape", "view", "rank", "dense B", "wire B")]
    for t in plan.tensors:
        shape = "×".join(map(str, t.shape)) or "scalar"
        rank = "-" if not t.compressed else "yes" if t.rank is None else str(t.rank)
        rows.append((t.name, shape, t.view, rank, f"{t.dense_bytes:,}", f"{t.wire_bytes:,.0f}"))
    width, tall, wide = (max(len(row[column]) for row in rows) for column in range(3))
    views = any(t.view for t in plan.tensors)
    return [
        f"{name:<{width}}  {shape:<{tall}}  {f'{view:<{wide}}  ' if views else ''}{rank:>5} "
        f" {dense:>13}  {wire:>13}"
        for name, shape, view, rank, dense, wire in rows
    ]


def _totals(plan: Plan) -> list[str]:
    """Lines below the table: buckets, a step, each of its levels, memory."""
    lines = []
    for number, bucket in enumerate(plan.buckets):
        first, last, n = bucket.names[0], bucket.names[-1], len(bucket.names)
        lines.append(
            f"bucket {number}: {bucket.nbytes:,} bytes:"
            f" {first if n == 1 else f'{first} … {last}, {n} tensors'}"
        )
    fewer = f"({plan.compression_ratio:.1f}x fewer)"
    if plan.levels:
        near, far = plan.levels
        lines += [
            (
                f"per step, between {far.replicas} nodes: {far.node_bytes:,.0f} bytes of"
                f" {plan.dense_bytes:,} for each {fewer}, {far.nbytes:,.0f} of each replica, in"
                f" {far.collectives:g} collectives"
            ),
            (
                f"within nodes of {near.replicas}: {near.nbytes:,.0f} bytes for each replica, in"
                f" {near.collectives:g} collectives"
            ),
        ]
    else:
        lines.append(
            f"per step: {plan.wire_bytes:,.0f} bytes of {plan.dense_bytes:,} {fewer} in"
            f" {plan.collectives:g} collectives"
        )
    if plan.optional_bytes:
        least = plan.wire_bytes - plan.optional_bytes
        lines.append(
            f"these are the most: a branch depends on data, and a step sends between {least:,.0f}"
            f" and {plan.wire_bytes:,.0f} bytes"
        )
    if isinstance(plan.algorithm, LocalSGD):
        lines.append(
            f"largest step: {plan.peak_bytes:,} bytes, of {sum(n for _, n in plan.kinds)} that"
            " repeat"
        )
        if plan.subgroup_bytes and not plan.levels:
            lines.append(
                f"within subgroups: {plan.subgroup_bytes:,.0f} bytes per step; among all:"
                f" {plan.wire_bytes - plan.subgroup_bytes:,.0f}"
            )
    if plan.memory_bytes:
        lines.append(f"memory: {plan.memory_bytes:,} bytes on each replica")
    return lines
