"""Arrays that travel from rank to rank as rows of one matrix: how they are joined, cut out again,
and averaged by their owner."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import group_by, message_key
from gradwire.torch_backend.engine.groups.point_to_point import Exchange

#: What one rank sends directly to another and has so many bytes travels by itself.
WORTH_A_MESSAGE = 1 << 16
#: Elements that are summed at a time on the CPU: what is divided stays in the processor's cache
#: until all is added.
IN_CACHE = 1 << 15


def rows_by_dtype(
    arrays: Sequence[Tensor], rows: int, exchange: Exchange, parts: int
) -> Iterator[tuple[list[int], list[Tensor]]]:
    """The numbers of those arrays that have any elements, and the arrays as so many rows. Together
    what travels together: those of one dtype, but for large ones, which joining would cost a
    copy."""
    for members in group_by(range(len(arrays)), map(message_key, arrays)):
        indices = [i for i in members if arrays[i].numel()]
        least = parts * WORTH_A_MESSAGE if exchange.direct else math.inf
        large = [i for i in indices if arrays[i].nbytes >= least]
        small = [i for i in indices if arrays[i].nbytes < least]
        for together in [*([i] for i in large), *([small] if small else [])]:
            yield together, [arrays[i].reshape(rows, -1) for i in together]


def cut_columns(
    arrays: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    received: Sequence[tuple[list[int], list[int], Tensor]],
) -> tuple[Tensor, ...]:
    """Answers of these shapes, out of matrices of which each has some columns."""
    answers: dict[int, Tensor] = {}
    for indices, widths, whole in received:
        pieces = whole.split_with_sizes(widths, dim=1)
        answers |= {i: piece.reshape(shapes[i]) for i, piece in zip(indices, pieces, strict=True)}
    return tuple(
        answers[i] if i in answers else x.new_empty(shapes[i]) for i, x in enumerate(arrays)
    )


def average_parts(
    parts: Sequence[tuple[Tensor, list[Tensor]]], factor: float
) -> tuple[Tensor, ...]:
    """The sums of this rank's parts and of what others have sent for each of them, times a factor;
    where this rank's parts are."""
    for whole, received in parts:
        if not received:
            continue
        n = IN_CACHE if whole.is_cpu else whole.numel()
        for own, *addends in zip(*(torch.split(x, n) for x in (whole, *received)), strict=True):
            # Each addend is divided, and not the sum: a sum of large float16 gradients would
            # overflow.
            own.mul_(factor)
            for part in addends:
                # torch would round `alpha` to the dtype, and a third is none of its numbers
                if part.itemsize < 4:
                    own.add_(part.mul_(factor))
                else:
                    own.add_(part, alpha=factor)
    return tuple(own for own, _ in parts)
