"""Two bits: a sign, and one of two sizes."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.codecs.codec import Blocks
from gradwire.core.ops import A, Ops

SIGN = 2


@dataclass(frozen=True)
class TwoBits(Blocks):
    """Elements up to half the largest of the block, and those above it, each as the mean size of their kind. There is no zero: one comes back as a
    small element, and error feedback knows.

    Evenly spaced codes would leave two bits to the largest element: of normally distributed ones they would lose more than they keep.
    """

    bits = 2
    scales = 2

    def coded(self, ops: Ops[A], x: A, dither: A | None, out: A | None) -> tuple[A, A]:
        size = ops.abs(x)
        large = ops.cast(size > ops.max_abs(x) * 0.5, "float32")
        # Zeros fill up the last block of a tensor; decoded they are not zeros any more.
        small = ops.cast(size > 0, "float32") - large
        ones = ops.zeros((x.shape[1], 1), "float32") + 1.0

        def mean(these: A) -> A:
            count = ops.matmul(these, ones)
            # A product passes inf and NaN on.
            return ops.matmul(size * these, ones) / ops.where(count > 0, count, 1.0)

        scales = ops.rows([mean(small), mean(large)], x.shape[0])
        codes = large + ops.cast(x < 0, "float32") * SIGN
        return ops.cast(codes, "uint8"), scales

    def decoded(self, ops: Ops[A], codes: A, scales: A, out: A | None) -> A:
        large = ops.cast(codes & 1, "float32")
        size = scales[:, :1] * (large * -1.0 + 1.0) + scales[:, 1:] * large
        return ops.multiply(size, ops.cast(codes >> 1, "float32") * -2.0 + 1.0, out=size if out is None else out)
