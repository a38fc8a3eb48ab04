"""How what the replicas of a node own lies in the messages between them.

A large tensor is a message of its own, as it lies: what it is made of belongs to its owners in the order of their places. Small ones share a message, in
which the part of each owner is what it owns of them. Where the host does not know which replica this is (JAX), all lie in such a message, and its parts
are filled up to one length. Averages that an algorithm knows as factors (`gradwire.core.forms`) come back as these, and every replica multiplies them out.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from gradwire.core.algorithm import State
from gradwire.core.division import Division
from gradwire.core.factors import LowRank, multiplied
from gradwire.core.forms import FactorSpecs
from gradwire.core.ops import A, Ops, Spec, largest_error, shaped

#: A tensor of so many bytes is worth a message of its own. Packing it would cost a copy.
ALONE = 1 << 18

#: What a replica contributes of a tensor: its name, and 0 or 1 for one of two factors.
Key = tuple[str, int]
#: Of each place, by parameter name, the factors that its averages come back as.
Forms = Sequence[Mapping[str, FactorSpecs]]


@dataclass(frozen=True)
class _Packed:
    """Arrays of one dtype in one message, by their owners. `lengths` of the parts, filling included."""

    dtype: str
    owned: tuple[dict[Key, Spec], ...]
    lengths: tuple[int, ...]

    def pieces(self, ops: Ops[A], place: int, arrays: Mapping[Key, A]) -> list[A]:
        """The part of one owner, filled up."""
        found = [arrays[key] for key in self.owned[place]]
        filling = self.lengths[place] - _size(self.owned[place])
        return [*found, ops.zeros((filling,), self.dtype)] if filling else found


def _size(specs: Mapping[Key, Spec]) -> int:
    return sum(spec.size for spec in specs.values())


def _packed(owned: Sequence[Mapping[Key, Spec]], *, even: bool) -> list[_Packed]:
    """What all of them contribute, a message for each dtype."""
    found = []
    for dtype in dict.fromkeys(spec.dtype for specs in owned for spec in specs.values()):
        of_dtype = tuple({key: spec for key, spec in specs.items() if spec.dtype == dtype} for specs in owned)
        sizes = tuple(map(_size, of_dtype))
        found.append(_Packed(dtype, of_dtype, (max(sizes),) * len(sizes) if even else sizes))
    return found


class Parts(Generic[A]):
    """Some gradients as messages to their owners, and what comes back.

    Args:
        ops: kernels.
        division: of the model.
        gradients: by name, some of the model's.
        even: parts of a message have one length.
        forms: what comes back as factors; (): nothing.
    """

    def __init__(
        self, ops: Ops[A], division: Division, gradients: Mapping[str, A], *, even: bool, forms: Forms = ()
    ) -> None:
        self.ops = ops
        self.division = division
        self.gradients = dict(gradients)
        self.forms = forms or [{}] * division.places
        owned = [division.specs_of(place, gradients) for place in range(division.places)]
        nbytes = {name: division.by_name[name][0].nbytes for name in gradients}
        self.alone = [name for name in gradients if not even and nbytes[name] >= ALONE]
        packed = [{(name, 0): spec for name, spec in specs.items() if name not in self.alone} for specs in owned]
        self.packed = _packed(packed, even=even)

        in_factors = {name for own in self.forms for name in own}
        self.back_alone = [name for name in self.alone if name not in in_factors]
        if gradients and len(self.back_alone) == len(gradients):  # something must carry the verdict
            self.back_alone.remove(min(gradients, key=lambda name: nbytes[name]))
        back = [self._back_specs(place, specs) for place, specs in enumerate(owned)]
        self.back_packed = _packed(back, even=even)

    def _back_specs(self, place: int, specs: Mapping[str, Spec]) -> dict[Key, Spec]:
        found: dict[Key, Spec] = {}
        for name, spec in specs.items():
            if name not in self.back_alone:
                found |= {(name, i): each for i, each in enumerate(self.forms[place].get(name, (spec,)))}
        return found

    def messages(self) -> tuple[list[A], list[tuple[int, ...]]]:
        """What a node's replicas average: vectors, and how many elements of each belong to whom."""
        vectors = [self.gradients[name].reshape((-1,)) for name in self.alone]
        counts = [self.division.counts(name) for name in self.alone]
        for packed in self.packed:
            pieces: list[A] = []
            for place, owned in enumerate(packed.owned):
                blocks = {key: self._piece(key[0], place) for key in owned}
                pieces += packed.pieces(self.ops, place, blocks)
            vectors.append(self.ops.rows(pieces, 1).reshape((-1,)))
            counts.append(packed.lengths)
        return vectors, counts

    def own(self, received: Sequence[A], place: int) -> dict[str, A]:
        """What one of them has received, by name: its blocks."""
        found: dict[str, A] = {}
        specs = self.division.specs_of(place, self.gradients)
        for name, vector in zip(self.alone, received, strict=False):
            if name in specs:
                found[name] = vector.reshape(specs[name].shape)
        for packed, vector in zip(self.packed, received[len(self.alone) :], strict=True):
            for (name, _), x in _cut(vector, packed.owned[place]).items():
                found[name] = x
        return {name: found[name] for name in specs}

    def back(self, averages: Mapping[str, A | LowRank[A]], place: int, flag: A | None = None) -> list[A]:
        """This replica's part of each message to all of its node. The first that is packed ends with the `flag`, a vector of length 1; None: it is
        still to be `flagged`."""
        vectors: list[A] = []
        arrays: dict[Key, Any] = {}
        for name, average in averages.items():
            arrays |= {(name, i): x for i, x in enumerate(average if isinstance(average, LowRank) else (average,))}
        for name in self.back_alone:
            if name in averages:
                vectors.append(arrays[name, 0].reshape((-1,)))
            else:
                vectors.append(self.ops.zeros((0,), self.division.by_name[name][0].dtype))
        for number, packed in enumerate(self.back_packed):
            pieces = packed.pieces(self.ops, place, arrays)
            if number == 0 and flag is not None:
                pieces.append(self.ops.cast(flag, packed.dtype))
            joined = self.ops.rows(pieces, 1).reshape((-1,)) if pieces else self.ops.zeros((0,), packed.dtype)
            vectors.append(joined)
        return vectors

    def flagged(self, vectors: Sequence[A], flag: A) -> list[A]:
        """What comes `back`, with a flag at the end of the first that is packed."""
        first, found = len(self.back_alone), list(vectors)
        found[first] = self.ops.rows([found[first], self.ops.cast(flag, self.back_packed[0].dtype)], 1).reshape((-1,))
        return found

    def back_counts(self) -> list[tuple[int, ...]]:
        """How many elements each replica contributes to what comes `back`."""
        packed = [tuple(n + (number == 0) for n in p.lengths) for number, p in enumerate(self.back_packed)]
        return [self.division.counts(name) for name in self.back_alone] + packed

    def places(self) -> list[A | None]:
        """Where what comes back may lie: a large tensor in that of its gradient."""
        return [self.gradients[name].reshape((-1,)) for name in self.back_alone] + [None] * len(self.back_packed)

    def whole(self, gathered: Sequence[A]) -> tuple[dict[str, A], A]:
        """The tensors that all have sent back, and their flags, one for each. They take the places of the gradients."""
        found: dict[str, A] = {}
        for name, vector in zip(self.back_alone, gathered, strict=False):
            found[name] = vector.reshape(self.division.by_name[name][0].shape)
        flags: list[A] = []
        blocks: dict[str, dict[int, dict[int, A]]] = {}  # name → place → arrays
        for number, (packed, vector) in enumerate(zip(self.back_packed, gathered[len(self.back_alone) :], strict=True)):
            begin = 0
            for place, (length, owned) in enumerate(zip(packed.lengths, packed.owned, strict=True)):
                for (name, i), x in _cut(vector[begin : begin + length], owned).items():
                    blocks.setdefault(name, {}).setdefault(place, {})[i] = x
                begin += length
                if number == 0:
                    flags.append(vector[begin : begin + 1])
                    begin += 1
        for name, of_places in blocks.items():
            found[name] = self._joined(name, of_places)
        return {name: found[name] for name in self.gradients}, self.ops.rows(flags, 1).reshape((-1,))

    def _joined(self, name: str, of_places: Mapping[int, Mapping[int, A]]) -> A:
        """A tensor of the blocks of its owners, in the order of their places."""
        spec = self.division.by_name[name][0]
        parts, places = [], []
        for place in sorted(of_places):
            arrays = of_places[place]
            if len(arrays) == 1:
                parts.append(arrays[0])
                continue
            out = self._piece(name, place)
            if spec.dtype != self.forms[place][name].p.dtype:
                out = self.ops.zeros(tuple(out.shape), self.forms[place][name].p.dtype)
            places.append(out)
            parts.append(self.ops.cast(multiplied(self.ops, arrays[0], arrays[1], out=out), spec.dtype))
        if len(parts) == 1:
            return shaped(parts[0], spec.shape)
        if len(places) == len(parts) and all(part is out for part, out in zip(parts, places, strict=True)):
            return self.gradients[name]  # of which they are the rows
        return shaped(self.ops.rows(parts, 1), spec.shape)

    def _piece(self, name: str, place: int) -> A:
        """The block of a gradient that is owned at a place."""
        block = self.division.block(name, place)
        assert block is not None
        x = self.gradients[name]
        return x if block.whole else x[block.start : block.stop]


def _cut(vector: A, specs: Mapping[Key, Spec]) -> dict[Key, A]:
    """Arrays of these shapes, one after the other at the beginning of a vector."""
    found: dict[Key, A] = {}
    start = 0
    for key, spec in specs.items():
        found[key] = vector[start : start + spec.size].reshape(spec.shape)
        start += spec.size
    return found


def flag_of(ops: Ops[A], ok: A) -> A:
    """0 or NaN for a boolean scalar, shape (1,)."""
    (flag,) = ops.nan_unless(ok, [ops.zeros((1,), "float32")])
    return flag


def kept(ops: Ops[A], ok: A, new: State[A], old: State[A], errors: Container[str]) -> State[A]:
    """The new memory if the boolean scalar `ok` holds, else the old, which is donated. `errors`: the names of those memories that are errors."""
    shared = {key: ops.where(ok, x, old.shared[key]) if key in old.shared else x for key, x in new.shared.items()}
    tensors = {name: dict(memory) for name, memory in new.tensors.items()}
    places = [(n, k) for n, memory in tensors.items() for k in memory if k in old.tensors.get(n, {})]
    before = [old.tensors[n][k] for n, k in places]
    limits = [largest_error(ops, x) if k in errors else math.inf for (_, k), x in zip(places, before, strict=True)]
    chosen = ops.where_each(ok, [tensors[n][k] for n, k in places], before, limits=limits)
    for (name, key), x in zip(places, chosen, strict=True):
        tensors[name][key] = x
    return State(shared, tensors)
