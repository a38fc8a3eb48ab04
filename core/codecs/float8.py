"""Floats of 8 bits, 4 of exponent and 3 of mantissa (Micikevicius et al. 2022, arXiv 2209.05433):
finer near zero than integers are."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.codecs.codec import Scaled
from gradwire.core.ops import A, Ops

DTYPE = "float8_e4m3fn"


@dataclass(frozen=True)
class Float8(Scaled):
    """float8_e4m3fn, whose largest number, 448, is the largest element of the block."""

    bits = 8
    largest = 448.0

    def codes(self, ops: Ops[A], y: A, dither: A | None) -> A:
        return ops.view_as(ops.cast(y, DTYPE), "uint8")

    def values(self, ops: Ops[A], codes: A) -> A:
        return ops.cast(ops.view_as(codes, DTYPE), "float32")
