"""Signs of many tensors as one vector of bits, and the sum of what those of all replicas stand for.

The vector is cut into blocks of 512 elements, of which byte j has elements j, 64 + j, 128 + j, …;
what is left, into eight parts. So few elements of all replicas are unpacked, added up and forgotten
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.torch_backend.cpu import signs as blocks
from gradwire.torch_backend.ops.addresses import side_by_side
from gradwire.torch_backend.ops.workspace import Workspace

#: Elements of a block, and bytes.
BLOCK, BYTES = 512, 64
#: Elements that are unpacked at a time, of all replicas together: each needs some 10 bytes. Of each
#: replica no fewer than the second, so that many replicas need no more operations than some.
UNPACKED, EACH = 1 << 22, 1 << 13
#: Tensors of fewer elements are copied to lie side by side.
SMALL = 1 << 16
#: Of tensors that lie in one vector, runs that share a number begin at multiples of this, if they
#: do.
RUN = 64

Shape = tuple[int, ...]


class Lot(NamedTuple):
    """Tensors whose bits lie in one vector.

    Attributes:
        members: their numbers.
        starts, ends: where each begins, and where it ends; between them there may be up to seven
            bits that stand for nothing.
        size: elements of the vector.
        runs: of so many elements each has one number.
        numbers: which, of those of all tensors; of each run of the vector.
    """

    members: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    size: int
    runs: int
    numbers: np.ndarray


def shares_along_rows(shape: Shape, sharing: Shape) -> bool:
    """Whether elements that share a number lie side by side."""
    last = max((i for i, n in enumerate(sharing) if n > 1), default=-1)
    return sharing[: last + 1] == shape[: last + 1]


@cache
def lots(shapes: tuple[Shape, ...], sharing: tuple[Shape, ...]) -> tuple[Lot, ...]:
    """Which tensors lie in one vector: those whose runs are long, and the others."""
    counts = [math.prod(shape) for shape in sharing]
    firsts = [0, *accumulate(counts)]
    found: dict[bool, list[int]] = {}
    # Backwards, since in DDP's buckets the last parameter is the first.
    for i in reversed(range(len(shapes))):
        found.setdefault(math.prod(shapes[i]) // counts[i] % RUN == 0, []).append(i)
    return tuple(
        _lot(members, [math.prod(shape) for shape in shapes], counts, firsts)
        for members in found.values()
    )


def _lot(
    members: Sequence[int], sizes: Sequence[int], counts: Sequence[int], firsts: Sequence[int]
) -> Lot:
    padded = [-(-sizes[i] // 8) * 8 for i in members]
    *starts, size = accumulate([0, *padded])
    long = [sizes[i] // counts[i] for i in members]
    runs = math.gcd(BLOCK, *long, *padded)
    numbers = []
    for i, n, whole in zip(members, long, padded, strict=True):
        own = np.repeat(np.arange(firsts[i], firsts[i] + counts[i]), n // runs)
        numbers.append(np.pad(own, (0, whole // runs - len(own)), mode="edge"))
    ends = tuple(start + sizes[i] for start, i in zip(starts, members, strict=True))
    return Lot(tuple(members), tuple(starts), ends, size, runs, np.concatenate(numbers))


def pack_signs(ops: Workspace, xs: Sequence[Tensor], sharing: Sequence[Shape]) -> list[Tensor]:
    """`Ops.pack_signs`: an array for each lot."""
    each = lots(tuple(tuple(x.shape) for x in xs), tuple(map(tuple, sharing)))
    return [_packed(ops, _positive(ops, [xs[i] for i in lot.members], lot)) for lot in each]


def _positive(ops: Workspace, xs: Sequence[Tensor], lot: Lot) -> Tensor:
    flags = ops.temporary((lot.size,), xs[0], torch.bool)
    if lot.size > sum(x.numel() for x in xs):
        flags.zero_()
    start = 0
    for flat, stride in _side_by_side(xs, lot):
        torch.gt(flat, 0, out=flags[start : start + len(flat)])
        start += stride
    return flags


def _side_by_side(xs: Sequence[Tensor], lot: Lot) -> Iterator[tuple[Tensor, int]]:
    """All tensors as few vectors, and how far it is from each to the next: such as lie side by
    side, and small ones copied."""
    i = 0
    while i < len(xs):
        first, j = i, i + 1
        while (
            j < len(xs)
            and lot.starts[j] == lot.ends[j - 1]
            and xs[j - 1].data_ptr() + xs[j - 1].nbytes == xs[j].data_ptr()
        ):
            j += 1
        whole = side_by_side(xs[i:j])
        if whole is None or whole.numel() < SMALL:
            copied = i + 1
            while (
                copied < len(xs)
                and lot.starts[copied] == lot.ends[copied - 1]
                and max(xs[copied - 1].numel(), xs[copied].numel()) < SMALL
            ):
                copied += 1
            if whole is None or copied > j:
                j = copied
                some = [x.reshape(-1) for x in xs[i:j]]
                whole = torch.cat(some) if len(some) > 1 else some[0]
        i = j
        yield whole, (lot.starts[j] if j < len(xs) else lot.size) - lot.starts[first]


def _packed(ops: Workspace, flags: Tensor) -> Tensor:
    whole = len(flags) // BLOCK * BLOCK
    parts = []
    if whole:  # eight bytes at a time
        shifts = ops.numbers(8, torch.int64).view(-1, 1)
        words = flags[:whole].view(torch.int64).view(-1, 8, BYTES // 8)
        parts.append((words << shifts).sum(1).view(torch.uint8).view(-1))
    if whole < len(flags):
        rest = flags[whole:].view(torch.uint8).view(8, -1)
        parts.append((rest << ops.numbers(8, torch.uint8).view(-1, 1)).sum(0, dtype=torch.uint8))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sum_of_signs(
    ops: Workspace,
    every: Sequence[Tensor],
    above: Tensor,
    below: Tensor,
    shapes: Sequence[Shape],
    sharing: Sequence[Shape],
) -> list[Tensor]:
    """`Ops.sum_of_signs`, of numbers (W, N) of all tensors: views of a vector for each lot."""
    answers: dict[int, Tensor] = {}
    key = tuple(map(tuple, shapes)), tuple(map(tuple, sharing))
    for number, (bits, lot) in enumerate(zip(every, lots(*key), strict=True)):

        def numbers(lot: Lot = lot) -> Tensor:
            return ops.asarray(lot.numbers, "int32")

        of_run = ops.constant(("numbers of runs", *key, number), numbers)
        bits = bits.reshape(len(bits), -1)
        if ops.fused is None:
            total = _added(ops, bits, above, below, lot, of_run)
        else:
            total = ops.temporary((lot.size,), above)
            ops.fused.sum_of_signs(bits, above, below, of_run, lot.runs, BLOCK, total)
        for i, start, end in zip(lot.members, lot.starts, lot.ends, strict=True):
            answers[i] = total[start:end].view(shapes[i])
    return [answers[i] for i in range(len(shapes))]


def _added(
    ops: Workspace, bits: Tensor, above: Tensor, below: Tensor, lot: Lot, of_run: Tensor
) -> Tensor:
    replicas, whole = len(bits), lot.size // BLOCK * BLOCK
    total = ops.temporary((lot.size,), above)
    done = (
        whole
        if blocks.sum_of_signs(ops.loops, bits, above, below, of_run, lot.runs, total[:whole])
        else 0
    )
    step = max(EACH, UNPACKED // replicas // BLOCK * BLOCK)
    ends = [
        *range(done + step, whole, step),
        *([whole] * (whole > done)),
        *([lot.size] * (whole < lot.size)),
    ]
    shifts = ops.numbers(8, torch.uint8).view(-1, 1)
    for start, end in zip([done, *ends], ends, strict=False):
        width = BYTES if end <= whole else (end - start) // 8
        own = bits[:, start // 8 : end // 8].reshape(replicas, -1, 1, width)
        flags = ((own >> shifts) & 1).view(torch.bool).view(replicas, -1, lot.runs)
        some = of_run[start // lot.runs : end // lot.runs]
        high, low = (x.index_select(1, some).unsqueeze(-1) for x in (above, below))
        _sum_in_order(ops, torch.where(flags, high, low).view(replicas, -1), total[start:end])
    return total


def _sum_in_order(ops: Workspace, every: Tensor, out: Tensor) -> None:
    """The sum of rows, one after the other."""
    if len(every) == 1:
        out.copy_(every[0])
    elif ops.host_knows:
        ops.add_in_order(out.zero_(), every)
    else:
        # A device without Triton, on which `index_add_` and `cumsum` add in any order.
        out.copy_(every[0])
        for row in every[1:]:
            out.add_(row)
