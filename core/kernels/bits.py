"""The places of booleans in bytes: eight rows apart, so that no element changes its place in a row.

Eight neighbours in a byte would be eight lanes of an accelerator's vector, or every eighth byte of
a processor's: both move all of them to pack them.
"""

from __future__ import annotations

import math

from gradwire.core.kernels.arrays import A
from gradwire.core.kernels.primitives import Primitives


def bytes_of_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many bytes hold the rows of an array in eights, along its last axis, and how many the
    elements of the rows that are left."""
    row = shape[-1] if len(shape) > 1 else 1
    size = math.prod(shape)
    whole = size // row // 8 * row if size else 0
    return whole, -(-(size - 8 * whole) // 8)


def pack_integers(ops: Primitives[A], x: A, bits: int) -> A:
    """`Ops.pack_integers`, by its booleans."""
    shifts = ops.iota(bits).reshape((-1, 1))
    return ops.pack_bits(((x.reshape((1, -1)) >> shifts) & 1) > 0)


def unpack_integers(ops: Primitives[A], data: A, bits: int, shape: tuple[int, ...]) -> A:
    """`Ops.unpack_integers`: put together from their bits in float32, which has every integer up to
    2²⁴."""
    if len(data.shape) > 1:
        rows = data.reshape((-1, data.shape[-1]))
        found = [unpack_integers(ops, rows[i], bits, shape) for i in range(rows.shape[0])]
        return ops.stack(found).reshape((*data.shape[:-1], *shape))
    each = ops.cast(ops.unpack_bits(data, (bits, math.prod(shape))), "float32")
    worth = ops.constant(
        ("worth of bits", bits), lambda: ops.asarray([[2**i for i in range(bits)]], "float32")
    )
    return ops.cast(ops.matmul(worth, each), "int32").reshape(shape)
