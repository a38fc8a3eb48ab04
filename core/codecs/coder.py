"""The quantized mean: of what all replicas have, in codes that each has made once, summed in float32.

    x ── encode ── all-to-all ── decode, sum ── encode ── all-gather ── decode ── the mean, the same bits everywhere

Each replica forms its part of the mean. Nothing is rounded more than twice, whatever the number of replicas, and as many bytes travel as in an
all-reduce of the codes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.codec import Codec
from gradwire.core.kernels import random
from gradwire.core.ops import ITEMSIZE, A, Ops, wide_dtype
from gradwire.core.programs import Groups
from gradwire.core.requests import all_to_all, all_to_all_parts, gather, replica_index, watch, world_size

#: Arrays of this number of elements are coded by themselves: joining them would cost a copy. Smaller ones share rows.
LARGE = 1 << 15


class Noise(NamedTuple):
    """What stochastic rounding draws from: a `key`, and the `step`, an int or a traced int32 scalar."""

    key: int
    step: Any


class _Pack(NamedTuple, Generic[A]):
    """Arrays that are coded together: `members` of all, in rows (R, B), of which each has so many."""

    members: list[int]
    matrix: A
    rows: list[int]


@dataclass
class Coder(Generic[A]):
    """Averages in codes. One for a step of a program.

    Args:
        ops: kernels.
        codec: how rows are coded.
        noise: of stochastic rounding. None: to the nearest.
    """

    ops: Ops[A]
    codec: Codec
    noise: Noise | None = None
    _drawn: int = field(default=0, init=False)

    @property
    def casts(self) -> bool:
        """Whether an array can be coded element by element, and so also be handed over."""
        return isinstance(self.codec, Cast)

    def shrinks(self, x: A) -> bool:
        """Whether an array is of floats that are longer than their codes."""
        return ITEMSIZE.get(self.ops.dtype_of(x), 0) > self.codec.itemsize

    async def mean(
        self, arrays: Sequence[A], *, donated: bool = False, watched: bool = True, groups: Groups | None = None
    ) -> list[A]:
        """The mean of each array over all replicas, or over this replica's group of `groups`, which are of equal size.

        `donated`: the answers may lie in the arrays. `watched`: see `gradwire.core.requests.StepIsFinite`.
        """
        return (await self._mean(arrays, donated, watched, groups, keeps=False))[0]

    async def mean_and_sent(self, arrays: Sequence[A]) -> tuple[list[A], list[A]]:
        """And what was sent of this replica's arrays, with mean `mean`: what the second rounding left out is taken off the part of the replica that
        has rounded it."""
        return await self._mean(arrays, False, True, None, keeps=True)

    async def _mean(
        self, arrays: Sequence[A], donated: bool, watched: bool, groups: Groups | None, *, keeps: bool
    ) -> tuple[list[A], list[A]]:
        ops, codec = self.ops, self.codec
        size = await world_size(groups, assumed=1)
        place = await replica_index(groups) if keeps or self.noise else 0
        packs = [self._pack(arrays, members) for members in self._members(arrays)]
        coded = [self._in_parts(self._encoded(pack.matrix, place + 1), size) for pack in packs]
        received = await all_to_all(*coded, groups=groups)
        shares = [
            self._share(y, pack.matrix.shape[1], ops.dtype_of(pack.matrix))
            for y, pack in zip(received, packs, strict=True)
        ]
        again = [self._encoded(x, 0) for x in shares]
        gathered = await gather(*again, watched=False, groups=groups, assumed=1)
        means, sent, shown = list(arrays), list(arrays), []
        for pack, mine, share, part, everything in zip(packs, coded, shares, again, gathered, strict=True):
            rows = everything.reshape((size * share.shape[0], -1))
            x = self._decoded(rows, out=self._room(pack, rows) if donated else None)
            shown.append(codec.witness(ops, rows, x))
            self._cut(x, arrays, pack, means)
            if keeps:
                dtype = ops.dtype_of(share)
                missed = share - ops.cast(self._decoded(part), dtype)
                own = ops.cast(self._decoded(mine.reshape(tuple(rows.shape))), dtype).reshape((1, size, -1))
                settled = ops.row(own, place) + (missed * -float(size)).reshape((1, 1, -1))
                self._cut(ops.set_row(own, place, settled), arrays, pack, sent)
        if watched and groups is None:
            await watch(*shown)
        return means, sent

    async def parts_of_mean(
        self, vectors: Sequence[A], counts: Sequence[tuple[int, ...]], groups: Groups | None = None
    ) -> list[A]:
        """This replica's part of the mean of each vector, of so many elements for each replica: rounded once."""
        ops, answers = self.ops, []
        place = await replica_index(groups)
        for x, own in zip(vectors, counts, strict=True):
            n = own[0] if len(set(own)) == 1 else own[place]
            starts = [sum(own[:replica]) for replica in range(len(own))]
            parts = [x[start : start + k] for start, k in zip(starts, own, strict=True) if k]
            if not parts:
                answers.append(x)
                continue
            coded = [self._encoded(self._matrix(part), place + 1) for part in parts]
            nbytes = iter([_size(y) for y in coded])
            sizes = tuple(next(nbytes) if k else 0 for k in own)
            flat = ops.rows(coded, 1).reshape((-1,))
            (received,) = await all_to_all_parts([flat], [sizes], groups=groups)
            dtype = ops.dtype_of(x)
            if n:
                share = self._share(received.reshape((len(own), -1)), self.codec.layout(n)[1], dtype)
                answers.append(ops.cast(share.reshape((-1,))[:n], dtype))
            else:
                answers.append(x[:0])
        return answers

    def _members(self, arrays: Sequence[A]) -> list[list[int]]:
        """Which are coded together: small ones in rows of one length and dtype."""
        together: dict[object, list[int]] = {}
        for i, x in enumerate(arrays):
            if size := _size(x):
                alike = (self.ops.kind_of(x), self.codec.layout(size)[1]) if size < LARGE else i
                together.setdefault(alike, []).append(i)
        return list(together.values())

    def _pack(self, arrays: Sequence[A], members: list[int]) -> _Pack[A]:
        matrices = [self._matrix(arrays[i].reshape((-1,))) for i in members]
        rows, width = [x.shape[0] for x in matrices], matrices[0].shape[1]
        joined = matrices[0] if len(members) == 1 else self.ops.rows(matrices, 1).reshape((sum(rows), width))
        return _Pack(members, joined, rows)

    def _matrix(self, vector: A) -> A:
        """A vector in rows, of which the last is filled up with zeros."""
        rows, width = self.codec.layout(vector.shape[0])
        n = rows * width
        return (vector if vector.shape[0] == n else self.ops.pad(vector, n)).reshape((rows, width))

    def _encoded(self, x: A, who: Any) -> A:
        """The codes (R, m) of rows (R, B). `who` rounds them: a replica, counted from 1, or all alike, 0."""
        ops, codec = self.ops, self.codec
        if self.noise is None or not codec.dithers:
            return ops.by_rows(lambda x: codec.encode(ops, ops.cast(x, "float32")), x)
        self._drawn += 1
        key = random.key(self.noise.key, str(self._drawn))
        drawn = random.dither(ops, key, tuple(x.shape), random.of_replica(self.noise.step, who))
        return ops.by_rows(lambda x, d: codec.encode(ops, ops.cast(x, "float32"), d), x, drawn)

    def _in_parts(self, codes: A, size: int) -> A:
        """Codes as a row for each replica, all with as many rows of the codes: zeros, which stand for zeros, fill them up."""
        flat, part = codes.reshape((-1,)), -(-codes.shape[0] // size) * codes.shape[1]
        return (flat if _size(flat) == size * part else self.ops.pad(flat, size * part)).reshape((size, part))

    def _decoded(self, codes: A, out: A | None = None) -> A:
        return self.ops.by_rows(lambda y: self.codec.decode(self.ops, y), codes, out=out)

    def _share(self, received: A, width: int, dtype: str) -> A:
        """The mean, in rows of this width, of what each replica has sent (W, …) of this one's part. In float32, of float64 in float64."""
        ops, codec, size = self.ops, self.codec, received.shape[0]
        summed = wide_dtype(dtype)
        coded = codec.width(width)
        rows = received.shape[1] // coded

        def of(replica: Any) -> A:
            return ops.row(received.reshape((1, size, -1)), replica).reshape((rows, coded))

        def decoded(y: A) -> A:
            return ops.cast(codec.decode(ops, y), summed)

        def added(i: Any, total: A) -> A:
            return ops.by_rows(lambda y, so_far: so_far + decoded(y), of(i + 1), total, out=total)

        total = ops.loop(size - 1, added, ops.by_rows(decoded, of(0)))
        return ops.by_rows(lambda x: x * (1.0 / size), total, out=total)

    def _room(self, pack: _Pack[A], rows: A) -> A | None:
        """The array itself, if what is decoded of these rows has its size and dtype."""
        fits = len(pack.members) == 1 and pack.matrix.shape[0] == rows.shape[0]
        return pack.matrix if fits and self.ops.dtype_of(pack.matrix) == "float32" else None

    def _cut(self, joined: A, arrays: Sequence[A], pack: _Pack[A], answers: list[A]) -> None:
        flat, start = joined.reshape((-1,)), 0
        for i, rows in zip(pack.members, pack.rows, strict=True):
            x = flat[start : start + _size(arrays[i])].reshape(tuple(arrays[i].shape))
            answers[i] = self.ops.cast(x, self.ops.dtype_of(arrays[i]))
            start += rows * pack.matrix.shape[1]


def _size(x: Any) -> int:
    return math.prod(x.shape)
