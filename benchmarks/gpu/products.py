"""The products that PowerSGD cannot do without, one matrix alone, by the kernels that gradwire
calls: the embedding and a layer.

Each reads or writes the matrix once, or twice, and little else, so its floor is a copy of as many
bytes. The suspect is the embedding: (r, n) times (n, m) with n = 50,257 gives cuBLAS few tiles to
share among the processors. A layer of the small model lies in the cache, and may beat the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gpu.target import Target
from gradwire.torch_backend.ops.kernels import TorchOps

Row = dict[str, Any]
RANKS = 4, 32


def product_rows(target: Target, bandwidth: float) -> Iterator[tuple[str, Callable[[], Row]]]:
    for size, (_, width, vocabulary, _) in reversed(target.sizes.items()):
        for which, shape in (("embedding", (vocabulary, width)), ("up", (4 * width, width))):
            for dtype in ("float32", "bfloat16"):
                for rank in RANKS:
                    name = f"{which} of {size}, {shape[0]} x {shape[1]}, rank {rank}, {dtype}"
                    row = {
                        "matrix": which,
                        "size": size,
                        "shape": list(shape),
                        "rank": rank,
                        "dtype": dtype,
                    }
                    yield name, partial(_measured, target, row, bandwidth)


def _measured(target: Target, row: Row, bandwidth: float) -> Row:
    (n, m), r, dtype = row["shape"], row["rank"], getattr(torch, row["dtype"])
    ops = TorchOps(target.device)
    matrix, p, q = (
        torch.randn(shape, device=target.device, dtype=dtype) for shape in ((n, m), (r, n), (r, m))
    )
    p, q = p / n, q / m
    out_p, out_q, rest = torch.empty_like(p), torch.empty_like(q), torch.zeros_like(matrix)
    #: What runs, and how often it passes over the matrix.
    products: dict[str, tuple[Callable[[], Any], int]] = {
        "Q Mᵀ": (lambda: ops.matmul(q, matrix.mT, out=out_p), 1),
        "P M": (lambda: ops.matmul(p, matrix, out=out_q), 1),
        "M - Pᵀ Q": (lambda: ops.subtract_product(rest, p, q, out=rest), 2),
        "Pᵀ Q": (lambda: ops.matmul(p.mT, q, out=matrix), 1),
    }
    found = dict(row)
    for name, (run, passes) in products.items():
        ms = target.kernel_ms(run)
        found[name] = {"ms": ms, "of_bandwidth": passes * matrix.nbytes / bandwidth / (ms / 1e3)}
    return found
