"""Many arrays in one, and back, without a kernel of its own for every piece."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gradwire.jax_backend.axis import vary, varying_axes

__all__ = ["columns", "pack", "unpack", "unstack"]

#: From this many pieces on, compile time is worth a trick.
MANY = 8


def pack(arrays: Sequence[jax.Array]) -> jax.Array:
    """Arrays of one dtype in one: the only one as it is, several as a flat vector."""
    return arrays[0] if len(arrays) == 1 else jnp.concatenate([x.reshape(-1) for x in arrays])


def unpack(packed: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """What `pack` made of arrays of these shapes."""
    if len(shapes) == 1:
        return [packed]
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = _starts([0, *np.cumsum(sizes)[:-1].tolist()], packed)
    return [
        lax.dynamic_slice_in_dim(packed, start, size).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=True)
    ]


def columns(matrix: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """A matrix cut into matrices that lie side by side."""
    starts = _starts([0, *np.cumsum(widths)[:-1].tolist()], matrix)
    return [lax.dynamic_slice_in_dim(matrix, s, width, axis=1) for s, width in zip(starts, widths, strict=True)]


def unstack(batch: jax.Array) -> list[jax.Array]:
    """The members of a batch, along its first axis."""
    return [lax.dynamic_index_in_dim(batch, i, keepdims=False) for i in _starts(list(range(batch.shape[0])), batch)]


def _starts(values: list[int], of: jax.Array) -> Sequence[int | jax.Array]:
    """These integers, in a form in which XLA on CPU does not know them, where it compiles for that.

    It compiles a kernel for every slice with a start of its own, about 20 ms each and several for every parameter, but only one for
    all slices of one shape whose start is an operand. A branch is what no pass looks through. (With 200 matrices: 8 seconds instead
    of 80.) If one day it does, slices are static again, and right.
    """
    if len(values) < MANY or not of.size:
        return values
    known = tuple(np.int32(v) for v in values)

    def behind_a_branch() -> tuple[jax.Array, ...]:
        probe = of.reshape(-1)[0]
        always = (probe == probe) | (probe != probe)
        hidden: tuple[jax.Array, ...] = lax.cond(always, lambda: known, lambda: (np.int32(0),) * len(known))
        return hidden

    def as_they_are() -> tuple[jax.Array, ...]:
        return vary(tuple(jnp.asarray(v) for v in known), varying_axes(of))

    # Of the platform that is compiled for, which need not be the one that traces.
    starts: tuple[jax.Array, ...] = lax.platform_dependent(
        cpu=lambda: vary(behind_a_branch(), varying_axes(of)), default=as_they_are
    )
    return starts
