"""The quantized mean: of what all replicas have, quantized once by each, summed in float32.

    x ── encode ── all-to-all ── decode, sum ── encode ── all-gather ── decode ── the mean

It has the same bits everywhere.

Each replica forms its part of the mean. Nothing is rounded more than twice, whatever the number of
replicas, and as many bytes travel as in an all-reduce of the codes. Two replicas send each other
everything at once: these are the same bytes, and nothing is rounded twice. How rows become codes is
in `row_coder`; what is joined, and how it is cut, in `packs`; who forms which part in `shares`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, cast

from gradwire.core.codecs.codec import Scaled, as_sent
from gradwire.core.codecs.packs import Joined, Pack, Packer, members_of, size_of
from gradwire.core.codecs.row_coder import Drawn, RowCoder
from gradwire.core.kernels.arrays import array_key, group_by
from gradwire.core.kernels.payloads import Coded
from gradwire.core.kernels.rounding import mean_decoded
from gradwire.core.ops import ITEMSIZE, A, wide_dtype
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

#: So many times less than the mean weight is little.
LITTLE = 4


class Rounded(NamedTuple, Generic[A]):
    """A part of a mean as codes, and what rounding has taken from its rows, times what one replica
    adds to what it has sent to add that to the mean: from a first row to the last. None: nobody
    asks."""

    codes: tuple[A, ...]
    lost: Callable[[int, int], A] | None


@dataclass
class Coder(RowCoder[A]):
    """Quantized averages. One for a step of a program."""

    _weights: Weights[A] | None = field(default=None, init=False)

    @property
    def _packer(self) -> Packer[A]:
        return Packer(self.ops, self.codec, in_place=self.draws)

    def shrinks(self, x: A) -> bool:
        """Whether an array is of floats that are longer than their codes."""
        return ITEMSIZE.get(self.ops.dtype_of(x), 0) > self.codec.itemsize

    async def mean(
        self,
        arrays: Sequence[A],
        *,
        donated: bool = False,
        watched: bool = True,
        groups: Groups | None = None,
    ) -> list[A]:
        """The mean of each array over all replicas, or over this replica's group of `groups`, which
        are of equal size.

        `donated`: the answers may lie in the arrays. `watched`: see
        `gradwire.core.protocol.control_requests.StepIsFinite`.
        """
        return (await self._mean(arrays, None, donated=donated, watched=watched, groups=groups))[0]

    async def mean_and_sent(
        self, arrays: Sequence[A], firsts: Sequence[tuple[int, ...]], *, late: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """The means, and what counts as sent of this replica's arrays, whose mean they are: the
        error of the second rounding is subtracted from the part of the replica that has rounded it.
        `firsts`: of `gradwire.core.codecs.shares.deal`, of each tensor that an array holds. `late`:
        some of either may be left `Coded`."""
        return await self._mean(arrays, firsts, late=late)

    async def _mean(
        self,
        arrays: Sequence[A],
        firsts: Sequence[tuple[int, ...]] | None,
        *,
        donated: bool = False,
        watched: bool = True,
        groups: Groups | None = None,
        late: bool = False,
    ) -> tuple[list[Any], list[Any]]:
        keeps, packer = firsts is not None, self._packer
        size = await world_size(groups, assumed=1)
        place = await replica_index(groups) if keeps or self.noise else 0
        packs = packer.packs(arrays, size, firsts)
        if size == 2:
            return await self._mean_of_two(
                arrays, packs, place, donated, watched, groups, keeps=keeps, late=late
            )
        coded = [self._encode_pack(pack, place + 1) for pack in packs]
        together = self._group_packs(packs)
        mine = [
            self._join_codes([coded[i] for i in some], [packs[i] for i in some], size)
            for some in together
        ]
        arrived = iter(await all_to_all(*chain.from_iterable(mine), groups=groups))
        self._weights = await replica_weights(groups)
        likes = [packs[some[0]].matrix for some in together]
        of_each = [
            self.fields_of(list(islice(arrived, len(own))), like)
            for own, like in zip(mine, likes, strict=True)
        ]
        drawn = [self._draw_for_share([packs[i] for i in some], size, place) for some in together]
        parts = [
            self._encode_mean(y, like, place, own, keeps=keeps)
            for y, like, own in zip(of_each, likes, drawn, strict=True)
        ]
        sent_again = [as_sent(self.ops, part.codes) for part in parts]
        gathered = iter(
            await gather(*chain.from_iterable(sent_again), watched=False, groups=groups, assumed=1)
        )
        means, sent = self._initial_answers(arrays), self._initial_answers(arrays)
        shown = []
        for some, like, given, own, part in zip(
            together, likes, mine, sent_again, parts, strict=True
        ):
            everything = self.fields_of(list(islice(gathered, len(own))), like)
            if watched and groups is None:
                shown.append(self.codec.witness(*everything))
            start = 0
            for i in some:
                pack = packs[i]
                stays = late and pack.shares is not None and self._stays(like, pack)
                end = start + pack.each(size)
                rows = [packer.put_together(y[:, start:end], pack) for y in everything]
                if stays:
                    for array, first, count in members_of(pack):
                        codes, scales = rows
                        means[array] = Coded(
                            self.codec, codes[first : first + count], scales[first : first + count]
                        )
                else:
                    self._decode(
                        pack, self._with_layout(rows, pack.parts[0]), arrays, means, donated=donated
                    )
                if part.lost is not None:
                    cut = partial(self._cut_codes, pack, start, end, size)
                    mine_again = [
                        self.ops.storage.reuse_sent(coded[i][0], given[0], cut),
                        *coded[i][1:],
                    ]
                    self._note_sent(
                        pack,
                        mine_again,
                        part.lost(start, end),
                        arrays,
                        sent,
                        place,
                        size,
                        late=stays,
                    )
                start = end
        await watch(*shown)
        return means, sent

    async def _mean_of_two(
        self,
        arrays: Sequence[A],
        packs: Sequence[Pack[A]],
        place: Any,
        donated: bool,
        watched: bool,
        groups: Groups | None,
        *,
        keeps: bool,
        late: bool,
    ) -> tuple[list[Any], list[Any]]:
        ops = self.ops
        coded = [self._encode_pack(pack, place + 1) for pack in packs]
        given = [as_sent(ops, own) for own in coded]
        arrived = iter(await gather(*chain.from_iterable(given), watched=False, groups=groups))
        self._weights = await replica_weights(groups)
        means, sent, shown = self._initial_answers(arrays), self._initial_answers(arrays), []
        for pack, mine, own in zip(packs, coded, given, strict=True):
            of_both = self.fields_of(list(islice(arrived, len(own))), pack.matrix)
            if (
                late
                and self._stays(pack.matrix, pack)
                and self._weights is None
                and self._cannot_overflow(of_both)
            ):
                self._leave_coded(pack, mine, sent)
                self._leave_coded(pack, of_both, means)
                continue
            if keeps:
                self._decode(pack, mine, arrays, sent)
            for part, rows in self._rows_of(pack, of_both):
                x = self._share(rows, part.matrix, self._place_to_decode(part) if donated else None)
                if watched and groups is None:
                    shown.append(self._shown(rows, x))
                self._packer.divide(x, part, arrays, means)
        await watch(*shown)
        return means, sent

    def _shown(self, fields: Sequence[A], mean: A) -> A:
        """An array that is finite if the mean of these codes (W, R, m) is: their sum may overflow
        where each is finite."""
        ops = self.ops
        if self.casts:
            return mean
        if self._weights is None and isinstance(self.codec, Scaled):
            return self._most(fields)
        largest: A = ops.by_rows(lambda x, out=None: ops.max_abs(x), mean)
        return largest

    def _most(self, fields: Sequence[A]) -> A:
        """A bound on the magnitude of the sums of all replicas' codes (W, R, m), for each row."""
        ops, codec, (_, scales) = self.ops, cast("Scaled", self.codec), fields
        most = ops.abs(scales[0])
        for i in range(1, scales.shape[0]):
            most = most + ops.abs(scales[i])
        bound: A = most * (codec.largest + 1.0)
        return bound

    def _cannot_overflow(self, fields: Sequence[A]) -> bool:
        """Whether the host knows that all codes (W, R, m) stand for finite numbers, and so do their
        sums."""
        return bool(self.ops.truth(self.ops.all_finite(self._most(fields))))

    def _leave_coded(self, pack: Pack[A], fields: Sequence[A], answers: list[Any]) -> None:
        """Codes of a pack, (R, m) or of all replicas (W, R, m), as they are."""
        for part, own in self._rows_of(pack, fields):
            start = 0
            for i, rows in zip(part.members, part.rows, strict=True):
                codes, scales = (y[..., start : start + rows, :] for y in own)
                answers[i] = Coded(self.codec, codes, scales)
                start += rows

    def _initial_answers(self, arrays: Sequence[A]) -> list[Any]:
        """What arrays begin with: those of no elements, of which nothing is sent, are made here,
        the same on all replicas, as every mean is."""
        ops = self.ops
        return [x if size_of(x) else ops.zeros(tuple(x.shape), ops.dtype_of(x)) for x in arrays]

    async def parts_of_mean(
        self, vectors: Sequence[A], counts: Sequence[tuple[int, ...]], groups: Groups | None = None
    ) -> list[A]:
        """This replica's part of the mean of each vector, of so many elements for each replica:
        rounded once."""
        ops, answers = self.ops, []
        place = await replica_index(groups)
        for x, own in zip(vectors, counts, strict=True):
            n = own[0] if len(set(own)) == 1 else own[place]
            starts = [sum(own[:replica]) for replica in range(len(own))]
            parts = [x[start : start + k] for start, k in zip(starts, own, strict=True) if k]
            if not parts:
                answers.append(x)
                continue
            coded = [
                as_sent(ops, self.encode_rows(self._packer.matrix(part), place + 1))
                for part in parts
            ]
            elements = iter([sum(map(size_of, fields)) for fields in coded])
            sizes = tuple(next(elements) if k else 0 for k in own)
            flat = ops.rows(list(chain.from_iterable(coded)), 1).reshape((-1,))
            (arrived,) = await all_to_all_parts([flat], [sizes], groups=groups)
            self._weights = await replica_weights(groups)
            dtype = ops.dtype_of(x)
            if n:
                of_each = self.split_bytes(arrived.reshape((len(own), -1)), self.codec.layout(n))
                answers.append(ops.cast(self._share(of_each, x).reshape((-1,))[:n], dtype))
            else:
                answers.append(x[:0])
        return answers

    def _encode_pack(self, pack: Pack[A], who: Any) -> list[A]:
        """The codes of all rows of a pack."""
        each = [
            self._with_layout(self.encode_rows(part.matrix, who, self.draw_for(part, "1")), part)
            for part in pack.parts
        ]
        if len(each) == 1:
            return list(each[0])
        return [self._stack_rows(own) for own in zip(*each, strict=True)]

    def _with_layout(self, fields: Sequence[A], part: Joined[A]) -> list[A]:
        if len(fields) == 1 or not part.shape:
            return list(fields)
        codes, scales = fields
        return list(self.ops.storage.with_layout(codes, scales, part.shape))

    def _draw_for_share(self, packs: Sequence[Pack[A]], size: int, place: Any) -> Drawn[A] | None:
        """What is drawn for a replica's parts of several packs."""
        each = []
        for pack in packs:
            of_parts = [
                drawn for part in pack.parts if (drawn := self.draw_for(part, "2")) is not None
            ]
            if not of_parts:
                return None
            wholes = [self._stack_rows(own) for own in zip(*of_parts, strict=True)]
            each.append([self._packer.cut(whole, pack, size)[place] for whole in wholes])
        return Drawn(*(self._stack_rows(own) for own in zip(*each, strict=True)))

    def _stack_rows(self, matrices: Sequence[A]) -> A:
        """Matrices of one width as one."""
        first = matrices[0]
        return (
            first
            if len(matrices) == 1
            else self.ops.rows(matrices, 1).reshape((-1, first.shape[1]))
        )

    def _group_packs(self, packs: Sequence[Pack[A]]) -> list[list[int]]:
        """The packs whose means are formed as one, since rows of one length are computed with
        alike; of a cast, which has no rows, each by itself: to join them would be a copy."""
        if self.casts:
            return [[i] for i in range(len(packs))]
        keys = [(array_key(self.ops, pack.matrix), pack.matrix.shape[1]) for pack in packs]
        return group_by(range(len(packs)), keys)

    def _join_codes(
        self, coded: Sequence[Sequence[A]], packs: Sequence[Pack[A]], size: int
    ) -> list[A]:
        """Codes, as they are sent, as a row for each replica, all with as many rows of the
        codes."""
        ops, fields = self.ops, []
        for own in zip(*coded, strict=True):
            parts = [self._packer.cut(y, pack, size) for y, pack in zip(own, packs, strict=True)]
            fields.append(
                parts[0]
                if len(parts) == 1
                else ops.rows(parts, size).reshape((size, -1, own[0].shape[1]))
            )
        return [y.reshape((size, -1)) if self.casts else y for y in fields[:1]] + [
            ops.storage.to_bytes(ops, y.reshape((size, -1))) for y in fields[1:]
        ]

    def _cut_codes(self, pack: Pack[A], start: int, end: int, size: int, sent: A) -> A:
        """The codes of a pack, of which each replica was sent so many rows."""
        (m, _), *_ = self.codec.fields(pack.matrix.shape[1])
        return self._packer.put_together(sent.reshape((size, -1, m))[:, start:end], pack)

    def _share(self, of_each: Sequence[A], like: A, out: A | None = None) -> A:
        """The mean of the rows of all replicas (W, R, m), decoded (R, B)."""
        ops, dtype = self.ops, self.ops.dtype_of(like)
        if self._weights is None:
            return ops.decode_mean(self.codec, *of_each, dtype=wide_dtype(dtype), out=out)
        return ops.by_rows(
            lambda *y, out=None: self._average_decoded(y, dtype, out), *of_each, out=out
        )

    def _encode_mean(
        self, of_each: Sequence[A], like: A, place: Any, drawn: Drawn[A] | None, *, keeps: bool
    ) -> Rounded[A]:
        """The mean of the rows of all replicas, encoded; and, if it `keeps` that, what rounding
        takes from it."""
        ops, codec = self.ops, self.codec
        dtype, size = ops.dtype_of(like), of_each[0].shape[0]
        if not self.draws and self._weights is None and (self._stays(like) or not keeps):
            fields, lost = ops.encode_mean(codec, *of_each, dtype=wide_dtype(dtype), keeps=keeps)
            return Rounded(fields, None if lost is None else lambda start, end: lost[start:end])
        if not keeps:
            shape = (of_each[0].shape[1], like.shape[1])
            return Rounded(
                self.encode_numbers(
                    of_each, lambda *y: self._average_decoded(y, dtype), shape, 0, drawn
                ),
                None,
            )
        share = self._share(of_each, like)
        coded, factor = self.encode_rows(share, 0, drawn), self._factor(size, place, dtype)

        def rounding_error(share: A, *part: A, out: A | None = None) -> A:
            rest: A = (share - ops.cast(codec.decode(ops, *part), dtype)) * factor
            return rest

        # Of each array by itself: cut out of the error of all, it would be stored twice.
        return Rounded(
            coded,
            lambda start, end: ops.by_rows(
                rounding_error, *(y[start:end] for y in (share, *coded))
            ),
        )

    def _stays(self, rows: A, pack: Pack[A] | None = None) -> bool:
        """Whether codes of such rows (R, B) stay codes: those of a pack for each of its arrays."""
        if pack is None:
            return self.ops.codes_stay(self.codec, rows)
        arrays = sum(len(part.members) for part in pack.parts)
        return self.ops.codes_stay(self.codec, rows, pack.rows * rows.shape[1] // arrays)

    def _average_decoded(self, of_each: Sequence[A], dtype: str, out: A | None = None) -> A:
        """Summed in float32, of float64 in float64."""
        ops, weights, summed = self.ops, self._weights, wide_dtype(dtype)

        def decoded(*y: A) -> A:
            return ops.cast(self.codec.decode(ops, *y), summed)

        if weights is None:
            return mean_decoded(ops, self.codec, of_each, summed, out)
        counted = weights

        def weighed(*given: A) -> A:
            *y, these = given
            return Weights(these, counted.total).times_each(ops, decoded(*y))

        total = ops.sum_of_each(weighed, *of_each, counted.of_each)
        # halfway between two numbers of 16 bits the last bit of the reciprocal would decide
        if self.casts:
            return ops.divide(
                total, ops.cast(counted.total, summed), out=total if out is None else out
            )
        share = ops.divide(ops.zeros((), summed) + 1.0, ops.cast(counted.total, summed))
        return ops.multiply(total, share, out=total if out is None else out)

    def _note_sent(
        self,
        pack: Pack[A],
        own: Sequence[A],
        off: A,
        arrays: Sequence[A],
        sent: list[Any],
        place: Any,
        size: int,
        *,
        late: bool,
    ) -> None:
        """What counts as sent: what was sent, less the error of the second rounding in the part of
        this replica, `off`."""
        ops, dtype = self.ops, self.ops.dtype_of(off)
        (rows,), shares = pack.parts, pack.shares
        if late:
            assert shares is not None
            codes, scales = own
            for (i, first, count), mine in zip(members_of(pack), shares.of(place), strict=True):
                there = slice(first, first + count)
                lost = off[mine.start : mine.start + mine.rows]
                sent[i] = Coded(self.codec, codes[there], scales[there], lost, mine.begin)
            return
        decoded = ops.cast(self.decode_rows(own), dtype)
        if shares is None:
            (n, width), each = decoded.shape, off.shape[0]
            if n < size * each:
                decoded = ops.pad(decoded.reshape((-1,)), size * each * width).reshape(
                    (size * each, width)
                )
            decoded = ops.add_to_slice(decoded, off, size, place, rows.shape)[:n]
        elif isinstance(place, int):
            which = shares.own(place)
            decoded = ops.add_rows(decoded, which, off[: which.n])
        else:
            # Chosen element by element: to write rows that only the device knows would move
            # everything.
            owners: Any = ops.constant(
                ("owners", shares), lambda: ops.asarray(shares.owners(), "int32")
            )
            decoded = decoded + ops.where(owners == place, ops.take_rows(off, shares.places()), 0.0)
        self._packer.divide(decoded, rows, arrays, sent)

    def _factor(self, size: int, place: Any, dtype: str) -> Any:
        """What one replica adds to what it has sent, so that the mean changes by -1: of one that
        does not count, nothing changes it. Nor is anything noted of one that counts little: at its
        next full weight all of it would come back."""
        if self._weights is None:
            return -float(size)
        ops, own = self.ops, self._weights.of_each[place]
        counts = (own > 0) & (own * float(LITTLE * size) >= self._weights.total)
        inverse = ops.divide(self._weights.total, ops.where(counts, own, 1.0))
        return ops.cast(ops.where(counts, inverse * -1.0, 0.0), dtype)

    def _place_to_decode(self, part: Joined[A]) -> A | None:
        """The arrays themselves, if what is decoded has their dtype."""
        alone = len(part.members) == 1 or self.ops.join_order([part.matrix]) is not None
        return part.matrix if alone and self.ops.dtype_of(part.matrix) == "float32" else None

    def _rows_of(self, pack: Pack[A], fields: Sequence[A]) -> Iterator[tuple[Joined[A], list[A]]]:
        """Each part of a pack with its rows of the fields (…, R, m)."""
        start, alone = 0, len(pack.parts) == 1
        for part in pack.parts:
            end = start + part.matrix.shape[0]
            own = (
                fields
                if alone
                else [y[start:end] if len(y.shape) == 2 else y[:, start:end] for y in fields]
            )
            yield part, list(own)
            start = end

    def _decode(
        self,
        pack: Pack[A],
        fields: Sequence[A],
        arrays: Sequence[A],
        answers: list[A],
        *,
        donated: bool = False,
    ) -> None:
        """All of a pack."""
        for part, rows in self._rows_of(pack, fields):
            decoded = self.decode_rows(rows, out=self._place_to_decode(part) if donated else None)
            self._packer.divide(decoded, part, arrays, answers)
