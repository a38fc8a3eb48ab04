"""Powers of two in 4 bits: a sign, 3 bits of exponent, no mantissa. What Streaming DiLoCo sends
(Douillard et al. 2025, arXiv 2501.18512, 2.3)."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.codecs.codec import Scaled
from gradwire.core.ops import A, Ops

#: Bits of the mantissa, and the bias of the exponent, of a float32.
MANTISSA, BIAS = 23, 127
SIGN = 8


@dataclass(frozen=True)
class E3M0(Scaled):
    """0 and ±1, ±2, ±4, …, ±64, the nearest of them; 64 is the largest element of the block."""

    bits = 4
    largest = 64.0

    def codes(self, ops: Ops[A], y: A, dither: A | None) -> A:
        size = ops.abs(y)
        # Halfway between 2**k and 2**(k+1) lies 3/2 · 2**k: times 4/3 a number has the exponent of
        # the nearest power, or of what lies between.
        exponent = (ops.view_as(size * (4 / 3), "int32") >> MANTISSA) - BIAS
        code = ops.where(size > 0.75, exponent + 1, ops.cast(size > 0.5, "int32"))
        # Of inf and NaN the exponent is no code, and what a byte cannot hold may become anything.
        return ops.cast((code & (SIGN - 1)) + ops.cast(y < 0, "int32") * SIGN, "uint8")

    def values(self, ops: Ops[A], codes: A) -> A:
        code = ops.cast(codes, "int32")
        power = ops.view_as(((code & (SIGN - 1)) + (BIAS - 1)) * 2**MANTISSA, "float32")
        size = ops.where((code & (SIGN - 1)) > 0, power, 0.0)
        return size * ops.cast((code >> 3) * -2 + 1, "float32")
