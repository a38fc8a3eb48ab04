"""Top-k: of each block of a gradient the largest elements travel, with their positions.

The rest is remembered (Stich, Cordonnier and Jaggi 2018, arXiv 1809.07599, "Sparsified SGD with
memory"). Replicas choose different positions, so what they send is gathered, and W replicas receive
W times as much.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import itemgetter
from typing import Annotated, Any, Literal, NamedTuple

from gradwire.core.algorithms.compressor import Compressor, Hints, StepContext
from gradwire.core.algorithms.shared.sparse_blocks import LARGEST_BLOCK, Blocks, bits_of, blocks_of
from gradwire.core.codecs import CODECS, Codec
from gradwire.core.codecs.codec import as_sent, from_sent
from gradwire.core.kernels.arrays import array_key
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, reshape_if_needed, wide_dtype
from gradwire.core.protocol import gather, replica_weights, together, watch, world_size
from gradwire.core.protocol.programs import Program
from gradwire.core.text.options import AtLeast1, share

#: Of an accelerator's registers.
LANES = 128


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(Compressor):
    """The largest elements of each block: `TopK(64)` is 64 of each 4096, `TopK(0.01)` one in a
    hundred.

    A tensor is compressed if what a replica sends of it is less than half of it; others travel
    uncompressed, in a message of their own. A step is one all-gather for values and one for
    positions; with `bits` both are in one.

    Examples:
        >>> from gradwire import TopK, plan
        >>> plans = [plan({"w": (512, 512)}, TopK(64), world_size=w) for w in (2, 8, 32)]
        >>> [round(p.compression_ratio, 1) for p in plans]
        [46.5, 11.6, 2.9]

    Args:
        keep: how many elements of each block; or a number below 1, which part of them, at least
            one.
        per: elements of a block, as they lie in memory. Or (rows, columns): tiles of the matrix,
            `per=(64, 64)` as SparseLoCo has them. See
            `gradwire.core.algorithms.shared.sparse_blocks`. A smaller tensor is one block.
        bits: 2, 4 or 8, in which values are sent, with a scale for each block, by the codecs of
            `gradwire.core.codecs` ("int2", …). Of each block as many are kept as fill whole bytes,
            a multiple of 4, 2 or 1. None: values are sent as they are.
        mean: "replicas" divides the sum of an element by the number of replicas, "senders" by the
            number of those that have sent it, as the implementations of SparseLoCo and DeMo do.
            Where replicas choose different elements that is a step up to as many times as large as
            there are replicas. It is no mean of what was sent: the averages then add up to more
            than the gradients, and the method is `biased`.

    And those of `Compressor`: `start_step`, `error_feedback`, `state_dtype`, `max_norm`.

    Raises:
        TypeError, ValueError: naming the option, its value and the fix.
    """

    keep: (
        AtLeast1 | Annotated[float, share(least_open=True, most_open=True), "64 of 4096 is usual"]
    ) = field(kw_only=False)
    per: AtLeast1 | tuple[AtLeast1, AtLeast1] | None = None
    bits: Literal[2, 4, 8] | None = None
    mean: Literal["replicas", "senders"] = "replicas"

    hints = Hints(recompute=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = self.per if isinstance(self.per, tuple) else (1, self.per or 4096)
        if math.prod(sides) > LARGEST_BLOCK:
            raise ValueError(
                f"per={self.per!r} is more than {LARGEST_BLOCK:,} elements; 4096 is usual"
            )
        if self.keep >= math.prod(sides):
            raise ValueError(
                f"keep={self.keep} is all of a block of {math.prod(sides)} elements"
                f" (per={self.per})"
            )

    @property
    def biased(self) -> bool:
        """Whether averages and mean error do not add up to the gradients, see `Compressor.biased`;
        always with a mean over senders."""
        return self.mean == "senders" or super().biased

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """{} where values and positions are less than half of the tensor's bytes; else None,
        uncompressed.

        Arguments are those of `Compressor.memory`.
        """
        blocks, itemsize = self._blocks(name, spec.shape), ITEMSIZE[spec.dtype]
        kept = self._kept(blocks)
        values = kept * itemsize if self._codec is None else self._codec.width(kept)
        sent = blocks.count * values + -(-blocks.count * kept * bits_of(blocks.length) // 8)
        return {} if kept <= blocks.length and 2 * sent < spec.nbytes else None

    async def compress(
        self, ops: Ops[A], name: str, x: A, memory: dict[str, A], context: StepContext
    ) -> tuple[A, A, dict[str, A]]:
        """Gather the largest elements of one tensor.

        Returns:
            This replica's elements at their places, the mean of those of all replicas, zeros
            elsewhere; and `memory` as it was.
        """
        return *(await self._exchange_blocks(ops, {name: x}, context))[name], memory

    def alike(self, name: str, shape: tuple[int, ...], memory: Mapping[str, A]) -> Blocks | None:
        """The tensor's blocks: those that are cut alike are cut as one. None where something would
        be filled up between two of them."""
        blocks = self._blocks(name, shape)
        return (
            blocks if self._fills_bytes(blocks) and blocks.and_below(blocks) is not None else None
        )

    def splittable(self, name: str, shape: tuple[int, ...], axis: int | None, pieces: int) -> bool:
        """True where the blocks of the pieces are those of the tensor."""
        if axis is None:
            return False
        piece = (*shape[:axis], shape[axis] // pieces, *shape[axis + 1 :])
        return self._blocks(name, shape).are_those_of(self._blocks(name, piece), axis)

    def compress_together(
        self,
        ops: Ops[A],
        x: Mapping[str, A],
        memory: Mapping[str, dict[str, A]],
        context: StepContext,
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """The blocks of several tensors are searched, packed and added up as those of one."""
        messages = self._group_by_message(ops, x, context)
        together = len(messages) < len(x) or context.stacks
        return self._all(ops, x, memory, messages, context) if together else None

    async def _all(
        self,
        ops: Ops[A],
        x: Mapping[str, A],
        memory: Mapping[str, dict[str, A]],
        messages: list[list[str]],
        context: StepContext,
    ) -> list[tuple[Any, Any, dict[str, A]]]:
        own = [{name: x[name] for name in names} for names in messages]
        answers = await together([self._exchange_blocks(ops, each, context) for each in own])
        found = dict(chain.from_iterable(answer.items() for answer in answers))
        return [(*found[name], memory[name]) for name in x]

    def _group_by_message(
        self, ops: Ops[A], x: Mapping[str, A], context: StepContext
    ) -> list[list[str]]:
        """Which tensors are sent as one: those of as many elements of each block, whose positions
        fill whole bytes, so that no more is sent. Blocks of one length come after each other."""
        alike: dict[Hashable, list[tuple[int, str]]] = {}
        for name, each in x.items():
            blocks = self._blocks_in(name, each, context)
            key = (array_key(ops, each), self._kept(blocks)) if self._fills_bytes(blocks) else name
            alike.setdefault(key, []).append((blocks.length, name))
        return [[name for _, name in sorted(names, key=itemgetter(0))] for names in alike.values()]

    def _fills_bytes(self, blocks: Blocks) -> bool:
        """Whether the positions of all that is kept fill whole bytes."""
        return blocks.count * self._kept(blocks) * bits_of(blocks.length) % 8 == 0

    def _group_by_matrix(
        self, ops: Ops[A], x: Mapping[str, A], context: StepContext
    ) -> list[tuple[list[str], Blocks]]:
        """Which of these tensors are cut as one matrix: those of one width and one length of
        blocks, up to `Storage.max_joined` elements. One that takes a quarter of them by itself is
        joined with others of its shape alone: what is joined is copied, which for few large ones
        costs more than it saves."""
        parts: list[tuple[list[str], Blocks]] = []
        open_: dict[Hashable, int] = {}
        for name, each in x.items():
            blocks = self._blocks_in(name, each, context)
            large = 4 * blocks.count * blocks.length > ops.storage.max_joined
            key = blocks.width, blocks.length, tuple(each.shape) if large else ()
            i = open_.setdefault(key, len(parts))
            both = (
                parts[i][1].and_below(blocks) if i < len(parts) and ops.storage.max_joined else None
            )
            if both is None or both.count * both.length > ops.storage.max_joined:
                open_[key] = len(parts)
                parts.append(([name], blocks))
            else:
                parts[i] = [*parts[i][0], name], both
        return parts

    async def _exchange_blocks(
        self, ops: Ops[A], x: Mapping[str, A], context: StepContext
    ) -> dict[str, tuple[A, A]]:
        """What this replica sent of each of these tensors, and the mean; their blocks are sent as
        those of one."""
        parts = self._group_by_matrix(ops, x, context)
        arrays = [
            _stack_rows(ops, [x[name] for name in names], blocks.width) for names, blocks in parts
        ]
        cut = [blocks.cut(ops, each) for (_, blocks), each in zip(parts, arrays, strict=True)]
        found = await self._gathered(
            ops, [blocks for _, blocks in parts], cut, ops.join_order(arrays)
        )
        answers: dict[str, tuple[A, A]] = {}
        for (names, blocks), dense in zip(parts, found, strict=True):
            end = 0
            for name in names:
                shape = tuple(x[name].shape)
                start, end = end, end + math.prod(shape) // blocks.width
                sent, mean = (
                    reshape_if_needed(y if len(names) == 1 else y[start:end], shape) for y in dense
                )
                answers[name] = sent, mean
        return answers

    async def _gathered(
        self, ops: Ops[A], blocks: list[Blocks], cut: list[A], order: Sequence[int] | None
    ) -> list[tuple[A, A]]:
        kept, dtype, codec = self._kept(blocks[0]), ops.dtype_of(cut[0]), self._codec
        cut = ops.storage.materialize(cut)
        # What is not finite counts as largest, so it is among what is sent, and everyone hears of
        # it.
        index, values = ops.largest_each(cut, kept)
        rows, positions = tuple(index.shape), _Positions.of(blocks, kept)
        packed = positions.packed(ops, index)
        if codec is None:
            # A row of an accelerator's lanes is not moved to be sent.
            lanes = LANES if rows[0] * kept % LANES == 0 else kept
            every_value, *every_index = await gather(
                values.reshape((-1, lanes)), *packed, watched=False
            )
        else:
            fields = codec.encode(ops, values)
            given = as_sent(ops, fields)
            every = await gather(*given, *packed, watched=False)
            every_index = list(every[len(given) :])
            found = from_sent(ops, codec, kept, every[: len(given)])
            values = ops.cast(codec.decode(ops, *fields), dtype)
            every_value = ops.cast(codec.decode(ops, *found), dtype)
        replicas, weights, wide = await world_size(), await replica_weights(), wide_dtype(dtype)
        every_value = ops.cast(every_value, wide)
        if weights is not None:
            every_value = weights.times_each(ops, every_value)
            every_index = [weights.present_codes(ops, x) for x in every_index]
        # What is not finite is in it, and of finite numbers a sum may overflow: none is larger than
        # this one. as they came, which moves none
        sent_rows = every_value.reshape((replicas, -1, every_value.shape[-1]))
        largest = ops.max_abs(ops.max_abs(sent_rows).reshape((replicas, -1)))
        await watch(ops.matmul(ops.zeros((1, replicas), wide) + 1.0, largest))

        def of_replica(values: A, *packed: A) -> tuple[A, A]:
            return positions.unpacked(ops, packed), values.reshape((*packed[0].shape[:-1], *rows))

        def counted(weight: A, *packed: A) -> tuple[A, A]:
            index = positions.unpacked(ops, packed)
            ones = ops.zeros(tuple(index.shape), wide) + 1.0
            return index, ops.multiply(ones, weight.reshape((*packed[0].shape[:-1], 1, 1)))

        parts = [(part.count, part.length, part.tiles) for part in blocks]

        def mean(total: A) -> A:
            return ops.cast(
                total / replicas if weights is None else weights.share(ops, total), dtype
            )

        if self.mean == "replicas":
            means = ops.scatter_sum_each(
                parts, of_replica, every_value, *every_index, order=order, finish=mean
            )
        else:
            totals = ops.scatter_sum_each(parts, of_replica, every_value, *every_index, order=order)
            ones = (
                ops.zeros((replicas,), wide) + 1.0
                if weights is None
                else ops.cast(weights.of_each, wide)
            )
            counts = ops.scatter_sum_each(parts, counted, ones, *every_index, order=order)

            def among_senders(total: A, count: A) -> A:
                return ops.cast(total / ops.where(count > 0, count, 1.0), dtype)

            means = ops.elementwise_each(among_senders, totals, counts)
        # These do not wait for the means, nor those for them: what is the same on all replicas may
        # not wait for what is not. Nor for the message: they are made while it travels.
        sent = ops.scatter_sum_each(parts, None, index, values, order=order)
        return [
            (part.whole(own), part.whole(mean))
            for part, own, mean in zip(blocks, sent, means, strict=True)
        ]

    def _blocks(self, name: str, shape: tuple[int, ...]) -> Blocks:
        return blocks_of(name, shape, self.per or 4096)

    def _blocks_in(self, name: str, x: A, context: StepContext) -> Blocks:
        """Those of a tensor, or of a stack of them."""
        members = context.stacks.get(name)
        if members is None:
            return self._blocks(name, tuple(x.shape))
        return self._blocks(members[0], tuple(x.shape[1:])).times(len(members))

    def _kept(self, blocks: Blocks) -> int:
        length = blocks.length
        kept = (
            min(length, self.keep)
            if isinstance(self.keep, int)
            else max(1, round(self.keep * length))
        )
        whole = 8 // (self.bits or 8)
        return -(-kept // whole) * whole

    @property
    def _codec(self) -> Codec | None:
        return CODECS[f"int{self.bits}"] if self.bits else None


class _Positions(NamedTuple):
    """Positions (R, k) in the blocks of several tensors, those that need as many bits together:
    (rows, bits) of each part of them, and k."""

    parts: tuple[tuple[int, int], ...]
    kept: int

    @classmethod
    def of(cls, blocks: Sequence[Blocks], kept: int) -> _Positions:
        """The positions of blocks in this order."""
        parts: list[tuple[int, int]] = []
        for block in blocks:
            bits = bits_of(block.length)
            if parts and parts[-1][1] == bits:
                parts[-1] = parts[-1][0] + block.count, bits
            else:
                parts.append((block.count, bits))
        return cls(tuple(parts), kept)

    def packed(self, ops: Ops[A], index: A) -> list[A]:
        """The bytes of each part, an array for each."""
        if len(self.parts) == 1:
            return [ops.pack_integers(index, self.parts[0][1])]
        ends = list(accumulate(rows for rows, _ in self.parts))
        return [
            ops.pack_integers(index[end - rows : end], bits)
            for end, (rows, bits) in zip(ends, self.parts, strict=True)
        ]

    def unpacked(self, ops: Ops[A], packed: Sequence[A]) -> A:
        """The integers (…, R, k) in bytes (…, b) of each part."""
        lead = tuple(packed[0].shape[:-1])
        each = [
            ops.unpack_integers(own, bits, (rows, self.kept))
            for own, (rows, bits) in zip(packed, self.parts, strict=True)
        ]
        if len(each) == 1:
            return each[0]
        return ops.rows(each, math.prod(lead)).reshape((*lead, -1, self.kept))


def _stack_rows(ops: Ops[A], arrays: Sequence[A], width: int) -> A:
    if len(arrays) == 1:
        return arrays[0]
    return ops.rows([x.reshape((-1, width)) for x in arrays], 1).reshape((-1, width))
