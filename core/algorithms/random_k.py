"""Random-k: other elements of a gradient in each step, at positions that nobody sends (Stich, Cordonnier and Jaggi 2018, arXiv 1809.07599).

The positions are a function of the seed, the parameter's name and the step, so all replicas draw the same ones. What is sent is values alone, by a plain
average: nothing grows with the number of replicas, and `WireDtype` makes it smaller still.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gradwire.core.algorithms.compressor import Compressor, StepContext
from gradwire.core.blocks import LARGEST_BLOCK, Blocks, blocks_of
from gradwire.core.kernels import random
from gradwire.core.ops import A, Ops, Spec
from gradwire.core.requests import mean


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomK(Compressor):
    """A random part of each gradient: `RandomK(1 / 64)` is one element of each 64 neighbours, drawn anew in each step.

    One all-reduce for all tensors; what is not compressed travels in the same message. What a step leaves out comes back by error feedback, but 1 / keep
    steps late on average: learning rates must be smaller than with `TopK`, which finds the elements that matter.

    Examples:
        >>> from gradwire import RandomK, plan
        >>> plan({"w": (512, 512)}, RandomK(1 / 64)).compression_ratio
        64.0

    Args:
        keep: the part that is sent, at most a half.
        seed: of the positions.

    And those of `Compressor`: `start_step`, `error_feedback`, `state_dtype`, `max_norm`.

    Raises:
        ValueError: a part that is not between 0 and a half.
    """

    keep: float = field(kw_only=False)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 / LARGEST_BLOCK <= self.keep <= 0.5:
            raise ValueError(f"keep={self.keep} must be a part of at most 0.5: 1 / 64 sends one element of each 64")

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """{} for a tensor of more than one block, whose positions are drawn anew in each step; None for a smaller one, uncompressed.

        Arguments are those of `Compressor.memory`.
        """
        return {} if self._blocks(name, spec.shape).count < spec.size else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A, A, dict[str, A]]:
        """Average one element of each block of 1 / `keep` neighbours, in one all-reduce; all others are 0 in what is sent and received.

        Returns:
            This replica's elements at their places, their averages there, and `memory` as it was.
        """
        blocks = self._blocks(name, tuple(x.shape))
        drawn = random.uniform(ops, random.key(self.seed, name), (blocks.count, 1), context.step)
        # Below the length, however it is rounded: the largest that is drawn is 1 - 2**-24.
        index = ops.cast(ops.abs(drawn) * blocks.length, "int32")
        cut, dtype = blocks.cut(ops, x), ops.dtype_of(x)
        # An inf or NaN that is not drawn has to be heard of, too.
        values = ops.where(ops.all_finite(x), ops.take(cut, index), math.nan)

        def spread(values: A) -> A:
            return blocks.joined(ops.scatter_add(ops.zeros((blocks.count, blocks.length), dtype), index, values))

        return spread(values), spread(await mean(values)), memory

    def _blocks(self, name: str, shape: tuple[int, ...]) -> Blocks:
        return blocks_of(name, shape, round(1 / self.keep))
