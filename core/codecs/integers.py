"""Integers of 8 or 4 bits, evenly spaced between minus and plus the largest element of the block."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.codecs.codec import Scaled
from gradwire.core.ops import A, Ops

#: A float32 of this size has a last place of 1: a whole number that is added to it stands in its lowest bits as an integer does in two's complement.
#: That is one addition where clipping and casting would be several passes.
MAGIC = 1.5 * 2**23


@dataclass(frozen=True)
class Integers(Scaled):
    """Whole multiples of the scale: -127 to 127, or -7 to 7."""

    bits: int = 8
    dithers = True

    @property
    def largest(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    def codes(self, ops: Ops[A], y: A, dither: A | None) -> A:
        y = y if dither is None else ops.add(y, dither, out=y)
        # Rounded before: else XLA would multiply by the scale and add in one operation, which rounds once where others round twice.
        y = ops.round(y, out=y)
        codes = ops.cast(ops.view_as(ops.add(y, MAGIC, out=y), "int32"), "uint8")
        return codes if self.bits == 8 else codes & (2**self.bits - 1)

    def values(self, ops: Ops[A], codes: A) -> A:
        if self.bits < 8:
            sign = 2 ** (self.bits - 1)
            codes = (codes ^ sign) - sign  # as a byte has it
        return ops.cast(ops.view_as(codes, "int8"), "float32")
