"""How blocks of numbers are rounded: to which multiples, and to the nearest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gradwire.core.kernels.arrays import A
from gradwire.core.kernels.primitives import Primitives

#: A float32 of this size has a last place of 1: a whole number that is added to it stands in its
#: lowest bits as an integer does in two's complement. That is one addition where clipping and
#: casting would be several passes.
MAGIC = 1.5 * 2**23
#: The bits of that number.
MAGIC_BITS = 0x4B400000
#: The least scale: no division by zero, and by nothing that processors round to zero.
TINY = 2.0**-100


def scales(ops: Primitives[A], x: A, largest: float, *, signed: bool = False) -> tuple[A, A]:
    """The scale of each row of a float32 matrix (R, B), by which the magnitude of its largest
    element is `largest`, rounded up to 16 bits, and the reciprocal of that, each float32 (R, 1). Of
    a row with inf or NaN the scale is inf or NaN.

    `signed`: the scale is negative where the largest element is positive, so that this element
    becomes `-largest`; also of a row in which the largest and the smallest are the same but for the
    sign.

    A code times a scale of 16 bits is exact, so that a processor that adds what it multiplies in
    one operation comes to the same sum as one that does not, and the mean of all replicas to the
    same codes.
    """
    # Times the reciprocal, into which XLA would turn the division by a constant.
    size = ops.max_abs(x)
    exact = size * (1.0 / largest)
    tiny = ops.constant("the least scale", lambda: ops.asarray([[TINY]], "float32"))
    exact = ops.where(exact < TINY, tiny, exact)  # NaN stays
    rounded = ops.view_as((ops.view_as(exact, "int32") + 255) & -256, "float32")
    # Of some NaNs all bits are ones, and what is added to those makes a number of it.
    scale = ops.where(size < math.inf, rounded, exact)
    if signed:
        scale = ops.where(ops.max_abs(ops.where(x > 0, x, 0.0)) >= size, scale * -1.0, scale)
    return scale, 1.0 / scale


def nearest_bytes(ops: Primitives[A], x: A) -> A:
    """The nearest integer, between -128 and 127, to each element of a float32 array, as uint8 in
    two's complement; halves to the even one. Of anything else, inf and NaN included, one of these
    bytes.

    No conversion is out of range, whatever comes in: what becomes of such a number StableHLO leaves
    to the device, and one has made 255 of all of them.
    """
    code = nearest_integers(ops, x)
    # Compared, not masked: a mask of eight bits is dropped before what keeps eight bits.
    code = ops.where(code < 128, code, 127)
    code = ops.where(code > -129, code, -128)
    return ops.view_as(ops.cast(code, "int8"), "uint8")


def nearest_integers(ops: Primitives[A], x: A) -> A:
    """The same integers as int32. Of what does not lie between -2**22 and 2**22: any integer."""
    # Rounded before: else XLA would add in one operation with what was multiplied to make `x`,
    # which rounds once where others round twice.
    x = ops.round(x, out=x)
    code: A = ops.view_as(ops.add(x, MAGIC, out=x), "int32") - MAGIC_BITS
    return code


def quantize(ops: Any, x: A, largest: float) -> tuple[A, A]:
    """`Ops.quantize`: each number times the reciprocal of its row's scale, rounded to the nearest
    integer."""
    x = ops.cast(x, "float32")
    scale, reciprocal = ops.scales(x, largest)
    # Times the reciprocal: into that XLA turns the division by what is the same along a row, and a
    # code in a million would be another.
    return ops.nearest_bytes(ops.multiply(x, reciprocal)), scale


def mean_decoded(
    ops: Any, codec: Any, of_each: Sequence[A], dtype: str = "float32", out: A | None = None
) -> A:
    """The mean (R, B) of what fields (W, R, m) of W replicas stand for, decoded and added one
    replica after the other, in this dtype."""
    total = ops.sum_of_each(lambda *fields: ops.cast(codec.decode(ops, *fields), dtype), *of_each)
    mean: A = ops.multiply(total, 1.0 / of_each[0].shape[0], out=total if out is None else out)
    return mean
