"""Rows as codes, and back: one rounding, and what is drawn for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, NamedTuple

import numpy as np

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.codec import Codec, from_sent
from gradwire.core.codecs.packs import Joined
from gradwire.core.kernels import random
from gradwire.core.kernels.rows import RowNumbers
from gradwire.core.ops import WIRE_ITEMSIZE, A, Ops


class Noise(NamedTuple):
    """What stochastic rounding draws from: a `key`, and the `step`, an int or a traced int32
    scalar."""

    key: int
    step: Any


class Drawn(NamedTuple, Generic[A]):
    """Beside each row, int32 (R, 1): the key of what is drawn for its tensor, and the number of its
    first element there."""

    keys: A
    firsts: A


@dataclass
class RowCoder(Generic[A]):
    """Codes of rows.

    Args:
        ops: kernels.
        codec: how rows are coded.
        noise: of stochastic rounding. None: to the nearest.
        keys: of each array that is coded, so that what is drawn for it does not depend on the
            others. None: it does.
    """

    ops: Ops[A]
    codec: Codec
    noise: Noise | None = None
    keys: Sequence[int] | None = None
    _drawn: int = field(default=0, init=False)

    @property
    def casts(self) -> bool:
        """Whether an array can be coded element by element, and so also be handed over."""
        return isinstance(self.codec, Cast)

    @property
    def draws(self) -> bool:
        """Whether rounding is stochastic."""
        return self.noise is not None and self.codec.dithers

    def encode_rows(self, x: A, who: Any, drawn: Drawn[A] | None = None) -> tuple[A, ...]:
        """The codes (R, m) of rows (R, B). `who` rounds them: a replica, counted from 1, or all
        alike, 0."""
        if not self.draws:
            return self.ops.encode_rows(self.codec, x)
        return self.encode_numbers([x], lambda x: x, tuple(x.shape), who, drawn)

    def encode_numbers(
        self,
        arrays: Sequence[A],
        numbers: Callable[..., A],
        shape: tuple[int, ...],
        who: Any,
        drawn: Drawn[A] | None = None,
    ) -> tuple[A, ...]:
        """The codes (R, m) of the rows, of this shape (R, B), that `numbers` makes of the rows of
        arrays (…, R, …): in one go, so that they are never stored."""
        ops, codec, noise = self.ops, self.codec, self.noise
        codes: Any  # several matrices
        if noise is None or not codec.dithers:

            def nearest(*y: A, out: A | None = None) -> Any:
                return codec.encode(ops, numbers(*y))

            codes = ops.by_rows(nearest, *arrays)
            return tuple(codes)
        step, columns = random.of_replica(noise.step, who), ops.iota(shape[1]).reshape((1, -1))
        beside: list[A]
        if drawn is None:
            self._drawn += 1
            key: Any = random.key(noise.key, str(self._drawn))
            beside = [(ops.iota(shape[0]) * shape[1]).reshape((-1, 1))]
        else:
            beside = [drawn.firsts, drawn.keys]

        def rows(*given: A, out: A | None = None) -> Any:
            y, firsts, keys = given[: len(arrays)], given[len(arrays)], given[len(arrays) + 1 :]
            dither = random.dither(ops, keys[0] if keys else key, firsts + columns, step)
            return codec.encode(ops, numbers(*y), dither)

        codes = ops.by_rows(rows, *arrays, *beside)
        return tuple(codes)

    def draw_for(self, part: Joined[A], rounding: str) -> Drawn[A] | None:
        """What a rounding draws for the rows of a matrix; None: nothing, or what depends on all of
        them."""
        if not self.keys or not self.draws:
            return None
        ops, rows, width = self.ops, tuple(part.rows), part.matrix.shape[1]
        keys = tuple(random.key(self.keys[i], rounding) for i in part.members)
        member = RowNumbers(
            ("member", rows),
            sum(rows),
            lambda: np.repeat(np.arange(len(rows), dtype=np.int32), rows),
        )

        def beside(numbers: Sequence[int]) -> A:
            return ops.take_rows(ops.asarray(np.array(numbers).reshape(-1, 1), "int32"), member)

        def firsts() -> A:
            begin = list(accumulate(rows, initial=0))[:-1]
            return (ops.iota(sum(rows)).reshape((-1, 1)) - beside(begin)) * width

        return Drawn(
            ops.constant(("keys", keys, rows), lambda: beside(keys)),
            ops.constant(("firsts", width, rows), firsts),
        )

    def fields_of(self, arrived: Sequence[A], like: A) -> list[A]:
        """What has arrived of each replica, (W, …), as fields (W, R, m)."""
        return from_sent(self.ops, self.codec, like.shape[1], arrived)

    def split_bytes(self, of_each: A, layout: tuple[int, int]) -> list[A]:
        """Split the bytes of each replica, (W, …), into codes and scales, which stand one after the
        other."""
        (rows, n), start, fields = layout, 0, []
        for m, dtype in self.codec.fields(n):
            length = rows * m * (1 if self.casts else WIRE_ITEMSIZE[dtype])
            own = of_each[:, start : start + length]
            fields.append(own)
            start += length
        return from_sent(self.ops, self.codec, n, fields)

    def decode_rows(self, fields: Sequence[A], out: A | None = None) -> A:
        """The numbers (R, B) of codes, in `out` if that is given."""
        return self.ops.decode_rows(self.codec, *fields, out=out)
