"""What an algorithm may do to arrays: `Ops`, the primitives of a framework and the composites made
of them.

An algorithm never imports a framework. It receives `ops` (the kernels of NumPy, torch or JAX) and
arrays of that framework, and uses their operators and these functions and nothing else.

A backend must have the primitives (`gradwire.core.kernels.primitives`). A composite has its body
here, in primitives. The body says what the composite means: a backend that does better overrides
it, one by one, and `tests/parity` compares the two. A new composite is a body, its row in
`tests/parity/test_kernels.py`, and whoever calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from gradwire.core.kernels import payloads, rounding, signs
from gradwire.core.kernels.arrays import (
    FLOATS,
    INTEGERS,
    ITEMSIZE,
    LARGEST,
    LARGEST_E4M3,
    LONGEST_FLOAT16,
    WIRE_ITEMSIZE,
    A,
    Array,
    FloatDtype,
    Spec,
    name_of_dtype,
    reshape_if_needed,
    wide_dtype,
)
from gradwire.core.kernels.bits import pack_integers, unpack_integers
from gradwire.core.kernels.gram_schmidt import each_shape, gram_schmidt
from gradwire.core.kernels.payloads import Payload, Residual
from gradwire.core.kernels.primitives import Primitives
from gradwire.core.kernels.rows import RowNumbers, of_tiles
from gradwire.core.kernels.storage import Storage

__all__ = [
    "FLOATS",
    "INTEGERS",
    "ITEMSIZE",
    "LARGEST",
    "LARGEST_E4M3",
    "LONGEST_FLOAT16",
    "WIRE_ITEMSIZE",
    "A",
    "Array",
    "Bundled",
    "FloatDtype",
    "Ops",
    "Primitives",
    "Spec",
    "name_of_dtype",
    "reshape_if_needed",
    "wide_dtype",
]


class Bundled(Protocol[A]):
    """Tensors of a step, some of them in stacks: what `Ops.bundle` returns.

    Attributes:
        names: of each stack, the name that stands for it → the names of its members, in order.
        gradients: name → gradient; of a stack, all of them with a leading axis, or what behaves as
            that.
        tensors: name → memory, in the same way.
    """

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def gradients(self) -> dict[str, A]: ...

    @property
    def tensors(self) -> dict[str, dict[str, A]]: ...

    def apart(
        self, averages: Mapping[str, Any], tensors: Mapping[str, Mapping[str, A]]
    ) -> tuple[dict[str, Any], dict[str, dict[str, A]]]:
        """Averages and memory after the step, of every single tensor."""


class Ops(Primitives[A], Protocol):
    """Primitives, and what is made of them: what an algorithm is given."""

    #: How arrays lie on the device, and what its compiler wants to know.
    storage: Storage[Any] = Storage()

    #: Whether `bundle` may join anything: whoever compiles nothing need not be asked.
    bundles: bool = False

    #: Whether `matmul_each` of many may take less than `matmul` of each, so that products wait for
    #: others.
    multiplies_together: bool = True

    def codes_stay(self, codec: Any, x: A, each: int | None = None) -> bool:
        """Whether codes of rows like `x` (R, B) stay codes (`gradwire.core.kernels.payloads.Coded`)
        until `settle`, and means are formed of them by `encode_mean`: where that takes fewer passes
        over memory than to decode what arrives. `each`: elements, on average, of the arrays that
        the rows are of, where each would be settled by itself."""
        return False

    @property
    def late_residuals(self) -> bool:
        """Whether `errors_after` subtracts and commits in one pass: a residual that is computed
        before, while a message travels, would be one more."""
        return False

    def add_each(
        self, xs: Sequence[A], ys: Sequence[A], *, multiplied: bool = False, coded: bool = False
    ) -> list[A]:
        """`x + y` for each pair of equal shapes and dtypes. `xs` are donated.

        `multiplied` promises that the sums are only seen in other shapes (`reshape`, `mT`, `pad`),
        multiplied from the left by thin factors (`matmul`), and subtracted from
        (`subtract_product`, inside `where_lazy` with `y`). A kernel may then leave them unadded.
        `coded` promises that those of many elements are only seen in other shapes (`reshape`,
        `pad`, and joined, `rows`) until they are encoded (`encode_rows`).
        """
        return [self.add(x, y, out=x) for x, y in zip(xs, ys, strict=True)]

    def matmul_each(self, xs: Sequence[A], ys: Sequence[A]) -> list[A]:
        """`x @ y` for each pair of a thin factor and a matrix, of any shapes: `matmul`."""
        return [self.matmul(x, y) for x, y in zip(xs, ys, strict=True)]

    def orthonormalize(self, x: A, epsilon: float) -> A:
        """Orthonormal rows for a batch (k, r, n), which is donated:
        `gradwire.core.kernels.gram_schmidt.gram_schmidt`, or to rounding the same."""
        return gram_schmidt(self, x, epsilon, out=x)

    def orthonormalize_each(
        self, arrays: Sequence[A], fresh: Sequence[A], epsilon: float
    ) -> list[A]:
        """Orthonormal rows for each matrix (r, n) or stack of them (b, r, n), of any shapes:
        `gradwire.core.kernels.gram_schmidt.each_shape`, or to rounding the same.

        `fresh` holds, for each matrix, the rows that replace its negligible ones
        (`gradwire.core.kernels.gram_schmidt.refresh`), or is empty.
        """
        return each_shape(self, arrays, fresh, epsilon)

    def unstack(self, batch: A) -> Sequence[A]:
        """The members of a batch (k, …), in order: views, or copies."""
        return [batch[i] for i in range(batch.shape[0])]

    def elementwise_each(self, f: Callable[..., A], *lists: Sequence[A]) -> list[A]:
        """`f(x, y, …)` for each x, y, … of these lists, for an `f` that computes each element by
        itself, of arrays of one shape. Where they lie side by side a kernel may call it once. It
        may write into its first argument."""
        return [f(*own) for own in zip(*lists, strict=True)]

    def mean_abs_each(self, xs: Sequence[A]) -> A:
        """Mean magnitudes of the rows of matrices of one dtype, (N,), one after the other: no row
        is empty, and dtypes are those of `mean_abs`."""
        means = [self.mean_abs(x) for x in xs]
        return means[0].reshape((-1,)) if len(means) == 1 else self.rows(means, 1).reshape((-1,))

    def pack_signs(self, xs: Sequence[A], sharing: Sequence[tuple[int, ...]]) -> list[A]:
        """The signs of these arrays, of one dtype: whether elements are above 0, as bits, uint8, of
        each array in whole bytes, for what is sent. One array or several, in the kernel's own
        order. `sharing`: in which shape each array has its numbers, see
        `gradwire.core.kernels.signs`."""
        return signs.pack_signs(self, xs)

    def signed(
        self,
        xs: Sequence[A],
        bits: Sequence[A],
        above: Sequence[A],
        below: Sequence[A],
        sharing: Sequence[tuple[int, ...]],
    ) -> list[A]:
        """Arrays of two numbers: where an element is above 0 the number `above` of its array, else
        `below`. `bits` are what `pack_signs` made of the arrays: a kernel may look at those
        instead. Numbers are an array for each, or one for all, (N,), of those of one after the
        other."""
        return signs.signed(self, xs, above, below, sharing)

    def sum_of_signs(
        self,
        every: Sequence[A],
        above: Sequence[A],
        below: Sequence[A],
        shapes: Sequence[tuple[int, ...]],
        sharing: Sequence[tuple[int, ...]],
    ) -> list[A]:
        """Arrays of these shapes: the sum of what `signed` makes on all replicas, added one after
        the other. `every` is what they have packed, and `above` and `below` are their numbers, each
        array (W, …)."""
        return signs.sum_of_signs(self, every, above, below, shapes, sharing)

    def largest_each(self, xs: Sequence[A], k: int) -> tuple[A, A]:
        """The `k` elements of largest magnitude of each row of matrices (n, m), of one dtype: their
        positions, int32, and they themselves, (N, k) for all rows, those of one matrix below those
        of another. In any order, but of equal magnitudes the first count as larger; NaN is as large
        as inf."""
        each = [self.top_k(self.abs(x), k) for x in xs]
        return self.rows(each, 1).reshape((-1, k)), self.take_each(xs, each)

    def take_each(self, xs: Sequence[A], indices: Sequence[A]) -> A:
        """What `take` takes of several matrices, one below the other."""
        values = [self.take(x, index) for x, index in zip(xs, indices, strict=True)]
        return (
            values[0]
            if len(values) == 1
            else self.rows(values, 1).reshape((-1, indices[0].shape[-1]))
        )

    def take_rows(self, x: A, which: RowNumbers) -> A:
        """Rows of a matrix, or of several, one below the other: (…, R, m) → (n, m)."""
        x = x.reshape((-1, x.shape[-1]))
        return self.take(x.mT, self._row_numbers(x, which)).mT

    def add_rows(self, x: A, which: RowNumbers, rows: A) -> A:
        """A matrix (R, B), donated, with `rows` (n, B) added to n different ones of its rows."""
        return self.scatter_add(x.mT, self._row_numbers(x, which), rows.mT).mT

    def _row_numbers(self, x: A, which: RowNumbers) -> A:
        index = self.constant(which.key, lambda: self.asarray(which.make(), "int32"))
        return self.zeros((x.shape[1], 1), "int32") + index

    def scatter_sum(
        self,
        n: int,
        of: Callable[..., tuple[A, A]],
        *every: A,
        tiles: tuple[int, int] | None = None,
        after: A | None = None,
    ) -> A:
        """Rows (…, n): the sum of what all replicas have sent of them. `of(*(x[i] for x in every))`
        are positions (…, k), distinct in each row, and values (…, k) of replica i, for arrays (W,
        …). They are added one replica after the other, or in one product that is the same on all
        replicas, so that no order is left to chance.

        With `tiles`, (a, c), rows are tiles of a matrix, of a rows, column by column, c of them
        side by side: that matrix is the result. `after`: what a kernel that makes zeros first may
        wait for, so that these arrays need not lie in memory at a time."""
        total: A | None = None
        for i in range(every[0].shape[0]):
            index, values = of(*(x[i] for x in every))
            start = (
                self.zeros((*index.shape[:-1], n), self.dtype_of(values))
                if total is None
                else total
            )
            total = self.scatter_add(start, index, values)
        assert total is not None
        return total if tiles is None else of_tiles(total, *tiles)

    def scatter_sum_each(
        self,
        parts: Sequence[tuple[int, int, tuple[int, int] | None]],
        of: Callable[..., tuple[A, A]] | None,
        *every: A,
        order: Sequence[int] | None = None,
        finish: Callable[[A], A] | None = None,
    ) -> list[A]:
        """`scatter_sum` for several parts, each of (rows, n, tiles): `of` returns the positions and
        values of the rows of all, one part below the other.

        `of` may be called for one replica, or with a leading axis in arguments and results for
        several of them; None: `every` are positions and values of one replica, without such an
        axis. `order`: in which parts better lie side by side. `finish`: what becomes of each sum,
        element by element, as in `elementwise_each`."""
        answers: list[A] = []
        start = 0
        for count, n, tiles in parts:
            rows = slice(start, start + count)

            def of_part(*own: A, rows: slice = rows) -> tuple[A, A]:
                assert of is not None
                index, values = of(*own)
                return (index, values) if len(parts) == 1 else (index[rows], values[rows])

            after = answers[-1] if answers else None
            if of is None:
                own = [x[rows].reshape((1, count, -1)) for x in every]
                total = self.scatter_sum(n, lambda *own: own, *own, tiles=tiles, after=after)
            else:
                total = self.scatter_sum(n, of_part, *every, tiles=tiles, after=after)
            # Finished before the next begins, which waits for it: a sum that others wait for is
            # stored by itself.
            answers.append(total if finish is None else finish(total))
            start += count
        return answers

    def pack_integers(self, x: A, bits: int) -> A:
        """Integers below 2**bits, at most 24 bits, int32 of any shape, as bytes: the lowest bits of
        all, then the next, as `pack_bits` packs such rows. Only the last byte may have bits to
        spare."""
        return pack_integers(self, x, bits)

    def unpack_integers(self, data: A, bits: int, shape: tuple[int, ...]) -> A:
        """The integers, int32, that `pack_integers` packed: of bytes (…, b) as many as this shape
        has, (…, *shape)."""
        return unpack_integers(self, data, bits, shape)

    def scales(self, x: A, largest: float, *, signed: bool = False) -> tuple[A, A]:
        """`gradwire.core.kernels.rounding.scales`, bit for bit."""
        return rounding.scales(self, x, largest, signed=signed)

    def quantize(self, x: A, largest: float) -> tuple[A, A]:
        """Codes of 8 bits, uint8 (R, B), and scales, float32 (R, 1), of rows of floats, cast to
        float32: the nearest multiples of the scale, the same bits in all backends."""
        return rounding.quantize(self, x, largest)

    def encode_rows(self, codec: Any, x: A) -> tuple[A, ...]:
        """The fields (R, m) of rows of floats (R, B), by
        `gradwire.core.codecs.codec.Codec.encode`."""
        fields: Any = self.by_rows(lambda x, out=None: codec.encode(self, x), x)
        return tuple(fields)

    def decode_rows(self, codec: Any, *fields: A, out: A | None = None) -> A:
        """Rows, float32 (R, B), that fields (R, m) stand for, by
        `gradwire.core.codecs.codec.Codec.decode`."""
        return self.by_rows(partial(codec.decode, self), *fields, out=out)

    def decode_mean(
        self, codec: Any, *of_each: A, dtype: str = "float32", out: A | None = None
    ) -> A:
        """`gradwire.core.kernels.rounding.mean_decoded`, the same bits in all backends: (W, R, m),
        … → (R, B)."""
        return self.by_rows(
            lambda *y, out=None: rounding.mean_decoded(self, codec, y, dtype, out),
            *of_each,
            out=out,
        )

    def encode_mean(
        self, codec: Any, *of_each: A, dtype: str = "float32", keeps: bool
    ) -> tuple[tuple[A, ...], A | None]:
        """The fields of that mean; and, if it `keeps` that, what rounding takes from it, times -W,
        float32 (R, B); else None."""
        if not keeps:
            fields: Any = self.by_rows(
                lambda *y, out=None: codec.encode(
                    self, rounding.mean_decoded(self, codec, y, dtype)
                ),
                *of_each,
            )
            return tuple(fields), None
        mean = self.decode_mean(codec, *of_each, dtype=dtype)
        own = self.encode_rows(codec, mean)
        return own, (mean - self.decode_rows(codec, *own)) * -float(of_each[0].shape[0])

    def nearest_bytes(self, x: A, *, out: A | None = None) -> A:
        """`gradwire.core.kernels.rounding.nearest_bytes`, bit for bit, of `x`, which is donated. Of
        what is no number between -128 and 127: any byte."""
        return rounding.nearest_bytes(self, x)

    def sum_of_each(self, f: Callable[..., A], *arrays: A) -> A:
        """`f(*(x[0] for x in arrays)) + f(*(x[1] for x in arrays)) + …`, for arrays (W, n, B) and
        an `f` that makes new rows of rows, whatever lies before them. An accelerator may add in
        another order: what has to be equal on all replicas is formed by one of them."""
        total = f(*[x[0] for x in arrays])
        for i in range(1, arrays[0].shape[0]):
            total = total + f(*[x[i] for x in arrays])
        return total

    def sum_in_order(self, x: A) -> A:
        """The sum of a vector's numbers: the same bits on all replicas, and with more zeros."""
        return self.loop(x.shape[0] - 1, lambda i, total: total + x[i + 1], x[0], fused=True)

    def join_order(self, arrays: Sequence[A]) -> list[int] | None:
        """The order in which arrays are better joined (`rows`) than computed with one by one. None:
        they are not. Replicas may differ in it."""
        return None

    def bundle(
        self,
        gradients: dict[str, A],
        tensors: Mapping[str, Mapping[str, A]],
        alike: Callable[[str], Hashable | None],
        *,
        multiplied: bool,
    ) -> Bundled[A] | None:
        """Tensors of one shape that are better computed with as stacks, where `alike` gives them
        the same, joined. None: there are none.

        `multiplied` promises of gradients and errors what it promises in `add_each`: they may be
        left apart until they are multiplied.
        """
        return None

    def unbundle(self) -> Ops[A]:
        """The same, but `bundle` joins nothing: for what another program sends in blocks, which
        begin anew with each tensor."""
        return self

    def errors_after(
        self,
        ok: A,
        x: Sequence[Residual[A]],
        sent: Sequence[Payload[A]],
        errors: Sequence[A],
        *,
        decay: float = 1.0,
    ) -> list[A]:
        """`decay * (x - sent)` if the boolean scalar `ok` holds, for each tensor, in the place of
        its error, which is donated; else the error, within
        `gradwire.core.kernels.payloads.largest_error`. What is left of a tensor may have been
        computed before; else `x` is donated too."""
        return payloads.errors_after(self, ok, x, sent, errors, decay)

    def dense_or_nan(
        self, ok: A, received: Sequence[Payload[A]], places: Sequence[A | None]
    ) -> list[A]:
        """Each tensor, decoded and multiplied out, if the boolean scalar `ok` holds, else NaN
        throughout: in its place, which is donated. One that is dense already may have none."""
        return payloads.dense_or_nan(self, ok, received, places)

    def settle(
        self,
        ok: A,
        finite: A,
        x: Sequence[Residual[A]],
        sent: Sequence[Payload[A]],
        errors: Sequence[A],
        received: Sequence[Payload[A]],
        *,
        decay: float = 1.0,
    ) -> tuple[list[A], list[A]]:
        """The end of a step: `errors_after` if `ok` holds, and `dense_or_nan` of what was received,
        if the step is `finite`, in the places of `x`."""
        after = self.errors_after(ok, x, sent, errors, decay=decay)
        return after, self.dense_or_nan(finite, received, [left.x for left in x])

    def cast_each(
        self, xs: Sequence[A], dtypes: Sequence[str], errors: Sequence[A], *, decay: float = 1.0
    ) -> tuple[list[A], list[A]]:
        """Each array in another dtype, one with fewer bits; and, of the dtype of the array, `error
        + decay * (x - that)`, where it is finite: else the error as it is. Arrays and errors are
        donated."""
        return payloads.cast_each(self, xs, dtypes, errors, decay)
