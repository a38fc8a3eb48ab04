"""Tensors that lie side by side in memory: what is done to all of them takes one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.torch_backend.torch_internals import view_base


def side_by_side(arrays: Sequence[Tensor]) -> Tensor | None:
    """The one vector that these arrays, of one dtype, fill without gaps, in order; None if they do not."""
    first = arrays[0]
    begin = end = first.data_ptr()
    for x in arrays:
        if x.data_ptr() != end or not x.is_contiguous():
            return None
        end += x.nbytes
    size = ((end - begin) // first.element_size(),)
    bucket = view_base(first)  # often they are views of just that vector, which spares making it
    if bucket is not None and bucket.shape == size and bucket.dtype == first.dtype and bucket.data_ptr() == begin:
        return bucket
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():  # neighbours by chance
        return None
    return first.as_strided(size, (1,), first.storage_offset())
