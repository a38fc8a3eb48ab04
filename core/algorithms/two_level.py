"""Two levels of replicas: dense on the fast network inside a node, any algorithm on the slow one between nodes.

    TwoLevel(PowerSGD(rank=4), within=8)      # nodes of 8 replicas, numbered one after the other

        this replica's part of the node's average  =  reduce-scatter(gradients), within the node
        this replica's part of the average         =  algorithm(part), between the nodes
        average                                    =  all-gather(part), within the node: factors, where these are what is known

A flat group would make each of the k replicas of a node compress the whole gradient, for the one slow link that all of them share. Here each compresses
1/k of it, and remembers 1/k of what was left out. Parts are whole tensors (`gradwire.core.division`), so that a method sees the matrices that it would see
without: the result is that of the algorithm on the averages of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

from gradwire.core.algorithm import Algorithm, State, Stepped, nested, require_algorithm, with_inner
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.division import Division, divide
from gradwire.core.factors import LowRank
from gradwire.core.forms import factored, step_in_factors
from gradwire.core.kernels.abstract import AbstractOps
from gradwire.core.one_program import SharedMemory, step_in_one_program
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.parts import Forms, Parts, flag_of, kept
from gradwire.core.paused import Paused, stores_last
from gradwire.core.plan.dry_run import try_out
from gradwire.core.programs import Groups, NoPartition, Program, UnknownWorldSize
from gradwire.core.requests import (
    all_gather,
    apart,
    asks_local_norm,
    local_norm,
    of_one_part,
    reduce_scatter,
    rejoin,
    step_is_finite,
    watch,
)
from gradwire.core.wording import configured

T = TypeVar("T")

#: Who is near: so many consecutive replicas; those of a machine; the groups themselves; in JAX those along a mesh axis, by its name.
Within = int | Groups | Literal["node"] | str


@dataclass(frozen=True, repr=False)
class TwoLevel(Wrapper):
    """Another algorithm between nodes, with its work divided among the replicas of each: `TwoLevel(PowerSGD(rank=4), within="node")`.

    With `AllReduce()` it is the hierarchical all-reduce: each byte crosses the slow network once for each node, and not once for each replica. With
    any other algorithm it gives what that gives on the averages of the nodes. Inside a node gradients travel once, and averages that are known as factors
    as these. Tensors that are more than a fair share of the work are cut into blocks of rows, which are compressed each by itself.

    A replica has memory of its part alone. A checkpoint is that of `algorithm` between as many replicas as there are nodes: it can go on with other
    nodes, other replicas in a node, and without levels.

    Examples:
        >>> from gradwire import PowerSGD, TwoLevel, plan
        >>> between = plan({"a": (512, 512), "b": (512, 512)}, TwoLevel(PowerSGD(rank=4), within=2), world_size=4).levels[1]
        >>> between.groups, between.replicas, between.nbytes, between.node_bytes
        (2, 2, 16384, 32768)

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
        """The same with "node" replaced, by the number of replicas on each machine, or by a partition of the replicas. Raises ValueError as the class does."""
        return replace(self, within=near) if self.mentions_nodes else self

    def near(self, replicas: int) -> Groups:
        """Groups of the replicas of a node, all of one size. Raises ValueError where so many replicas cannot be divided so."""
        within = self.within
        if isinstance(within, int):
            if replicas % within:
                raise Indivisible(within, replicas)
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

    def on_replica(
        self, specs: Mapping[str, Spec], replica: int | None, replicas: int | None
    ) -> Algorithm | TwoLevelOnReplica:
        """The algorithm as one replica runs it, which compresses the part of the model that is its own: `algorithm` itself on nodes of one replica.

        Args:
            specs: parameter name → shape and dtype, of the whole model: by these the work is divided.
            replica: which one; None where the host does not know, as in JAX: then the result runs as any of them.
            replicas: how many there are.

        Raises:
            ValueError: so many replicas cannot be divided in groups as `within` says.
        """
        if replicas is None:
            raise UnknownWorldSize
        near = self.near(replicas)
        if len(near[0]) == 1:
            return self.algorithm
        place = None if replica is None else next(own.index(replica) for own in near if replica in own)
        return self.divided_as(divide(self.algorithm, specs, len(near[0])), near, place)

    def divided_as(self, division: Division, near: Groups, place: int | None) -> TwoLevelOnReplica:
        """The algorithm as one replica runs it, with the work divided as given: for drivers that keep a division with the state.

        Args:
            division: which place owns which rows of which parameters.
            near: groups of the replicas of a node, all of one size.
            place: which place of its group the replica has; None where the host does not know.
        """
        specs = dict(division.specs)
        whole = self.algorithm.init(AbstractOps(), specs)
        remembers = bool(whole.tensors or whole.shared)
        return TwoLevelOnReplica(
            self.algorithm,
            self.within,
            division,
            near,
            tuple(zip(*near, strict=True)),
            place,
            norms=_asks_norm(self.algorithm, specs),
            remembers=remembers,
            agrees=remembers and place is not None and stores_last(self.algorithm, specs),
            forms=_forms(self.algorithm, division),
        )

    async def step(self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any) -> Stepped[A]:
        """Refused: steps are taken by what `on_replica` returns, one for each replica. Raises RuntimeError."""
        raise RuntimeError(
            f"{self!r} divides its memory among replicas: make it, and take its steps, by gradwire.core.algorithm.on_replica"
        )


@dataclass(frozen=True, repr=False)
class TwoLevelOnReplica(TwoLevel):
    """What one replica does of it.

    Attributes:
        division: who owns what.
        groups, peers: replicas of a node, and replicas of one place.
        place: of this replica in its node. None: the host does not know.
        norms: whether the algorithm asks for the norm of the whole gradient.
        remembers: whether it has a memory, of anything on any replica.
        agrees: whether it stores that after all its messages, and so can wait until all owners know that the step counts.
        forms: of each place, by parameter name, the factors as which its averages travel back, see `gradwire.core.forms`. (): they travel as arrays.
    """

    division: Division = field(default=None)  # type: ignore[assignment]
    groups: Groups = ()
    peers: Groups = ()
    place: int | None = None
    norms: bool = False
    remembers: bool = True
    agrees: bool = False
    forms: Forms = field(default=(), compare=False)  # what it is follows from the rest

    def __repr__(self) -> str:
        return repr(TwoLevel(self.algorithm, self.within))

    def on_replica(self, specs: Mapping[str, Spec], replica: int | None, replicas: int | None) -> TwoLevelOnReplica:
        """Itself."""
        return self

    def on_places(self) -> list[TwoLevelOnReplica]:
        """What each replica of a node does."""
        return [replace(self, place=place) for place in range(self.division.places)]

    def init(self, ops: Ops[A], specs: Mapping[str, Spec]) -> State[A]:
        """The memory of what this replica owns; where the host does not know which it is, see `gradwire.core.one_program`."""
        if self.place is None:
            return SharedMemory(self).init(self, ops)
        return self.division.init(self.algorithm, ops, self.place)

    async def step(self, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any) -> Stepped[A]:
        if not gradients:
            return {}, state
        if self.place is None:
            return await step_in_one_program(self, ops, gradients, state, step)
        place = self.place
        started = self.start_step == 0 or (isinstance(step, int) and step >= self.start_step)
        forms = self.forms if started else ()
        stepped: Callable[..., Program[Any]] = (
            partial(step_in_factors, self.algorithm) if forms else self.algorithm.step
        )
        parts = Parts(ops, self.division, gradients, even=False, forms=forms)
        vectors, counts = parts.messages()
        received = await reduce_scatter(vectors, counts, groups=self.groups)
        mine = parts.own(received, place)
        norm = await local_norm(ops, mine, groups=self.groups) if self.norms else None
        if self.agrees:
            paused = Paused(of_one_part(stepped(ops, mine, state, step), norm))
            _, ok = await apart(ops, self.peers, place, [paused.until_it_asks] * self.division.places)
            await rejoin()
            await watch(
                *await all_gather([flag_of(ops, ok)], [(1,) * self.division.places], groups=self.groups, exact=(True,))
            )
            averages, after = await paused.resumed(await step_is_finite())
            gathered = await self._gathered(parts, averages, flag_of(ops, ok))
            return parts.whole(gathered)[0], after

        # Nobody knows before the parts of all are there whether the step counts. Then what was remembered is still wanted.
        async def between(x: dict[str, A], memory: State[A]) -> Any:
            return await of_one_part(stepped(ops, x, memory, step), norm)

        results, ok = await apart(ops, self.peers, place, [between] * self.division.places, mine, state.map(_copied))
        averages, after = results
        await rejoin()
        averages, flags = parts.whole(await self._gathered(parts, averages, flag_of(ops, ok)))
        if not self.remembers:
            return averages, after
        await watch(flags)
        return averages, kept(ops, await step_is_finite(), after, state, self.per_replica)

    async def _gathered(self, parts: Parts[A], averages: Mapping[str, A | LowRank[A]], flag: A) -> tuple[A, ...]:
        assert self.place is not None
        back = parts.back(averages, self.place, flag)
        return await all_gather(back, parts.back_counts(), out=parts.places(), groups=self.groups)


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


def _forms(algorithm: Algorithm, division: Division) -> Forms:
    """(): nothing comes back as factors; also where one owner's step cannot be tried without data."""
    ops, forms = AbstractOps(), []
    for place in range(division.places):
        own = factored(algorithm, division.specs_of(place), division.init(algorithm, ops, place))
        if own is None:
            return ()
        forms.append(own)
    return tuple(forms) if any(forms) else ()


def _copied(x: A) -> A:
    return (x.reshape((-1,)) * 1).reshape(tuple(x.shape))  # a scalar stays an array


def _asks_norm(algorithm: Algorithm, specs: Mapping[str, Spec]) -> bool:
    try:
        return asks_local_norm(try_out(algorithm, specs, 2)[0])
    except Exception:  # it is written for the arrays of one framework
        return False


class Indivisible(NoPartition):
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
