"""The kernels in JAX. Nothing is written in place: a donated `out` only says which dtype the result
has."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.core.kernels import rounding
from gradwire.core.kernels.arrays import group_by
from gradwire.core.kernels.bits import bytes_of_rows, pack_integers, unpack_integers
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.kernels.payloads import Payload, Residual
from gradwire.core.kernels.rows import RowNumbers
from gradwire.core.ops import INTEGERS, Ops
from gradwire.jax_backend.axes.auto_axes import free, whole
from gradwire.jax_backend.axes.mapped_axis import vary, varying_axes
from gradwire.jax_backend.ops import integers, signs
from gradwire.jax_backend.ops.batched_small import LARGE, Bundles, Members, StackedSum, bundles_of
from gradwire.jax_backend.ops.factors import orthonormal_each
from gradwire.jax_backend.ops.lazy_sum import Sum, limited
from gradwire.jax_backend.ops.packing import (
    LANES,
    TILE,
    apart_on_tpu,
    chosen_each,
    columns,
    or_each,
    stored,
    unstack,
)
from gradwire.jax_backend.ops.products import product
from gradwire.jax_backend.ops.short_floats import converted
from gradwire.jax_backend.ops.sparse import Part, chosen, compared_on_tpu, parts_of, scatter_sums
from gradwire.jax_backend.ops.storage import XlaStorage, in_tiles

#: Up to this inner dimension a large product is computed element by element where it is used: XLA
#: would store the result of a `dot` first. Of less than `LARGE` elements that saves less time than
#: it takes to compile, since the program grows with the inner dimension.
THIN = 16
#: Turns of a loop that are fused into one: each is compiled.
AT_ONCE = 8
#: Elements of the largest array that is made while the program is traced, and becomes part of it.
LARGEST_CONSTANT = 1 << 17


class JaxOps(Ops[jax.Array]):
    """The kernels of `gradwire.core.ops.Ops` for JAX arrays and tracers: each means what it says
    there. Has no state.

    Args:
        bundles: whether small matrices are computed with as stacks.
        across: mesh axes along which devices have pieces of one array, of equal size: its mean is
            that of all of them.
    """

    storage = XlaStorage()

    def __init__(self, *, bundles: bool = True, across: tuple[str, ...] = ()) -> None:
        self.bundles = bundles
        self._across = across

    def dtype_of(self, x: jax.Array) -> str:
        return str(x.dtype.name)

    def kind_of(self, x: jax.Array) -> Hashable:
        return x.dtype, varying_axes(x)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> jax.Array:
        return jnp.zeros(shape, dtype)

    def iota(self, n: int) -> jax.Array:
        # From a NumPy array `gradwire.core.kernels.random.uniform` makes a constant while the
        # program is traced. Traced, it is a chain of kernels for every parameter to compile and, at
        # every step, to run. Very large ones would make the program large.
        if n <= LARGEST_CONSTANT:
            return np.arange(n, dtype=np.int32)  # type: ignore[return-value]
        return jnp.arange(n, dtype=jnp.int32)

    def cast(self, x: jax.Array, dtype: str, *, out: jax.Array | None = None) -> jax.Array:
        if x.dtype.name == dtype or not jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(dtype)
        if x.dtype.itemsize == 1:
            x = x.astype(jnp.float32)
        if dtype in INTEGERS:
            # What becomes of NaN, and of numbers that are too large, XLA leaves to the device.
            limits = np.iinfo(dtype)
            # Powers of two, which all floats have, or inf in their place.
            above, below = (
                jnp.asarray(limits.max + 1.0, x.dtype),
                jnp.asarray(float(limits.min), x.dtype),
            )
            within = jnp.where((x < above) & (x > below), x, 0).astype(dtype)
            return jnp.where(
                x >= above, limits.max, jnp.where(x <= below, limits.min, within)
            ).astype(dtype)
        return converted(x, dtype)

    def asarray(self, numbers: Any, dtype: str) -> jax.Array:
        return jnp.asarray(NumpyOps().asarray(numbers, dtype))

    def add(self, x: jax.Array, y: jax.Array | float, *, out: jax.Array | None = None) -> jax.Array:
        return _like(out, x + _typed(y, x))

    def multiply(
        self, x: jax.Array, y: jax.Array | float, *, out: jax.Array | None = None
    ) -> jax.Array:
        return _like(out, x * _typed(y, x))

    def divide(self, x: jax.Array, y: jax.Array, *, out: jax.Array | None = None) -> jax.Array:
        return _like(out, x / y)

    def matmul(
        self, x: jax.Array, y: jax.Array | Sum, *, out: jax.Array | None = None
    ) -> jax.Array:
        x = free(x)
        if isinstance(y, Sum):
            return _like(out, y.multiplied_by(x))
        stack: Any = out
        if isinstance(stack, StackedSum):
            large: jax.Array = stack.replaced_by(x, y)
            return large
        if x.shape[-1] <= min(THIN, x.shape[-2], y.shape[-1]) and x.ndim == y.ndim:
            return _like(out, self._product(x.mT, y))
        # By default a TPU multiplies float32 in bfloat16, and a recent GPU in TF32.
        return _like(out, jnp.matmul(x, y, precision=lax.Precision.HIGHEST))

    def subtract_product(
        self, x: jax.Array | Sum, p: jax.Array, q: jax.Array, *, out: jax.Array | None = None
    ) -> jax.Array:
        if isinstance(x, StackedSum):
            return x.less(p, q)  # type: ignore[return-value]
        product = self._product(p, q)
        return x.minus(product) if isinstance(x, Sum) else _like(out, x - product)  # type: ignore[return-value]

    def _product(self, p: jax.Array, q: jax.Array) -> jax.Array:
        """`p.mT @ q`."""
        p, q = free(p), free(q)
        r, n, m = p.shape[-2], p.shape[-1], q.shape[-1]
        if 1 <= r <= THIN and r < min(n, m) and n * m >= LARGE:
            fused: jax.Array = _sum_of_outer_products(p, q)
            return fused
        batch = tuple(range(p.ndim - 2))
        # as Gram-Schmidt's are
        return product(p, q, (((p.ndim - 2,), (p.ndim - 2,)), (batch, batch)), exact=n == 1)

    def where(
        self, ok: jax.Array, x: jax.Array, y: jax.Array | float, *, out: jax.Array | None = None
    ) -> jax.Array:
        return _like(out, jnp.where(ok, x, jnp.asarray(y, x.dtype)))

    def add_each(
        self,
        xs: Sequence[jax.Array],
        ys: Sequence[jax.Array],
        *,
        multiplied: bool = False,
        coded: bool = False,
    ) -> list[jax.Array]:
        return [self._sum(x, y, multiplied) for x, y in zip(xs, ys, strict=True)]

    def _sum(self, x: jax.Array, y: jax.Array, multiplied: bool) -> jax.Array:
        if isinstance(x, Members) and isinstance(y, Members):
            # the same
            return StackedSum(x, y) if multiplied else x.plus(y)  # type: ignore[return-value]
        lazy = multiplied and x.ndim > 1 and x.size >= LARGE and x.dtype == y.dtype
        # to programs it is an array
        return Sum(x, y) if lazy else self.add(x, y, out=x)  # type: ignore[return-value]

    def copies(self, xs: Sequence[jax.Array]) -> list[jax.Array]:
        return list(xs)  # to which nobody writes

    def where_each(
        self,
        ok: jax.Array,
        xs: Sequence[jax.Array],
        ys: Sequence[jax.Array],
        *,
        limits: Sequence[float] = (),
    ) -> list[jax.Array]:
        ys = [limited(y, limit) for y, limit in zip(ys, limits, strict=True)] if limits else ys
        return chosen_each(ok, [jnp.asarray(x, y.dtype) for x, y in zip(xs, ys, strict=True)], ys)

    def nan_unless(
        self, ok: jax.Array, xs: Sequence[jax.Array], *, out: Sequence[jax.Array] | None = None
    ) -> list[jax.Array]:
        return or_each(ok, xs, math.nan)

    def where_lazy(
        self,
        ok: jax.Array,
        x: Callable[[jax.Array | None], jax.Array],
        y: jax.Array,
        *,
        limit: float = math.inf,
    ) -> jax.Array:
        value: jax.Array | Sum = x(None)
        if isinstance(value, Sum) and value.error is y:
            return value.added(ok, limit)
        if isinstance(y, Members):
            # no sum: what is multiplied is one
            return y.replaced(ok, value, limit)  # type: ignore[return-value, arg-type]
        # In the shape of the state, as `Sum.added`: so an accelerator writes over the argument.
        return lax.select(ok, jnp.asarray(value, y.dtype)[None], limited(y[None], limit))[0]

    def errors_after(
        self,
        ok: jax.Array,
        x: Sequence[Residual[jax.Array]],
        sent: Sequence[Payload[jax.Array]],
        errors: Sequence[jax.Array],
        *,
        decay: float = 1.0,
    ) -> list[jax.Array]:
        """The errors after a step. Of terms that are better added twice, a TPU adds them again: the
        sum would lie in memory all the time."""

        def again(
            sums: list[jax.Array], terms: list[tuple[jax.Array, jax.Array]]
        ) -> list[jax.Array]:
            return [g + lax.select(ok, error, jnp.zeros_like(error)) for g, error in terms]

        if apart := [i for i, each in enumerate(x) if each.terms is not None]:
            # With a condition, since XLA finds the same sum.
            sums, terms = [x[i].x for i in apart], [x[i].terms for i in apart]
            found = iter(
                lax.platform_dependent(sums, terms, tpu=again, default=lambda sums, terms: sums)
            )
            x = [each if each.terms is None else Residual(self, next(found)) for each in x]
        return super().errors_after(ok, x, sent, errors, decay=decay)

    def truth(self, ok: jax.Array) -> bool | None:
        return None if isinstance(ok, jax.core.Tracer) else bool(ok)

    def all_finite(self, *arrays: jax.Array) -> jax.Array:
        # A GPU needs a second kernel to come from the flags of rows to one: not one for each array.
        rows: dict[tuple[int, ...], jax.Array] = {}
        for x in arrays:
            finite = jnp.isfinite(x).all(x.ndim - 1) if x.ndim else jnp.isfinite(x)
            rows[finite.shape] = rows[finite.shape] & finite if finite.shape in rows else finite
        return functools.reduce(
            jnp.logical_and, [flags.all() for flags in rows.values()], jnp.ones((), bool)
        )

    def orthonormalize_each(
        self, arrays: Sequence[jax.Array], fresh: Sequence[jax.Array], epsilon: float
    ) -> list[jax.Array]:
        answers, arrays, fresh = list(arrays), whole(arrays), whole(fresh)
        # What varies along a mapped axis, and what does not, stay apart: in one batch all of it
        # would.
        for members in group_by(range(len(arrays)), map(varying_axes, arrays)):
            own = [fresh[i] for i in members] if fresh else []
            rows = orthonormal_each(self, [arrays[i] for i in members], own, epsilon)
            # What replaces rows is last step's factor, which is only multiplied by; others are used
            # element by element too.
            rows = apart_on_tpu(whole(rows))
            for i, x in zip(members, rows if fresh else stored(rows), strict=True):
                answers[i] = x
        return answers

    def max_abs(self, x: jax.Array) -> jax.Array:
        def as_integers(x: jax.Array) -> jax.Array:
            bits = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
            return lax.bitcast_convert_type(
                jnp.max(bits, axis=-1, keepdims=True, initial=0), x.dtype
            )

        def as_floats(x: jax.Array) -> jax.Array:
            return jnp.max(x, axis=-1, keepdims=True, initial=0)

        # Of integers NaN is the largest: XLA:CPU loses a NaN among many floats, and with it what
        # came before it in its row. A TPU has no maximum of integers along lanes, and takes ten
        # times as long to compile one.
        largest: jax.Array = lax.platform_dependent(jnp.abs(x), cpu=as_integers, default=as_floats)
        return largest

    def nearest_bytes(self, x: jax.Array, *, out: jax.Array | None = None) -> jax.Array:
        # `rounding.nearest_bytes` with one operation less. With its two comparisons XLA for CUDA
        # takes codes for expensive, and stores what they are made of: the sum of gradient and
        # error, as much memory again as gradients take.
        code = lax.clamp(np.int32(-128), rounding.nearest_integers(self, x), np.int32(127))
        return lax.bitcast_convert_type(code.astype(jnp.int8), jnp.uint8)

    def mean_abs(self, x: jax.Array) -> jax.Array:
        mean: jax.Array = jnp.mean(
            jnp.abs(x), axis=-1, keepdims=True, dtype=jnp.result_type(jnp.float32, x)
        )
        return lax.pmean(mean, self._across) if self._across else mean  # type: ignore[no-untyped-call]

    def norm(self, x: jax.Array) -> jax.Array:
        return jnp.linalg.vector_norm(x, axis=-1, keepdims=True)

    def norm_of_all(self, xs: Sequence[jax.Array]) -> jax.Array:
        wide = jnp.result_type(jnp.float32, *xs)
        squares = [jnp.sum(jnp.square(x.astype(wide))) for x in xs]
        return jnp.sqrt(functools.reduce(jnp.add, squares, jnp.zeros((), wide)))

    def scale_each(self, xs: Sequence[jax.Array], factor: jax.Array) -> list[jax.Array]:
        return [(x * factor).astype(x.dtype) for x in xs]

    # As they are, with no function round them: they take more arguments.
    sqrt = staticmethod(jnp.sqrt)  # type: ignore[assignment]
    abs = staticmethod(jnp.abs)  # type: ignore[assignment]
    sign = staticmethod(jnp.sign)  # type: ignore[assignment]

    def round(self, x: jax.Array, *, out: jax.Array | None = None) -> jax.Array:
        return jnp.round(x)

    def top_k(self, x: jax.Array, k: int) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = _in_order(x)
        # Of a matrix of many rows a TPU would sort all elements, and their positions beside them;
        # of eight at a time it finds the largest in one pass.
        eights = x.ndim > 1 and x.size and math.prod(x.shape[:-1]) % TILE == 0
        rows = x.reshape(-1, TILE, x.shape[-1]) if eights else x
        # Else a GPU keeps all positions, sorted, wherever these are used.
        index: jax.Array = lax.optimization_barrier(lax.top_k(rows, k)[1])  # type: ignore[no-untyped-call]
        return index.reshape(*x.shape[:-1], k)

    def take(self, x: jax.Array, index: jax.Array) -> jax.Array:
        def compared() -> jax.Array:
            return chosen(index[..., None], x.shape[-1], x[..., None, :], -1)

        values: jax.Array = compared_on_tpu(
            index.shape[-1], lambda: jnp.take_along_axis(x, index, axis=-1), compared
        )
        return values

    def take_each(self, xs: Sequence[jax.Array], indices: Sequence[jax.Array]) -> jax.Array:
        runs = [
            list(run)
            for _, run in itertools.groupby(
                zip(xs, indices, strict=True), lambda both: both[0].shape[-1]
            )
        ]
        if len(runs) > 1:  # matrices of other widths are not joined
            return jnp.concatenate([self.take_each(*zip(*run, strict=True)) for run in runs])

        def each(xs: list[jax.Array], indices: list[jax.Array]) -> jax.Array:
            return jnp.concatenate(
                [self.take(x, index) for x, index in zip(xs, indices, strict=True)]
            )

        def joined(xs: list[jax.Array], indices: list[jax.Array]) -> jax.Array:
            return self.take(jnp.concatenate(xs), jnp.concatenate(indices))

        # A GPU looks into what lies anywhere, in one kernel, and copies nothing.
        values: jax.Array = lax.platform_dependent(
            list(xs), list(indices), cuda=joined, default=each
        )
        return values

    def take_rows(self, x: jax.Array, which: RowNumbers) -> jax.Array:
        return x.reshape((-1, x.shape[-1])).at[which.make()].get(mode="promise_in_bounds")

    def scatter_add(self, x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.asarray(x).at[(*jnp.indices(index.shape, sparse=True)[:-1], index)].add(values)

    def scatter_sum(
        self,
        n: int,
        of: Callable[..., tuple[jax.Array, jax.Array]],
        *every: jax.Array,
        tiles: tuple[int, int] | None = None,
        after: jax.Array | None = None,
    ) -> jax.Array:
        return scatter_sums([Part(None, n, tiles)], of, every, lambda x: x, after)[0]

    def scatter_sum_each(
        self,
        parts: Sequence[tuple[int, int, tuple[int, int] | None]],
        of: Callable[..., tuple[jax.Array, jax.Array]] | None,
        *every: jax.Array,
        order: Sequence[int] | None = None,
        finish: Callable[[jax.Array], jax.Array] | None = None,
    ) -> list[jax.Array]:
        arrays = every if of is not None else [x[None] for x in every]
        own = of or (lambda *own: own)
        return scatter_sums(parts_of(parts), own, arrays, finish or (lambda x: x))

    def pack_bits(self, x: jax.Array, *, of: jax.Array | None = None) -> jax.Array:
        if not x.size:
            return jnp.zeros(0, jnp.uint8)
        (whole, left), row = bytes_of_rows(x.shape), x.shape[1:][-1:]

        def packed(x: jax.Array, tpu: bool = False) -> jax.Array:
            rows = x.reshape(-1, *row)
            k = len(rows) // 8
            parts = [rows[: 8 * k].reshape(8, k, *row)] * (whole > 0)
            parts += [self.pad(rows[8 * k :].reshape(-1), 8 * left).reshape(8, left)] * (left > 0)

            def byte(part: jax.Array) -> jax.Array:
                if not tpu:  # which would store what it adds up
                    return jnp.where(part, _each_bit(part.ndim - 1), np.uint8(0)).sum(
                        0, dtype=jnp.uint8
                    )
                above = (part[i] if part.dtype == bool else part[i] > 0 for i in range(8))
                return functools.reduce(
                    jnp.bitwise_or, [bit.astype(jnp.int32) << i for i, bit in enumerate(above)]
                )

            def sent(x: jax.Array) -> jax.Array:  # as they lie on a TPU: none is moved to send it
                return (
                    self.storage.to_blocks(self, x, x.size // LANES, LANES)
                    if tpu and in_tiles(x.shape, LANES)
                    else x
                )

            return jnp.concatenate(
                [sent(byte(part).astype(jnp.uint8)).reshape(-1) for part in parts]
            )

        # What is compared piece by piece a TPU computes once and keeps, for whatever else is made
        # of it.
        given = x if of is None else of
        result: jax.Array = lax.platform_dependent(
            x, given, tpu=lambda x, of: packed(of, tpu=True), default=lambda x, of: packed(x)
        )
        return result

    def unpack_bits(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if not math.prod(shape):
            return jnp.zeros(shape, bool)
        (whole, left), row = bytes_of_rows(shape), shape[1:][-1:]

        def bits(part: jax.Array) -> jax.Array:
            return (part[None] & _each_bit(part.ndim)) != 0

        def eights(x: jax.Array) -> jax.Array:
            lies = len(x) // math.prod(row), *row
            if not in_tiles(lies, LANES):
                return x.reshape(lies)
            result: jax.Array = lax.platform_dependent(
                x,
                tpu=lambda x: self.storage.from_blocks(x.reshape(-1, LANES), lies),
                default=lambda x: x.reshape(lies),
            )
            return result

        parts = [bits(eights(x[:whole])).reshape(-1, *row)] * (whole > 0)
        if left:
            parts.append(
                bits(x[whole:]).reshape(-1)[: math.prod(shape) - 8 * whole].reshape(-1, *row)
            )
        return jnp.concatenate(parts).reshape(shape)

    def pack_signs(
        self, xs: Sequence[jax.Array], sharing: Sequence[tuple[int, ...]]
    ) -> list[jax.Array]:
        return signs.pack_signs(self, xs, sharing)

    def sum_of_signs(
        self,
        every: Sequence[jax.Array],
        above: Sequence[jax.Array],
        below: Sequence[jax.Array],
        shapes: Sequence[tuple[int, ...]],
        sharing: Sequence[tuple[int, ...]],
    ) -> list[jax.Array]:
        return signs.sum_of_signs(self, every, above, below, shapes, sharing)

    def pack_integers(self, x: jax.Array, bits: int) -> jax.Array:
        data = integers.pack_integers(x, bits)
        return pack_integers(self, x, bits) if data is None else data

    def unpack_integers(self, data: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
        if data.ndim > 1:
            rows = jax.vmap(lambda row: self.unpack_integers(row, bits, shape))(
                data.reshape(-1, data.shape[-1])
            )
            return rows.reshape(*data.shape[:-1], *shape)
        flat = integers.unpack_integers(data, bits, math.prod(shape))
        return unpack_integers(self, data, bits, shape) if flat is None else flat.reshape(shape)

    def view_as(self, x: jax.Array, dtype: str) -> jax.Array:
        size, wanted = x.dtype.itemsize, jnp.dtype(dtype).itemsize
        if wanted > size:  # `bitcast_convert_type` wants the bytes along an axis of their own
            x = x.reshape((*x.shape[:-1], -1, wanted // size))
        viewed = lax.bitcast_convert_type(x, jnp.dtype(dtype))
        return viewed if wanted >= size else viewed.reshape((*x.shape[:-1], -1))

    def add_to_slice(
        self, x: jax.Array, part: jax.Array, n: int, i: Any, shape: tuple[int, ...]
    ) -> jax.Array:
        return self.storage.add_to_slice(self, x, part, n, i, shape)

    def sum_of_each(self, f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        # All at once: in a loop over the replicas the sum would be stored and read again for each
        # of them.
        return f(*arrays).sum(0)

    def loop(
        self,
        n: int,
        body: Callable[[Any, jax.Array], jax.Array],
        start: jax.Array,
        *,
        fused: bool = False,
    ) -> jax.Array:
        if n == 1 or (fused and n <= AT_ONCE):
            for i in range(n):  # with numbers that are known there is less to compile
                start = body(i, start)
            return start
        # A loop's carry must vary over the same mapped axes at its start and at its end.
        start = vary(start, varying_axes(jax.eval_shape(body, jnp.int32(0), start)))
        # Else what is summed would be stored and read again for each replica.
        result: jax.Array = lax.fori_loop(0, n, body, start, unroll=AT_ONCE if fused else 1)
        return result

    def rows_before(self, x: jax.Array, i: Any) -> jax.Array:
        return x[..., :i, :] if isinstance(i, int) else x

    def row(self, x: jax.Array, i: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, i, 1, axis=x.ndim - 2)

    def set_row(self, x: jax.Array, i: Any, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, row, i, axis=x.ndim - 2)

    def stack(self, arrays: Sequence[jax.Array]) -> jax.Array:
        if all(isinstance(x, np.ndarray) for x in arrays):
            return np.stack(arrays)  # type: ignore[return-value]  # a constant
        first = arrays[0]
        if not first.ndim:
            return jnp.stack(arrays)
        # With no operation of its own for each of them.
        return jnp.concatenate(arrays).reshape((len(arrays), *first.shape))

    def unstack(self, batch: jax.Array) -> list[jax.Array]:
        return unstack(batch)

    def pad(self, x: jax.Array, n: int) -> jax.Array:
        return jnp.pad(x, ((0, n - x.shape[0]),))

    def rows(
        self,
        arrays: Sequence[jax.Array],
        n: int,
        *,
        out: jax.Array | None = None,
        donated: bool = False,
    ) -> jax.Array:
        if n == 1 and all(x.ndim == 2 and x.shape[1] == arrays[0].shape[1] for x in arrays):
            return jnp.concatenate(arrays).reshape(1, -1)  # whose rows need not be moved
        if all(
            x.ndim == 3 and x.shape[0] == n and 1 < x.shape[2] == arrays[0].shape[2] for x in arrays
        ):
            return jnp.concatenate(arrays, axis=1).reshape(n, -1)
        lengths = [-(-x.size // n) for x in arrays]
        filled = [
            x if x.size == n * k else self.pad(x.reshape(-1), n * k)
            for x, k in zip(arrays, lengths, strict=True)
        ]
        matrices = [x.reshape(n, k) for x, k in zip(filled, lengths, strict=True)]
        return matrices[0] if len(matrices) == 1 else jnp.concatenate(matrices, axis=1)

    def from_rows(
        self,
        matrix: jax.Array,
        shapes: Sequence[tuple[int, ...]],
        *,
        out: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        sizes = [math.prod(shape) for shape in shapes]
        blocks = columns(matrix, [-(-size // matrix.shape[0]) for size in sizes])
        exact = [
            x if x.size == size else x.reshape(-1)[:size]
            for x, size in zip(blocks, sizes, strict=True)
        ]
        return [x.reshape(shape) for x, shape in zip(exact, shapes, strict=True)]

    def row_of(self, x: jax.Array, n: int, i: Any) -> jax.Array:
        if x.ndim > 1 and x.shape[0] % n == 0:
            k = x.shape[0] // n
            # of which a TPU does not move the rest
            return lax.dynamic_slice_in_dim(x, i * k, k).reshape(-1)
        k = -(-x.size // n)
        return lax.dynamic_slice_in_dim(self.pad(x.reshape(-1), n * k), i * k, k)

    def bundle(
        self,
        gradients: dict[str, jax.Array],
        tensors: Mapping[str, Mapping[str, jax.Array]],
        alike: Callable[[str], Hashable | None],
        *,
        multiplied: bool,
    ) -> Bundles | None:
        return (
            bundles_of(gradients, tensors, alike, multiplied=multiplied) if self.bundles else None
        )

    def unbundle(self) -> JaxOps:
        return JaxOps(bundles=False, across=self._across)


def _each_bit(axes: int) -> np.ndarray[Any, Any]:
    """1, 2, 4, …, 128 as bytes, with so many axes of length 1 behind."""
    return np.left_shift(1, np.arange(8)).astype(np.uint8).reshape(8, *[1] * axes)


@jax.jit  # which traces it once for each shape
def _sum_of_outer_products(p: jax.Array, q: jax.Array) -> jax.Array:
    """`p.mT @ q`. XLA fuses it with what is done to it, where it would store the result of a
    `dot`."""
    dtype = jnp.promote_types(p.dtype, jnp.float32)
    columns, rows = p.astype(dtype)[..., None], q.astype(dtype)[..., None, :]
    axis = p.ndim - 2

    def of(x: jax.Array, i: int) -> jax.Array:
        return lax.slice_in_dim(x, i, i + 1, axis=axis)

    products = (of(columns, i) * of(rows, i) for i in range(p.shape[axis]))
    return lax.squeeze(functools.reduce(jnp.add, products), [axis]).astype(p.dtype)


def _in_order(x: jax.Array) -> jax.Array:
    """Floats that XLA orders as `top_k` says: NaN is inf, and -0, which XLA takes to be less, is 0.
    With no `where`: a GPU would transpose its condition too."""
    n = 8 * x.dtype.itemsize
    bits = lax.bitcast_convert_type(x, f"int{n}")
    largest = lax.bitcast_convert_type(jnp.asarray(jnp.inf, x.dtype), bits.dtype)
    size = bits & np.iinfo(bits.dtype).max
    unsigned = ((largest - size) | (size - 1)) >> (n - 1)  # all ones for NaN and for 0
    bits = jnp.minimum(size, largest) | (bits & ~unsigned & np.iinfo(bits.dtype).min)
    return lax.bitcast_convert_type(bits, x.dtype)


def _typed(y: jax.Array | float, x: jax.Array) -> jax.Array:
    return jnp.asarray(y, x.dtype) if isinstance(y, float) else y.astype(x.dtype)


def _like(out: jax.Array | None, x: jax.Array) -> jax.Array:
    """The result in the dtype of `out`: torch and NumPy write into that."""
    return x if out is None else converted(x, out.dtype)
