"""Two bits: a sign, and one of two sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.core.codecs.codec import BlockCodec
from gradwire.core.ops import A, Ops

SIGN = 2
#: The threshold is found from magnitudes in so many parts of the block's largest. Of whole numbers
#: float32 has every sum up to `EXACT`, so all processors find the same one, in whatever order they
#: add.
PARTS = 255
EXACT = 1 << 24


@dataclass(frozen=True)
class TwoBits(BlockCodec):
    """Elements up to a threshold, and those above it, each as the mean size of their kind. The
    threshold is half the largest element of the block or the root of the mean square of all,
    whichever leaves the smaller error. There is no zero: one comes back as a small element, and
    error feedback knows.

    Evenly spaced codes would leave two bits to the largest element: of normally distributed ones
    they would lose more than they keep. For those the best threshold is 0.98 standard deviations
    (Max 1960, "Quantizing for minimum distortion"); half the largest is better where a few elements
    are much larger than the others.
    """

    bits = 2
    scales = 2

    def coded(self, ops: Ops[A], x: A, dither: A | None) -> tuple[A, A]:
        size, ones = ops.abs(x), ops.zeros((x.shape[1], 1), "float32") + 1.0

        def total(of: A) -> A:
            return ops.matmul(of, ones)

        # Zeros fill up the last block of a tensor; decoded they are not zeros any more.
        present = _negative(ops.view_as(size, "int32") * -1)
        n = total(ops.cast(present, "float32")) * -1.0
        parts, limit, count = self._threshold(ops, size, n, total)
        small = _up_to(ops, parts, limit)
        large = small + 1.0

        def mean(these: A, count: A) -> A:
            # A product passes inf and NaN on. `total` would round by how many rows there are, of
            # other tensors too: only of whole numbers it is exact.
            return ops.mean_abs(ops.multiply(size, these)) * float(x.shape[1]) / _or_one(ops, count)

        scales = ops.rows([mean(small, n - count), mean(large, count)], x.shape[0])
        sign = ops.cast(_negative(ops.view_as(x, "int32")) & present, "float32")
        return (
            ops.nearest_bytes(
                ops.add(large, ops.multiply(sign, -float(SIGN), out=sign), out=large)
            ),
            scales,
        )

    def _threshold(self, ops: Ops[A], size: A, n: A, total: Callable[[A], A]) -> tuple[A, A, A]:
        """Magnitudes in whole parts of the largest of the row, up to how many parts they are small,
        and how many are larger. `n` are not zero."""
        block = size.shape[1]
        most = min(PARTS, math.isqrt(EXACT // block))
        # by the reciprocal, as in `Scaled.coded`
        parts = ops.multiply(size, ops.scales(size, float(most))[1])
        parts = ops.round(parts, out=parts)
        in_all, squares = total(parts), total(ops.multiply(parts, parts))

        def split(limit: A) -> tuple[A, A]:
            """How many are larger, and what is kept of the squares: the more, the smaller the
            error."""
            small = _up_to(ops, parts, limit)
            count, of_small = (
                total(small) + float(block),
                total(ops.multiply(small, parts, out=small)) * -1.0,
            )
            others, of_large = n - count, in_all - of_small
            # Zeros cost what the others keep. Quotients are added: of products and a sum some
            # processors round only one.
            divisor = _or_one(ops, others)
            kept = of_small * of_small * (others + n - float(block)) / (divisor * divisor)
            return count, kept + of_large * of_large / _or_one(ops, count)

        # The largest whole number whose square is not above the mean square.
        root = ops.round(ops.sqrt(squares * (1.0 / block)))
        root = root - ops.cast(root * root * float(block) > squares, "float32")
        half = root * 0.0 + float(most // 2)
        (by_half, kept_by_half), (by_root, kept_by_root) = split(half), split(root)
        better = kept_by_root > kept_by_half
        return parts, ops.where(better, root, half), ops.where(better, by_root, by_half)

    def decoded(self, ops: Ops[A], codes: A, scales: A, out: A | None) -> A:
        large = ops.cast(codes & 1, "float32")
        size = scales[:, :1] * (large * -1.0 + 1.0) + scales[:, 1:] * large
        return ops.multiply(
            size, ops.cast(codes >> 1, "float32") * -2.0 + 1.0, out=size if out is None else out
        )


def _negative(bits: A) -> A:
    """-1 for negative numbers, 0 for others: for numbers side by side much quicker than to compare
    them."""
    return bits >> 31


def _up_to(ops: Ops[A], parts: A, limit: A) -> A:
    """-1.0 for whole numbers up to a whole limit, 0.0 for larger ones."""
    return ops.cast(_negative(ops.view_as(ops.add(parts, limit * -1.0 - 0.5), "int32")), "float32")


def _or_one(ops: Ops[A], count: A) -> A:
    return ops.where(count > 0, count, 1.0)
