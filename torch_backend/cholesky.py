"""Orthonormal rows on an accelerator: from small Gram matrices, for all shapes at once, unseen by the host.

    G = X Xᵀ,  G = L Lᵀ,  X ← L⁻¹ X        twice ("CholeskyQR2", Yamamoto, Nakatsukasa, Yanagisawa and Fukaya 2015)

Gram-Schmidt takes eleven kernels for every row of every shape, which an accelerator spends on launching them. Here the wide products are
five for each shape, and what happens to the small matrices happens to those of all shapes together. Everything is in float64, whose
squares hold every float32 and tell rows apart that Gram-Schmidt in float32 tells apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradwire.core.kernels.gram_schmidt import DEPENDENT, NEGLIGIBLE, each_shape

if TYPE_CHECKING:
    from gradwire.torch_backend.kernels import TorchOps

#: Added to the diagonal of Gram matrices of unit rows, so that the factor of a singular one exists and shows which rows are dependent.
JITTER = 1e-14


def orthonormalized_unseen(ops: TorchOps, arrays: Sequence[Tensor], fresh: Sequence[Tensor]) -> list[Tensor]:
    """`gradwire.core.kernels.gram_schmidt.each_shape` without epsilon, up to rounding: new matrices, in which dependent rows are zero, and so are rows
    with inf or NaN. Matrices are on one device. float64 is left to Gram-Schmidt, since its squares overflow."""
    answers = list(arrays)
    equal: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for i, x in enumerate(arrays):
        kind = x.shape, x.dtype
        if kind in equal:
            equal[kind].append(i)
        else:
            equal[kind] = [i]
    doubles: list[int] = []
    by_rank: dict[int, list[list[int]]] = {}
    for (shape, dtype), members in equal.items():
        if dtype == torch.float64:
            doubles += members
        elif shape.numel():
            by_rank.setdefault(shape[-2], []).append(members)
    for rank, groups in by_rank.items():
        wide = [_stacked(ops, [arrays[i] for i in members]) for members in groups]
        new = [_stacked(ops, [fresh[i] for i in members]) for members in groups] if fresh else []
        for members, rows in zip(groups, _orthonormal(ops, rank, wide, new), strict=True):
            narrow = ops.temporary(tuple(rows.shape), arrays[members[0]]).copy_(rows)
            for i, matrices in zip(members, narrow.view(len(members), *arrays[members[0]].shape).unbind(), strict=True):
                answers[i] = matrices
    if doubles:
        some = [fresh[i] for i in doubles] if fresh else []
        for i, x in zip(doubles, each_shape(ops, [arrays[i] for i in doubles], some, 0.0, Tensor.unbind), strict=True):
            answers[i] = x
    return answers


def _stacked(ops: TorchOps, matrices: Sequence[Tensor]) -> Tensor:
    """(k, r, n) in float64; stacks one after the other."""
    *stack, r, n = matrices[0].shape
    first = stack[0] if stack else r
    out = ops.temporary((len(matrices) * first, *matrices[0].shape[1:]), matrices[0], torch.float64)
    return torch.cat(list(matrices), out=out).view(-1, r, n)


def _orthonormal(ops: TorchOps, rank: int, wide: list[Tensor], fresh: list[Tensor]) -> list[Tensor]:
    """For batches (k, rank, n) with different n, which are overwritten."""
    counts = [len(x) for x in wide]
    largest = torch.cat([torch.linalg.vector_norm(x, ord=torch.inf, dim=-1) for x in wide]).unsqueeze(-1)
    if fresh:
        reliable = largest > largest.amax(dim=-2, keepdim=True) * NEGLIGIBLE
        for x, new, keep in zip(wide, fresh, torch.split(reliable, counts), strict=True):
            torch.where(keep, x, new, out=x)
    else:
        finite = largest < torch.inf  # a row of zeros times NaN would not be zero
        for x, keep in zip(wide, torch.split(finite, counts), strict=True):
            torch.where(keep, x, ops.scalar(0.0, torch.float64), out=x)
    gram = _grams(wide)
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt().unsqueeze(-1)
    scale = torch.where(lengths > 0, lengths.reciprocal(), 0.0)
    if rank == 1:
        for x, factor in zip(wide, torch.split(scale, counts), strict=True):
            x.mul_(factor)
        return wide
    identity = ops.constant(("identity", rank), lambda: torch.eye(rank, dtype=torch.float64, device=ops.device))
    gram = gram * scale * scale.mT
    # A dependent row becomes zero, and no other row is projected on it.
    pivots = torch.linalg.cholesky_ex(gram + identity * JITTER)[0].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    kept = (pivots > DEPENDENT) & (scale > 0)
    dropped = identity * ~kept
    first = _inverse_factor(torch.where(kept & kept.mT, gram, dropped), identity)
    once = [ops.temporary(tuple(x.shape), x) for x in wide]
    _multiply(first * (scale * kept).mT, wide, once)
    _multiply(_inverse_factor(_grams(once) + dropped, identity), once, wide)
    return wide


def _grams(wide: list[Tensor]) -> Tensor:
    return torch.cat([x @ x.mT for x in wide])


def _inverse_factor(gram: Tensor, identity: Tensor) -> Tensor:
    """L⁻¹ of G = L Lᵀ. The small triangle is inverted, since products with wide rows are what BLAS is good at."""
    factor = torch.linalg.cholesky_ex(gram)[0]
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity.expand_as(gram), upper=False)
    return inverse


def _multiply(small: Tensor, wide: list[Tensor], out: list[Tensor]) -> None:
    for s, x, y in zip(torch.split(small, [len(x) for x in wide]), wide, out, strict=True):
        torch.matmul(s, x, out=y)
