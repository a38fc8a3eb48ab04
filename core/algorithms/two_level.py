"""Two levels of replicas: gradients average inside a node, and whatever an algorithm sends crosses
the slow network once for each node.

    TwoLevel(PowerSGD(rank=4), within=8)      # nodes of 8 replicas, numbered one after the other

        gradient of the node  =  mean(gradients), within the node
        any message           =  cut in 8; each replica of a node exchanges one part in its
                                 inter-node group; all-gather, within the node

So the result is that of the algorithm between as many replicas as there are nodes, on the averages
of the nodes. All replicas of a node run it alike, and have the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, Self, TypeVar

from gradwire.core.algorithm import Algorithm, State, Stepped, nested, with_inner
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.kernels.arrays import array_key, group_by
from gradwire.core.ops import FLOATS, A, Ops
from gradwire.core.protocol import all_gather, mean_each, replica_index, watch, world_size
from gradwire.core.protocol.groups import Groups, NoPartition
from gradwire.core.protocol.programs import Fusable, Program, Request, ask, relay
from gradwire.core.protocol.weights import count_as
from gradwire.core.text.options import AtLeast1, check_options
from gradwire.core.text.wording import configured

T = TypeVar("T")

#: Who is near: so many consecutive replicas; those of a machine; the groups themselves; in JAX
#: those along a mesh axis, by its name.
Within = AtLeast1 | Groups | Literal["node"] | str


@dataclass(frozen=True, repr=False)
class TwoLevel(Wrapper):
    """Another algorithm between nodes: `TwoLevel(PowerSGD(rank=4), within="node")`.

    With `AllReduce()` it is the hierarchical all-reduce: each byte crosses the slow network once
    for each node, and not once for each replica. With any other algorithm it gives what that gives
    on the averages of the nodes. Inside a node gradients are averaged, and each message is gathered
    once. Where there is one node it is the uncompressed average: nothing is compressed, and no
    memory changes.

    Memory is whole on each replica, and equal on those of a node. A checkpoint is that of
    `algorithm` between as many replicas as there are nodes: it can go on with other nodes, other
    replicas in a node, and without levels.

    Examples:
        >>> from gradwire import PowerSGD, TwoLevel, plan
        >>> shapes = {"a": (512, 512), "b": (512, 512)}
        >>> between = plan(shapes, TwoLevel(PowerSGD(rank=4), within=2), world_size=4).levels[1]
        >>> between.groups, between.replicas, between.nbytes, between.node_bytes
        (2, 2, 16384, 32768)

    Args:
        algorithm: any.
        within: which replicas are near each other. A number of consecutive replicas; "node", those
            of a machine, in torch; a partition in groups of equal size, `((0, 2), (1, 3))`; in JAX
            also the name of a mesh axis.

    Raises:
        TypeError: `algorithm` is none, or has two levels itself; or `within` is nothing of these.
        ValueError: `within` is no number of replicas, or has groups that differ in size.
    """

    within: Within = "node"

    def __post_init__(self) -> None:
        check_options(self)
        if any(isinstance(inner, TwoLevel) for inner in nested(self.algorithm)):
            raise TypeError(
                f"algorithm={self.algorithm!r} has two levels already, and there are no more"
                " than two"
            )
        if isinstance(self.within, tuple) and (
            len({len(members) for members in self.within}) != 1 or not self.within[0]
        ):
            raise ValueError(
                f"within={self.within} must be a partition of the replicas into nodes of equally"
                " many, such as ((0, 1), (2, 3))"
            )

    def __repr__(self) -> str:
        return configured(self)

    @property
    def biased(self) -> bool:
        """Whether something of the gradients is lost for good, as with `algorithm` alone: see
        `Compressor.biased`."""
        return bool(getattr(self.algorithm, "biased", False))

    @property
    def mentions_nodes(self) -> bool:
        """Whether `within` is "node", which a backend replaces by what it knows of its machines:
        see `on_nodes_of`."""
        return self.within == "node"

    def on_nodes_of(self, near: int | Groups) -> Self:
        """The same with "node" replaced, by the number of replicas on each machine, or by a
        partition of the replicas."""
        return replace(self, within=near) if self.mentions_nodes else self

    def near(self, replicas: int) -> Groups:
        """Groups of the replicas of a node, all of one size. Raises ValueError where so many
        replicas cannot be divided so."""
        return _near(self.within, replicas)

    def inter_node(self, replicas: int) -> Groups:
        """The inter-node groups: of the replicas with the same index in their nodes, in the order
        of the nodes."""
        return _inter_node(self.near(replicas))

    def is_near(self, groups: Groups) -> bool:
        """Whether these are the groups of replicas of a node."""
        return self.near(sum(map(len, groups))) == groups

    async def step(
        self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
    ) -> Stepped[A]:
        """A step of the inner algorithm on the average of the node. Arguments and results are those
        of `Algorithm.step`."""
        near = self.near(await world_size())
        if len(near[0]) == 1:
            return await self.algorithm.step(ops, gradients, state, step)
        node = await mean_each(gradients, watched=False, groups=near)
        if len(near) == 1:  # nothing leaves it, and nothing has to be made smaller
            return node, state
        await count_as(near)
        between = Between(ops, near, await replica_index(near))
        return await between.run(self.algorithm.step(ops, node, state, step))


class Between:
    """The messages of a program that all replicas of a node run alike, each sent once by each node.
    Each request says how it is asked (`Request.between`).

    Args:
        ops: kernels.
        near: groups of the replicas of a node, of two and more.
        index: of this replica in its node, an int or a traced int32 scalar.

    Attributes:
        inter_node: the inter-node groups, of the replicas of one index.
        size, count: replicas in a node, and nodes.
    """

    def __init__(self, ops: Ops[Any], near: Groups, index: Any) -> None:
        self.ops, self.near, self.index = ops, near, index
        self.inter_node = _inter_node(near)
        self.size, self.count = len(near[0]), len(near)

    async def run(self, program: Program[T]) -> T:
        """What the program returns."""
        return await relay(program, lambda request: request.between(self))

    async def whole(self, request: Request) -> tuple[Any, ...]:
        """The answers, where each replica exchanges all of it in its inter-node group: in a single
        node nothing is sent, and parts of several sizes are those of a sharded optimizer."""
        answers = await ask(request.among(self.inter_node))
        return await watch(*answers) if getattr(request, "watched", False) else answers

    async def in_parts(
        self, request: Fusable[Any], sent: int = 0, received: int = 0, *, donated: bool = False
    ) -> tuple[Any, ...]:
        """The answers, by messages of which each replica of a node exchanges one part in its
        inter-node group, and all gather those of the node.

        Args:
            request: about arrays.
            sent: rows of each array, one for each node. 0: all nodes are sent the same.
            received: rows of each answer, one from each node. 0: one for all.
            donated: the answers may lie in the arrays.
        """
        if self.count == 1:
            return await self.whole(request)
        ops, gathers = self.ops, bool(received and not sent)
        packs = self._packs(request.arrays, sent or 1, donated)
        rows = [
            ops.row(pack.matrix.reshape((sent or 1, self.size, pack.length)), self.index)
            for pack in packs
        ]
        parts = [x.reshape((sent, -1) if sent else (-1,)) for x in rows]
        about = request.about_parts(tuple(parts), tuple(pack.ours for pack in packs))
        answers = await ask(about.among(self.inter_node))
        wholes = await all_gather(
            [x.reshape((-1,)) for x in answers],
            [((received or 1) * pack.length,) * self.size for pack in packs],
            out=[
                pack.matrix.reshape((-1,)) if pack.ours and not received else None for pack in packs
            ],
            groups=self.near,
        )
        if getattr(request, "watched", False):
            await watch(*[x for x in wholes if ops.dtype_of(x) in FLOATS])
        shapes = [(received, *x.shape) if gathers else tuple(x.shape) for x in request.arrays]
        found = [
            x if not gathers or math.prod(x.shape) else ops.zeros(shape, ops.dtype_of(x))
            for x, shape in zip(request.arrays, shapes, strict=True)
        ]
        for pack, whole in zip(packs, wholes, strict=True):
            matrix = whole.reshape((1, -1))
            if received:
                of_parts = whole.reshape((self.size, received, pack.length))
                matrix = ops.stack([of_parts[:, node] for node in range(received)]).reshape(
                    (received, -1)
                )
            filled = [*(shapes[i] for i in pack.members), ((received or 1) * pack.fill,)]
            cut = ops.from_rows(
                matrix, filled[: len(pack.arrays)], out=pack.arrays if donated else None
            )
            for i, x in zip(pack.members, cut, strict=False):
                found[i] = x
        return tuple(found)

    def _packs(self, arrays: Sequence[Any], rows: int, donated: bool) -> list[_Pack]:
        """What is sent together, in so many rows, filled up so that each can be cut."""
        ops, packs = self.ops, []
        sent = [i for i, x in enumerate(arrays) if math.prod(x.shape)]
        for members in group_by(sent, [array_key(ops, arrays[i]) for i in sent]):
            own = [arrays[i] for i in members]
            width = sum(math.prod(x.shape) for x in own) // rows
            fill = -width % self.size
            if fill:
                own.append(ops.zeros((rows * fill,), ops.dtype_of(own[0])))
            matrix = ops.rows(own, rows, donated=donated)
            packs.append(
                _Pack(
                    members, own, matrix, donated or len(own) > 1, fill, (width + fill) // self.size
                )
            )
        return packs


@dataclass(frozen=True)
class _Pack:
    """Arrays of one kind that are sent together.

    Attributes:
        members: their numbers in the request.
        arrays: those, and if `fill` zeros, so many in each row.
        matrix: all of them, as `Ops.rows` joins them.
        ours: nobody else looks at the matrix any more.
        fill, length: elements that each row is filled up with; elements of a part of a row.
    """

    members: list[int]
    arrays: list[Any]
    matrix: Any
    ours: bool
    fill: int
    length: int


def levels_of(algorithm: Any) -> TwoLevel | None:
    """The two levels in an algorithm, or in a schedule that has it for a compressor; None: it has
    one."""
    return next((each for each in nested(algorithm) if isinstance(each, TwoLevel)), None)


def require_nodes(algorithm: Any, replicas: int) -> None:
    """Raise ValueError where so many replicas cannot be divided into the nodes of an algorithm, or
    schedule, with two levels."""
    if (levels := levels_of(algorithm)) is not None:
        levels.near(replicas)


def with_levels(algorithm: T, new: Callable[[TwoLevel], Algorithm]) -> T:
    """The algorithm with something `new` in place of the two levels in it, if there are any."""
    if isinstance(algorithm, TwoLevel):
        return new(algorithm)  # type: ignore[return-value]
    changed: T = with_inner(algorithm, lambda inner: with_levels(inner, new))
    return changed


def without_levels(algorithm: T) -> T:
    """The algorithm with one level in place of two: whose memory a checkpoint of all replicas
    holds, one row for each node."""
    return with_levels(algorithm, lambda two: two.algorithm)


@lru_cache(maxsize=64)
def _near(within: Within, replicas: int) -> Groups:
    if isinstance(within, int):
        if replicas % within:
            raise Indivisible(within, replicas)
        return tuple(tuple(range(first, first + within)) for first in range(0, replicas, within))
    if isinstance(within, tuple):
        if sorted(member for members in within for member in members) != list(range(replicas)):
            raise NoPartition(within, replicas, "within")
        return within
    if within == "node":
        raise ValueError(
            "within='node' does not say how many replicas that is; give the number, or a partition"
        )
    raise ValueError(
        f"within={within!r} names a mesh axis, which only JAX has; give 'node', a number of"
        " replicas, or a partition"
    )


@lru_cache(maxsize=64)
def _inter_node(near: Groups) -> Groups:
    return tuple(zip(*near, strict=True))


class Indivisible(NoPartition):
    """Replicas that cannot be divided into nodes of one size."""

    def __init__(self, within: int, replicas: int) -> None:
        ValueError.__init__(
            self,
            f"within={within}, but {replicas} replicas cannot be divided so; use a divisor of"
            f" {replicas}",
        )
        self.members = within
