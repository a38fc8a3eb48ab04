"""The largest elements of many matrices, their positions as bytes, and their sum at their places:
each at once for all matrices and replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from gradwire.core.kernels.rows import of_tiles
from gradwire.torch_backend.cpu.largest import largest as compiled_largest
from gradwire.torch_backend.ops.workspace import Workspace

#: Elements that are searched at a time, on the CPU and on a device: each needs 16 bytes beside it.
SEARCHED = 1 << 20, 1 << 25
#: Matrices of other widths are searched as one, filled up with so many zeros at most; or a quarter
#: of all, if that is more.
FILLED = 1 << 20
#: Elements that are added up at a time: each needs 16 bytes beside it.
ADDED = 1 << 24
#: The bits of a float32 that is inf; those of a NaN are more.
INFINITE = 0x7F800000

Part = tuple[int, int, tuple[int, int] | None]


def largest_each(ops: Workspace, xs: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """`Ops.largest_each`. Matrices of several widths are filled up to be one: of zeros the last are
    never chosen."""
    found = [_largest(ops, _joined(ops, xs[lot]), k) for lot in _lots([tuple(x.shape) for x in xs])]
    index, values = (
        each[0] if len(each) == 1 else torch.cat(each) for each in zip(*found, strict=True)
    )
    return index, values


def _lots(shapes: Sequence[tuple[int, ...]]) -> Iterator[slice]:
    """Which matrices are searched as one: neighbours, as far as not too much of it is filled up."""
    start = size = rows = widest = 0
    for i, (n, m) in enumerate(shapes):
        filled = (rows + n) * max(widest, m) - size - n * m
        if i > start and filled > max(FILLED, (size + n * m) // 4):
            yield slice(start, i)
            start, size, rows, widest = i, 0, 0, 0
        size, rows, widest = size + n * m, rows + n, max(widest, m)
    yield slice(start, len(shapes))


def _joined(ops: Workspace, xs: Sequence[Tensor]) -> Tensor:
    """Matrices below each other, narrow ones filled up with zeros."""
    if len(xs) == 1:
        return xs[0]
    counts, width = [len(x) for x in xs], max(x.shape[1] for x in xs)
    if all(x.shape[1] == width for x in xs):
        return torch.cat(list(xs))
    whole = ops.temporary((sum(counts), width), xs[0])
    narrow = [i for i, x in enumerate(xs) if x.shape[1] < width]
    ends = list(accumulate(counts))
    whole[ends[narrow[0]] - counts[narrow[0]] : ends[narrow[-1]]].zero_()
    places = [part[:, : x.shape[1]] for part, x in zip(torch.split(whole, counts), xs, strict=True)]
    ops.copy_each(places, xs)
    return whole


def _largest(ops: Workspace, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions, int32, and elements."""
    if (found := compiled_largest(ops.loops, x, k)) is not None:
        return found
    some = max(1, SEARCHED[not ops.host_knows] // max(1, x.shape[1]))
    each = [_searched(ops, part, k) for part in torch.split(x, some)]
    index = each[0] if len(each) == 1 else torch.cat(each)
    return index.to(torch.int32), x.gather(-1, index)


def _searched(ops: Workspace, x: Tensor, k: int) -> Tensor:
    if x.dtype == torch.float64:
        size = x.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
        return size.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    # `topk` promises nothing about equal elements. So no two are equal: one integer holds the
    # magnitude, whose bits have the order of integers, and below it the position.
    if ops.fused is not None and x.numel():
        keys = ops.fused.search_keys(x)
    else:
        size = (x.to(torch.float32).view(torch.int32) & 0x7FFFFFFF).clamp_max_(INFINITE)
        keys = (
            size.to(torch.int64).mul_(1 << 32).bitwise_or_(ops.numbers(x.shape[1], torch.int64, -1))
        )
    return keys.topk(k, dim=-1, sorted=False).indices


def scatter_sum_each(
    ops: Workspace,
    parts: Sequence[Part],
    of: Callable[..., tuple[Tensor, Tensor]],
    every: Sequence[Tensor],
    order: Sequence[int] | None,
) -> list[Tensor]:
    """`Ops.scatter_sum_each`: all parts lie in one vector, and what several replicas have sent is
    added to it at once, in their order."""
    order = range(len(parts)) if order is None else order
    sizes = [n * m for n, m, _ in parts]
    firsts = dict(zip(order, accumulate([0, *(sizes[i] for i in order)]), strict=False))

    def begins() -> Tensor:
        rows = [firsts[i] + m * np.arange(n) for i, (n, m, _) in enumerate(parts)]
        return ops.asarray(np.concatenate(rows)[:, None], "int64")

    rows = ops.constant(("where rows begin", tuple(parts), tuple(order)), begins)
    replicas, total = every[0].shape[0], None
    some = max(1, ADDED // max(1, *(x.numel() // replicas for x in every)))
    for start in range(0, replicas, some):
        index, values = of(*(x[start : start + some] for x in every))
        if total is None:
            total = ops.zeros((sum(sizes),), ops.dtype_of(values))
        _add(ops, total, index, rows, values, distinct=replicas == 1)
    assert total is not None
    found = [
        total[firsts[i] : firsts[i] + size].view(n, -1)
        for i, (size, (n, _, _)) in enumerate(zip(sizes, parts, strict=True))
    ]
    return [
        x if tiles is None else of_tiles(x, *tiles)
        for x, (_, _, tiles) in zip(found, parts, strict=True)
    ]


def _add(
    ops: Workspace, total: Tensor, index: Tensor, rows: Tensor, values: Tensor, *, distinct: bool
) -> None:
    """Add values (W, R, k) to a vector, one replica after the other, in rows that begin at `rows`
    (R, 1). `distinct`: no two have one place."""
    if ops.fused is not None and not distinct and index.shape[-1] <= ops.fused.widest:
        ops.fused.add_at(total, index, rows, values)
        return
    at, added = (index + rows).reshape(-1), values.reshape(-1)
    if distinct:
        total.scatter_(0, at, added)
    elif ops.host_knows:
        total.scatter_add_(0, at, added)
    else:
        # On CUDA `scatter_add_` adds in any order, so that ranks may differ in the last bit; this
        # sorts the positions.
        total.index_put_((at,), added, accumulate=True)


# --- positions as bytes: whole bytes of each, then bytes that several positions share ---


@cache
def _shared(bits: int) -> tuple[int, int, np.ndarray, np.ndarray]:
    """How integers of so few bits, below 8, share bytes: in how many equal pieces they are cut, how
    many rows of bytes one of each piece share, and two tables. Bit i of byte row j is bit (j + i ·
    rows) // pieces of the integer of piece (j + i · rows) % pieces (`gradwire.core.kernels.bits`).

    Returns:
        pieces, rows, uint8 (rows, pieces, 2**bits): what an integer has in each byte; int32 (rows,
            pieces, 256): what a byte has of each.
    """
    pieces = 8 // math.gcd(bits, 8)
    rows = bits * pieces // 8
    packed, unpacked = (
        np.zeros((rows, pieces, 1 << bits), np.uint8),
        np.zeros((rows, pieces, 256), np.int32),
    )
    for j in range(rows):
        for i in range(8):
            bit, piece = divmod(j + i * rows, pieces)
            packed[j, piece] |= ((np.arange(1 << bits) >> bit & 1) << i).astype(np.uint8)
            unpacked[j, piece] |= (np.arange(256) >> i & 1) << bit
    return pieces, rows, packed, unpacked


def pack_integers(ops: Workspace, x: Tensor, bits: int) -> Tensor | None:
    """`Ops.pack_integers`; None where they fill no whole bytes, or more than one each."""
    whole, rest = divmod(bits, 8)
    x = x.reshape(-1)
    pieces, rows, packed, _ = _shared(rest)
    if whole > 1 or len(x) % pieces or not bits:
        return None
    parts = [x.to(torch.uint8)] * whole  # which keeps the lowest eight bits
    if rest:
        # Of each piece the rows of its own in the table.
        table = ops.constant(
            ("packed", rest), lambda: ops.asarray(packed.reshape(rows, -1).T, "uint8")
        )
        first = ops.constant(
            ("first of packed", rest),
            lambda: ops.asarray([[i << rest] for i in range(pieces)], "int32"),
        )
        high = x >> 8 if whole else x
        found = table.index_select(0, (high.view(pieces, -1) + first).view(-1)).view(
            pieces, -1, rows
        )
        # Of one bit each piece has others, so that the sum is what is in any of them.
        parts.append(found.sum(0, dtype=torch.uint8).mT.reshape(-1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack_integers(ops: Workspace, data: Tensor, bits: int, n: int) -> Tensor | None:
    """Integers (…, n), int32, of bytes (…, b); None where `pack_integers` has none."""
    whole, rest = divmod(bits, 8)
    pieces, rows, _, unpacked = _shared(rest)
    if whole > 1 or n % pieces or not bits:
        return None
    low = data[..., :n].to(torch.int32) if whole else None
    if not rest:
        return low
    table = ops.constant(("unpacked", rest), lambda: ops.asarray(unpacked, "int32"))
    lead = data.shape[:-1]
    shared = data[..., whole * n :].reshape(*lead, rows, -1).to(torch.int32)
    each = [table[j].index_select(1, shared[..., j, :].reshape(-1)) for j in range(rows)]
    high = reduce(torch.bitwise_or, each).view(pieces, *lead, -1).movedim(0, -2).reshape(*lead, n)
    return high if low is None else low.bitwise_or_(high << 8)
