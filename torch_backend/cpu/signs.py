"""Signs of all replicas, unpacked and added up in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.torch_backend.cpu.compiled import Loops, compiled
from gradwire.torch_backend.cpu.pool import over_rows

#: Elements of a block, and the least of a run; blocks that a thread gets at least.
BLOCK, RUN, LEAST = 512, 64, 32


def sum_of_signs(
    loops: Loops, bits: Tensor, above: Tensor, below: Tensor, of_run: Tensor, runs: int, out: Tensor
) -> bool:
    """`out` (n,), of whole blocks, becomes the sum over replicas (W, …) of what their bits stand
    for. False, and nothing is done, where no loop does that."""
    if (
        not loops.have("sum_of_signs", out.dtype)
        or runs % RUN
        or not len(out)
        or above.dtype != out.dtype
    ):
        return False
    arrays = [x.contiguous().numpy() for x in (bits, above, below)]
    loop, numbers, blocks = (
        compiled("sum_of_signs", torch.float32),
        of_run.view(1, -1).numpy(),
        out.view(-1, BLOCK),
    )
    place = blocks.numpy()
    over_rows(
        len(blocks), LEAST, lambda begin, end: loop(*arrays, numbers, place, runs, begin, end)
    )
    return True
