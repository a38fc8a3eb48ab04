"""Whether the device computes what it should, before any time of it counts: orthonormal factors of gradients that have few rows, and the kernels in Triton beside
torch's own operations on the CPU.

    make bench-gpu ARGS="--only numbers"
    pytest tests/torch/triton_numbers.py        # on a GPU: the same kernels on many more inputs
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.target import Target
from gradwire.core.codecs.integers import Integers
from gradwire.torch_backend.ops.fused import TorchFused, available
from gradwire.torch_backend.ops.kernels import TorchOps

Row = dict[str, Any]
#: Replicas, rows and elements of a row.
CODES = 8, 3000, 128
#: Rank, and rows that are not zero.
FEW_ROWS = [(4, 2), (4, 3), (8, 5), (32, 8), (32, 16), (32, 31)]


def number_rows(target: Target) -> Iterator[tuple[str, Callable[[], Row]]]:
    for rank, rows in FEW_ROWS:
        yield f"orthonormal factors, rank {rank}, {rows} rows", partial(_orthonormal, target, rank, rows)
    if available(target.device):
        for check in (_codes, _mean_of_codes, _product, _averages):
            yield (check.__doc__ or "").strip("."), partial(check, target)


def _found(found: float, at_most: float) -> Row:
    return {"found": found, "at_most": at_most}


def _orthonormal(target: Target, rank: int, rows: int) -> Row:
    """500 random factors of a gradient that has so many rows: the most that products of their rows differ from 0, or from 1 and 0."""
    ops, generator, worst = TorchOps(target.device), torch.Generator().manual_seed(rank), 0.0
    for _ in range(5 if target.tiny else 500):
        gradient = torch.zeros(256, 96)
        gradient[:rows] = torch.randn(rows, 96, generator=generator)
        factor = torch.randn(rank, 96, generator=generator) @ gradient.mT
        (found,) = ops.orthonormalize_each([factor.to(target.device)], [], 0.0)
        gram = (found @ found.mT).double().cpu()
        norms = gram.diagonal().clone()
        worst = max(worst, float(torch.minimum(norms.abs(), (norms - 1).abs()).max()))
        worst = max(worst, float((gram - gram.diagonal().diag()).abs().max()))
    return _found(worst, 1e-4)


def _both(target: Target) -> tuple[TorchFused, TorchOps, Tensor]:
    """The kernels, operations on the CPU, and numbers there of all magnitudes."""
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-60, 60, (*CODES[:2], 1), generator=generator).float())
    return (
        TorchFused(TorchOps(target.device)),
        TorchOps(torch.device("cpu")),
        torch.randn(CODES, generator=generator) * size,
    )


def _codes(target: Target) -> Row:
    """Codes of 8 bits and scales that differ."""
    fused, ops, x = _both(target)
    wanted = Integers().encode(ops, x[0])
    found = fused.quantized(x[0].to(target.device), Integers().largest)
    return _found(float(sum((a.cpu() != b).sum() for a, b in zip(found, wanted, strict=True))), 0)


def _mean_of_codes(target: Target) -> Row:
    """Codes of the mean of eight replicas and scales that differ."""
    fused, ops, x = _both(target)
    coded = [Integers().encode(ops, each) for each in x]
    codes, scales = (torch.stack(each) for each in zip(*coded, strict=True))
    total = Integers().decode(ops, codes[0], scales[0]).clone()
    for i in range(1, len(codes)):
        total += Integers().decode(ops, codes[i], scales[i])
    wanted = Integers().encode(ops, total * (1 / len(codes)))
    device = target.device
    found = fused.mean_quantized(codes.to(device), scales.to(device), Integers().largest, keeps=False)[:2]
    return _found(float(sum((a.cpu() != b).sum() for a, b in zip(found, wanted, strict=True))), 0)


def _product(target: Target) -> Row:
    """Residual of a product of rank 32, and nothing if the step is not finite: parts of its terms."""
    generator = torch.Generator().manual_seed(0)
    x, p, q = (torch.randn(shape, generator=generator) for shape in ((1003, 517), (32, 1003), (32, 517)))
    y, no, yes = x.clone().to(target.device), *(torch.tensor(ok, device=target.device) for ok in (False, True))
    fused = TorchFused(TorchOps(target.device))
    there, own_p, own_q = (each.to(target.device) for each in (x, p, q))
    fused.subtract_product_if(no, there, own_p, own_q, y)
    untouched = torch.equal(y.cpu(), x)
    fused.subtract_product_if(yes, there, own_p, own_q, y)
    terms = x.double().abs() + p.double().abs().mT @ q.double().abs()
    off = ((y.cpu().double() - (x.double() - p.double().mT @ q.double())).abs() / terms).max()
    return _found(float(off) if untouched else float("inf"), 4e-6)


def _averages(target: Target) -> Row:
    """What codes stand for, and what is subtracted of it, in elements that differ."""
    fused, ops, x = _both(target)
    coded = Integers().encode(ops, x[0])
    wanted = Integers().decode(ops, *coded)
    codes, scales = (each.to(target.device) for each in coded)
    yes = torch.tensor(True, device=target.device)
    (found,) = fused.decoded_each(yes, [codes], [scales], [torch.empty(wanted.shape, device=target.device)])
    rest = fused.subtract_decoded_if(yes, found, codes, scales, found[:0], 0, torch.ones_like(found))
    return _found(float((found.cpu() != wanted).sum() + rest.count_nonzero().cpu()), 0)
