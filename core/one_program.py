"""Two levels where all replicas run one program, and the host does not know which of them does what (JAX).

Arrays have one shape on all replicas. So messages are filled up to one length, each replica takes the side of its place (`gradwire.core.requests.Apart`), and
memory is divided in another way: what differs between nodes, the error, is one vector of what a replica owns, as long as that of the replica that owns
most. The rest, factors, is small; it travels with the averages, and all replicas have all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from gradwire.core.algorithm import State, Stepped
from gradwire.core.forms import step_in_factors
from gradwire.core.kernels.abstract import AbstractOps
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.parts import Forms, Parts, flag_of, kept
from gradwire.core.programs import Program
from gradwire.core.requests import (
    all_gather,
    apart,
    branch,
    local_norm,
    of_one_part,
    reduce_max,
    reduce_scatter,
    replica_index,
    step_is_finite,
    watch,
)

if TYPE_CHECKING:
    from gradwire.core.algorithms.two_level import TwoLevelOnReplica

#: The name of the memory in which a replica has the errors of what it owns, under the name of their dtype.
OWN = "own"
#: Between the name of a memory and the number of its block, of those after the first.
BLOCK = "@"


@dataclass(frozen=True)
class Kept:
    """One memory of one owner.

    Attributes:
        name, key: of the parameter and of the memory, as the algorithm knows them.
        stored: the key of the memory where all replicas have all of it.
        spec: of the memory.
        own: whether it differs between nodes.
    """

    name: str
    key: str
    stored: str
    spec: Spec
    own: bool


class SharedMemory:
    """Where in the memory of one program lies what each place remembers."""

    def __init__(self, parts: TwoLevelOnReplica) -> None:
        division = parts.division
        self.kept: list[list[Kept]] = []
        #: Parameters that are compressed, whether or not anything is remembered of them.
        self.compressed: set[str] = set()
        for place in range(division.places):
            state = division.init(parts.algorithm, AbstractOps(), place)
            self.compressed |= state.tensors.keys()
            mine = []
            for name, memory in state.tensors.items():
                blocks = division.by_name[name][1]
                number = next(i for i, block in enumerate(blocks) if block.place == place)
                for key, x in memory.items():
                    stored = f"{key}{BLOCK}{number}" if number else key
                    mine.append(Kept(name, key, stored, Spec(x.shape, x.dtype), key in parts.per_replica))
            self.kept.append(mine)

    def init(self, parts: TwoLevelOnReplica, ops: Ops[A]) -> State[A]:
        """The memory before the first step."""
        state: State[A] = State()
        for place, mine in enumerate(self.kept):
            made = parts.division.init(parts.algorithm, ops, place)
            state.shared = made.shared
            for k in mine:
                if not k.own:
                    state.tensors.setdefault(k.name, {})[k.stored] = made.tensors[k.name][k.key]
        for name in self.compressed:
            state.tensors.setdefault(name, {})
        for dtype, length in self.lengths(own=True).items():
            state.tensors[dtype] = {OWN: ops.zeros((length,), dtype)}
        return state

    def lengths(self, *, own: bool) -> dict[str, int]:
        """Of the vectors in which each place has what it keeps, its own or what all replicas have, by dtype."""
        sums = [_sizes(k.spec for k in mine if k.own == own) for mine in self.kept]
        return {dtype: max(each.get(dtype, 0) for each in sums) for dtype in sorted({d for each in sums for d in each})}

    def of_place(self, state: State[A], place: int, names: Iterable[str]) -> State[A]:
        """What the owner at a place remembers of some parameters, as the algorithm knows it."""
        owned = {k.name for k in self.kept[place]}
        found: dict[str, dict[str, A]] = {name: {} for name in names if name in owned or self._empty(name)}
        starts: dict[str, int] = {}
        for k in self.kept[place]:
            start = starts.get(k.spec.dtype, 0)
            if k.own:
                starts[k.spec.dtype] = start + k.spec.size
            if k.name in found and k.own:
                x = state.tensors[k.spec.dtype][OWN][start : start + k.spec.size]
                found[k.name][k.key] = x.reshape(k.spec.shape)
            elif k.name in found:
                found[k.name][k.key] = state.tensors[k.name][k.stored]
        return State(dict(state.shared), found)

    def _empty(self, name: str) -> bool:
        """Whether a tensor is compressed and remembers nothing, at whatever place."""
        return name in self.compressed and not any(k.name == name for mine in self.kept for k in mine)

    def vectors(self, ops: Ops[A], state: State[A], new: State[A], place: int, *, own: bool) -> dict[str, A]:
        """What a place keeps, after a step in which it was `new` for some parameters: a vector for each dtype."""
        before = self.of_place(state, place, [k.name for k in self.kept[place]])
        flat: dict[str, list[A]] = {dtype: [] for dtype in self.lengths(own=own)}
        for k in self.kept[place]:
            if k.own == own:
                memory = new.tensors.get(k.name, before.tensors[k.name])
                flat[k.spec.dtype].append(memory[k.key].reshape((-1,)))
        vectors = {}
        for dtype, length in self.lengths(own=own).items():
            filling = length - _sizes(k.spec for k in self.kept[place] if k.own == own).get(dtype, 0)
            pieces = [*flat[dtype], *([ops.zeros((filling,), dtype)] if filling else [])]
            vectors[dtype] = ops.rows(pieces, 1).reshape((-1,))
        return vectors

    def after(self, shared: Mapping[str, A], own: Mapping[str, A], gathered: Mapping[str, A]) -> State[A]:
        """The memory, of this replica's own vectors, and the vectors of all places one after the other."""
        state: State[A] = State(dict(shared), {name: {} for name in self.compressed})
        for dtype, vector in own.items():
            state.tensors[dtype] = {OWN: vector}
        for place, mine in enumerate(self.kept):
            starts = {dtype: place * length for dtype, length in self.lengths(own=False).items()}
            for k in mine:
                if not k.own:
                    start = starts[k.spec.dtype]
                    starts[k.spec.dtype] = start + k.spec.size
                    x = gathered[k.spec.dtype][start : start + k.spec.size]
                    state.tensors[k.name][k.stored] = x.reshape(k.spec.shape)
        return state


async def step_in_one_program(
    parts: TwoLevelOnReplica, ops: Ops[A], gradients: Mapping[str, A], state: State[A], step: Any
) -> Stepped[A]:
    """`gradwire.core.algorithms.two_level.TwoLevel.step`, with the memory of `SharedMemory`: all of it, whatever the gradients."""
    memory = SharedMemory(parts)
    place = await replica_index(parts.groups)
    messages = Parts(ops, parts.division, gradients, even=True)
    vectors, counts = messages.messages()
    received = await reduce_scatter(vectors, counts, groups=parts.groups)
    norm = await local_norm(ops, dict(enumerate(received)), groups=parts.groups) if parts.norms else None
    lengths = memory.lengths(own=False)

    async def stepped(how: Callable[..., Program[Any]], forms: Forms = ()) -> _Stepped[A]:
        """All after the reduce-scatter, with averages that travel back in these forms."""
        messages = Parts(ops, parts.division, gradients, even=True, forms=forms)

        def side(place: int) -> Callable[[Sequence[A], State[A]], Program[Any]]:
            async def between(received: Sequence[A], state: State[A]) -> Any:
                x = messages.own(received, place)
                mine = memory.of_place(state, place, x)
                averages, after = await of_one_part(how(ops, x, mine, step), norm)
                own = memory.vectors(ops, state, after, place, own=True)
                rest = memory.vectors(ops, state, after, place, own=False)
                return messages.back(averages, place), own, rest, after.shared

            return between

        sides = [side(place) for place in range(parts.division.places)]
        (back, own, rest, shared), ok = await apart(ops, parts.peers, place, sides, received, state)
        vectors, counts = messages.flagged(back, flag_of(ops, ok)), messages.back_counts()
        more = [(length,) * len(sides) for length in lengths.values()]
        exact = [False] * len(vectors) + [True] * len(more)
        gathered = await all_gather([*vectors, *rest.values()], [*counts, *more], groups=parts.groups, exact=exact)
        averages, flags = messages.whole(gathered[: len(vectors)])
        return _Stepped(averages, flags, shared, own, dict(zip(lengths, gathered[len(vectors) :], strict=True)))

    if parts.forms:
        # A step before the start has no factors. Where it is not known which it is, one of the two is taken.
        started = parts.start_step == 0 or step >= parts.start_step
        in_factors = partial(stepped, partial(step_in_factors, parts.algorithm), parts.forms)
        found: _Stepped[A] = await branch(started, in_factors, partial(stepped, parts.algorithm.step))
    else:
        found = await stepped(parts.algorithm.step)
    # Counters, equal already. JAX takes what comes of a branch by place to differ between places, unless all have agreed on it.
    shared = {key: await reduce_max(x, watched=False) for key, x in found.shared.items()}
    if not parts.remembers:
        return found.averages, state
    await watch(found.flags)
    after = memory.after(shared, found.own, found.rest)
    return found.averages, kept(ops, await step_is_finite(), after, state, {OWN})


class _Stepped(NamedTuple, Generic[A]):
    """What a step has come to: averages, whether each place found them finite, counters, what this replica remembers, and what all do."""

    averages: dict[str, A]
    flags: A
    shared: dict[str, A]
    own: dict[str, A]
    rest: dict[str, A]


def _sizes(specs: Iterable[Spec]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.size
    return sizes
