"""Top-k: of each block of a gradient the largest elements travel, with their positions.

The rest is remembered (Stich, Cordonnier and Jaggi 2018, arXiv 1809.07599, "Sparsified SGD with memory"). Replicas choose different positions, so
what they send is gathered, and W replicas receive W times as much.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Annotated, Any, Literal

from gradwire.core.algorithms.compressor import Compressor, Hints, StepContext
from gradwire.core.algorithms.shared.sparse_blocks import LARGEST_BLOCK, Blocks, bits_of, blocks_of
from gradwire.core.codecs import CODECS, Codec
from gradwire.core.codecs.codec import received, sendable
from gradwire.core.ops import ITEMSIZE, A, Ops, Spec, shaped, wide_dtype
from gradwire.core.protocol import gather, replica_weights, together, watch, world_size
from gradwire.core.protocol.programs import Program
from gradwire.core.text.options import AtLeast1, share

#: Of an accelerator's registers.
LANES = 128


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(Compressor):
    """The largest elements of each block: `TopK(64)` is 64 of each 4096, `TopK(0.01)` one in a hundred.

    A tensor is compressed if what a replica sends of it is less than half of it; others travel uncompressed, in a message of their own. A step is one
    all-gather for values and one for positions; with `bits` both are in one.

    Examples:
        >>> from gradwire import TopK, plan
        >>> [round(plan({"w": (512, 512)}, TopK(64), world_size=w).compression_ratio, 1) for w in (2, 8, 32)]
        [46.5, 11.6, 2.9]

    Args:
        keep: how many elements of each block; or a number below 1, which part of them, at least one.
        per: elements of a block, as they lie in memory. Or (rows, columns): tiles of the matrix, `per=(64, 64)` as SparseLoCo has them. See
            `gradwire.core.algorithms.shared.sparse_blocks`. A smaller tensor is one block.
        bits: 2, 4 or 8, in which values are sent, with a scale for each block, by the codecs of `gradwire.core.codecs` ("int2", …). Of each block
            as many are kept as fill whole bytes, a multiple of 4, 2 or 1. None: values are sent as they are.
        mean: "replicas" divides the sum of an element by the number of replicas, "senders" by the number of those that have sent it, as the
            implementations of SparseLoCo and DeMo do. Where replicas choose different elements that is a step up to as many times as large as there
            are replicas. It is no mean of what was sent: the averages then add up to more than the gradients, and the method is `biased`.

    And those of `Compressor`: `start_step`, `error_feedback`, `state_dtype`, `max_norm`.

    Raises:
        TypeError, ValueError: naming the option, its value and the fix.
    """

    keep: AtLeast1 | Annotated[float, share(least_open=True, most_open=True), "64 of 4096 is usual"] = field(
        kw_only=False
    )
    per: AtLeast1 | tuple[AtLeast1, AtLeast1] | None = None
    bits: Literal[2, 4, 8] | None = None
    mean: Literal["replicas", "senders"] = "replicas"

    hints = Hints(recompute=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sides = self.per if isinstance(self.per, tuple) else (1, self.per or 4096)
        if math.prod(sides) > LARGEST_BLOCK:
            raise ValueError(f"per={self.per!r} is more than {LARGEST_BLOCK:,} elements; 4096 is usual")
        if self.keep >= math.prod(sides):
            raise ValueError(f"keep={self.keep} is all of a block of {math.prod(sides)} elements (per={self.per})")

    @property
    def biased(self) -> bool:
        """Whether averages and mean error do not add up to the gradients, see `Compressor.biased`; always with a mean over senders."""
        return self.mean == "senders" or super().biased

    def memory(self, ops: Ops[A], name: str, spec: Spec) -> dict[str, A] | None:
        """{} where values and positions are less than half of the tensor's bytes; else None, uncompressed.

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
            This replica's elements at their places, the mean of those of all replicas, zeros elsewhere; and `memory` as it was.
        """
        return *(await self._sent(ops, {name: x}))[name], memory

    def by_pieces(self, name: str, shape: tuple[int, ...], axis: int | None, pieces: int) -> bool:
        """Where the blocks of the pieces are those of the tensor."""
        if axis is None:
            return False
        piece = (*shape[:axis], shape[axis] // pieces, *shape[axis + 1 :])
        return self._blocks(name, shape).are_those_of(self._blocks(name, piece), axis)

    def compress_together(
        self, ops: Ops[A], x: Mapping[str, A], memory: Mapping[str, dict[str, A]], context: StepContext
    ) -> Program[list[tuple[Any, Any, dict[str, A]]]] | None:
        """The blocks of several tensors as those of one, where that takes less time to compile."""
        messages = self._messages(ops, x)
        return None if len(messages) == len(x) else self._all(ops, x, memory, messages)

    async def _all(
        self, ops: Ops[A], x: Mapping[str, A], memory: Mapping[str, dict[str, A]], messages: list[list[str]]
    ) -> list[tuple[Any, Any, dict[str, A]]]:
        answers = await together([self._sent(ops, {name: x[name] for name in names}) for names in messages])
        found = dict(chain.from_iterable(answer.items() for answer in answers))
        return [(*found[name], memory[name]) for name in x]

    def _messages(self, ops: Ops[A], x: Mapping[str, A]) -> list[list[str]]:
        """Which tensors are sent as one: those of blocks of one length, whose positions fill whole bytes, so that no more is sent."""
        alike: dict[Hashable, list[str]] = {}
        for name, each in x.items():
            blocks = self._blocks(name, tuple(each.shape))
            kept = self._kept(blocks)
            whole = ops.joined and blocks.count * kept * bits_of(blocks.length) % 8 == 0
            alike.setdefault((ops.kind_of(each), blocks.length, kept) if whole else name, []).append(name)
        return list(alike.values())

    def _parts(self, ops: Ops[A], x: Mapping[str, A]) -> list[tuple[list[str], Blocks]]:
        """Which of these tensors are cut and searched as one matrix: those of one width, up to `Ops.joined` elements."""
        parts: list[tuple[list[str], Blocks]] = []
        open_: dict[int, int] = {}
        for name, each in x.items():
            blocks = self._blocks(name, tuple(each.shape))
            i = open_.setdefault(blocks.width, len(parts))
            both = parts[i][1].and_below(blocks) if i < len(parts) else None
            if both is None or both.count * both.length > ops.joined:
                open_[blocks.width] = len(parts)
                parts.append(([name], blocks))
            else:
                parts[i] = [*parts[i][0], name], both
        return parts

    async def _sent(self, ops: Ops[A], x: Mapping[str, A]) -> dict[str, tuple[A, A]]:
        """Of each of these tensors what this replica sent and the mean; their blocks are sent as those of one."""
        parts = self._parts(ops, x)
        cut = [blocks.cut(ops, _below(ops, [x[name] for name in names], blocks.width)) for names, blocks in parts]
        found = await self._gathered(ops, [blocks for _, blocks in parts], cut)
        answers: dict[str, tuple[A, A]] = {}
        for (names, blocks), dense in zip(parts, found, strict=True):
            end = 0
            for name in names:
                shape = tuple(x[name].shape)
                start, end = end, end + math.prod(shape) // blocks.width
                sent, mean = (y if len(names) == 1 else shaped(y[start:end], shape) for y in dense)
                answers[name] = sent, mean
        return answers

    async def _gathered(self, ops: Ops[A], blocks: list[Blocks], cut: list[A]) -> list[tuple[A, A]]:
        length, kept, dtype = blocks[0].length, self._kept(blocks[0]), ops.dtype_of(cut[0])
        bits, codec = bits_of(length), self._codec
        cut = ops.computed_once(cut)
        # What is not finite counts as largest, so it is among what is sent, and everyone hears of it.
        each = [ops.top_k(ops.abs(x), kept) for x in cut]
        index = ops.rows(each, 1).reshape((-1, kept))
        values = ops.take_each(cut, each)
        positions = ops.pack_integers(index, bits)
        if codec is None:
            # A row of an accelerator's lanes is not moved to be sent.
            lanes = LANES if values.shape[0] * kept % LANES == 0 else kept
            every_value, every_index = await gather(values.reshape((-1, lanes)), positions, watched=False)
        else:
            fields = codec.encode(ops, values)
            *every_code, every_index = await gather(*sendable(ops, fields), positions, watched=False)
            rows = received(ops, codec, kept, every_code)
            values = ops.cast(codec.decode(ops, *fields), dtype)
            every_value = ops.cast(codec.decode(ops, *rows), dtype)
        replicas, weights, wide = await world_size(), await replica_weights(), wide_dtype(dtype)
        shape = tuple(index.shape)
        every_value = ops.cast(every_value, wide)
        if weights is not None:
            every_value = weights.times_each(ops, every_value)
        # What is not finite is in it, and of finite numbers a sum may overflow: none is larger than this one.
        await watch(ops.sum_of_each(ops.max_abs, every_value))
        ends = list(accumulate(part.count for part in blocks))
        spans = [slice(end - part.count, end) for part, end in zip(blocks, ends, strict=True)]
        means: list[A] = []
        for part, own in zip(blocks, spans, strict=True):

            def of_replica(index: A, values: A, own: slice = own) -> tuple[A, A]:
                return ops.unpack_integers(index, bits, shape)[own], values.reshape(shape)[own]

            def counted(index: A, *weight: A, own: slice = own) -> tuple[A, A]:
                ones = ops.zeros((own.stop - own.start, kept), wide) + 1.0
                return ops.unpack_integers(index, bits, shape)[own], ops.multiply(ones, weight[0]) if weight else ones

            after = means[-1] if means else None
            total = part.sum_of(ops, of_replica, every_index, every_value, after=after)
            if self.mean == "replicas":
                mean = total / replicas if weights is None else weights.share(ops, total)
            else:
                ones = [] if weights is None else [ops.cast(weights.of_each, wide)]
                count = part.sum_of(ops, counted, every_index, *ones, after=after)
                mean = total / ops.where(count > 0, count, 1.0)
            means.append(ops.cast(mean, dtype))
        # These do not wait for the means, nor those for them: what is the same on all replicas may not wait for what is not. Nor for the message: they are made
        # while it travels.
        sent: list[A] = []
        for part, own in zip(blocks, spans, strict=True):
            each = [x[own].reshape((1, -1, kept)) for x in (index, values)]
            sent.append(part.sum_of(ops, lambda *own: own, *each, after=sent[-1] if sent else None))
        return list(zip(sent, means, strict=True))

    def _blocks(self, name: str, shape: tuple[int, ...]) -> Blocks:
        return blocks_of(name, shape, self.per or 4096)

    def _kept(self, blocks: Blocks) -> int:
        length = blocks.length
        kept = min(length, self.keep) if isinstance(self.keep, int) else max(1, round(self.keep * length))
        whole = 8 // (self.bits or 8)
        return -(-kept // whole) * whole

    @property
    def _codec(self) -> Codec | None:
        return CODECS[f"int{self.bits}"] if self.bits else None


def _below(ops: Ops[A], arrays: Sequence[A], width: int) -> A:
    if len(arrays) == 1:
        return arrays[0]
    return ops.rows([x.reshape((-1, width)) for x in arrays], 1).reshape((-1, width))
