"""Signs and a scale: one bit for each element (EF-SignSGD, Karimireddy et al. 2019, arXiv 1901.09847, Algorithm 1).

    sent = (‖x‖₁ / d) · sign(x)      # of d elements that share a scale
    error = x - sent

1-bit SGD (Seide et al. 2014, "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs") differs in
two things: each column of a matrix has values of its own, and there are two, the mean of its positive elements and that of the others.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, Literal, NamedTuple

from gradwire.core.algorithms.compressor import Compressor, StepContext
from gradwire.core.algorithms.shared.views import view_of
from gradwire.core.kernels.bits import bytes_of_rows
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, wide_dtype
from gradwire.core.protocol import gather, replica_weights, together, watch, world_size
from gradwire.core.protocol.programs import Program

#: Elements of the longest vector that is copied to be computed with together with others.
SHORT = 1 << 16


class _Lot(NamedTuple, Generic[A]):
    """What is compressed as one: a tensor as its elements lie, or vectors as rows; these tensors, and what shares a scale in `matrix`."""

    tensors: list[A]
    matrix: A
    per: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)


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
        ((sent, mean),) = await self._gathered(ops, [self._lot(ops, {name: x})])
        return sent.reshape(tuple(x.shape)), mean.reshape(tuple(x.shape)), memory

    def compress_together(
        self, ops: Ops[A], x: Mapping[str, A], memory: Mapping[str, dict[str, A]], context: StepContext
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """Vectors of one length as rows of a matrix, and scales of tensors in one array, where that takes less time to compile."""
        return self._all(ops, x, memory) if ops.joined and len(x) > 1 else None

    def by_pieces(self, name: str, shape: tuple[int, ...], axis: int | None, pieces: int) -> bool:
        """Where a tensor has one scale, and no piece is filled up."""
        return self.per == "tensor" and axis is not None

    async def _all(
        self, ops: Ops[A], x: Mapping[str, A], memory: Mapping[str, dict[str, A]]
    ) -> list[tuple[Any, Any, dict[str, A]]]:
        kinds: dict[Hashable, dict[Hashable, list[str]]] = {}
        for name, each in x.items():
            n = math.prod(each.shape)
            # Whose bits fill whole bytes, so that no more is sent.
            row = len(each.shape) == 1 and n <= SHORT and n % 8 == 0 and self.per != "column"
            kinds.setdefault(ops.kind_of(each), {}).setdefault(n if row else name, []).append(name)
        names = [list(kind.values()) for kind in kinds.values()]
        lots = [[self._lot(ops, {name: x[name] for name in some}) for some in kind] for kind in names]
        answers = await together([self._gathered(ops, own) for own in lots])
        found: dict[str, tuple[A, A]] = {}
        for some, (sent, mean) in zip(chain(*names), chain(*answers), strict=True):
            shapes = [tuple(x[name].shape) for name in some]
            own, average = (_apart(ops, whole.reshape((1, -1)), shapes) for whole in (sent, mean))
            found |= zip(some, zip(own, average, strict=True), strict=True)
        return [(*found[name], memory[name]) for name in x]

    def _lot(self, ops: Ops[A], x: dict[str, A]) -> _Lot[A]:
        tensors = [each.reshape(self._lies(name, tuple(each.shape))) for name, each in x.items()]
        if len(tensors) == 1:
            return _Lot(tensors, tensors[0], self.per)
        return _Lot(tensors, ops.rows(tensors, 1).reshape((len(tensors), -1)), "row")

    async def _gathered(self, ops: Ops[A], lots: Sequence[_Lot[A]]) -> list[tuple[A, A]]:
        """Of each of these, of one kind: this replica's signs times its scales, and the mean of those of all replicas, both of its shape."""
        dtype, replicas = ops.dtype_of(lots[0].matrix), await world_size()
        wide = wide_dtype(dtype)
        positive = [lot.matrix > 0 for lot in lots]
        bits = [ops.pack_bits(own, of=lot.matrix) for own, lot in zip(positive, lots, strict=True)]
        # Rows, of which none is moved to send it.
        sent = [
            own if bytes_of_rows(lot.shape)[1] else own.reshape((-1, lot.shape[-1]))
            for own, lot in zip(bits, lots, strict=True)
        ]
        scales = [ops.cast(self._scales(ops, lot, own, wide), dtype) for own, lot in zip(positive, lots, strict=True)]
        # Those of rows are many: a TPU's compiler takes longer to join them than it saves.
        parts = [scales] if self.per == "tensor" else [[own] for own in scales]
        joined = [part[0] if len(part) == 1 else ops.rows(part, 1) for part in parts]
        # As bytes, scales travel in the message of the bits.
        every = await gather(*sent, *(ops.view_as(part, "uint8") for part in joined), watched=False)
        every_part, weights = [ops.view_as(part, dtype) for part in every[len(lots) :]], await replica_weights()
        if weights is not None:
            every_part = [weights.present(ops, part) for part in every_part]
        await watch(*every_part)
        every_scales: list[A] = []
        for part, of_each in zip(parts, every_part, strict=True):
            shapes = [(replicas, *own.shape) for own in part]
            every_scales += _apart(ops, of_each.reshape((replicas, -1)), shapes)

        def reconstructed(lot: _Lot[A], positive: A, scales: A) -> A:
            above = self._spread(ops.cast(scales, wide), lot)
            return ops.where(positive, above[0], above[self.magnitudes - 1] * (-1.0 if self.magnitudes == 1 else 1.0))

        def mean(lot: _Lot[A], every_bits: A, every_scales: A) -> A:
            def add(replica: int, total: A) -> A:
                positive = ops.unpack_bits(every_bits[replica].reshape((-1,)), lot.shape)
                sent = reconstructed(lot, positive, every_scales[replica])
                return ops.add(total, sent if weights is None else weights.times(ops, sent, replica), out=total)

            total = ops.loop(replicas, add, ops.zeros(lot.shape, wide), fused=True)
            return ops.cast(total / replicas if weights is None else weights.share(ops, total), dtype)

        answers: list[tuple[A, A]] = []
        for lot, *own, every_bits, theirs in zip(lots, positive, scales, every[: len(lots)], every_scales, strict=True):
            average = mean(lot, every_bits, theirs)
            answers.append((ops.cast(reconstructed(lot, *own), dtype), average))
        return answers

    def _scales(self, ops: Ops[A], lot: _Lot[A], positive: A, dtype: str) -> A:
        """(magnitudes, …, 1): what stands for a positive element; and, if there are two, what for another. An inf or NaN shows in them."""
        if len(lot.tensors) == 1:
            return self._scales_of(ops, lot.matrix, positive, dtype)
        # Each vector by itself: of several a kernel may add up each in another order.
        scales = [self._scales_of(ops, x, x > 0, dtype) for x in lot.tensors]
        return ops.rows(scales, 1).reshape((-1, self.magnitudes)).mT.reshape((self.magnitudes, -1, 1))

    def _scales_of(self, ops: Ops[A], matrix: A, positive: A, dtype: str) -> A:
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

    def _spread(self, scales: A, lot: _Lot[A]) -> A:
        """Scales (magnitudes, …, 1) so that each stands beside the elements that share it."""
        if lot.per == "tensor":
            return scales.reshape((self.magnitudes, *[1] * len(lot.shape)))
        return scales.mT if lot.per == "column" else scales

    def _lies(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A tensor as its elements lie: a matrix, a stack of them, or one row."""
        if self.per == "tensor" and len(shape) > 1:
            return shape
        view = None if self.per == "tensor" else view_of(name, shape)
        if view is None:
            return (math.prod(shape), 1) if self.per == "column" else (1, math.prod(shape))
        return view.shape


def _apart(ops: Ops[A], rows: A, shapes: Sequence[tuple[int, ...]]) -> list[A]:
    """What lies side by side in these rows; torch would copy the only one."""
    return [rows.reshape(shapes[0])] if len(shapes) == 1 else ops.from_rows(rows, shapes)
