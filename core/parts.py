"""How what the replicas of a node own lies in the messages between them.

A large tensor is a message of its own, as it lies: what it is made of belongs to its owners in the order of their places. Small ones share a message, in
which the part of each owner is what it owns of them. Where the host does not know which replica this is (JAX), all lie in such a message, and its parts
are filled up to one length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from gradwire.core.algorithm import State
from gradwire.core.division import Division
from gradwire.core.ops import A, Ops, shaped

#: A tensor of so many bytes is worth a message of its own. Packing it would cost a copy.
ALONE = 1 << 18


@dataclass(frozen=True)
class _Packed:
    """Tensors of one dtype in one message. `lengths` of the parts, filling included."""

    names: tuple[str, ...]
    dtype: str
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]


class Parts(Generic[A]):
    """Some gradients as messages to their owners, and what comes back.

    Args:
        ops: kernels.
        division: of the model.
        gradients: by name, some of the model's.
        even: parts of a message have one length.
    """

    def __init__(self, ops: Ops[A], division: Division, gradients: Mapping[str, A], *, even: bool) -> None:
        self.ops = ops
        self.division = division
        self.gradients = dict(gradients)
        sizes = {name: division.by_name[name][0].nbytes for name in gradients}
        small = [name for name in sizes if even or sizes[name] < ALONE]
        if sizes and not small:  # something must carry the verdict
            small = [min(sizes, key=lambda name: sizes[name])]
        self.alone = [name for name in sizes if name not in small]
        by_dtype: dict[str, list[str]] = {}
        for name in small:
            by_dtype.setdefault(division.by_name[name][0].dtype, []).append(name)
        self.packed = [self._packed(tuple(names), dtype, even) for dtype, names in by_dtype.items()]

    def _packed(self, names: tuple[str, ...], dtype: str, even: bool) -> _Packed:
        owned = [self.division.specs_of(place, names) for place in range(self.division.places)]
        sizes = tuple(sum(spec.size for spec in specs.values()) for specs in owned)
        return _Packed(names, dtype, sizes, (max(sizes),) * len(sizes) if even else sizes)

    def messages(self) -> tuple[list[A], list[tuple[int, ...]]]:
        """What a node's replicas average: vectors, and how many elements of each belong to whom."""
        vectors = [self.gradients[name].reshape((-1,)) for name in self.alone]
        counts = [self.division.counts(name) for name in self.alone]
        for packed in self.packed:
            pieces: list[A] = []
            for place, (size, length) in enumerate(zip(packed.sizes, packed.lengths, strict=True)):
                pieces += [self._piece(name, place) for name in self.division.specs_of(place, packed.names)]
                if length > size:
                    pieces.append(self.ops.zeros((length - size,), packed.dtype))
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
            start = 0
            for name, spec in self.division.specs_of(place, packed.names).items():
                found[name] = vector[start : start + spec.size].reshape(spec.shape)
                start += spec.size
        return {name: found[name] for name in specs}

    def back(self, averages: Mapping[str, A], place: int, flag: A | None = None) -> list[A]:
        """This replica's part of each message to all of its node. The first that is packed ends with the `flag`, a vector of length 1; None: it is
        still to be `flagged`."""
        vectors = []
        for name in self.alone:
            if name in averages:
                vectors.append(averages[name].reshape((-1,)))
            else:
                vectors.append(self.ops.zeros((0,), self.division.by_name[name][0].dtype))
        for number, packed in enumerate(self.packed):
            pieces = [averages[name] for name in self.division.specs_of(place, packed.names)]
            filling = packed.lengths[place] - packed.sizes[place]
            if filling:
                pieces.append(self.ops.zeros((filling,), packed.dtype))
            if number == 0 and flag is not None:
                pieces.append(self.ops.cast(flag, packed.dtype))
            joined = self.ops.rows(pieces, 1).reshape((-1,)) if pieces else self.ops.zeros((0,), packed.dtype)
            vectors.append(joined)
        return vectors

    def flagged(self, vectors: Sequence[A], flag: A) -> list[A]:
        """What comes `back`, with a flag at the end of the first that is packed."""
        first, found = len(self.alone), list(vectors)
        found[first] = self.ops.rows([found[first], self.ops.cast(flag, self.packed[0].dtype)], 1).reshape((-1,))
        return found

    def back_counts(self) -> list[tuple[int, ...]]:
        """How many elements each replica contributes to what comes `back`."""
        packed = [tuple(n + (number == 0) for n in p.lengths) for number, p in enumerate(self.packed)]
        return [self.division.counts(name) for name in self.alone] + packed

    def places(self) -> list[A | None]:
        """Where what comes back may lie: a large tensor in that of its gradient."""
        return [self.gradients[name].reshape((-1,)) for name in self.alone] + [None] * len(self.packed)

    def whole(self, gathered: Sequence[A]) -> tuple[dict[str, A], A]:
        """The tensors that all have sent back, and their flags, one for each."""
        found: dict[str, A] = {}
        for name, vector in zip(self.alone, gathered, strict=False):
            found[name] = vector.reshape(self.division.by_name[name][0].shape)
        flags: list[A] = []
        for number, (packed, vector) in enumerate(zip(self.packed, gathered[len(self.alone) :], strict=True)):
            pieces: dict[str, list[A]] = {}
            begin = 0
            for place, length in enumerate(packed.lengths):
                start = begin
                for name, spec in self.division.specs_of(place, packed.names).items():
                    pieces.setdefault(name, []).append(vector[start : start + spec.size])
                    start += spec.size
                begin += length
                if number == 0:
                    flags.append(vector[begin : begin + 1])
                    begin += 1
            for name, parts in pieces.items():
                flat = parts[0] if len(parts) == 1 else self.ops.rows(parts, 1)
                found[name] = shaped(flat, self.division.by_name[name][0].shape)
        return {name: found[name] for name in self.gradients}, self.ops.rows(flags, 1).reshape((-1,))

    def _piece(self, name: str, place: int) -> A:
        block = self.division.block(name, place)
        assert block is not None
        x = self.gradients[name]
        return x if block.whole else x[block.start : block.stop]


def flag_of(ops: Ops[A], ok: A) -> A:
    """0 or NaN for a boolean scalar, shape (1,)."""
    (flag,) = ops.nan_unless(ok, [ops.zeros((1,), "float32")])
    return flag


def kept(ops: Ops[A], ok: A, new: State[A], old: State[A]) -> State[A]:
    """The new memory if the boolean scalar `ok` holds, else the old, which is donated."""
    shared = {key: ops.where(ok, x, old.shared[key]) if key in old.shared else x for key, x in new.shared.items()}
    tensors = {name: dict(memory) for name, memory in new.tensors.items()}
    places = [(n, k) for n, memory in tensors.items() for k in memory if k in old.tensors.get(n, {})]
    chosen = ops.where_each(ok, [tensors[n][k] for n, k in places], [old.tensors[n][k] for n, k in places])
    for (name, key), x in zip(places, chosen, strict=True):
        tensors[name][key] = x
    return State(shared, tensors)
