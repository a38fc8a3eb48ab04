"""A gradient and its error, not added up.

PowerSGD multiplies the sum of the two by thin matrices, and subtracts a product from it. XLA would
store the sum first: a pass over memory, and as much memory as the model, fresh in every step. (G +
E) Q = G Q + E Q needs neither, and the new error, E + (G - P Qᵀ), is written where the old one
lies. Only a TPU adds the two as a product reads them, and stores nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.core.ops import LONGEST_FLOAT16
from gradwire.jax_backend.ops.products import on_tpu
from gradwire.jax_backend.ops.short_floats import converted


class Sum:
    """`gradient + error`, of one dtype, as a matrix or a stack of them, for what
    `gradwire.core.ops.Ops.add_each` promises to do to it. It is seen in another shape than they
    have, of as many elements."""

    def __init__(
        self,
        gradient: jax.Array,
        error: jax.Array,
        rows: tuple[int, ...] | None = None,
        transposed: bool = False,
    ) -> None:
        self.gradient = gradient
        self.error = error
        self._rows = tuple(gradient.shape) if rows is None else rows
        self._transposed = transposed

    @property
    def shape(self) -> tuple[int, ...]:
        return _swapped(self._rows) if self._transposed else self._rows

    @property
    def dtype(self) -> Any:
        return self.gradient.dtype

    @property
    def ndim(self) -> int:
        return len(self._rows)

    @property
    def mT(self) -> Sum:  # noqa: N802
        return Sum(self.gradient, self.error, self._rows, not self._transposed)

    def reshape(self, shape: tuple[int, ...], /) -> Any:
        if self._transposed or -1 in shape:
            return self.value().reshape(shape)
        return Sum(self.gradient, self.error, tuple(shape))

    def value(self) -> jax.Array:
        """The sum."""
        total = (self.gradient + self.error).reshape(self._rows)
        return total.mT if self._transposed else total

    def multiplied_by(self, thin: jax.Array) -> jax.Array:
        """`thin @ self`: (…, r, n) by (…, n, m)."""
        parts = [x.reshape(self._rows) for x in (self.gradient, self.error)]
        result: jax.Array = _multiplied(*parts, thin, transposed=self._transposed)
        return result

    def minus(self, product: jax.Array) -> Sum:
        """What is left of it; `product` has this shape."""
        if self._transposed:
            product = product.mT
        rest = self.gradient.reshape(self._rows) - product
        return Sum(rest.reshape(self.gradient.shape), self.error, self._rows, self._transposed)

    def added(self, ok: jax.Array, limit: float) -> jax.Array:
        """The sum in the error's place, in its shape; the error itself, `limited`, where `ok` is
        false."""
        # In the shape of the state, where the error has a leading axis for the replicas: XLA writes
        # a result over an argument only if no change of shape lies between them.
        error = self.error[None]
        chosen = lax.select(ok, self.gradient[None] + error, limited(error, limit))
        return chosen[0]


@functools.partial(jax.jit, static_argnames="transposed")  # which traces it once for each shape
def _multiplied(x: jax.Array, y: jax.Array, thin: jax.Array, *, transposed: bool) -> jax.Array:
    """`thin @ (x + y)`, or of the transposed sum."""
    batch, last = tuple(range(x.ndim - 2)), x.ndim - 1
    kind = jnp.promote_types(x.dtype, jnp.float32)

    def times(x: jax.Array, thin: jax.Array, precision: lax.Precision, swapped: bool) -> jax.Array:
        first, second, axis = (
            (x, thin, last) if swapped else (thin, x, last if transposed else last - 1)
        )
        numbers = (((last,), (axis,)), (batch, batch))
        return lax.dot_general(
            first, second, numbers, precision=precision, preferred_element_type=kind
        )

    def apart(x: jax.Array, y: jax.Array, thin: jax.Array, swapped: bool = False) -> jax.Array:
        first, second = (times(each, thin, lax.Precision.HIGHEST, swapped) for each in (x, y))
        total = first + second
        # transposed terms XLA would take for the other product
        return total.mT if swapped else total

    def added(x: jax.Array, y: jax.Array, thin: jax.Array) -> jax.Array:
        result = times(x.astype(kind) + y.astype(kind), thin.astype(kind), on_tpu(kind), transposed)
        return result.mT if transposed else result

    # The large factor first, and the transposition last: XLA on CPU is up to three times as slow on
    # `thin @ x.mT`. A GPU launches a kernel to transpose.
    cpu = {"cpu": functools.partial(apart, swapped=True)} if transposed else {}
    result: jax.Array = lax.platform_dependent(x, y, thin, **cpu, tpu=added, default=apart)
    return converted(result, x.dtype)


def limited(x: jax.Array, limit: float, *, stacked: int = 0) -> jax.Array:
    """`x` with its elements brought into [-limit, limit]; NaN stays. `stacked`: along so many
    leading axes are arrays each by itself."""
    if x.dtype != jnp.float16:
        bound = np.asarray(limit, x.dtype)  # of NumPy, which is no operation
        return lax.clamp(-bound, x, bound)
    norm = jnp.sqrt(
        jnp.square(x.astype(jnp.float32)).sum(tuple(range(stacked, x.ndim)), keepdims=True)
    )
    most = jnp.where(norm < LONGEST_FLOAT16, jnp.inf, limit).astype(x.dtype)
    return jnp.clip(x, -most, most)


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
