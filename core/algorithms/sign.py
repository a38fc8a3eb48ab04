"""Signs and a scale: one bit for each element (EF-SignSGD, Karimireddy et al. 2019, arXiv
1901.09847, Algorithm 1).

    sent = (‖x‖₁ / d) · sign(x)      # of d elements that share a scale
    error = x - sent

1-bit SGD (Seide et al. 2014, "1-bit stochastic gradient descent and its application to
data-parallel distributed training of speech DNNs") differs in two things: each column of a matrix
has values of its own, and there are two, the mean of its positive elements and that of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Literal, NamedTuple

from gradwire.core.algorithms.compressor import Compressor, StepContext
from gradwire.core.algorithms.shared.views import view_of
from gradwire.core.kernels.arrays import array_key, group_by
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, reshape_if_needed, wide_dtype
from gradwire.core.protocol import gather, replica_weights, together, watch, world_size
from gradwire.core.protocol.programs import Program


class _Lot(NamedTuple, Generic[A]):
    """What is computed with as one: a tensor, or as many `tensors` in an array with a leading axis
    for them.

    `sharing`: the shape of its numbers, of length 1 along axes whose elements share one.
    """

    tensors: int
    array: A
    sharing: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


@dataclass(frozen=True, kw_only=True, repr=False)
class Sign(Compressor):
    """The sign of each element, and the mean magnitude of all that share a scale. What is received
    is the mean of what replicas sent.

    `Sign()` is EF-SignSGD; `Sign(per="column", magnitudes=2)` is 1-bit SGD, but for the second
    quantization by which its authors sent the average back. A tensor is compressed, a vector too,
    if what a replica sends of it is less than half of it. A step is one all-gather, so each of W
    replicas receives W bits for each element: from 65 replicas on that is more than an all-reduce
    in float32.

    Examples:
        >>> from gradwire import Sign, plan
        >>> plans = [plan({"w": (512, 512)}, Sign(), world_size=w) for w in (2, 8, 32)]
        >>> [round(p.compression_ratio, 1) for p in plans]
        [32.0, 8.0, 2.0]

    Args:
        per: what shares a scale: each tensor, or each row or column of its matrix
            (`gradwire.core.algorithms.shared.views`). A vector is one row.
        magnitudes: 1, the same for positive elements and others; or 2, one for each of the two.

    And those of `Compressor`: `start_step`, `error_feedback`, `state_dtype`, `max_norm`. Without
    error feedback training falls apart (section 3 of the paper).

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    per: Literal["tensor", "row", "column"] = "tensor"
    magnitudes: Literal[1, 2] = 1

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """{} where bits and scales are less than half of the tensor's bytes; else None,
        uncompressed.

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
        """Send the bits and scales of one tensor, in one all-gather, and average what all replicas
        have sent.

        Returns:
            This replica's signs times its scales, the mean of those of all replicas, both of the
            shape of `x`; and `memory` as it was.
        """
        ((sent, mean, after),) = await self._all(ops, {name: x}, {name: memory}, context)
        return sent, mean, after

    def compress_together(
        self,
        ops: Ops[A],
        x: Mapping[str, A],
        memory: Mapping[str, dict[str, A]],
        context: StepContext,
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """The bits of several tensors are packed and averaged as those of one."""
        return self._all(ops, x, memory, context) if len(x) > 1 or context.stacks else None

    def alike(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> tuple[int, ...]:
        """How the tensor lies: those that lie alike are signed as one."""
        return self._lies(name, shape)

    def splittable(self, name: str, shape: tuple[int, ...], axis: int | None, pieces: int) -> bool:
        """True where a tensor has one scale, and no piece is filled up."""
        return self.per == "tensor" and axis is not None

    async def _all(
        self,
        ops: Ops[A],
        x: Mapping[str, A],
        memory: Mapping[str, dict[str, A]],
        context: StepContext,
    ) -> list[tuple[Any, Any, dict[str, A]]]:
        kinds = group_by(x, [array_key(ops, each) for each in x.values()])
        lots = [
            [self._lot(name, x[name], context.stacks.get(name, ())) for name in names]
            for names in kinds
        ]
        answers = await together([self._gather_means(ops, own) for own in lots])
        found = dict(zip(chain(*kinds), chain(*answers), strict=True))

        def as_it_was(name: str) -> tuple[Any, ...]:
            return tuple(reshape_if_needed(each, tuple(x[name].shape)) for each in found[name])

        return [(*as_it_was(name), memory[name]) for name in x]

    def _lot(self, name: str, x: A, members: Sequence[str]) -> _Lot[A]:
        lies = self._lies(name, tuple(x.shape[1:] if members else x.shape))
        shared = {
            "tensor": (1,) * len(lies),
            "row": (*lies[:-1], 1),
            "column": (*lies[:-2], 1, lies[-1]),
        }[self.per]
        if not members:
            return _Lot(1, reshape_if_needed(x, lies), shared)
        # Rows as rows, which a TPU does not move.
        first = 1 if lies[0] == 1 else 0
        shape = (len(members), *lies[first:])
        return _Lot(len(members), reshape_if_needed(x, shape), (len(members), *shared[first:]))

    async def _gather_means(self, ops: Ops[A], lots: Sequence[_Lot[A]]) -> list[tuple[A, A]]:
        """This replica's signs times its scales of each of these, of one kind, and the mean of
        those of all replicas, both of its shape."""
        arrays, shapes, sharing = (
            [lot.array for lot in lots],
            [lot.shape for lot in lots],
            [lot.sharing for lot in lots],
        )
        dtype, replicas = ops.dtype_of(arrays[0]), await world_size()
        wide = wide_dtype(dtype)
        bits = ops.pack_signs(arrays, sharing)
        scales = [ops.cast(part, dtype) for part in self._scales(ops, lots, wide)]
        # As bytes, scales travel in the message of the bits.
        every = await gather(*bits, *(ops.view_as(part, "uint8") for part in scales), watched=False)
        every_scale, weights = (
            [ops.view_as(part, dtype) for part in every[len(bits) :]],
            await replica_weights(),
        )
        if weights is not None:
            every_scale = [weights.present(ops, part) for part in every_scale]
        await watch(*every_scale)
        theirs = [ops.cast(part, wide) for part in every_scale]
        if weights is not None:
            theirs = [weights.times_each(ops, part) for part in theirs]
        above, below = zip(*(self._sizes_of_both_signs(part) for part in theirs), strict=True)
        totals = ops.sum_of_signs(every[: len(bits)], above, below, shapes, sharing)

        def mean(total: A) -> A:
            return ops.cast(
                total / replicas if weights is None else weights.share(ops, total), dtype
            )

        # Of one replica, as they are of all.
        mine = [
            self._sizes_of_both_signs(ops.cast(part, wide).reshape((1, *part.shape)))
            for part in scales
        ]
        high, low = ([x.reshape((-1,)) for x in each] for each in zip(*mine, strict=True))
        own = ops.signed(arrays, bits, high, low, sharing)
        sent = ops.elementwise_each(lambda x: ops.cast(x, dtype), own)
        return list(zip(sent, ops.elementwise_each(mean, totals), strict=True))

    def _sizes_of_both_signs(self, scales: A) -> tuple[A, A]:
        """The numbers (W, N) of scales (W, magnitudes, N) that stand for positive elements, and for
        others."""
        return scales[:, 0], scales[:, 1] if self.magnitudes == 2 else scales[:, 0] * -1.0

    def _scales(self, ops: Ops[A], lots: Sequence[_Lot[A]], wide: str) -> list[A]:
        """(magnitudes, N) of all lots, one after the other, or of each by itself. An inf or NaN
        shows in them."""
        if self.per == "tensor" and self.magnitudes == 1:
            stacks = [lot.array.reshape((lot.tensors, -1)) for lot in lots]
            return [ops.mean_abs_each(stacks).reshape((1, -1))]
        each = [self._scales_of(ops, lot, wide).reshape((self.magnitudes, -1)) for lot in lots]
        # Those of rows are many: a TPU's compiler takes longer to join them than it saves.
        return each if self.per != "tensor" or len(each) == 1 else [ops.rows(each, self.magnitudes)]

    def _scales_of(self, ops: Ops[A], lot: _Lot[A], wide: str) -> A:
        """(magnitudes, N, 1): what stands for a positive element; and, if there are two, what for
        another."""
        x = lot.array

        def mean_abs(x: A) -> A:
            if self.per == "tensor":
                return ops.mean_abs(x.reshape((lot.tensors, -1)))
            return ops.mean_abs(x.mT if self.per == "column" else x)

        if self.magnitudes == 1:
            return ops.stack([mean_abs(x)])
        positive, zero = x > 0, ops.zeros((), ops.dtype_of(x))
        share = mean_abs(ops.cast(positive, wide))
        above, below = mean_abs(ops.where(positive, x, 0.0)), mean_abs(ops.where(positive, zero, x))
        rest = share * -1.0 + 1.0
        mean = above / ops.where(share > 0, share, 1.0)
        return ops.stack([mean, below / ops.where(rest > 0, rest, 1.0) * -1.0])

    def _lies(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor as its elements lie: a matrix, a stack of them, or one row."""
        if self.per == "tensor" and len(shape) > 1:
            return shape
        view = None if self.per == "tensor" else view_of(name, shape)
        if view is None:
            return (math.prod(shape), 1) if self.per == "column" else (1, math.prod(shape))
        return view.shape
