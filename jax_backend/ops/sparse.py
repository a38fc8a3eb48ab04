"""Sums of few elements at their places: added one replica after the other, or all compared with
each place, as is quicker on a TPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.core.kernels.rows import of_tiles
from gradwire.jax_backend.axes.mapped_axis import vary, varying_axes
from gradwire.jax_backend.ops.tiles import product_of_tiles, quotient, remainder

#: Up to so many positions in a row a TPU compares all of them with each place.
FEW = 128
#: Elements of sums that are made together.
SMALL = 1 << 19
#: Positions and values of a replica.
Of = Callable[..., tuple[jax.Array, jax.Array]]


class Part(NamedTuple):
    """Rows of a sum, see `gradwire.core.ops.Ops.scatter_sum`: which of all, how many places each
    has, and of which tiles they are. None: all rows."""

    rows: slice | None
    n: int
    tiles: tuple[int, int] | None

    def of(self, x: jax.Array) -> jax.Array:
        """This part's rows of what all parts have, (…, R, k)."""
        return x if self.rows is None else x[..., self.rows, :]

    def shape(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the sum, for positions of so many rows."""
        if self.tiles is None:
            return (*rows, self.n)
        (tall, across), count = self.tiles, math.prod(rows)
        return count // across * tall, across * self.n // tall

    def add(self, total: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
        """The total with these values at these positions, uint32: of those JAX does not ask whether
        they count from the end."""
        before = [
            lax.broadcasted_iota(jnp.uint32, index.shape, axis) for axis in range(index.ndim - 1)
        ]
        if self.tiles is None:
            return total.at[(*before, index)].add(values)
        (tall, across), (block,) = self.tiles, before
        row = quotient(block, across) * tall + remainder(index, tall)
        column = remainder(block, across) * (self.n // tall) + quotient(index, tall)
        return total.at[row, column].add(values)


def parts_of(shapes: Sequence[tuple[int, int, tuple[int, int] | None]]) -> list[Part]:
    """The parts that (rows, n, tiles) describe, one below the other."""
    ends = accumulate((count for count, *_ in shapes), initial=0)
    one = len(shapes) == 1
    return [
        Part(None if one else slice(*rows), n, tiles)
        for rows, (_, n, tiles) in zip(pairwise(ends), shapes, strict=True)
    ]


def scatter_sums(
    parts: Sequence[Part],
    of: Of,
    every: Sequence[jax.Array],
    finish: Callable[[jax.Array], jax.Array],
    after: jax.Array | None = None,
) -> list[jax.Array]:
    """The sum of each part, finished. Small parts are summed in one loop. Others wait for what came
    before them, the first for `after`: so they need not all lie in memory at a time."""
    kept = jax.eval_shape(lambda: of(*(x[0] for x in every)))[1]

    def compared() -> list[jax.Array]:  # all replicas at once: each of them runs this program
        index, values = jax.vmap(of)(*every)
        answers, last = list[jax.Array](), after
        for some in _divided(parts, kept):
            own = values
            if last is not None:
                own = values + zeros_after(last, values.shape[:1], values.dtype)[:, None, None]
            answers += [finish(_compared(part, part.of(index), part.of(own))) for part in some]
            last = answers[-1]
        return answers

    def scattered() -> list[jax.Array]:
        answers, last = list[jax.Array](), after
        for some in _divided(parts, kept):
            answers += [finish(total) for total in _scattered(some, of, every, last)]
            last = answers[-1]
        return answers

    sums: list[jax.Array] = compared_on_tpu(kept.shape[-1], scattered, compared)
    return sums


def _divided(parts: Sequence[Part], kept: Any) -> list[list[Part]]:
    """Runs of up to `SMALL` elements."""
    runs: list[list[Part]] = []
    room = 0
    for part in parts:
        size = math.prod(part.shape(_rows_of(part, kept)))
        if not runs or size > room:
            runs.append([])
            room = SMALL
        runs[-1].append(part)
        room -= size
    return runs


def _rows_of(part: Part, kept: Any) -> tuple[int, ...]:
    rows: tuple[int, ...] = kept.shape[:-1]
    return rows if part.rows is None else (part.rows.stop - part.rows.start,)


def _scattered(
    parts: Sequence[Part], of: Of, every: Sequence[jax.Array], after: jax.Array | None
) -> list[jax.Array]:
    # What positions are below is said of all: they become int32 again where JAX adds.
    below = jnp.uint32((1 << (max(part.n for part in parts) - 1).bit_length()) - 1)

    def of_replica(i: Any) -> tuple[jax.Array, jax.Array]:
        index, values = of(*(x[i] for x in every))
        return index.astype(jnp.uint32) & below, values

    def add(i: Any, totals: list[jax.Array]) -> list[jax.Array]:
        index, values = of_replica(i)
        return [
            part.add(x, part.of(index), part.of(values))
            for part, x in zip(parts, totals, strict=True)
        ]

    # Not before there is something to add, and the last such array is there: a GPU would make these
    # zeros first of all, and copies of them.
    last = of_replica(0)[1] if after is None else after
    kept = jax.eval_shape(of_replica, jnp.int32(0))[1]
    shapes = [part.shape(_rows_of(part, kept)) for part in parts]
    axes = varying_axes(kept)

    def zeros(x: jax.Array) -> list[jax.Array]:
        return [vary(jnp.zeros(shape, kept.dtype), axes) for shape in shapes]

    def waiting(x: jax.Array) -> list[jax.Array]:
        if len(shapes) == 1:
            return [vary(zeros_after(x, shapes[0], kept.dtype), axes)]
        zero = zeros_after(x, (1,), kept.dtype).reshape(())
        return [vary(jnp.broadcast_to(zero, shape), axes) for shape in shapes]

    start: list[jax.Array] = lax.platform_dependent(last, cuda=waiting, default=zeros)
    if len(every[0]) == 1:
        return add(0, start)
    # A loop's carry must vary over the same mapped axes at its start and at its end.
    ends = jax.eval_shape(add, jnp.int32(0), start)
    start = [vary(x, varying_axes(end)) for x, end in zip(start, ends, strict=True)]
    totals: list[jax.Array] = lax.fori_loop(0, len(every[0]), add, start)
    return totals


def _compared(part: Part, index: jax.Array, values: jax.Array) -> jax.Array:
    if (
        part.tiles is not None
        and (matrix := product_of_tiles(index, values, part.n, *part.tiles)) is not None
    ):
        return matrix
    rows = chosen(index[..., None], part.n, values[..., None], (0, -2))
    return rows if part.tiles is None else of_tiles(rows, *part.tiles)


def compared_on_tpu(k: int, default: Callable[[], Any], compared: Callable[[], Any]) -> Any:
    """A TPU takes one element after the other by its position: to compare all `k` positions with
    each place is quicker for few, and is fused with what is around it."""
    if not 0 < k <= FEW:
        return default()
    default = jax.jit(default, inline=True)  # traced once, though its results are asked for first
    likes = jax.eval_shape(default)

    def marked() -> Any:
        return jax.tree.map(lambda x, like: vary(x, varying_axes(like)), compared(), likes)

    return lax.platform_dependent(tpu=marked, default=default)


def chosen(index: jax.Array, n: int, values: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """The values (…, k, n) whose position in the row is `index` (…, k, 1), summed along an axis."""
    places = lax.broadcasted_iota(jnp.int32, (*index.shape[:-1], n), index.ndim - 1)
    return jnp.where(index == places, values, jnp.zeros((), values.dtype)).sum(
        axis, dtype=values.dtype
    )


def zeros_after(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros, or NaN, made of an element of `x`: what is added to them waits for `x`. Compilers drop
    a barrier for less."""
    # The first of `x`, in a form that XLA does not know: a GPU computes what is broadcast in a
    # kernel of its own.
    first = lax.broadcasted_iota(jnp.uint32, shape, 0) >> 31
    return (jnp.abs(x.reshape(-1).at[first].get(mode="promise_in_bounds")) * 0).astype(dtype)
