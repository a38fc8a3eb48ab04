"""The largest elements of rows, and where they are, in one pass over them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.torch_backend.cpu.compiled import Loops, compiled
from gradwire.torch_backend.cpu.pool import over_rows

#: Elements that a thread gets at least.
PER_THREAD = 1 << 14


def largest(loops: Loops, x: Tensor, k: int) -> tuple[Tensor, Tensor] | None:
    """Positions (R, k), int32, of the largest elements of rows (R, m), and these. None where no
    loop finds them."""
    if (
        not loops.have("largest", x.dtype)
        or x.numel() < loops.large
        or not x.is_contiguous()
        or not k
    ):
        return None
    positions, values = x.new_empty((len(x), k), dtype=torch.int32), x.new_empty((len(x), k))
    loop, arrays = compiled("largest", x.dtype), [y.numpy() for y in (x, positions, values)]
    over_rows(len(x), -(-PER_THREAD // x.shape[1]), lambda begin, end: loop(*arrays, begin, end))
    return positions, values
