"""Integers of 8 or 4 bits, evenly spaced between minus and plus the largest element of the
block."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.codecs.codec import Scaled
from gradwire.core.ops import A, Ops


@dataclass(frozen=True)
class Integers(Scaled):
    """Whole multiples of the scale: -127 to 127, or in 4 bits -8 to 7.

    In 4 bits the scale has a sign, so that the largest element of the block is -8: else one of 16
    codes would stand for nothing (as in llama.cpp's Q4_0). What is nearer to 8 becomes 7. That is
    not right on average, so rounding by chance has -7 to 7.
    """

    bits: int = 8
    dithers = True

    @property
    def largest(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    def encode(self, ops: Ops[A], x: A, dither: A | None = None) -> tuple[A, ...]:
        if self.bits == 8 and dither is None:
            return ops.quantize(x, self.largest)
        return super().encode(ops, x, dither)

    def coded(self, ops: Ops[A], x: A, dither: A | None) -> tuple[A, A]:
        if self.bits == 8 or dither is not None:
            return super().coded(ops, x, dither)
        scale, reciprocal = ops.scales(x, self.largest + 1.0, signed=True)
        codes = ops.nearest_bytes(ops.multiply(x, reciprocal))
        # Of -8, …, 8 only in the byte of 8 the fourth bit and the fifth differ.
        return (codes - (((codes >> 3) ^ (codes >> 4)) & 1)) & 15, scale

    def codes(self, ops: Ops[A], y: A, dither: A | None) -> A:
        codes = ops.nearest_bytes(y if dither is None else ops.add(y, dither, out=y))
        return codes if self.bits == 8 else codes & (2**self.bits - 1)

    def values(self, ops: Ops[A], codes: A) -> A:
        return ops.cast(self._signed(ops, codes), "float32")

    def decoded(self, ops: Ops[A], codes: A, scales: A, out: A | None) -> A:
        return ops.multiply(scales, self._signed(ops, codes), out=out)  # without a copy as floats

    def _signed(self, ops: Ops[A], codes: A) -> A:
        if self.bits == 8:
            return ops.view_as(codes, "int8")
        sign = 2 ** (self.bits - 1)
        signed: A = ops.view_as(codes ^ sign, "int8") - sign
        return signed
