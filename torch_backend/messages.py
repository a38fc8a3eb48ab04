"""One `Mean` request as messages: one flat buffer per dtype, one asynchronous all-reduce each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.collectives import Mean
from gradwire.torch_backend.scratch import Scratch

__all__ = ["Message", "Sent", "share"]


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
        divided: the arrays have been multiplied by `share` already.
    """

    def __init__(
        self, request: Mean[Tensor], group: dist.ProcessGroup, buffers: Scratch, *, divided: bool = False
    ) -> None:
        self.request = request
        self._divided = divided
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
        if not self._divided:
            flat.mul_(share(group, flat.dtype))
        work = dist.all_reduce(flat, group=group, async_op=True)
        return Message(indices, flat, in_place, work)

    def settle(self) -> None:
        """Wait for messages whose answers nobody wants."""
        for message in self.messages:
            message.work.wait()

    def wait(self) -> tuple[Tensor, ...]:
        """The averages, after the work that was meant for the meantime. On the CPU this blocks until they are there; on CUDA only the
        current stream waits."""
        for work in self.request.meanwhile:
            work()
        for message in self.messages:
            message.work.wait()
        return self.unpacked()

    def unpacked(self) -> tuple[Tensor, ...]:
        """The averages, once all messages are known to have arrived."""
        answers = list(self.request.arrays)
        for message in self.messages:
            if not message.in_place:
                start = message.flat.storage_offset()
                for i in message.indices:
                    shape = answers[i].shape
                    answers[i] = message.flat.as_strided(shape, _strides(shape), start)
                    start += shape.numel()
        return tuple(answers)


def share(group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The scalar that arrays of this dtype are multiplied by before they are summed over the ranks, so that the sum is the average.

    As the C++ reducer of DDP does it, bit for bit: before the sum, which large float16 gradients would make overflow; by the reciprocal
    of the number of ranks, which is not rounded to less than float32. A tensor: torch takes three times as long over a Python number.
    """
    return torch.tensor(1.0 / dist.get_world_size(group), dtype=torch.promote_types(dtype, torch.float32))


@functools.cache
def _strides(shape: torch.Size) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _side_by_side(arrays: Sequence[Tensor]) -> Tensor | None:
    """The one vector that these arrays, of one dtype, fill without gaps, in order; None if they do not."""
    first = arrays[0]
    begin = end = first.data_ptr()
    itemsize = first.element_size()
    for x in arrays:
        if x.data_ptr() != end or not x.is_contiguous():
            return None
        end += x.numel() * itemsize
    size = ((end - begin) // itemsize,)
    bucket = first._base  # often they are views of just that vector, which spares making it
    if bucket is not None and bucket.shape == size and bucket.dtype == first.dtype and bucket.data_ptr() == begin:
        return bucket
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.as_strided(size, (1,), first.storage_offset())
