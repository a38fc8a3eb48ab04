"""Who owns what among the replicas of a node, when they divide the work of an algorithm: whole tensors, balanced, by name.

    division = divide(PowerSGD(4), specs, 2)
    division.specs_of(0)             # parameter name → shape and dtype of what the first of two replicas compresses

Ownership is a property of parameters, by name. It depends on the model, the algorithm and the number of replicas alone, so it survives the rebuilding of
buckets and a restart. A tensor that is more than a fair share of the work is cut into blocks of rows, each with an owner of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from gradwire.core.algorithm import Algorithm, State
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.plan.dry_run import DryRun, dry_run
from gradwire.core.programs import UnknownRequest

#: An element on the slow network costs as much as so many that are compressed once: 1 Gbit/s against some billions of operations per second.
SENT = 32


@dataclass(frozen=True)
class Block:
    """Rows `start` to `stop` of a parameter, of its `rows`, which the replica at this `place` of its node owns. A scalar has one row."""

    place: int
    start: int
    stop: int
    rows: int

    @property
    def whole(self) -> bool:
        """Whether it is all there is."""
        return self.stop - self.start == self.rows


@dataclass(frozen=True)
class Division:
    """A partition of all parameters among the replicas of a node.

    Attributes:
        specs: (parameter name, shape and dtype), in the order of the model.
        blocks: of each, in the order of its rows, and of their owners.
        places: number of replicas.
    """

    specs: tuple[tuple[str, Spec], ...]
    blocks: tuple[tuple[Block, ...], ...]
    places: int

    @cached_property
    def by_name(self) -> dict[str, tuple[Spec, tuple[Block, ...]]]:
        """What is known of each parameter."""
        return {name: (spec, own) for (name, spec), own in zip(self.specs, self.blocks, strict=True)}

    def block(self, name: str, place: int) -> Block | None:
        """What a replica owns of a parameter: one block, or nothing."""
        return next((block for block in self.by_name[name][1] if block.place == place), None)

    def spec(self, name: str, block: Block) -> Spec:
        """Shape and dtype of a block."""
        return _rows_of(self.by_name[name][0], block.stop - block.start)

    def specs_of(self, place: int, names: Iterable[str] | None = None) -> dict[str, Spec]:
        """Shape and dtype of what a replica owns, of these parameters or of all. Not to be changed: it is found once, and asked for in every step."""
        key = place, None if names is None else tuple(names)
        if key not in self._owned:
            owned: dict[str, Spec] = {}
            for name in self.by_name if key[1] is None else key[1]:
                if (block := self.block(name, place)) is not None:
                    owned[name] = self.spec(name, block)
            self._owned[key] = owned
        return self._owned[key]

    def counts(self, name: str) -> tuple[int, ...]:
        """How many elements of a parameter each replica owns."""
        if name not in self._counts:
            blocks = [self.block(name, place) for place in range(self.places)]
            self._counts[name] = tuple(self.spec(name, block).size if block else 0 for block in blocks)
        return self._counts[name]

    @cached_property
    def _owned(self) -> dict[tuple[int, tuple[str, ...] | None], dict[str, Spec]]:
        return {}

    @cached_property
    def _counts(self) -> dict[str, tuple[int, ...]]:
        return {}

    def init(self, algorithm: Algorithm, ops: Ops[A], place: int) -> State[A]:
        """The memory of what a replica owns."""
        return algorithm.init(ops, self.padded(place)).of(self.specs_of(place))

    def padded(self, place: int) -> dict[str, Spec]:
        """What a replica owns, and of everything else nothing: so patterns of names are still found to fit some parameter."""
        owned = self.specs_of(place)
        return owned | {name: Spec((0,), spec.dtype) for name, spec in self.specs if name not in owned}


def divide(algorithm: Algorithm, specs: Mapping[str, Spec], places: int) -> Division:
    """Divide the work of an algorithm: the most costly tensor first, each to the replica that has least to do so far (Graham 1969).

    Work is what is computed with the elements of compressed tensors, and what is sent. A tensor that is more than a fair share, and is compressed as well
    in parts, is cut into as many blocks of rows as make each no more than that.
    """
    specs = {name: Spec(tuple(spec.shape), spec.dtype) for name, spec in specs.items()}
    dry = dry_run(algorithm, specs, 2)
    state = dry.memory
    work = _work(algorithm, specs, dry)
    share = sum(work.values()) / places
    load = [0.0] * places
    blocks: dict[str, tuple[Block, ...]] = {}
    for name in sorted(specs, key=lambda name: (-work[name], name)):
        rows = specs[name].shape[0] if specs[name].shape else 1
        wanted = min(places, math.ceil(work[name] / share)) if share else 1
        parts = _parts(algorithm, name, specs, state, wanted)
        # Blocks lie in the order of their owners, so that a message to all of these is the tensor as it is.
        owners = sorted(sorted(range(places), key=lambda place: (load[place], place))[:parts])
        edges = [rows * i // parts for i in range(parts + 1)]
        blocks[name] = tuple(Block(place, edges[i], edges[i + 1], rows) for i, place in enumerate(owners))
        for place in owners:
            load[place] += work[name] / parts
    return Division(tuple(specs.items()), tuple(blocks[name] for name in specs), places)


def _work(algorithm: Algorithm, specs: Mapping[str, Spec], dry: DryRun) -> dict[str, float]:
    work = {}
    for name, spec in specs.items():
        rank = algorithm.rank_of(name, spec.shape) if hasattr(algorithm, "rank_of") else 0
        computed = spec.size * max(1, rank) if name in dry.memory.tensors else 0
        work[name] = computed + SENT * _sent(dry, name, spec)
    return work


def _sent(dry: DryRun, name: str, spec: Spec) -> float:
    """Elements of the tensor's dtype that a step sends of it by itself; all of them for an algorithm that cannot be tried without data."""
    try:
        steps = dry.only([name]).traffic
    except (AttributeError, TypeError, ValueError, UnknownRequest):
        return spec.size
    return sum(step.nbytes for step in steps) / len(steps) * spec.size / max(spec.nbytes, 1)


def _parts(
    algorithm: Algorithm,
    name: str,
    specs: Mapping[str, Spec],
    state: State[AbstractArray],
    parts: int,
) -> int:
    """Into how many blocks a tensor is cut that should be cut into so many."""
    spec = specs[name]
    if parts < 2 or not spec.shape or spec.shape[0] < 2 * parts:
        return 1
    part = _rows_of(spec, spec.shape[0] // parts)
    empty = {other: Spec((0,), each.dtype) for other, each in specs.items() if other != name}
    compressed = name in dry_run(algorithm, {name: part} | empty, 2).memory.tensors
    return parts if compressed == (name in state.tensors) else 1


def _rows_of(spec: Spec, rows: int) -> Spec:
    return Spec((rows, *spec.shape[1:]), spec.dtype) if spec.shape else spec
