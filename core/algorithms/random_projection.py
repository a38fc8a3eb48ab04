"""Random directions: each gradient matrix is averaged along a few of them, other ones in every step.

The directions are a function of the seed, the parameter's name and the step, so all replicas draw the same ones and nobody sends them. It is what
Vogels, Karimireddy and Jaggi (2019, arXiv 1905.13727, section 4.1) compare PowerSGD with, here with orthonormal directions and with an error memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwire.core.algorithms.compressor import Compressor, StepContext
from gradwire.core.factors import LowRank
from gradwire.core.kernels import random
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.requests import mean, orthonormalize
from gradwire.core.views import View, view_of


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomProjection(Compressor):
    """Average gradient matrices along random directions. Nothing is remembered but the error.

    Of a matrix (n, m), n·rank numbers are sent, in one all-reduce for all tensors. Vectors travel uncompressed in the same message. What a step leaves
    out comes back by error feedback, but m / rank steps late: learning rates must be smaller than with `PowerSGD`, which finds the directions
    that matter.

    Examples:
        >>> from gradwire import RandomProjection, plan
        >>> plan({"w": (512, 256)}, RandomProjection(rank=4)).compression_ratio
        64.0

    Args:
        rank: number of directions, of the m that the rows of a matrix have. See `gradwire.core.views` for what is a row.
        min_compression_rate: compress a tensor only if its elements shrink by more than this factor.
        seed: of the directions.

    And those of `Compressor`: `start_step`, `error_feedback`, `state_dtype`, `max_norm`.

    Raises:
        ValueError: a rank below 1, or a rate that is not positive.
    """

    rank: int = field(kw_only=False)
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not self.min_compression_rate > 0:
            raise ValueError(
                f"min_compression_rate={self.min_compression_rate} must be a positive number; 2.0 is usual"
            )

    @property
    def multiplies_only(self) -> bool:
        """True: a gradient is only multiplied by directions, see `Compressor.multiplies_only`."""
        return True

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """{} for a matrix of more than `rank * min_compression_rate` columns; else None, uncompressed.

        Arguments are those of `Compressor.memory`.
        """
        view = view_of(name, spec.shape)
        return {} if view is not None and self.rank * self.min_compression_rate < view.m else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[LowRank[A], LowRank[A], dict[str, A]]:
        """Average the matrix along `rank` orthonormal directions of this step, in one all-reduce of (rank, n) numbers.

        Returns:
            What this replica sent and what all received, as factors; and `memory` as it was.
        """
        view = view_of(name, tuple(x.shape))
        assert isinstance(view, View)  # else it would have no memory
        drawn = random.uniform(ops, random.key(self.seed, name), (self.rank, view.m), context.step)
        q = await orthonormalize(ops, ops.cast(drawn, ops.dtype_of(x)))
        local = ops.matmul(q, view.matrices(ops, x).mT)
        sent = LowRank(local, q)
        p = await mean(local, overlap=context.residual(sent))
        return sent, LowRank(p, q), memory
