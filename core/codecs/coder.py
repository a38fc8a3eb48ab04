"""The quantized mean: of what all replicas have, in codes that each has made once, summed in float32.

    x ── encode ── all-to-all ── decode, sum ── encode ── all-gather ── decode ── the mean, the same bits everywhere

Each replica forms its part of the mean. Nothing is rounded more than twice, whatever the number of replicas, and as many bytes travel as in an
all-reduce of the codes. Two replicas send each other everything at once: these are the same bytes, and nothing is rounded twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.codec import Codec
from gradwire.core.kernels import random
from gradwire.core.ops import ITEMSIZE, A, Ops, wide_dtype
from gradwire.core.protocol import (
    all_to_all,
    all_to_all_parts,
    gather,
    replica_index,
    replica_weights,
    watch,
    world_size,
)
from gradwire.core.protocol.groups import Groups
from gradwire.core.protocol.weights import Weights

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
    #: Of the replicas whose codes have arrived last; None: all count alike.
    _weights: Weights[A] | None = field(default=None, init=False)

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

        `donated`: the answers may lie in the arrays. `watched`: see `gradwire.core.protocol.control_requests.StepIsFinite`.
        """
        return (await self._mean(arrays, donated, watched, groups, keeps=False))[0]

    async def mean_and_sent(self, arrays: Sequence[A]) -> tuple[list[A], list[A]]:
        """And what was sent of this replica's arrays, with mean `mean`: what the second rounding left out is taken off the part of the replica that
        has rounded it."""
        return await self._mean(arrays, False, True, None, keeps=True)

    async def _mean(
        self, arrays: Sequence[A], donated: bool, watched: bool, groups: Groups | None, *, keeps: bool
    ) -> tuple[list[A], list[A]]:
        ops = self.ops
        size = await world_size(groups, assumed=1)
        place = await replica_index(groups) if keeps or self.noise else 0
        packs = [self._pack(arrays, members) for members in self._members(arrays)]
        if size == 2:
            return await self._mean_of_two(arrays, packs, place, donated, watched, groups, keeps=keeps)
        coded = [self._in_parts(self._encoded(pack.matrix, place + 1), size) for pack in packs]
        received = await all_to_all(*coded, groups=groups)
        self._weights = await replica_weights(groups)
        of_each = [self._of_each(y, pack.matrix.shape[1]) for y, pack in zip(received, packs, strict=True)]
        shares = [self._share(y, pack.matrix) for y, pack in zip(of_each, packs, strict=True)] if keeps else []
        if keeps:
            again = [self._encoded(x, 0) for x in shares]
        else:
            again = [self._share_encoded(y, pack.matrix) for y, pack in zip(of_each, packs, strict=True)]
        gathered = await gather(*again, watched=False, groups=groups, assumed=1)
        means, sent, shown = list(arrays), list(arrays), []
        for pack, everything in zip(packs, gathered, strict=True):
            rows = everything.reshape((-1, everything.shape[2]))[: pack.matrix.shape[0]]
            x = self._decoded(rows, out=self._room(pack) if donated else None)
            if watched and groups is None:
                shown.append(self.codec.witness(ops, rows))
            self._cut(x, arrays, pack, means)
        for pack, mine, share, part in zip(packs, coded, shares, again, strict=keeps):
            self._cut(self._settled(mine, share, part, place), arrays, pack, sent)
        await watch(*shown)
        return means, sent

    async def _mean_of_two(
        self,
        arrays: Sequence[A],
        packs: Sequence[_Pack[A]],
        place: Any,
        donated: bool,
        watched: bool,
        groups: Groups | None,
        *,
        keeps: bool,
    ) -> tuple[list[A], list[A]]:
        ops = self.ops
        coded = [self._encoded(pack.matrix, place + 1) for pack in packs]
        of_both = await gather(*coded, watched=False, groups=groups)
        self._weights = await replica_weights(groups)
        means, sent, shown = list(arrays), list(arrays), []
        for pack, mine, codes in zip(packs, coded, of_both, strict=True):
            if keeps:
                self._cut(self._decoded(mine), arrays, pack, sent)
            x = self._share(codes, pack.matrix, self._room(pack) if donated else None)
            if watched and groups is None:  # the mean, since a sum of finite numbers may overflow
                shown.append(ops.by_rows(lambda x, out=None: ops.max_abs(x), x))
            self._cut(x, arrays, pack, means)
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
            self._weights = await replica_weights(groups)
            dtype = ops.dtype_of(x)
            if n:
                of_each = self._of_each(received.reshape((len(own), -1)), self.codec.layout(n)[1])
                answers.append(ops.cast(self._share(of_each, x).reshape((-1,))[:n], dtype))
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
        return self._codes_of(x, lambda x: x, tuple(x.shape), who)

    def _codes_of(self, arrays: A, numbers: Callable[[A], A], shape: tuple[int, ...], who: Any) -> A:
        """The codes (R, m) of the rows, of this shape (R, B), that `numbers` makes of the rows of arrays (…, R, …): in one go, so that they are never
        stored."""
        ops, codec, noise = self.ops, self.codec, self.noise
        if noise is None or not codec.dithers:
            return ops.by_rows(lambda y, out=None: codec.encode(ops, ops.cast(numbers(y), "float32"), out=out), arrays)
        self._drawn += 1
        key, step = random.key(noise.key, str(self._drawn)), random.of_replica(noise.step, who)
        firsts, columns = (ops.iota(shape[0]) * shape[1]).reshape((-1, 1)), ops.iota(shape[1])

        def rows(y: A, firsts: A, out: A | None = None) -> A:
            dither = random.dither(ops, key, firsts + columns, step)
            return codec.encode(ops, ops.cast(numbers(y), "float32"), dither, out=out)

        return ops.by_rows(rows, arrays, firsts)

    def _in_parts(self, codes: A, size: int) -> A:
        """Codes as a row for each replica, all with as many rows of the codes: zeros, which stand for zeros, fill them up."""
        flat, part = codes.reshape((-1,)), -(-codes.shape[0] // size) * codes.shape[1]
        return (flat if _size(flat) == size * part else self.ops.pad(flat, size * part)).reshape((size, part))

    def _decoded(self, codes: A, out: A | None = None) -> A:
        return self.ops.by_rows(partial(self.codec.decode, self.ops), codes, out=out)

    def _of_each(self, received: A, width: int) -> A:
        """What each replica has sent of this one's part (W, …), in rows of the codes of this width (W, R, m)."""
        return received.reshape((received.shape[0], -1, self.codec.width(width)))

    def _share(self, of_each: A, like: A, out: A | None = None) -> A:
        """The mean of the rows of all replicas (W, R, m), decoded (R, B)."""
        dtype = self.ops.dtype_of(like)
        return self.ops.by_rows(lambda y, out=None: self._mean_of(y, dtype, out), of_each, out=out)

    def _share_encoded(self, of_each: A, like: A) -> A:
        """And encoded again."""
        dtype, shape = self.ops.dtype_of(like), (of_each.shape[1], like.shape[1])
        return self._codes_of(of_each, lambda y: self._mean_of(y, dtype), shape, 0)

    def _mean_of(self, of_each: A, dtype: str, out: A | None = None) -> A:
        """Summed in float32, of float64 in float64."""
        ops, size, weights = self.ops, of_each.shape[0], self._weights
        summed = wide_dtype(dtype)

        def decoded(y: A, i: Any) -> A:
            x = ops.cast(self.codec.decode(ops, y), summed)
            return x if weights is None else weights.times(ops, x, i)

        def added(i: Any, total: A) -> A:
            def add(y: A, total: A, out: A | None = None) -> A:
                return ops.add(total, decoded(y, i + 1), out=out)

            return ops.by_rows(add, of_each[i + 1], total, out=total)

        total = ops.loop(size - 1, added, decoded(of_each[0], 0))
        if weights is not None:
            share = ops.divide(ops.zeros((), summed) + 1.0, ops.cast(weights.total, summed))
            return ops.multiply(total, share, out=total if out is None else out)
        return ops.multiply(total, 1.0 / size, out=total if out is None else out)

    def _settled(self, mine: A, share: A, part: A, place: Any) -> A:
        """What counts as sent, in rows: what was sent, and in the part of this replica what the second rounding left out of the share is taken off."""
        ops, size, dtype = self.ops, mine.shape[0], self.ops.dtype_of(share)
        own = ops.cast(self._decoded(mine.reshape((-1, part.shape[1]))), dtype).reshape((1, size, -1))

        factor = self._owed(size, place, dtype)

        def less(own: A, share: A, part: A, out: A | None = None) -> A:
            missed = share - ops.cast(self.codec.decode(ops, part), dtype)
            return ops.add(own, missed * factor, out=out)

        settled = ops.by_rows(less, ops.row(own, place).reshape(tuple(share.shape)), share, part)
        return ops.set_row(own, place, settled.reshape((1, 1, -1)))

    def _owed(self, size: int, place: Any, dtype: str) -> Any:
        """What one replica adds to what it has sent, so that the mean changes by -1: of one that does not count, nothing changes it."""
        if self._weights is None:
            return -float(size)
        ops, own = self.ops, self._weights.of_each[place]
        counts = own > 0
        return ops.cast(
            ops.where(counts, ops.divide(self._weights.total, ops.where(counts, own, 1.0)) * -1.0, 0.0), dtype
        )

    def _room(self, pack: _Pack[A]) -> A | None:
        """The array itself, if what is decoded has its dtype."""
        alone = len(pack.members) == 1 and self.ops.dtype_of(pack.matrix) == "float32"
        return pack.matrix if alone else None

    def _cut(self, joined: A, arrays: Sequence[A], pack: _Pack[A], answers: list[A]) -> None:
        flat, start = joined.reshape((-1,)), 0
        for i, rows in zip(pack.members, pack.rows, strict=True):
            x = flat[start : start + _size(arrays[i])].reshape(tuple(arrays[i].shape))
            answers[i] = self.ops.cast(x, self.ops.dtype_of(arrays[i]))
            start += rows * pack.matrix.shape[1]


def _size(x: Any) -> int:
    return math.prod(x.shape)
