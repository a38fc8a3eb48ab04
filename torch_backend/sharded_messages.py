"""`ReduceScatter` and `AllGather` requests as messages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.requests import AllGather, ReduceScatter
from gradwire.torch_backend.leaving import kept
from gradwire.torch_backend.messages import share

__all__ = ["Exchange", "Gathered", "Scattered"]

# torch 2.13 has given them other names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: The library that has both collectives.
NCCL = "nccl"
#: Tags of messages between two ranks, apart from those that a program may use itself.
FIRST_TAG = 0x67720000


class Exchange:
    """How ranks send each other parts of a vector. The same calls in the same order on all ranks.

    NCCL has both collectives. Gloo's reduce-scatter sums everything everywhere and throws most of it away, and its all-gather takes as
    long as an all-reduce; so on the CPU ranks send each other their parts directly, from where they lie to where they belong. The same
    bytes as half of a ring all-reduce, in half the time. Gloo cannot do that with CUDA tensors, for which all-to-all and broadcasts serve.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        # Not `dist.get_backend`: a group may have one library for each kind of device ("cpu:gloo,cuda:nccl").
        self.native = f"{device.type}:{NCCL}" in dist.get_backend_config(group).split(",")
        self.direct = device.type == "cpu"
        self._peers = {r: dist.get_global_rank(group, r) for r in range(self.world_size) if r != self.rank}
        self._tags = count()

    def direct_messages(self, sent: dict[int, Tensor], received: dict[int, Tensor]) -> list[Any]:
        """Start to send and receive, each by the other's rank. Empty messages are not sent."""
        tag = FIRST_TAG + next(self._tags) % 0x8000
        works = [
            dist.irecv(_bytes(x), self._peers[r], group=self.group, tag=tag) for r, x in received.items() if x.numel()
        ]
        works += [
            dist.isend(_bytes(x), self._peers[r], group=self.group, tag=tag) for r, x in sent.items() if x.numel()
        ]
        return works

    def others(self, parts: Sequence[Tensor]) -> dict[int, Tensor]:
        """The parts of the other ranks."""
        return {r: part for r, part in enumerate(parts) if r != self.rank}


class Scattered:
    """A `ReduceScatter` request on its way."""

    def __init__(self, request: ReduceScatter[Tensor], exchange: Exchange) -> None:
        self._world_size = exchange.world_size
        self._own: list[Tensor] = []
        self._from_others: list[list[Tensor]] = []
        self._works: list[Any] = []
        for x, counts in zip(request.arrays, request.counts, strict=True):
            parts = torch.split(x, list(counts))
            own = parts[exchange.rank]
            others: list[Tensor] = []
            if exchange.direct:
                received = {r: torch.empty_like(own) for r in range(exchange.world_size) if r != exchange.rank}
                self._works += exchange.direct_messages(exchange.others(parts), received)
                others = list(received.values())
            elif exchange.native:
                x.mul_(share(exchange.group, x.dtype))
                self._works += _to_owners(x, parts, exchange)
            else:
                everything = x.new_empty(exchange.world_size * own.numel())
                size = x.element_size()
                self._works.append(
                    dist.all_to_all_single(
                        _bytes(everything),
                        _bytes(x),
                        [own.numel() * size] * exchange.world_size,
                        [n * size for n in counts],
                        group=exchange.group,
                        async_op=True,
                    )
                )
                others = list(exchange.others(everything.chunk(exchange.world_size)).values()) if own.numel() else []
            self._own.append(own)
            self._from_others.append(others)

    def wait(self) -> tuple[Tensor, ...]:
        """This rank's parts of the averages, where they lay in the arrays. On CUDA only the current stream waits."""
        for work in self._works:
            kept(work, self._own[0]).wait()
        # Each addend is divided, and not the sum: a sum of large float16 gradients would overflow.
        factor = 1.0 / self._world_size
        for own, others in zip(self._own, self._from_others, strict=True):
            if others:
                own.mul_(factor)
            for part in others:
                own.add_(part, alpha=factor)
        self._from_others = []
        return tuple(self._own)


def _to_owners(x: Tensor, parts: Sequence[Tensor], exchange: Exchange) -> list[Any]:
    """Sum the parts of `x` over all ranks, each on the rank that owns it, where it lies."""
    group = exchange.group
    if len({part.numel() for part in parts}) == 1:
        return [_reduce_scatter(parts[exchange.rank], x, group=group, async_op=True)]
    # One by one, and not by all-to-all: who owns much would need room for everybody's addends.
    owners = {dist.get_global_rank(group, r): part for r, part in enumerate(parts) if part.numel()}
    return [dist.reduce(part, owner, group=group, async_op=True) for owner, part in owners.items()]


class Gathered:
    """An `AllGather` request on its way. What is gathered lies in the place that the request gives for it, or in new memory."""

    def __init__(self, request: AllGather[Tensor], exchange: Exchange) -> None:
        self._gathered: list[Tensor] = []
        self._works: list[Any] = []
        self._sent: list[Tensor] = []  # kept until it has arrived
        for x, counts, out in zip(request.arrays, request.counts, request.out, strict=True):
            whole = x.new_empty(sum(counts)) if out is None else out
            parts = torch.split(whole, list(counts))
            own = parts[exchange.rank]
            if x.numel() and own.data_ptr() != x.data_ptr():
                own.copy_(x)
            if exchange.direct:
                received = exchange.others(parts)
                self._works += exchange.direct_messages(dict.fromkeys(received, own), received)
            elif len(set(counts)) == 1:
                self._works.append(_all_gather(_bytes(whole), _bytes(x), group=exchange.group, async_op=True))
            else:
                for r, part in enumerate(parts):
                    if part.numel():
                        source = dist.get_global_rank(exchange.group, r)
                        self._works.append(dist.broadcast(_bytes(part), source, group=exchange.group, async_op=True))
            self._sent.append(x)
            self._gathered.append(whole)

    def wait(self) -> tuple[Tensor, ...]:
        """The parts of all ranks, joined. On CUDA only the current stream waits."""
        for work in self._works:
            kept(work, self._sent[0]).wait()
        return tuple(self._gathered)


def _bytes(x: Tensor) -> Tensor:
    """Libraries do not know all dtypes that parameters may have."""
    return x.view(torch.uint8)
