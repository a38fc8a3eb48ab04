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
        scales = math.prod(lies) // lies[self._axis]
        sent = -(-spec.size // 8) + self.magnitudes * scales * ITEMSIZE[spec.dtype]
        return {} if 2 * sent < spec.nbytes else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A, A, dict[str, A]]:
        """Send the bits and scales of one tensor, in one all-gather, and average what all replicas have sent.

        Returns:
            This replica's signs times its scales, the mean of those of all replicas, both of the shape of `x`; and `memory` as it was.
        """
        shape, lies, dtype = tuple(x.shape), self._lies(name, tuple(x.shape)), ops.dtype_of(x)
        wide = wide_dtype(dtype)
        matrix = x.reshape(lies)
        rows = matrix.mT if self._axis == -2 else matrix  # what shares a scale lies along the last axis
        positive = rows > 0
        bits, scales = ops.pack_bits(positive.reshape((-1,))), ops.cast(self._scales(ops, rows, positive, wide), dtype)
        # As bytes, scales travel in the message of the bits.
        every_bits, every_byte = await gather(bits, ops.view_as(scales, "uint8"), watched=False)
        every_scales, weights = ops.view_as(every_byte, dtype), await replica_weights()
        if weights is not None:
            every_scales = weights.present(ops, every_scales)
        await watch(every_scales)

        def reconstructed(positive: A, scales: A) -> A:
            scales = ops.cast(scales, wide)
            return ops.where(positive, scales[0], scales[self.magnitudes - 1] * (-1.0 if self.magnitudes == 1 else 1.0))

        def add(replica: int, total: A) -> A:
            its = ops.unpack_bits(every_bits[replica], math.prod(lies)).reshape(tuple(rows.shape))
            sent = reconstructed(its, every_scales[replica])
            return ops.add(total, sent if weights is None else weights.times(ops, sent, replica), out=total)

        def back(rows: A) -> A:
            return ops.cast(rows.mT if self._axis == -2 else rows, dtype).reshape(shape)

        replicas = await world_size()
        total = ops.loop(replicas, add, ops.zeros(tuple(rows.shape), wide))
        mean = total / replicas if weights is None else weights.share(ops, total)
        return back(reconstructed(positive, scales)), back(mean), memory

    def _scales(self, ops: Ops[A], rows: A, positive: A, dtype: str) -> A:
        """(magnitudes, …, 1): what stands for a positive element; and, if there are two, what for another. An inf or NaN shows in them."""
        if self.magnitudes == 1:
            return ops.stack([ops.mean_abs(rows)])
        share, zero = ops.mean_abs(ops.cast(positive, dtype)), ops.zeros((), ops.dtype_of(rows))
        above, below = ops.mean_abs(ops.where(positive, rows, 0.0)), ops.mean_abs(ops.where(positive, zero, rows))
        rest = share * -1.0 + 1.0
        mean = above / ops.where(share > 0, share, 1.0)
        return ops.stack([mean, below / ops.where(rest > 0, rest, 1.0) * -1.0])

    @property
    def _axis(self) -> int:
        """Along which a scale is shared."""
        return -2 if self.per == "column" else -1

    def _lies(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor as its elements lie: a matrix, a stack of them, or one long row."""
        view = None if self.per == "tensor" else view_of(name, shape)
        if view is None:
            return (1, math.prod(shape)) if self._axis == -1 else (math.prod(shape), 1)
        return view.shape
