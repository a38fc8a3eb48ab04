"""Messages that send half of what an all-reduce does: how they are packed, launched and cut apart.

Each function launches what is asked for, and says what to wait for. ZeRO, codes, signs and
positions travel so; averages of full precision and of low rank do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.torch_backend.engine.groups.joined_rows import (
    average_parts,
    cut_columns,
    rows_by_dtype,
)
from gradwire.torch_backend.engine.groups.point_to_point import Exchange
from gradwire.torch_backend.ops.workspace import Scratch

#: Launches messages: a function of these arguments that gives what to wait for.
Send = Callable[..., list[Any]]


class Launched(NamedTuple):
    """Messages on their way.

    Attributes:
        works: to wait for.
        sent: what each message makes all ranks' parts of together, which counts as half an
            all-reduce of it.
        unpacked: gives the answers, once all have arrived.
        watched: what arrives of floats.
    """

    works: list[Any]
    sent: list[Tensor]
    unpacked: Callable[[], tuple[Tensor, ...]]
    watched: Sequence[Tensor] = ()


def launch_gather(
    send: Send, exchange: Exchange, scratch: Scratch, arrays: Sequence[Tensor]
) -> Launched:
    """Send each rank's arrays to all, which have them below each other."""
    works, received = [], []
    for indices, rows in rows_by_dtype(arrays, 1, exchange, 1):
        widths = [row.shape[1] for row in rows]
        whole = scratch.take((exchange.size, sum(widths)), rows[0])
        torch.cat(rows, dim=1, out=whole[exchange.rank : exchange.rank + 1])
        works += send(exchange.gather, whole.view(-1), [sum(widths)] * exchange.size)
        received.append((indices, widths, whole))
    wholes = [whole for *_, whole in received]
    shapes = [(exchange.size, *x.shape) for x in arrays]
    floats = [whole for whole in wholes if whole.dtype.is_floating_point]
    return Launched(works, wholes, lambda: cut_columns(arrays, shapes, received), floats)


def launch_all_to_all(
    send: Send,
    exchange: Exchange,
    scratch: Scratch,
    arrays: Sequence[Tensor],
    parts: Sequence[Sequence[int]],
    shapes: Sequence[tuple[int, ...]],
) -> Launched:
    """Send each rank its part of each array.

    Args:
        parts: how many elements of each array go to each rank.
        shapes: of the answers, of as many elements as arrive.
    """
    size = exchange.size
    works, sent, received = [], [], []
    for indices, rows in rows_by_dtype(arrays, 1, exchange, size):
        counts = [parts[i] for i in indices]
        widths = [own[exchange.rank] for own in counts]
        given = rows[0].view(-1)
        # From memory that lasts: what was made for this message might be used anew while a stream
        # still sends it.
        if len(indices) > 1 or not given.is_cpu:
            pieces = [
                row.view(-1).split_with_sizes(list(own))
                for row, own in zip(rows, counts, strict=True)
            ]
            given = scratch.take((sum(row.numel() for row in rows),), given)
            torch.cat([piece[r] for r in range(size) for piece in pieces], out=given)
        arrives = scratch.take((size, sum(widths)), given)
        leaves = [sum(own) for own in zip(*counts, strict=True)]
        works += send(exchange.swap, given, leaves, arrives.view(-1), [sum(widths)] * size)
        sent.append(given)
        received.append((indices, widths, arrives))
    return Launched(works, sent, lambda: cut_columns(arrays, shapes, received))


def launch_reduce_scatter(
    send: Send,
    exchange: Exchange,
    scratch: Scratch | None,
    arrays: Sequence[Tensor],
    each: Sequence[Sequence[int]],
    share: Callable[[dist.ProcessGroup, torch.dtype], Tensor],
) -> Launched:
    """Average each part of an array at the rank that owns it.

    Args:
        scratch: where what arrives lies; None: in new memory.
        each: how many elements of each array each rank owns.
        share: by what arrays are multiplied before they are summed.
    """
    works: list[Any] = []
    # This rank's, where they lie in the arrays, and those of the others.
    parts: list[tuple[Tensor, list[Tensor]]] = []
    for x, counts in zip(arrays, each, strict=True):
        split, addends = torch.split(x, list(counts)), []
        own, chained = split[exchange.rank], exchange.find_chained(counts)
        if chained:
            works += [exchange.mean_for_owner(split[owner], owner) for owner in chained]
            counts = tuple(0 if owner in chained else n for owner, n in enumerate(counts))
            x = torch.cat([part for owner, part in enumerate(split) if owner not in chained])
        if exchange.native:
            works += send(exchange.sum_for_owners, x.mul_(share(exchange.group, x.dtype)), counts)
        elif x.numel():
            n = [counts[exchange.rank]] * exchange.size
            if exchange.direct:
                n[exchange.rank] = 0
            received = x.new_empty(sum(n)) if scratch is None else scratch.take((sum(n),), x)
            works += send(exchange.swap, x, counts, received, n)
            others = torch.split(received, n)
            addends = [part for r, part in enumerate(others) if r != exchange.rank and part.numel()]
        parts.append((own, addends))
    return Launched(works, list(arrays), lambda: average_parts(parts, 1.0 / exchange.size))


def launch_all_gather(
    send: Send,
    exchange: Exchange,
    arrays: Sequence[Tensor],
    each: Sequence[Sequence[int]],
    out: Sequence[Tensor | None],
) -> Launched:
    """Send each rank's part of an array to all, which have them one after the other.

    Args:
        each: how many elements of each array each rank has.
        out: where it is to lie; None: in new memory.
    """
    works, gathered = [], []
    for x, counts, place in zip(arrays, each, out, strict=True):
        whole = x.new_empty(sum(counts)) if place is None else place
        own = torch.split(whole, list(counts))[exchange.rank]
        if x.numel() and own.data_ptr() != x.data_ptr():
            own.copy_(x)
        works += send(exchange.gather, whole, counts)
        gathered.append(whole)
    return Launched(works, gathered, lambda: tuple(gathered))
