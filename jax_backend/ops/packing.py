"""Many arrays in one, and back, without a kernel of its own for every piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.jax_backend.axes.auto_axes import compiler_axes, divided, whole
from gradwire.jax_backend.axes.mapped_axis import vary, varying_axes

T = TypeVar("T")
Shape = tuple[int, ...]

ZERO = np.uint32(0)
#: (number of pieces, rows of each, axes along which they vary) → where they begin.
Starts = dict[tuple[int, int, frozenset[str]], Sequence[np.uint32 | jax.Array]]

#: Rows and lanes of a tile, in which a TPU keeps an array, and of an accelerator's registers; from
#: how many bytes on for a replica messages are padded to fill them.
TILE, LANES, PADDED = 8, 128, 1 << 13
#: Elements of a tile of a vector.
VECTOR = 1024
#: From this many pieces on, compile time is worth a trick. (60 matrices of ten shapes, six of each:
#: 4.6 seconds of a processor for `Quantize`, in place of 6.)
MANY = 6


def pack(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one dtype in one: the only one as it is, several as a flat vector."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate([x.reshape(-1) for x in arrays])


def _in_lanes(arrays: Sequence[jax.Array], rows: int) -> list[jax.Array] | None:
    """Rows of bytes as (rows, n, 128), padded with zeros where they are large enough: then a TPU
    does not move them to send them."""
    if any(x.dtype != jnp.uint8 for x in arrays) or sum(x.size for x in arrays) < PADDED * rows:
        return None
    missing = [-(x.size // rows) % LANES for x in arrays]
    flat = [x.reshape(rows, -1) for x in arrays]
    full = [jnp.pad(x, ((0, 0), (0, n))) if n else x for x, n in zip(flat, missing, strict=True)]
    return [x.reshape(rows, -1, LANES) for x in full]


def _pack_lanes(arrays: Sequence[jax.Array]) -> jax.Array:
    """`pack`, or bytes as (n, 128); large vectors filled up."""
    if len(arrays) == 1:
        return arrays[0]
    if (lanes := _in_lanes(arrays, 1)) is not None:
        return jnp.concatenate(lanes, axis=1)[0]
    flat = pack(arrays)
    # A part of a tile a TPU does not gather, but adds to zeros: twice as much is sent.
    return jnp.pad(flat, (0, -flat.size % VECTOR)) if flat.nbytes >= PADDED else flat


def unpack(packed: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """What `pack` made of arrays of these shapes."""
    if len(shapes) == 1:
        return [packed]
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = _starts([0, *np.cumsum(sizes)[:-1].tolist()], packed)
    return [
        lax.dynamic_slice(packed, (start,), (size,)).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]


def side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays of as many rows in one matrix: the only one as it is. `columns` cuts it again."""
    if len(arrays) == 1:
        return arrays[0]
    rows = arrays[0].shape[0]
    lanes = _in_lanes(arrays, rows)
    return jnp.concatenate(lanes or [x.reshape(rows, -1) for x in arrays], axis=1)


def columns(matrix: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """A matrix cut into matrices that lie side by side."""
    starts = _starts([0, *np.cumsum(widths)[:-1].tolist()], matrix)
    n = matrix.shape[0]
    return [
        lax.dynamic_slice(matrix, (ZERO, s), (n, width))
        for s, width in zip(starts, widths, strict=True)
    ]


@dataclass(frozen=True)
class Layout:
    """How several arrays of one dtype share an array of a message.

    Attributes:
        pack: arrays → the one that is sent.
        unpack: what came of it, and the shapes of the answers → the answers.
        received: what is done to that first, before anything looks at its numbers.
    """

    pack: Callable[[Sequence[jax.Array]], jax.Array]
    unpack: Callable[[jax.Array, Sequence[Shape]], list[jax.Array]]
    received: Callable[[jax.Array], jax.Array] = lambda x: x


def _from_columns(matrix: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    if len(shapes) == 1:
        return [matrix]
    rows = matrix.shape[0]
    if matrix.ndim > 2:
        widths = [math.prod(shape) // rows for shape in shapes]
        ends = np.cumsum([-(-width // LANES) for width in widths])
        parts = [x.reshape(rows, -1) for x in jnp.split(matrix, ends[:-1], axis=1)]
        return [
            x[:, :width].reshape(shape)
            for x, width, shape in zip(parts, widths, shapes, strict=True)
        ]
    cut = columns(matrix, [math.prod(shape) // rows for shape in shapes])
    return [x.reshape(shape) for x, shape in zip(cut, shapes, strict=True)]


#: Everything flat, in one vector.
FLAT = Layout(pack, unpack)
#: Everything flat, of which a row from each replica comes back.
FLAT_TO_ROWS = Layout(_pack_lanes, _from_columns)
#: Rows, one for each replica, side by side.
ROWS = Layout(side_by_side, _from_columns)


def divided_rows(devices: int) -> Layout:
    """Arrays that are equal on all devices of a slice, as rows of which each device sends one."""
    return Layout(
        lambda arrays: divided(to_rows(whole(arrays), devices), 0),
        lambda rows, shapes: whole(from_rows(rows, shapes)),
        lambda rows: whole([rows])[0],
    )


def unstack(
    batch: jax.Array,
    known: Starts | None = None,
    decision: Callable[[jax.Array], jax.Array] | None = None,
) -> list[jax.Array]:
    """The members of a batch, along its first axis. `known` keeps what batches of other arrays can
    use too; `decision`: see `taken`."""
    k, *shape = batch.shape
    if k == 1 or not shape:
        return [batch[i] for i in range(k)]
    known = {} if known is None else known
    key = k, shape[0], varying_axes(batch)
    if key not in known:
        known[key] = _starts([i * shape[0] for i in range(k)], batch, decision)
    starts = known[key]
    zero = starts[0]
    rows = batch.reshape(k * shape[0], *shape[1:])
    return [lax.dynamic_slice(rows, (start, *(zero for _ in shape[1:])), shape) for start in starts]


def to_rows(arrays: Sequence[jax.Array], n: int) -> jax.Array:
    """Arrays of one dtype as n rows, (n, k), filled up with zeros.

    Where n divides the last axis of an array, each row has a piece of that axis. A factor (r, n) of
    a parameter that is sharded by rows, or by columns, lies in such pieces, and nothing has to
    move.
    """
    even = [x for x in arrays if _is_even(x.shape, n)]
    rows = [jnp.moveaxis(_split(x, n), -2, 0).reshape(n, -1) for x in even]
    rest = [x.reshape(-1) for x in arrays if not _is_even(x.shape, n)]
    if rest:
        flat = jnp.concatenate(rest)
        rows += whole([jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)])
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)


def from_rows(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """What `to_rows` made of arrays of these shapes."""
    n, start = rows.shape[0], 0
    arrays: dict[int, jax.Array] = {}
    for i, shape in enumerate(shapes):
        if _is_even(shape, n):
            width = math.prod(shape) // n
            piece = rows[:, start : start + width].reshape(n, *shape[:-1], shape[-1] // n)
            arrays[i] = jnp.moveaxis(piece, 0, -2).reshape(shape)
            start += width
    flat, start = rows[:, start:].reshape(-1), 0
    for i, shape in enumerate(shapes):
        if i not in arrays:
            size = math.prod(shape)
            arrays[i] = flat[start : start + size].reshape(shape)
            start += size
    return [arrays[i] for i in range(len(shapes))]


def _is_even(shape: tuple[int, ...], n: int) -> bool:
    return bool(shape) and shape[-1] % n == 0


def _split(x: jax.Array, n: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)


def stored(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """These arrays, each computed once and kept.

    XLA on CPU puts what makes a small array, slices of a message and selections, into the loop over
    a large one in which it is used, and computes it there for each element. The results of a branch
    it cannot move.
    """
    if not arrays or compiler_axes():
        return list(arrays)
    kept: list[jax.Array] = within_a_branch(arrays[0], lambda: list(arrays))
    return kept


def apart_on_tpu(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """These arrays. XLA for TPU would take each out of its batch in every product that it is a
    factor of, and takes twice as long to compile those."""
    kept: list[jax.Array] = lax.platform_dependent(
        list(arrays), tpu=lax.optimization_barrier, default=lambda xs: xs
    )
    return kept


def within_a_branch(probe: jax.Array, make: Callable[[], T]) -> T:
    """`make()`, arrays, computed on CPU in a branch: after `probe`, and with memory of its own that
    ends with the branch.

    XLA on CPU begins whatever it can begin, and so keeps all of it at a time. This is how to say
    that something can wait.
    """
    return taken(always(probe), make)


def taken(decision: jax.Array, make: Callable[[], T]) -> T:
    """`within_a_branch` that is taken by what `always` returned."""
    make = jax.jit(make, inline=True)  # traced once, though its results are asked for first
    results = jax.eval_shape(make)

    def otherwise() -> T:
        zeros: T = jax.tree.map(
            lambda x: vary(jnp.zeros(x.shape, x.dtype), varying_axes(x)), results
        )
        return zeros

    made: T = lax.switch(decision, (otherwise, make))
    return made


def or_each(ok: jax.Array, arrays: Sequence[jax.Array], otherwise: float) -> list[jax.Array]:
    """Each array if the boolean scalar `ok` holds, else an array filled with this number; see
    `chosen_each`."""
    axes = [varying_axes(x) | varying_axes(ok) for x in arrays]

    def filled() -> list[jax.Array]:  # where it is chosen, which takes no memory beside the arrays
        made = {(x.shape, x.dtype): jnp.full(x.shape, otherwise, x.dtype) for x in arrays}
        return [vary(made[x.shape, x.dtype], own) for x, own in zip(arrays, axes, strict=True)]

    return _either(
        ok, [vary(x, own) for x, own in zip(arrays, axes, strict=True)], [], lambda ys: filled()
    )


def chosen_each(ok: jax.Array, xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    """`xs` if the boolean scalar `ok` holds, else `ys`, pairwise of one shape and dtype: on CPU one
    branch for all of them, as `stored`."""
    axes = [
        varying_axes(x) | varying_axes(y) | varying_axes(ok) for x, y in zip(xs, ys, strict=True)
    ]

    def marked(values: Sequence[jax.Array]) -> list[jax.Array]:
        return [vary(v, a) for v, a in zip(values, axes, strict=True)]

    return _either(ok, marked(xs), marked(ys), lambda ys: ys)


def _either(
    ok: jax.Array,
    xs: list[jax.Array],
    given: list[jax.Array],
    others: Callable[[list[jax.Array]], list[jax.Array]],
) -> list[jax.Array]:
    """`xs` or `others(given)`, which vary alike."""

    def branch(ok: jax.Array, xs: list[jax.Array], given: list[jax.Array]) -> list[jax.Array]:
        sides: list[jax.Array] = lax.cond(ok, lambda: xs, lambda: others(given))
        return sides

    def select(ok: jax.Array, xs: list[jax.Array], given: list[jax.Array]) -> list[jax.Array]:
        return [lax.select(ok, x, y) for x, y in zip(xs, others(given), strict=True)]

    # Elsewhere the host would have to learn which side it is.
    cpu = select if compiler_axes() else branch
    results: list[jax.Array] = lax.platform_dependent(ok, xs, given, cpu=cpu, default=select)
    return results


def _starts(
    values: list[int], of: jax.Array, decision: Callable[[jax.Array], jax.Array] | None = None
) -> Sequence[np.uint32 | jax.Array]:
    """These integers, in a form in which XLA on CPU does not know them.

    It compiles a kernel for every slice with a start of its own, about 20 ms each and several for
    every parameter, but only one for all slices of one shape whose start is an operand. A branch is
    what no pass looks through. (With 200 matrices: 8 seconds instead of 80.) If one day it does,
    slices are static again, and right.
    """
    # of what has no sign, JAX does not ask whether it counts from the end
    known = [np.uint32(v) for v in values]
    if len(values) < MANY or not of.size or compiler_axes():
        return known

    axes = varying_axes(of)
    return taken((decision or always)(of), lambda: vary([jnp.asarray(v) for v in known], axes))


def always(x: jax.Array) -> jax.Array:
    """1, the number of a branch, which XLA on CPU does not know. Of the platform that is compiled
    for, which need not be the one that traces."""

    def unknown(probe: jax.Array) -> jax.Array:
        return ((probe == probe) | (probe != probe)).astype(jnp.int32)

    def known(probe: jax.Array) -> jax.Array:
        return vary(jnp.ones((), jnp.int32), varying_axes(probe))

    decision: jax.Array = lax.platform_dependent(x.reshape(-1)[0], cpu=unknown, default=known)
    return decision
