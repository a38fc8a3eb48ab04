"""Signs and a scale: one bit for each element (EF-SignSGD, Karimireddy et al. 2019, arXiv 1901.09847, Algorithm 1).

    sent = (‖x‖₁ / d) · sign(x)      # of d elements that share a scale
    error = x - sent

1-bit SGD (Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs") differs in
two things: each column of a matrix has values of its own, and there are two, the mean of its positive elements and that of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from gradwire.core.algorithms.compressor import Compressor, StepContext
from gradwire.core.algorithms.shared.views import view_of
from gradwire.core.kernels.bits import bytes_of_rows
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, wide_dtype
from gradwire.core.protocol import gather, replica_weights, watch, world_size


@dataclass(frozen=True, kw_only=True, repr=False)
class Sign(Compressor):
    """The sign of each element, and the mean magnitude of all that share a scale. What is received is the mean of what replicas sent.

    `Sign()` is EF-SignSGD; `Sign(per="column", magnitudes=2)` is 1-bit SGD, but for the second quantization by which its authors sent the
    average back. A tensor is compressed, a vector too, if what a replica sends of it is less than half of it. A step is one all-gather, so
    each of W replicas receives W bits for each element: from 65 replicas on that is more than an all-reduce in float32.

    Examples:
        >>> from gradwire import Sign, plan
        >>> [round(plan({"w": (512, 512)}, Sign(), world_size=w).compression_ratio, 1) for w in (2, 8, 32)]
        [32.0, 8.0, 2.0]

    Args:
        per: what shares a scale: each tensor, or each row or column of its matrix (`gradwire.core.algorithms.shared.views`). A vector is one row.
        magnitudes: 1, the same for positive elements and others; or 2, one for each of the two.

    And those of `Compressor`: `start_step`, `error_feedback`, `state_dtype`, `max_norm`. Without error feedback training falls apart (section 3 of
    the paper).

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    per: Literal["tensor", "row", "column"] = "tensor"
    magnitudes: Literal[1, 2] = 1

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """{} where bits and scales are less than half of the tensor's bytes; else None, uncompressed.

        Arguments are those of `Compressor.memory`.
        """
        lies = self._lies(name, spec.shape)
        sharing = {"tensor": spec.size, "row": lies[-1], "column": lies[-2]}[self.per]
        scales = spec.size // sharing
        sent = -(-spec.size // 8) + self.magnitudes * scales * ITEMSIZE[spec.dtype]
        return {} if 2 * sent < spec.nbytes else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A, A, dict[str, A]]:
        """Send the bits and scales of one tensor, in one all-gather, and average what all replicas have sent.

        Returns:
            This replica's signs times its scales, the mean of those of all replicas, both of the shape of `x`; and `memory` as it was.
        """
        shape, dtype = tuple(x.shape), ops.dtype_of(x)
        wide, lies = wide_dtype(dtype), self._lies(name, shape)
        matrix = x.reshape(lies)
        positive = matrix > 0
        bits, scales = ops.pack_bits(positive, of=matrix), ops.cast(self._scales(ops, matrix, positive, wide), dtype)
        if not bytes_of_rows(lies)[1]:
            bits = bits.reshape((-1, lies[-1]))  # rows, of which none is moved to send it
        # As bytes, scales travel in the message of the bits.
        every_bits, every_byte = await gather(bits, ops.view_as(scales, "uint8"), watched=False)
        every_scales, weights = ops.view_as(every_byte, dtype), await replica_weights()
        if weights is not None:
            every_scales = weights.present(ops, every_scales)
        await watch(every_scales)

        def reconstructed(positive: A, scales: A) -> A:
            above = self._spread(ops.cast(scales, wide), lies)
            return ops.where(positive, above[0], above[self.magnitudes - 1] * (-1.0 if self.magnitudes == 1 else 1.0))

        def add(replica: int, total: A) -> A:
            sent = reconstructed(ops.unpack_bits(every_bits[replica].reshape((-1,)), lies), every_scales[replica])
            return ops.add(total, sent if weights is None else weights.times(ops, sent, replica), out=total)

        replicas = await world_size()
        total = ops.loop(replicas, add, ops.zeros(lies, wide), fused=True)
        mean = total / replicas if weights is None else weights.share(ops, total)
        sent = ops.cast(reconstructed(positive, scales), dtype)
        return sent.reshape(shape), ops.cast(mean, dtype).reshape(shape), memory

    def by_pieces(self, name: str, shape: tuple[int, ...], axis: int | None, pieces: int) -> bool:
        """Where a tensor has one scale, and no piece is filled up."""
        return self.per == "tensor" and axis is not None

    def _scales(self, ops: Ops[A], matrix: A, positive: A, dtype: str) -> A:
        """(magnitudes, …, 1): what stands for a positive element; and, if there are two, what for another. An inf or NaN shows in them."""

        def mean_abs(x: A) -> A:
            if self.per == "tensor":
                return ops.mean_abs(x.reshape((1, -1)))
            return ops.mean_abs(x.mT if self.per == "column" else x)

        if self.magnitudes == 1:
            return ops.stack([mean_abs(matrix)])
        share, zero = mean_abs(ops.cast(positive, dtype)), ops.zeros((), ops.dtype_of(matrix))
        above, below = mean_abs(ops.where(positive, matrix, 0.0)), mean_abs(ops.where(positive, zero, matrix))
        rest = share * -1.0 + 1.0
        mean = above / ops.where(share > 0, share, 1.0)
        return ops.stack([mean, below / ops.where(rest > 0, rest, 1.0) * -1.0])

    def _spread(self, scales: A, lies: tuple[int, ...]) -> A:
        """Scales (magnitudes, …, 1) so that each stands beside the elements that share it."""
        if self.per == "tensor":
            return scales.reshape((self.magnitudes, *[1] * len(lies)))
        return scales.mT if self.per == "column" else scales

    def _lies(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor as its elements lie: a matrix, a stack of them, or one row."""
        if self.per == "tensor" and len(shape) > 1:
            return shape
        view = None if self.per == "tensor" else view_of(name, shape)
        if view is None:
            return (math.prod(shape), 1) if self.per == "column" else (1, math.prod(shape))
        return view.shape
