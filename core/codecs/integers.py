"""Integers of 8 or 4 bits, evenly spaced between minus and plus the largest element of the block."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.codecs.codec import Scaled
from gradwire.core.ops import A, Ops


@dataclass(frozen=True)
class Integers(Scaled):
    """Whole multiples of the scale: -127 to 127, or -7 to 7."""

    bits: int = 8
    dithers = True

    @property
    def largest(self) -> float:
        return float(2 ** (self.bits - 1) - 1)

    def codes(self, ops: Ops[A], y: A, dither: A | None, out: A | None) -> A:
        codes = ops.nearest_bytes(y if dither is None else ops.add(y, dither, out=y), out=out)
        return codes if self.bits == 8 else codes & (2**self.bits - 1)

    def values(self, ops: Ops[A], codes: A) -> A:
        if self.bits < 8:
            sign = 2 ** (self.bits - 1)
            codes = (codes ^ sign) - sign  # as a byte has it
        return ops.cast(ops.view_as(codes, "int8"), "float32")
