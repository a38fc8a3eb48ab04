"""Places of tensors in memory, so that what is done to many takes one kernel: side by side in one
vector, or anywhere, by a table of addresses.

A kernel in Triton is told of many tensors by a table of addresses and sizes on the device. Tensors
lie where they lay in the step before, as a rule: a table is made once for such addresses. It is
written by kernels that carry its numbers as arguments, and not from memory of the host, which a
CUDA graph would read again at each replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from gradwire.torch_backend.torch_internals import foreach_add_, view_base

#: So many tables are kept: of some hundred bytes a tensor.
KEPT = 256
#: Addresses and sizes that are multiples of this, bytes and elements, are read 16 bytes at a time.
ALIGNED = 16


def side_by_side(arrays: Sequence[Tensor]) -> Tensor | None:
    """The one vector that these arrays, of one dtype, fill without gaps, in order; None if they do
    not."""
    first = arrays[0]
    begin = end = first.data_ptr()
    for x in arrays:
        if x.data_ptr() != end or not x.is_contiguous():
            return None
        end += x.nbytes
    size = ((end - begin) // first.element_size(),)
    bucket = view_base(first)  # often they are views of just that vector, which spares making it
    if (
        bucket is not None
        and bucket.shape == size
        and bucket.dtype == first.dtype
        and bucket.data_ptr() == begin
    ):
        return bucket
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.as_strided(size, (1,), first.storage_offset())


def neighbours_joined(
    xs: Sequence[Tensor], ys: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The same pairs, small ones that lie side by side in memory on either side as one."""
    x, y = side_by_side(xs), side_by_side(ys)
    if x is not None and y is not None:
        yield x, y
        return
    start, x_end, y_end = 0, 0, 0
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        x_begin, y_begin = x.data_ptr(), y.data_ptr()
        if i and (x_begin != x_end or y_begin != y_end):
            yield from _joined(xs[start:i], ys[start:i])
            start = i
        x_end, y_end = x_begin + x.nbytes, y_begin + y.nbytes
    yield from _joined(xs[start:], ys[start:])


def _joined(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    if len(xs) < 2:
        return zip(xs, ys, strict=True)
    x, y = side_by_side(xs), side_by_side(ys)
    return zip(xs, ys, strict=True) if x is None or y is None else [(x, y)]


def table_of(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64 (R, C), to be read by what is launched on the current stream, and not to be written
    to."""
    numbers, width = tuple(chain.from_iterable(rows)), len(rows[0])
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=torch.int64, device=device).view(-1, width)
    if torch.cuda.is_current_stream_capturing():
        # in the graph's own memory, at each replay
        return _written(numbers, device).view(-1, width)
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return _kept(numbers, device, stream).view(-1, width)


@lru_cache(KEPT)
def _kept(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return _written(numbers, device)


def _written(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    foreach_add_(list(table.unbind()), numbers)
    return table


def with_programs(rows: Iterable[tuple[int, ...]]) -> tuple[int, list[tuple[int, ...]]]:
    """How many programs work on these, and rows that begin with the first of each. Of each row the
    first number says how many it takes."""
    first, told = 0, []
    for programs, *numbers in rows:
        told.append((first, *numbers))
        first += programs
    return first, told


def are_aligned(tensors: Iterable[Tensor], sizes: Iterable[int] = ()) -> bool:
    """Whether all addresses and sizes are multiples of `ALIGNED`."""
    return not any(x.data_ptr() % ALIGNED for x in tensors) and not any(n % ALIGNED for n in sizes)
