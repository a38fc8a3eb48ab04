"""One `Mean` request as messages: one flat buffer per dtype, one asynchronous all-reduce each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.collectives import Mean
from gradwire.torch_backend.scratch import Scratch

__all__ = ["Message", "Sent"]


@dataclass
class Message:
    """Some arrays of one dtype on their way."""

    indices: list[int]
    flat: Tensor
    in_place: bool
    work: Any

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class Sent:
    """A `Mean` request whose all-reduces have been launched.

    Args:
        request: arrays of any dtypes and shapes.
        group: process group.
        buffers: where messages are packed. Arrays that lie side by side in memory and are donated travel from where they are.
    """

    def __init__(self, request: Mean[Tensor], group: dist.ProcessGroup, buffers: Scratch) -> None:
        self.request = request
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, x in enumerate(request.arrays):
            if x.numel():
                by_dtype.setdefault(x.dtype, []).append(i)
        self.messages = [self._launch(indices, group, buffers) for indices in by_dtype.values()]

    def _launch(self, indices: list[int], group: dist.ProcessGroup, buffers: Scratch) -> Message:
        arrays = [self.request.arrays[i] for i in indices]
        flat = _side_by_side(arrays) if all(self.request.donated[i] for i in indices) else None
        in_place = flat is not None
        if flat is None:
            flat = buffers.take((sum(x.numel() for x in arrays),), arrays[0])
            torch.cat([x.reshape(-1) for x in arrays], out=flat)
        # Divided before the sum, as DDP does: a sum of large float16 gradients would overflow. Multiplied by the reciprocal, as the C++
        # reducer does, for the same bits.
        flat.mul_(1.0 / dist.get_world_size(group))
        work = dist.all_reduce(flat, group=group, async_op=True)
        return Message(indices, flat, in_place, work)

    def wait(self) -> tuple[Tensor, ...]:
        """The averages. On the CPU this blocks until they are there; on CUDA only the current stream waits."""
        for message in self.messages:
            message.work.wait()
        return self.unpacked()

    def unpacked(self) -> tuple[Tensor, ...]:
        """The averages, once all messages are known to have arrived."""
        answers = list(self.request.arrays)
        for message in self.messages:
            if not message.in_place:
                start = 0
                for i in message.indices:
                    x = answers[i]
                    answers[i] = message.flat[start : start + x.numel()].view(x.shape)
                    start += x.numel()
        return tuple(answers)


def _side_by_side(arrays: Sequence[Tensor]) -> Tensor | None:
    """The one vector that these arrays fill without gaps, in order; None if they do not."""
    first = arrays[0]
    end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for x in arrays:
        if not x.is_contiguous() or x.storage_offset() != end or x.untyped_storage().data_ptr() != storage:
            return None
        end += x.numel()
    return first.as_strided((end - first.storage_offset(),), (1,), first.storage_offset())
