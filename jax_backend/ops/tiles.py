"""Few elements at their places in the tiles of a matrix, as a TPU makes it: by a product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.jax_backend.ops.packing import LANES, TILE


def product_of_tiles(
    index: jax.Array, values: jax.Array, n: int, rows: int, across: int
) -> jax.Array | None:
    """The sum over W of `values` (W, R, k), at positions `index` in R tiles of n elements, as
    `gradwire.core.kernels.rows.of_tiles` joins them.

    Row and column of a position are two vectors with a single one in them: the tile is the sum of
    their outer products, times the values. XLA makes them where the product reads them, and the
    matrix comes out as it lies: other ways have to move it, rows of 64 in registers of 128. None
    where tiles do not fill whole registers.
    """
    width = n // rows
    beside, rest = divmod(LANES, width)
    if rest or across % beside or rows % TILE or values.dtype not in (jnp.float32, jnp.bfloat16):
        return None
    replicas, count, k = values.shape
    strips, lots = count // across, across // beside

    def of_lot(x: jax.Array) -> jax.Array:
        return (
            x.reshape(replicas, strips, lots, beside * k)
            .transpose(1, 2, 0, 3)
            .reshape(strips, lots, -1)
        )

    places = lax.iota(jnp.uint32, replicas * beside * k)
    first = remainder(quotient(places, k), beside) * width
    index, values = of_lot(index).astype(jnp.uint32), of_lot(values)
    row = remainder(index, rows)[..., None] == jnp.arange(rows, dtype=index.dtype)
    column = (quotient(index, rows) + first)[..., None] == jnp.arange(LANES, dtype=index.dtype)
    placed = jnp.where(column, values[..., None], 0)
    # Exact at the highest precision: a one times each of the three parts of a value.
    dims = (((2,), (2,)), ((0, 1), (0, 1)))
    found = lax.dot_general(row.astype(values.dtype), placed, dims, precision=lax.Precision.HIGHEST)
    # Whole tiles of a TPU change their places, and no element in them.
    lies = (
        found.reshape(strips, lots, rows // TILE, TILE, LANES)
        .swapaxes(1, 2)
        .reshape(-1, lots, TILE, LANES)
    )
    return lies.swapaxes(1, 2).reshape(strips * rows, across * width)


def quotient(x: jax.Array, n: int) -> jax.Array:
    """`x // n` of numbers without a sign, which is one operation."""
    return lax.div(x, np.uint32(n))


def remainder(x: jax.Array, n: int) -> jax.Array:
    """`x % n` of them."""
    return lax.rem(x, np.uint32(n))
