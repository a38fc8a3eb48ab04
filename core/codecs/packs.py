"""What is computed with and sent as one: arrays as rows of a matrix, several matrices in one
message, and back.

Arrays of one length of rows and one dtype share a message. What is joined for that is a copy: large
arrays are only where they lie side by side already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, NamedTuple

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.codec import Codec
from gradwire.core.codecs.shares import Shares, is_even, shares_of
from gradwire.core.kernels.arrays import array_key, group_by
from gradwire.core.ops import A, Ops

#: Arrays of this number of elements are quantized by themselves: joining them would cost a copy.
#: Smaller ones share rows.
LARGE = 1 << 15


class Joined(NamedTuple, Generic[A]):
    """Arrays that are computed with as one: `members` of all, in a matrix (R, B), of which each has
    so many `rows`, one below the other. `shape` is that of the only one."""

    members: list[int]
    matrix: A
    rows: list[int]
    shape: tuple[int, ...] = ()


class Pack(NamedTuple, Generic[A]):
    """Matrices that are sent together, one below the other. `shares`: how their tensors are divided
    among the replicas; None: all rows in equal parts, of which zeros fill up the last."""

    parts: list[Joined[A]]
    shares: Shares | None = None

    @property
    def matrix(self) -> A:
        """Like which all are."""
        return self.parts[0].matrix

    @property
    def rows(self) -> int:
        """The number of rows of all parts."""
        return sum(part.matrix.shape[0] for part in self.parts)

    def each(self, replicas: int) -> int:
        """Rows of each replica."""
        return -(-self.rows // replicas) if self.shares is None else self.shares.each


@dataclass
class Packer(Generic[A]):
    """Joins arrays, and cuts what has been made of them.

    Args:
        ops: kernels.
        codec: whose rows they become.
        in_place: what is drawn by chance depends on an element's place: rows are those of the flat
            array.
    """

    ops: Ops[A]
    codec: Codec
    in_place: bool = False

    def packs(
        self, arrays: Sequence[A], replicas: int, firsts: Sequence[tuple[int, ...]] | None = None
    ) -> list[Pack[A]]:
        """All arrays that have elements. `firsts`: each is divided among the replicas by itself, as
        `gradwire.core.codecs.shares` says of the replica that is dealt its first row; of an array
        that holds several tensors of one length, each of these."""
        ops, sent = self.ops, [i for i, x in enumerate(arrays) if size_of(x)]
        keys = [(array_key(ops, arrays[i]), self.codec.layout(size_of(arrays[i]))[1]) for i in sent]
        apart, packs = firsts is not None and replicas != 2, list[Pack[A]]()
        for members in group_by(sent, keys):
            large = [
                i
                for i in members
                if size_of(arrays[i]) >= LARGE and (firsts is None or len(firsts[i]) == 1)
            ]
            # Rows of a cast are single elements, which are not moved one by one.
            moved = not (self.in_place or (apart and isinstance(self.codec, Cast)))
            order = ops.join_order([arrays[i] for i in members]) if moved else None
            if order is not None:
                # Two send rows as they are joined, and replicas may differ in where arrays lie. In
                # DDP's buckets the last parameter is the first.
                reordered = members[::-1] if replicas == 2 else [members[k] for k in order]
                one = self._joined(arrays, members if firsts is None else reordered)
                packs.append(
                    Pack([one], self._shares(one, members, replicas, firsts) if apart else None)
                )
                continue
            # What is divided evenly by itself needs nothing to fill it up, or little. Two divide
            # nothing.
            rows = {i: self.codec.layout(size_of(arrays[i]))[0] for i in large}
            alone = [
                i
                for i in large
                if (is_even(rows[i], replicas) if apart else rows[i] % replicas == 0)
            ]
            alone = [] if replicas == 2 else alone
            packs += [Pack([self._joined(arrays, [i])]) for i in alone]
            by_themselves = set(alone)
            rest = [i for i in members if i not in by_themselves]
            if rest and apart:
                one = self._joined(arrays, rest)
                packs.append(Pack([one], self._shares(one, rest, replicas, firsts)))
            elif rest:
                small = [i for i in rest if i not in rows]
                shared = [*([i] for i in rest if i in rows), *([small] if small else [])]
                packs.append(Pack([self._joined(arrays, some) for some in shared]))
        return packs

    def _shares(
        self,
        joined: Joined[A],
        members: Sequence[int],
        replicas: int,
        firsts: Sequence[tuple[int, ...]] | None,
    ) -> Shares:
        """The shares in the order of `members`, which is that of all replicas."""
        assert firsts is not None
        begin = dict(zip(joined.members, accumulate(joined.rows, initial=0), strict=False))
        count = {
            i: rows // len(firsts[i]) for i, rows in zip(joined.members, joined.rows, strict=True)
        }
        divided = tuple((count[i], first) for i in members for first in firsts[i])
        starts = tuple(begin[i] + k * count[i] for i in members for k in range(len(firsts[i])))
        return shares_of(replicas, divided, starts)

    def _joined(self, arrays: Sequence[A], members: list[int]) -> Joined[A]:
        ops, matrices = self.ops, [self.matrix(arrays[i]) for i in members]
        one, width = matrices[0], matrices[0].shape[1]
        if len(members) > 1:
            # As if they were donated: where they lie side by side they are only read there, unless
            # they really are.
            one = ops.rows(matrices, 1, donated=ops.join_order(matrices) is not None).reshape(
                (-1, width)
            )
        shape = tuple(arrays[members[0]].shape) if len(members) == 1 else ()
        return Joined(members, one, [x.shape[0] for x in matrices], shape)

    def matrix(self, x: A) -> A:
        """An array in rows, of which zeros fill up the last."""
        rows, width = self.codec.layout(size_of(x))
        if not self.in_place:
            blocks: A = self.ops.storage.to_blocks(self.ops, x, rows, width)
            return blocks
        flat = x.reshape((-1,))
        return (flat if size_of(x) == rows * width else self.ops.pad(flat, rows * width)).reshape(
            (rows, width)
        )

    def divide(self, joined: A, part: Joined[A], arrays: Sequence[A], answers: list[Any]) -> None:
        """Answers of the shapes and dtypes of these arrays, of rows that were made of theirs."""
        ops, start = self.ops, 0
        dtype = ops.dtype_of(arrays[part.members[0]])  # of all that share rows
        longer = ops.dtype_of(joined) != dtype
        for i, rows in zip(part.members, part.rows, strict=True):
            own, shape = (
                joined[start : start + rows] if len(part.rows) > 1 else joined,
                tuple(arrays[i].shape),
            )
            if self.in_place:
                x = own.reshape((-1,))[: math.prod(shape)].reshape(shape)
            else:
                x = ops.storage.from_blocks(own, shape)
            answers[i] = ops.cast(x, dtype) if longer else x
            start += rows

    # ---- among replicas

    def cut(self, codes: A, pack: Pack[A], replicas: int) -> A:
        """The rows of each replica, (W, P, m), of all rows (R, m) of a pack."""
        ops, m = self.ops, codes.shape[1]
        if pack.shares is not None:
            return ops.take_rows(codes, pack.shares.sent()).reshape((replicas, -1, m))
        if missing := -codes.shape[0] % replicas * m:
            dtype = ops.dtype_of(codes)
            zeros = ops.constant(
                ("zero codes", missing, dtype), lambda: ops.zeros((missing,), dtype)
            )
            codes = ops.rows([codes.reshape((-1,)), zeros], 1)
        return codes.reshape((replicas, -1, m))

    def put_together(self, x: A, pack: Pack[A]) -> A:
        """All rows (R, m) of a pack, of which `cut` has made so many for each replica, (W, P,
        m)."""
        if pack.shares is None:
            return x.reshape((-1, x.shape[2]))[: pack.rows]
        return self.ops.take_rows(x, pack.shares.received())


def members_of(pack: Pack[Any]) -> Iterator[tuple[int, int, int]]:
    """Which array, its first row and its rows: of a pack whose arrays are divided each by itself,
    in the order in which they are."""
    (joined,) = pack.parts
    if pack.shares is None:
        yield joined.members[0], 0, joined.rows[0]
        return
    of_row = dict(zip(accumulate(joined.rows, initial=0), joined.members, strict=False))
    for start, (rows, _) in zip(pack.shares.starts, pack.shares.members, strict=True):
        yield of_row[start], start, rows


def size_of(x: Any) -> int:
    """Elements of an array."""
    return math.prod(x.shape)
