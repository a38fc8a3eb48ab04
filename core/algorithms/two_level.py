"""Two levels of replicas: gradients average inside a node, and whatever an algorithm sends crosses the slow network once for each node.

    TwoLevel(PowerSGD(rank=4), within=8)      # nodes of 8 replicas, numbered one after the other

        gradient of the node  =  mean(gradients), within the node
        any message           =  cut in 8; each replica of a node sends one part, to those of its place in other nodes; all-gather, within the node

So the result is that of the algorithm between as many replicas as there are nodes, on the averages of the nodes: its memory too, which all
replicas of a node have alike. Nothing is owned, and no message is larger or smaller than another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

from gradwire.core.algorithm import Algorithm, State, Stepped, nested, require_algorithm, with_inner
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.ops import A, Ops
from gradwire.core.programs import Fusable, Groups, NoPartition, Program, Request, ask, relayed
from gradwire.core.requests import (
    AllToAll,
    Gather,
    Reduce,
    ReplicaIndex,
    WorldSize,
    all_gather,
    among,
    mean_each,
    replica_index,
    watch,
    world_size,
)
from gradwire.core.wording import configured

T = TypeVar("T")

#: Who is near: so many consecutive replicas; those of a machine; the groups themselves; in JAX those along a mesh axis, by its name.
Within = int | Groups | Literal["node"] | str


@dataclass(frozen=True, repr=False)
class TwoLevel(Wrapper):
    """Another algorithm between nodes: `TwoLevel(PowerSGD(rank=4), within="node")`.

    With any algorithm it gives what that gives on the averages of the nodes. Inside a node gradients travel once, and what the algorithm sends.

    Args:
        algorithm: any.
        within: which replicas are near each other. A number of consecutive replicas; "node", those of a machine, in torch; a partition in groups of
            equal size, `((0, 2), (1, 3))`; in JAX also the name of a mesh axis.

    Raises:
        TypeError: `algorithm` is none, or has two levels itself; or `within` is nothing of these.
        ValueError: `within` is no number of replicas, or has groups that differ in size.
    """

    within: Within = "node"

    def __post_init__(self) -> None:
        require_algorithm(self.algorithm)
        if any(isinstance(inner, TwoLevel) for inner in nested(self.algorithm)):
            raise TypeError(f"algorithm={self.algorithm!r} has two levels already, and there are no more than two")
        given: object = self.within
        if isinstance(given, list | tuple):
            object.__setattr__(self, "within", _partition(given))
        elif isinstance(given, bool) or not isinstance(given, int | str):
            raise TypeError(f"within={given!r} must be a number of replicas, 'node', or a partition: ((0, 1), (2, 3))")
        elif isinstance(given, int) and given < 1:
            raise ValueError(f"within={given} must be at least 1, the number of replicas in a node")

    def __repr__(self) -> str:
        return configured(self)

    @property
    def biased(self) -> bool:
        """Whether something of the gradients is lost for good, as with `algorithm` alone: see `Compressor.biased`."""
        return bool(getattr(self.algorithm, "biased", False))

    @property
    def mentions_nodes(self) -> bool:
        """Whether `within` is "node", which a backend replaces by what it knows of its machines: see `on_nodes_of`."""
        return self.within == "node"

    def on_nodes_of(self, near: int | Groups) -> Self:
        """The same with "node" replaced, by the number of replicas on each machine, or by a partition of the replicas."""
        return replace(self, within=near) if self.mentions_nodes else self

    def near(self, replicas: int) -> Groups:
        """Groups of the replicas of a node, all of one size. Raises ValueError where so many replicas cannot be divided so."""
        within = self.within
        if isinstance(within, int):
            if replicas % within:
                raise _Indivisible(within, replicas)
            return tuple(tuple(range(first, first + within)) for first in range(0, replicas, within))
        if isinstance(within, tuple):
            if sorted(member for members in within for member in members) != list(range(replicas)):
                raise NoPartition(within, replicas)
            return within
        if within == "node":
            raise ValueError("within='node' does not say how many replicas that is; give the number, or a partition")
        raise ValueError(
            f"within={within!r} names a mesh axis, which only JAX has; give 'node', a number of replicas, or a partition"
        )

    def is_near(self, groups: Groups) -> bool:
        """Whether these are the groups of replicas of a node."""
        return self.near(sum(map(len, groups))) == groups

    async def step(self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any) -> Stepped[A]:
        near = self.near(await world_size())
        if len(near[0]) == 1:
            return await self.algorithm.step(ops, gradients, state, step)
        node = await mean_each(gradients, watched=False, groups=near)
        if len(near) == 1:
            await watch(*node.values())
        between = _Between(ops.unbundled(), near, await replica_index(near))
        return await between.run(self.algorithm.step(between.ops, node, state, step))


class _Between:
    """The messages of a program that all replicas of a node run alike, each sent once by each node."""

    def __init__(self, ops: Ops[Any], near: Groups, place: Any) -> None:
        self.ops, self.near, self.place = ops, near, place
        self.peers: Groups = tuple(zip(*near, strict=True))
        self.size = len(near[0])

    async def run(self, program: Program[T]) -> T:
        return await relayed(program, self._answer)

    async def _answer(self, request: Request) -> tuple[Any, ...]:
        if isinstance(request, WorldSize | ReplicaIndex):  # of the nodes
            return (len(self.near),) if isinstance(request, WorldSize) else (await replica_index(self.peers),)
        if isinstance(request, Reduce | Gather | AllToAll) and request.groups is None and not getattr(request, "counts", ()):
            answers = await self._in_parts(request)
            return await watch(*answers) if getattr(request, "watched", False) else answers
        if request.local or not isinstance(request, Fusable):
            return await ask(request.wrapped(self.run))
        return await ask(among(request, self.peers))

    async def _in_parts(self, request: Any) -> tuple[Any, ...]:
        """The answers, by a message of which each replica of a node sends a part."""
        answers: list[Any] = list(request.arrays)
        by_dtype: dict[str, list[int]] = {}
        for i, x in enumerate(request.arrays):
            if not math.prod(x.shape):
                continue
            by_dtype.setdefault(self.ops.dtype_of(x), []).append(i)
        nodes, shape_of = len(self.near), self._shape_of(request)
        for who in by_dtype.values():
            arrays, shapes = [request.arrays[i] for i in who], [shape_of(request.arrays[i]) for i in who]
            whole = partial(self.ops.from_rows, shapes=shapes)
            if isinstance(request, Reduce):
                parts = await self._sent(request, self._part(arrays))
                found = whole(parts[:, 0])
            else:
                rows = isinstance(request, AllToAll)
                mine = [self._part([x[n] for x in arrays]) for n in range(nodes)] if rows else [self._part(arrays)]
                sent = self.ops.rows(mine, 1).reshape((nodes, -1)) if rows else mine[0]
                parts = await self._sent(request, sent)
                by_node = [whole(parts[:, n]) for n in range(nodes)]
                found = [
                    self.ops.rows([each[i] for each in by_node], 1).reshape((nodes, *shape))
                    for i, shape in enumerate(shapes)
                ]
            for i, x in zip(who, found, strict=True):
                answers[i] = x
        return tuple(answers)

    def _shape_of(self, request: Any) -> Any:
        return lambda x: tuple(x.shape[1:] if isinstance(request, AllToAll) else x.shape)

    def _part(self, arrays: Sequence[Any]) -> Any:
        return self.ops.rows(arrays, self.size)[self.place]

    async def _sent(self, request: Any, part: Any) -> Any:
        """What the parts of all places come to: (places, nodes or 1, elements)."""
        named = {"watched": False} if hasattr(request, "watched") else {}
        given = {"donated": (True,), "overlap": ()} if isinstance(request, Reduce) else {}
        (mine,) = await ask(replace(request, arrays=(part,), groups=self.peers, **named, **given))
        rows, length = 1 if isinstance(request, Reduce) else len(self.near), part.shape[-1]
        (every,) = await all_gather([mine.reshape((rows * length,))], [(rows * length,) * self.size], groups=self.near)
        return every.reshape((self.size, rows, length))


def levels_of(algorithm: Any) -> TwoLevel | None:
    """The two levels in an algorithm, or in a schedule that has it for a compressor; None: it has one."""
    return next((each for each in nested(algorithm) if isinstance(each, TwoLevel)), None)


def with_levels(algorithm: T, new: Callable[[TwoLevel], Algorithm]) -> T:
    """The algorithm with something `new` in place of the two levels in it, if there are any."""
    if isinstance(algorithm, TwoLevel):
        return new(algorithm)  # type: ignore[return-value]
    changed: T = with_inner(algorithm, lambda inner: with_levels(inner, new))
    return changed


def without_levels(algorithm: T) -> T:
    """The algorithm with one level in place of two: whose memory a checkpoint of all replicas holds, one row for each node."""
    return with_levels(algorithm, lambda two: two.algorithm)


class _Indivisible(NoPartition):
    """Replicas that cannot be divided into nodes of one size."""

    def __init__(self, within: int, replicas: int) -> None:
        ValueError.__init__(
            self, f"within={within}, but {replicas} replicas cannot be divided so; use a divisor of {replicas}"
        )
        self.members = within


def _partition(given: Any) -> Groups:
    groups = tuple(tuple(members) if isinstance(members, list | tuple) else members for members in given)
    if not groups or not all(isinstance(m, tuple) and m and all(type(i) is int for i in m) for m in groups):
        raise TypeError(f"within={given!r} must be a partition of the replicas, such as ((0, 1), (2, 3))")
    if len({len(members) for members in groups}) > 1:
        raise ValueError(f"within={given!r} has groups that differ in size; all nodes must have equally many replicas")
    return groups
