"""`ReduceScatter` and `AllGather` requests as messages: one asynchronous collective for each array."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.collectives import AllGather, ReduceScatter

__all__ = ["Gathered", "Scattered"]

# torch 2.13 has given them other names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Scattered:
    """A `ReduceScatter` request on its way.

    NCCL has the collective. Gloo's sums everything everywhere and throws most of it away, so there every rank sends each other rank its
    part, and the owner sums: the same bytes as one half of a ring all-reduce, and parts may be of any size.
    """

    def __init__(self, request: ReduceScatter[Tensor], group: dist.ProcessGroup) -> None:
        self._world_size = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self._received: list[Tensor] = []
        self._works: list[Any] = []
        for x, counts in zip(request.arrays, request.counts, strict=True):
            # Divided before the sum, as an average is everywhere here: a sum of large float16 gradients would overflow.
            x.mul_(1.0 / self._world_size)
            if _has_even_collectives(group) and len(set(counts)) == 1:
                received = x.new_empty(counts[rank])
                self._works.append(reduce_scatter(received, x, group=group, async_op=True))
            else:
                received = x.new_empty(self._world_size * counts[rank])
                self._works.append(_all_to_all(received, [counts[rank]] * self._world_size, x, list(counts), group))
            self._received.append(received)
        self._counts = [counts[rank] for counts in request.counts]

    def wait(self) -> tuple[Tensor, ...]:
        """This rank's parts of the averages. On CUDA only the current stream waits."""
        for work in self._works:
            work.wait()
        return tuple(
            x if x.numel() == count else x.view(self._world_size, count).sum(dim=0)
            for x, count in zip(self._received, self._counts, strict=True)
        )


class Gathered:
    """An `AllGather` request on its way."""

    def __init__(self, request: AllGather[Tensor], group: dist.ProcessGroup) -> None:
        self._received: list[Tensor] = []
        self._works: list[Any] = []
        for x, counts in zip(request.arrays, request.counts, strict=True):
            received = x.new_empty(sum(counts))
            if len(set(counts)) == 1:
                # As bytes: libraries do not know all dtypes that parameters may have.
                work = all_gather(_bytes(received), _bytes(x), group=group, async_op=True)
            else:
                copies = x.repeat(len(counts))
                work = _all_to_all(received, list(counts), copies, [x.numel()] * len(counts), group)
            self._works.append(work)
            self._received.append(received)

    def wait(self) -> tuple[Tensor, ...]:
        """The parts of all ranks, joined. On CUDA only the current stream waits."""
        for work in self._works:
            work.wait()
        return tuple(self._received)


def _all_to_all(
    received: Tensor, received_counts: list[int], sent: Tensor, sent_counts: list[int], group: dist.ProcessGroup
) -> Any:
    size = sent.element_size()
    return dist.all_to_all_single(
        _bytes(received),
        _bytes(sent),
        [n * size for n in received_counts],
        [n * size for n in sent_counts],
        group=group,
        async_op=True,
    )


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _has_even_collectives(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "nccl"
