"""The quantized mean: of what all replicas have, quantized once by each, summed in float32.

    x ── encode ── all-to-all ── decode, sum ── encode ── all-gather ── decode ── the mean, the same bits everywhere

Each replica forms its part of the mean. Nothing is rounded more than twice, whatever the number of replicas, and as many bytes travel as in an
all-reduce of the codes. Two replicas send each other everything at once: these are the same bytes, and nothing is rounded twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any, Generic, NamedTuple

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.codec import Codec, received, sendable
from gradwire.core.kernels import random
from gradwire.core.kernels.payloads import Coded
from gradwire.core.ops import ITEMSIZE, WIRE_ITEMSIZE, A, Ops, wide_dtype
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

#: Arrays of this number of elements are quantized by themselves: joining them would cost a copy. Smaller ones share rows.
LARGE = 1 << 15


class Noise(NamedTuple):
    """What stochastic rounding draws from: a `key`, and the `step`, an int or a traced int32 scalar."""

    key: int
    step: Any


class _Rows(NamedTuple, Generic[A]):
    """Arrays that are computed with as one: `members` of all, in a matrix (R, B), of which each has so many rows. They lie one below the other, or so in
    each of as many `lots`, one for a replica, of rows of all of them. `shape` is that of the only one."""

    members: list[int]
    matrix: A
    rows: list[int]
    lots: int = 1
    shape: tuple[int, ...] = ()


class _Pack(NamedTuple, Generic[A]):
    """Arrays that are sent together, in rows of one length: matrices one below the other, and the first row and the number of rows of what is divided
    among the replicas by itself."""

    parts: list[_Rows[A]]
    divided: list[tuple[int, int]]

    @property
    def matrix(self) -> A:
        """Like which all are."""
        return self.parts[0].matrix


@dataclass
class Coder(Generic[A]):
    """Quantized averages. One for a step of a program.

    Args:
        ops: kernels.
        codec: how rows are coded.
        noise: of stochastic rounding. None: to the nearest.
    """

    ops: Ops[A]
    codec: Codec
    noise: Noise | None = None
    _drawn: int = field(default=0, init=False)
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

    async def mean_and_sent(self, arrays: Sequence[A], *, late: bool = False) -> tuple[list[Any], list[Any]]:
        """And what was sent of this replica's arrays, with mean `mean`: the error of the second rounding is subtracted from the part of the replica that
        has rounded it. `late`: some of either may be left `Coded`."""
        return await self._mean(arrays, False, True, None, keeps=True, late=late)

    async def _mean(
        self,
        arrays: Sequence[A],
        donated: bool,
        watched: bool,
        groups: Groups | None,
        *,
        keeps: bool,
        late: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        size = await world_size(groups, assumed=1)
        place = await replica_index(groups) if keeps or self.noise else 0
        packs = self._packs(arrays, apart=keeps, replicas=size)
        if size == 2:
            return await self._mean_of_two(arrays, packs, place, donated, watched, groups, keeps=keeps)
        coded = [self._all_encoded(pack, place + 1) for pack in packs]
        together = self._together(packs)
        mine = [self._sent_together([coded[i] for i in some], [packs[i] for i in some], size) for some in together]
        arrived = iter(await all_to_all(*chain.from_iterable(mine), groups=groups))
        self._weights = await replica_weights(groups)
        likes = [packs[some[0]] for some in together]
        of_each = [self._fields(list(islice(arrived, len(own))), like) for own, like in zip(mine, likes, strict=True)]
        of_shares = [
            self._share_encoded(y, like.matrix, place, keeps=keeps) for y, like in zip(of_each, likes, strict=True)
        ]
        sent_again = [sendable(self.ops, y) for y, _ in of_shares]
        gathered = iter(await gather(*chain.from_iterable(sent_again), watched=False, groups=groups, assumed=1))
        means, sent = self._unsent(arrays), self._unsent(arrays)
        shown = []
        for some, like, given, own, (_, lost) in zip(together, likes, mine, sent_again, of_shares, strict=True):
            everything = self._fields(list(islice(gathered, len(own))), like)
            if watched and groups is None:
                shown.append(self.codec.witness(*everything))
            start = 0
            for i in some:
                pack, stays = packs[i], late and self._stays(packs[i].matrix)
                end = start + sum(-(-rows // size) for _, rows in pack.divided)
                rows = [self._from_parts(y[:, start:end], pack.divided) for y in everything]
                if stays:
                    for array, first, count in _members(pack):
                        codes, scales = rows
                        means[array] = Coded(codes[first : first + count], scales[first : first + count])
                else:
                    rows = self._laid_out(rows, pack.parts[0])
                    self._cut(pack, rows, arrays, means, donated=donated)
                if lost is not None:
                    cut = partial(self._cut_again, pack, start, end, size)
                    mine_again = [self.ops.read_again(coded[i][0], given[0], cut), *coded[i][1:]]
                    self._note_sent(pack, mine_again, lost(start, end), arrays, sent, place, size, late=stays)
                start = end
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
        coded = [self._all_encoded(pack, place + 1) for pack in packs]
        given = [sendable(ops, own) for own in coded]
        arrived = iter(await gather(*chain.from_iterable(given), watched=False, groups=groups))
        self._weights = await replica_weights(groups)
        means, sent, shown = self._unsent(arrays), self._unsent(arrays), []
        for pack, mine, own in zip(packs, coded, given, strict=True):
            of_both = self._fields(list(islice(arrived, len(own))), pack)
            if keeps:
                self._cut(pack, mine, arrays, sent)
            for part, rows in self._rows_of(pack, of_both):
                x = self._share(rows, part.matrix, self._room(part) if donated else None)
                if watched and groups is None:  # the mean, since a sum of finite numbers may overflow
                    shown.append(ops.by_rows(lambda x, out=None: ops.max_abs(x), x))
                self._divide(x, part, arrays, means)
        await watch(*shown)
        return means, sent

    def _unsent(self, arrays: Sequence[A]) -> list[Any]:
        """What arrays begin with: those of no elements, of which nothing is sent, are made here, the same on all replicas, as every mean is."""
        ops = self.ops
        return [x if _size(x) else ops.zeros(tuple(x.shape), ops.dtype_of(x)) for x in arrays]

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
            coded = [sendable(ops, self._encoded(self._matrix(part), place + 1)) for part in parts]
            elements = iter([sum(map(_size, fields)) for fields in coded])
            sizes = tuple(next(elements) if k else 0 for k in own)
            flat = ops.rows(list(chain.from_iterable(coded)), 1).reshape((-1,))
            (arrived,) = await all_to_all_parts([flat], [sizes], groups=groups)
            self._weights = await replica_weights(groups)
            dtype = ops.dtype_of(x)
            if n:
                of_each = self._apart(arrived.reshape((len(own), -1)), self.codec.layout(n))
                answers.append(ops.cast(self._share(of_each, x).reshape((-1,))[:n], dtype))
            else:
                answers.append(x[:0])
        return answers

    def _packs(self, arrays: Sequence[A], *, apart: bool, replicas: int) -> list[_Pack[A]]:
        """Arrays of one length of rows and one kind together. `apart`: each is divided among the replicas by itself, so that which of them has formed
        which part of its mean does not depend on what is sent beside it."""
        together: dict[object, list[int]] = {}
        for i, x in enumerate(arrays):
            if size := _size(x):
                together.setdefault((self.ops.kind_of(x), self.codec.layout(size)[1]), []).append(i)
        packs = []
        for members in together.values():
            order = None if self._draws else self.ops.joining([arrays[i] for i in members])
            if order is not None:
                # Two send rows as they are joined, and replicas may differ in where arrays lie. In DDP's buckets the last parameter is the first.
                reordered = members[::-1] if replicas == 2 else [members[k] for k in order]
                one = self._joined(arrays, reordered if apart else members)
                packs.append(_Pack([one], _divided(one, members) if apart else [(0, sum(one.rows))]))
                continue
            large = [i for i in members if _size(arrays[i]) >= LARGE]
            small = [i for i in members if _size(arrays[i]) < LARGE]
            # What is divided evenly by itself needs nothing to fill it up. Two divide nothing.
            evenly = [i for i in large if self.codec.layout(_size(arrays[i]))[0] % replicas == 0]
            alone = [] if replicas == 2 else large if apart else evenly
            shared = [[i] for i in large if i not in alone] + ([small] if small else [])
            lots = replicas if apart and replicas != 2 else 1
            for some in [*([[i]] for i in alone), *([shared] if shared else [])]:
                parts = [self._joined(arrays, own, lots if len(own) > 1 else 1) for own in some]
                packs.append(_Pack(parts, [(0, sum(part.matrix.shape[0] for part in parts))]))
        return packs

    def _joined(self, arrays: Sequence[A], members: list[int], lots: int = 1) -> _Rows[A]:
        ops, matrices = self.ops, [self._matrix(arrays[i], lots) for i in members]
        rows, width = [x.shape[0] for x in matrices], matrices[0].shape[1]
        one = matrices[0]
        if len(members) > 1:
            # As if they were donated: where they lie side by side they are only read there, unless they really are.
            own = matrices if lots == 1 else [x.reshape((lots, -1, width)) for x in matrices]
            one = ops.rows(own, lots, donated=ops.joining(own) is not None)
        shape = tuple(arrays[members[0]].shape) if len(members) == 1 else ()
        return _Rows(members, one.reshape((sum(rows), width)), rows, lots, shape)

    def _matrix(self, x: A, lots: int = 1) -> A:
        """An array in rows, of which the last is filled up with zeros; in a multiple of so many."""
        rows, width = self.codec.layout(_size(x))
        rows = -(-rows // lots) * lots
        if not self._draws:  # what is drawn depends on an element's place
            return self.ops.to_blocks(x, rows, width)
        flat = x.reshape((-1,))
        return (flat if _size(x) == rows * width else self.ops.pad(flat, rows * width)).reshape((rows, width))

    @property
    def _draws(self) -> bool:
        return self.noise is not None and self.codec.dithers

    def _all_encoded(self, pack: _Pack[A], who: Any) -> list[A]:
        """Of all its rows."""
        each = [self._laid_out(self._encoded(part.matrix, who), part) for part in pack.parts]
        if len(each) == 1:
            return list(each[0])
        return [self.ops.rows(own, 1).reshape((-1, own[0].shape[1])) for own in zip(*each, strict=True)]

    def _laid_out(self, fields: Sequence[A], part: _Rows[A]) -> list[A]:
        if len(fields) == 1 or not part.shape:
            return list(fields)
        codes, scales = fields
        return list(self.ops.laid_out(codes, scales, part.shape))

    def _encoded(self, x: A, who: Any) -> tuple[A, ...]:
        """The codes (R, m) of rows (R, B). `who` rounds them: a replica, counted from 1, or all alike, 0."""
        return self._codes_of([x], lambda x: x, tuple(x.shape), who)

    def _codes_of(
        self, arrays: Sequence[A], numbers: Callable[..., A], shape: tuple[int, ...], who: Any
    ) -> tuple[A, ...]:
        """The codes (R, m) of the rows, of this shape (R, B), that `numbers` makes of the rows of arrays (…, R, …): in one go, so that they are never
        stored."""
        ops, codec, noise = self.ops, self.codec, self.noise
        codes: Any  # several matrices
        if noise is None or not codec.dithers:

            def nearest(*y: A, out: A | None = None) -> Any:
                return codec.encode(ops, numbers(*y))

            codes = ops.by_rows(nearest, *arrays)
            return tuple(codes)
        self._drawn += 1
        key, step = random.key(noise.key, str(self._drawn)), random.of_replica(noise.step, who)
        firsts, columns = (ops.iota(shape[0]) * shape[1]).reshape((-1, 1)), ops.iota(shape[1])

        def rows(*given: A, out: A | None = None) -> Any:
            *y, firsts = given
            dither = random.dither(ops, key, firsts + columns, step)
            return codec.encode(ops, numbers(*y), dither)

        codes = ops.by_rows(rows, *arrays, firsts)
        return tuple(codes)

    def _together(self, packs: Sequence[_Pack[A]]) -> list[list[int]]:
        """Of which packs the means are formed as one, since rows of one length are computed with alike; of a cast, which has no rows, each by itself: to join
        them would be a copy."""
        alike: dict[object, list[int]] = {}
        for i, pack in enumerate(packs):
            alike.setdefault(i if self.casts else (self.ops.kind_of(pack.matrix), pack.matrix.shape[1]), []).append(i)
        return list(alike.values())

    def _sent_together(self, coded: Sequence[Sequence[A]], packs: Sequence[_Pack[A]], size: int) -> list[A]:
        """Codes, as they are sent, as a row for each replica, all with as many rows of the codes: zeros, which stand for zeros, fill them up."""
        ops, fields = self.ops, []
        for own in zip(*coded, strict=True):
            parts = [self._parts(y, pack.divided, size) for y, pack in zip(own, packs, strict=True)]
            fields.append(parts[0] if len(parts) == 1 else ops.rows(parts, size).reshape((size, -1, own[0].shape[1])))
        return [y.reshape((size, -1)) if self.casts else y for y in fields[:1]] + [
            ops.to_bytes(y.reshape((size, -1))) for y in fields[1:]
        ]

    def _parts(self, codes: A, divided: Sequence[tuple[int, int]], size: int) -> A:
        """The rows of each replica, (W, P, m)."""
        flat, m, dtype = codes.reshape((-1,)), codes.shape[1], self.ops.dtype_of(codes)
        if len(divided) == 1:
            if missing := -codes.shape[0] % size * m:
                codes = self.ops.rows([flat, self._zeros(missing, dtype)], 1)
            return codes.reshape((size, -1, m))
        pieces = []
        for replica in range(size):
            for first, rows in divided:
                begin, end, each = _part(rows, size, replica)
                pieces += [flat[(first + begin) * m : (first + end) * m]] if end > begin else []
                missing = (each - (end - begin)) * m
                pieces += [self._zeros(missing, dtype)] if missing else []
        return self.ops.rows(pieces, 1).reshape((size, -1, m))

    def _cut_again(self, pack: _Pack[A], start: int, end: int, size: int, sent: A) -> A:
        """The codes of a pack, of which each replica was sent so many rows."""
        (m, _), *_ = self.codec.fields(pack.matrix.shape[1])
        return self._from_parts(sent.reshape((size, -1, m))[:, start:end], pack.divided)

    def _zeros(self, n: int, dtype: str) -> A:
        return self.ops.constant(("zero codes", n, dtype), lambda: self.ops.zeros((n,), dtype))

    def _from_parts(self, x: A, divided: Sequence[tuple[int, int]]) -> A:
        """The rows of which `_parts` has made so many for each replica, (W, P, m), as they lay."""
        (size, _, m), total = x.shape, sum(rows for _, rows in divided)
        if len(divided) == 1:
            return x.reshape((-1, m))[:total]
        starts, pieces = [0, *accumulate(-(-rows // size) for _, rows in divided)], []
        for (_, rows), start in sorted(zip(divided, starts, strict=False)):
            for replica in range(size):
                begin, end, _ = _part(rows, size, replica)
                pieces += [x[replica, start : start + end - begin]] if end > begin else []
        return self.ops.rows(pieces, 1).reshape((total, m))

    def _fields(self, arrived: Sequence[A], pack: _Pack[A]) -> list[A]:
        """What has arrived of each replica, (W, …), as fields (W, R, m)."""
        return received(self.ops, self.codec, pack.matrix.shape[1], arrived)

    def _apart(self, of_each: A, layout: tuple[int, int]) -> list[A]:
        """Likewise of (W, …), in which the fields of so many rows stand one after the other."""
        (rows, n), start, fields = layout, 0, []
        for m, dtype in self.codec.fields(n):
            length = rows * m * (1 if self.casts else WIRE_ITEMSIZE[dtype])
            own = of_each[:, start : start + length]
            fields.append(own)
            start += length
        return received(self.ops, self.codec, n, fields)

    def _decoded(self, fields: Sequence[A], out: A | None = None) -> A:
        return self.ops.by_rows(partial(self.codec.decode, self.ops), *fields, out=out)

    def _share(self, of_each: Sequence[A], like: A, out: A | None = None) -> A:
        """The mean of the rows of all replicas (W, R, m), decoded (R, B)."""
        dtype = self.ops.dtype_of(like)
        return self.ops.by_rows(lambda *y, out=None: self._mean_of(y, dtype, out), *of_each, out=out)

    def _share_encoded(
        self, of_each: Sequence[A], like: A, place: Any, *, keeps: bool
    ) -> tuple[tuple[A, ...], Callable[[int, int], A] | None]:
        """And encoded again; and, if it `keeps` that, of rows from a first one to the last, what rounding takes from them, times what one replica adds to what
        it has sent to add that to the mean."""
        ops, codec = self.ops, self.codec
        dtype, size = ops.dtype_of(like), of_each[0].shape[0]
        if self._stays(like) and self.noise is None and self._weights is None:
            fields, lost = codec.encode_mean(ops, *of_each, keeps=keeps)
            return fields, None if lost is None else lambda start, end: lost[start:end]
        if not keeps:
            shape = (of_each[0].shape[1], like.shape[1])
            return self._codes_of(of_each, lambda *y: self._mean_of(y, dtype), shape, 0), None
        share = self._share(of_each, like)
        coded, factor = self._encoded(share, 0), self._factor(size, place, dtype)

        def rounding_error(share: A, *part: A, out: A | None = None) -> A:
            rest: A = (share - ops.cast(codec.decode(ops, *part), dtype)) * factor
            return rest

        # Of each array by itself: cut out of the error of all, it would be stored twice.
        return coded, lambda start, end: ops.by_rows(rounding_error, *(y[start:end] for y in (share, *coded)))

    def _stays(self, rows: A) -> bool:
        """Whether codes of such rows (R, B) stay codes."""
        return self.codec.stays(self.ops, rows.shape[1]) and wide_dtype(self.ops.dtype_of(rows)) == "float32"

    def _mean_of(self, of_each: Sequence[A], dtype: str, out: A | None = None) -> A:
        """Summed in float32, of float64 in float64."""
        ops, size, weights, summed = self.ops, of_each[0].shape[0], self._weights, wide_dtype(dtype)

        def decoded(*y: A) -> A:
            return ops.cast(self.codec.decode(ops, *y), summed)

        if weights is None:
            total = ops.sum_of_each(decoded, *of_each)
            return ops.multiply(total, 1.0 / size, out=total if out is None else out)
        counted = weights

        def of_replica(i: Any) -> A:
            return counted.times(ops, decoded(*[y[i] for y in of_each]), i)

        total = ops.loop(
            size - 1, lambda i, total: ops.add(total, of_replica(i + 1), out=total), of_replica(0), fused=True
        )
        if self.casts:  # halfway between two numbers of 16 bits the last bit of the reciprocal would decide
            return ops.divide(total, ops.cast(counted.total, summed), out=total if out is None else out)
        share = ops.divide(ops.zeros((), summed) + 1.0, ops.cast(counted.total, summed))
        return ops.multiply(total, share, out=total if out is None else out)

    def _note_sent(
        self,
        pack: _Pack[A],
        own: Sequence[A],
        off: A,
        arrays: Sequence[A],
        sent: list[Any],
        place: Any,
        size: int,
        *,
        late: bool,
    ) -> None:
        """What counts as sent: what was sent, less the error of the second rounding in the part of this replica, `off`."""
        ops, dtype = self.ops, self.ops.dtype_of(off)
        (rows,) = pack.parts
        if late:
            start, (codes, scales) = 0, own
            for i, first, count in _members(pack):
                begin, end, each = _part(count, size, place)
                own_rows, lost = slice(first, first + count), off[start : start + end - begin]
                sent[i] = Coded(codes[own_rows], scales[own_rows], lost, begin)
                start += each
            return
        decoded = ops.cast(self._decoded(own), dtype)
        if ops.joining([]) is None:
            # Chosen element by element: to cut out a row that only the device knows would move everything.
            (n, width), each = decoded.shape, off.shape[0]
            if n < size * each:
                decoded = ops.pad(decoded.reshape((-1,)), size * each * width).reshape((size * each, width))
            decoded = ops.add_part(decoded, off, size, place, rows.shape)[:n]
        else:
            start, places, addends = 0, [], []
            for first, count in pack.divided:
                begin, end, each = _part(count, size, place)
                places.append(decoded[first + begin : first + end])
                addends.append(off[start : start + end - begin])
                start += each
            ops.add_each(places, addends)  # in place
        self._divide(decoded, rows, arrays, sent)

    def _factor(self, size: int, place: Any, dtype: str) -> Any:
        """What one replica adds to what it has sent, so that the mean changes by -1: of one that does not count, nothing changes it."""
        if self._weights is None:
            return -float(size)
        ops, own = self.ops, self._weights.of_each[place]
        counts = own > 0
        inverse = ops.divide(self._weights.total, ops.where(counts, own, 1.0))
        return ops.cast(ops.where(counts, inverse * -1.0, 0.0), dtype)

    def _room(self, part: _Rows[A]) -> A | None:
        """The arrays themselves, if what is decoded has their dtype."""
        alone = len(part.members) == 1 or self.ops.joining([part.matrix]) is not None
        return part.matrix if alone and self.ops.dtype_of(part.matrix) == "float32" else None

    def _rows_of(self, pack: _Pack[A], fields: Sequence[A]) -> Iterator[tuple[_Rows[A], list[A]]]:
        """Each part of a pack with its rows of the fields (…, R, m)."""
        start = 0
        for part in pack.parts:
            end = start + part.matrix.shape[0]
            alone = len(pack.parts) == 1
            yield (
                part,
                list(fields) if alone else [y[start:end] if len(y.shape) == 2 else y[:, start:end] for y in fields],
            )
            start = end

    def _cut(
        self, pack: _Pack[A], fields: Sequence[A], arrays: Sequence[A], answers: list[A], *, donated: bool = False
    ) -> None:
        """Decode all of a pack."""
        for part, rows in self._rows_of(pack, fields):
            self._divide(self._decoded(rows, out=self._room(part) if donated else None), part, arrays, answers)

    def _divide(self, joined: A, part: _Rows[A], arrays: Sequence[A], answers: list[A]) -> None:
        start, lots = 0, part.lots
        for i, rows in zip(part.members, part.rows, strict=True):
            own, shape, end = joined, tuple(arrays[i].shape), start + rows // lots
            if lots > 1:
                own = joined.reshape((lots, -1, joined.shape[1]))[:, start:end].reshape((rows, -1))
            elif len(part.rows) > 1:
                own = joined[start:end]
            x = (
                own.reshape((-1,))[: math.prod(shape)].reshape(shape)
                if self._draws
                else self.ops.from_blocks(own, shape)
            )
            answers[i] = self.ops.cast(x, self.ops.dtype_of(arrays[i]))
            start = end


def _divided(joined: _Rows[Any], members: Sequence[int]) -> list[tuple[int, int]]:
    """First row and rows of each member, in this order."""
    firsts = dict(zip(joined.members, [0, *accumulate(joined.rows)], strict=False))
    counts = dict(zip(joined.members, joined.rows, strict=True))
    return [(firsts[i], counts[i]) for i in members]


def _members(pack: _Pack[Any]) -> Iterator[tuple[int, int, int]]:
    """Which array, its first row and its rows: of a pack whose arrays are divided each by itself, in their order."""
    (joined,) = pack.parts
    of_row = dict(zip([0, *accumulate(joined.rows)], joined.members, strict=False))
    for first, count in pack.divided:
        yield of_row[first], first, count


def _part(rows: int, size: int, replica: int) -> tuple[int, int, int]:
    """The first and the last of so many rows that are a replica's, and how many each has, of which some may stand for nothing."""
    each = -(-rows // size)
    return min(replica * each, rows), min((replica + 1) * each, rows), each


def _size(x: Any) -> int:
    return math.prod(x.shape)
