"""One `Reduce` request as messages: one flat buffer per dtype, one asynchronous all-reduce each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.requests import Reduce
from gradwire.torch_backend.leaving import kept
from gradwire.torch_backend.neighbours import side_by_side
from gradwire.torch_backend.scratch import Scratch

__all__ = ["Message", "Sent", "share"]


@dataclass
class Message:
    """Some arrays of one dtype on their way."""

    indices: Sequence[int]
    sizes: list[int]
    flat: Tensor
    in_place: bool
    work: Any

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class Sent:
    """A `Reduce` request whose all-reduces have been launched.

    Args:
        request: arrays of any dtypes and shapes.
        group: process group.
        buffers: where messages are packed. Arrays that lie side by side in memory and are donated travel from where they are.
        divided: the arrays have been multiplied by `share` already.
    """

    def __init__(
        self, request: Reduce[Tensor], group: dist.ProcessGroup, buffers: Scratch, *, divided: bool = False
    ) -> None:
        self.request = request
        self._divided = divided
        self._shapes = [x.shape for x in request.arrays]
        sizes = [shape.numel() for shape in self._shapes]
        dtypes = [x.dtype for x in request.arrays]
        self.messages = []
        kinds = dict.fromkeys(dtypes)
        if len(kinds) == 1 and all(sizes):  # as a rule, and then there is nothing to sort
            self.messages.append(self._launch(range(len(sizes)), request.arrays, self._shapes, sizes, group, buffers))
            return
        for dtype in kinds:
            indices = [i for i, size in enumerate(sizes) if size and dtypes[i] == dtype]
            if indices:
                arrays, shapes = [request.arrays[i] for i in indices], [self._shapes[i] for i in indices]
                self.messages.append(self._launch(indices, arrays, shapes, [sizes[i] for i in indices], group, buffers))

    def _launch(
        self,
        indices: Sequence[int],
        arrays: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        sizes: list[int],
        group: dist.ProcessGroup,
        buffers: Scratch,
    ) -> Message:
        flat = side_by_side(arrays) if all(self.request.donated[i] for i in indices) else None
        in_place = flat is not None
        if flat is None:
            flat = buffers.take((sum(sizes),), arrays[0])
            torch.cat([x if len(s) == 1 else x.reshape(-1) for x, s in zip(arrays, shapes, strict=True)], out=flat)
        if not self._divided:
            flat.mul_(share(group, flat.dtype))
        work = kept(dist.all_reduce(flat, group=group, async_op=True), flat)
        return Message(indices, sizes, flat, in_place, work)

    def settle(self) -> None:
        """Wait for messages whose answers nobody wants."""
        for message in self.messages:
            message.work.wait()

    def wait(self) -> tuple[Tensor, ...]:
        """The averages, after the residuals that do not need them. On the CPU this blocks until they are there; on CUDA only the
        current stream waits."""
        for residual in self.request.overlap:
            residual.compute()
        for message in self.messages:
            message.work.wait()
        return self.unpacked()

    def unpacked(self) -> tuple[Tensor, ...]:
        """The averages, once all messages are known to have arrived."""
        answers = list(self.request.arrays)
        for message in self.messages:
            if not message.in_place:
                pieces = message.flat.split_with_sizes(message.sizes)
                shapes = [self._shapes[i] for i in message.indices]
                shaped = [x if len(s) == 1 else x.view(s) for x, s in zip(pieces, shapes, strict=True)]
                if len(shaped) == len(answers):
                    return tuple(shaped)
                for i, piece in zip(message.indices, shaped, strict=True):
                    answers[i] = piece
        return tuple(answers)


def share(group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The scalar that arrays of this dtype are multiplied by before they are summed over the ranks, so that the sum is the average.

    As the C++ reducer of DDP does it, bit for bit: before the sum, which large float16 gradients would make overflow; by the reciprocal
    of the number of ranks, which is not rounded to less than float32. A tensor: torch takes three times as long over a Python number.
    """
    return torch.tensor(1.0 / dist.get_world_size(group), dtype=torch.promote_types(dtype, torch.float32))
