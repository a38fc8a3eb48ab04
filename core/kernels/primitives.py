"""The operations that a backend must have, and the few of them that it may leave to a default.

Everything else that a method calls (`gradwire.core.ops.Ops`) is made of these.

**`out=` is a donation.** `z = ops.add(x, y, out=x)` allows the kernel to write the result into `x`.
torch and NumPy do, JAX cannot. After the call only the *returned* array may be used; the donated
one is gone. Written this way a program means the same in both worlds, and
`gradwire.core.simulate.PoisonOps` fails a program that peeks.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from gradwire.core.kernels.arrays import A


class Primitives(Protocol[A]):
    """The operations of one framework on its arrays. dtypes are named by strings: `"float32"`,
    `"bfloat16"`, `"int32"`, `"bool"`."""

    @abc.abstractmethod
    def dtype_of(self, x: A) -> str:
        """The name of `x`'s dtype."""

    def kind_of(self, x: A) -> Hashable:
        """Arrays are only joined with others of their kind: of one dtype, and in JAX varying along
        the same mapped axes."""
        return self.dtype_of(x)

    @abc.abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str) -> A:
        """A new array of zeros."""

    @abc.abstractmethod
    def iota(self, n: int) -> A:
        """0, 1, …, n-1 as int32."""

    @abc.abstractmethod
    def cast(self, x: A, dtype: str, *, out: A | None = None) -> A:
        """`x` in another dtype; `x` itself if it has that dtype already.

        Floats become integers towards zero: NaN is 0, and what lies beyond the dtype is the nearest
        that it has. Integers wrap round. Floats beyond a dtype become inf, or NaN in
        "float8_e4m3fn", which has no inf. All that is done to floats of 8 bits is to cast and to
        send them.
        """

    @abc.abstractmethod
    def asarray(self, numbers: Any, dtype: str) -> A:
        """A new array with these numbers: a NumPy array, a number, or nested sequences of them. A
        table, say, in `constant`."""

    @abc.abstractmethod
    def add(self, x: A, y: A | float, *, out: A | None = None) -> A:
        """`x + y`."""

    @abc.abstractmethod
    def multiply(self, x: A, y: A | float, *, out: A | None = None) -> A:
        """`x * y`, element by element."""

    @abc.abstractmethod
    def divide(self, x: A, y: A, *, out: A | None = None) -> A:
        """`x / y`."""

    @abc.abstractmethod
    def matmul(self, x: A, y: A, *, out: A | None = None) -> A:
        """`x @ y`, at the full precision of the dtype (no TF32, no bfloat16 passes). Of a sum that
        `add_each` left unadded, and where the result is as large as a gradient, JAX takes three
        products of bfloat16 on a TPU."""

    @abc.abstractmethod
    def subtract_product(self, x: A, p: A, q: A, *, out: A | None = None) -> A:
        """`x - p.mT @ q` for `x` (n, m), `p` (r, n), `q` (r, m); or for batches of them."""

    @abc.abstractmethod
    def where(self, ok: A, x: A, y: A | float, *, out: A | None = None) -> A:
        """`x` where the scalar (or broadcastable) boolean `ok` holds, else `y`."""

    @abc.abstractmethod
    def where_lazy(self, ok: A, x: Callable[[A | None], A], y: A, *, limit: float = math.inf) -> A:
        """`x(out)` if the boolean scalar `ok` holds, else `y`, which is donated, with its elements
        brought into [-limit, limit].

        For a large `x`: where the truth is known on the host at no cost, `x` is computed straight
        into `y`'s memory (`out` is `y`), or not at all; elsewhere it is computed anew (`out` is
        None) and selected. A kernel for which the limit would be another pass over memory in every
        step leaves it out.
        """

    def truth(self, ok: A) -> bool | None:
        """A boolean scalar, if the host knows it at no cost; None while it is traced, or where it
        lies on an accelerator."""
        return None

    @abc.abstractmethod
    def all_finite(self, *arrays: A) -> A:
        """Boolean scalar: no element of these is inf or NaN."""

    @abc.abstractmethod
    def sqrt(self, x: A) -> A:
        """Square root of each element."""

    @abc.abstractmethod
    def abs(self, x: A) -> A:
        """Magnitude of each element."""

    @abc.abstractmethod
    def sign(self, x: A) -> A:
        """-1, 0 or 1 for each element, in its dtype; NaN for NaN."""

    @abc.abstractmethod
    def round(self, x: A, *, out: A | None = None) -> A:
        """The nearest integer to each element of an array of floats, in its dtype; halves to the
        even one."""

    @abc.abstractmethod
    def top_k(self, x: A, k: int) -> A:
        """Positions, as int32, of the `k` largest elements of each row, the largest first: (…, n) →
        (…, k). Of equal elements the first counts as larger; NaN is as large as inf."""

    @abc.abstractmethod
    def take(self, x: A, index: A) -> A:
        """Elements of each row at positions of its own: (…, n) and int32 (…, k) → (…, k). Positions
        lie in 0, …, n-1."""

    @abc.abstractmethod
    def scatter_add(self, x: A, index: A, values: A) -> A:
        """`x` (…, n), donated, with `values` (…, k) of its dtype added at the positions `index` (…,
        k) of each row.

        A position may occur several times. On a GPU JAX then adds in any order, so replicas may
        come to different last bits: what has to be equal on all of them takes a call for each
        replica's values, whose positions are distinct.
        """

    @abc.abstractmethod
    def pack_bits(self, x: A, *, of: A | None = None) -> A:
        """Eight booleans in each byte: n of any shape → uint8 (⌈n / 8⌉,). To pack signs:
        `pack_bits(x > 0)`.

        Of 8k rows along the last axis, row i·k + j is in bit i, counted from the lowest, of the
        bytes of row j; a vector has rows of one element. The elements of up to seven rows that are
        left follow likewise: element i·l + j of 8l is bit i of byte j. Bits that stand for nothing
        are 0. On a TPU those bytes of whole eights are in the order in which they lie there. `of`:
        what is above 0 where `x` holds, and only there; a kernel may look at that instead.
        """

    @abc.abstractmethod
    def unpack_bits(self, x: A, shape: tuple[int, ...]) -> A:
        """The booleans of this shape, n elements, that `pack_bits` packed, of the same kernel:
        uint8 (⌈n / 8⌉,) → `shape`."""

    @abc.abstractmethod
    def view_as(self, x: A, dtype: str) -> A:
        """The same bits as elements of another dtype: (…, n) → (…, n · size of the old / size of
        the new), the lowest byte first."""

    @abc.abstractmethod
    def add_to_slice(self, x: A, part: A, n: int, i: Any, shape: tuple[int, ...]) -> A:
        """Rows (n·k, B), donated, with a `part` (k, B) added to the i-th of n equal parts of them.
        `i` may be traced; `shape` is that of the array whose rows they are, or ()."""

    @abc.abstractmethod
    def max_abs(self, x: A) -> A:
        """Largest magnitude along the last axis, which is kept with length 1. Zero on an empty
        axis."""

    @abc.abstractmethod
    def mean_abs(self, x: A) -> A:
        """Mean magnitude along the last axis, which is not empty and is kept with length 1: in
        float32, or float64 if `x` is."""

    @abc.abstractmethod
    def norm(self, x: A) -> A:
        """2-norm along the last axis, which is kept with length 1."""

    @abc.abstractmethod
    def norm_of_all(self, xs: Sequence[A]) -> A:
        """2-norm of all these arrays together, as if they were one vector: a scalar of the widest
        of their dtypes, float32 at least."""

    @abc.abstractmethod
    def scale_each(self, xs: Sequence[A], factor: A) -> list[A]:
        """`x * factor` for each array, in its own dtype, computed in that of the scalar `factor` at
        least. `xs` are donated."""

    def loop(self, n: int, body: Callable[[Any, A], A], start: A, *, fused: bool = False) -> A:
        """`x = body(i, x)` for i in 0, …, n-1. `i` may be traced.

        `fused`: `x` is large, and `body` goes over it element by element. A kernel may compile
        several turns into one.
        """
        for i in range(n):
            start = body(i, start)
        return start

    def rows_before(self, x: A, i: Any) -> A:
        """Rows 0, …, i-1 of each matrix of a batch (k, r, n). If `i` is traced: all rows, of which
        those from `i` on must be zero."""
        return x[..., :i, :]

    @abc.abstractmethod
    def row(self, x: A, i: Any) -> A:
        """Row `i` of each matrix of a batch: (k, r, n) → (k, 1, n). `i` may be traced."""

    @abc.abstractmethod
    def set_row(self, x: A, i: Any, row: A) -> A:
        """`x` with row `i` of each matrix replaced; `x` is donated."""

    @abc.abstractmethod
    def stack(self, arrays: Sequence[A]) -> A:
        """Arrays of one shape, along a new first axis."""

    @abc.abstractmethod
    def pad(self, x: A, n: int) -> A:
        """The vector `x`, followed by zeros up to length `n`."""

    @abc.abstractmethod
    def rows(
        self, arrays: Sequence[A], n: int, *, out: A | None = None, donated: bool = False
    ) -> A:
        """Arrays of one dtype as one matrix (n, k): each flattened, padded with zeros to a multiple
        of `n` and cut into `n` rows, which lie side by side. `n=1` joins them. Of a single array
        the matrix may be a view; of several, if they are `donated`, the memory in which they lie
        side by side already."""

    @abc.abstractmethod
    def from_rows(
        self, matrix: A, shapes: Sequence[tuple[int, ...]], *, out: Sequence[A] | None = None
    ) -> list[A]:
        """The arrays of these shapes of which `rows` made the matrix."""

    def row_of(self, x: A, n: int, i: Any) -> A:
        """Row `i` of `rows([x], n)`, shape (k,). `i` may be traced."""
        k = -(-math.prod(x.shape) // n)
        row = x.reshape((-1,))[i * k : (i + 1) * k]
        return row if row.shape[0] == k else self.pad(row, k)

    def constant(self, key: Hashable, make: Callable[[], A]) -> A:
        """`make()`, which depends on `key` alone: computed once where arrays outlive the step, in
        the program in JAX."""
        return make()

    def copies(self, xs: Sequence[A]) -> list[A]:
        """The same arrays where nobody else writes to them."""
        return [
            self.cast(x, self.dtype_of(x), out=self.zeros(x.shape, self.dtype_of(x))) for x in xs
        ]

    def where_each(
        self, ok: A, xs: Sequence[A], ys: Sequence[A], *, limits: Sequence[float] = ()
    ) -> list[A]:
        """`x` if the boolean scalar `ok` holds, else `y`, for each pair of equal shapes and dtypes.
        The result lies in the place of `y`, which is donated, and never is `x`. `limits`: as
        `limit` of `where_lazy`, one for each pair."""

        def chosen(x: A, y: A, limit: float) -> A:
            # Copied into y's place: who made x may write to it again.
            return self.where_lazy(ok, lambda out: self.where(ok, x, y, out=out), y, limit=limit)

        return [
            chosen(x, y, limit)
            for x, y, limit in zip(xs, ys, limits or [math.inf] * len(xs), strict=True)
        ]

    def nan_unless(self, ok: A, xs: Sequence[A], *, out: Sequence[A] | None = None) -> list[A]:
        """`x` if the boolean scalar `ok` holds, else NaN throughout, for each array. `out`: of the
        same shapes and dtypes."""
        places: Sequence[A | None] = [None] * len(xs) if out is None else out
        return [self.where(ok, x, math.nan, out=y) for x, y in zip(xs, places, strict=True)]

    def by_rows(self, f: Callable[..., A], *arrays: A, out: A | None = None) -> A:
        """`f(*arrays)`, for a function that makes of the n rows of each of its arguments, (…, n,
        B), a matrix of n rows, each row by itself; or, without `out`, a tuple of such matrices.

        A kernel may call it on a few rows at a time, whose intermediate results stay in a
        processor's cache; what kernels make in there is gone when it returns. `out` takes the
        result if it has its dtype and its number of elements. It may be one of the arrays. `f` is
        called with `out=`, where the kernel has a place for those rows, and may ignore it.
        """
        return f(*arrays)
