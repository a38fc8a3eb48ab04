"""Orthonormal rows from small Gram matrices, for all shapes at once, unseen by the host.

    G = X Xᵀ,  G = L Lᵀ,  X ← L⁻¹ X        twice ("CholeskyQR2", Yamamoto et al. 2015)

Gram-Schmidt takes eleven kernels for every row of every shape, which an accelerator spends on
launching them. Here the wide products are five for each shape, and what happens to the small
matrices happens to those of all shapes together. Everything is in float64, whose squares hold every
float32.

A Gram matrix cannot tell a dependent row: after a row of which a part p was left, the next one's is
known up to 1e-16/p². So rows are judged twice. The first pass makes orthonormal the rows that are
clearly independent, and of each other row what those leave of it: a difference of wide rows, which
is as exact as they are. The second pass decides, by Gram-Schmidt's rule, which of these are
rounding noise. Those that are nearly dependent on each other alone it cannot tell from noise
either, and drops: some 1e-4 of a row at most, in one of thousands of factors, which error feedback
returns.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import call_key, group_by
from gradwire.core.kernels.gram_schmidt import DEPENDENT, NEGLIGIBLE, each_shape
from gradwire.core.ops import Ops

#: A row that keeps more than this part of its norm, once the rows before it are projected out, is
#: clearly independent.
CLEAR = 3e-3
#: Added to the diagonal of Gram matrices of unit rows, so that the factor of a singular one exists.
#: More than rounding, in sums of any length.
SHIFT = 1e-12
#: Rows of an inverse factor are no longer than this, or what they make is not orthonormal: the
#: shift is in it, times the square.
LONGEST = 2e3


class KernelsWithMemory(Ops[Tensor], Protocol):
    """Kernels with memory to work in, see `gradwire.torch_backend.ops.kernels.TorchOps`."""

    @property
    def device(self) -> torch.device: ...
    def temporary(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor: ...
    def briefly(self) -> AbstractContextManager[None]: ...
    def scalar(self, y: float, dtype: torch.dtype) -> Tensor: ...
    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor: ...


def orthonormalized_unseen(
    ops: KernelsWithMemory, arrays: Sequence[Tensor], fresh: Sequence[Tensor]
) -> list[Tensor]:
    """`gradwire.core.kernels.gram_schmidt.each_shape` without epsilon, up to rounding: new
    matrices, in which dependent rows are zero, and so are rows with inf or NaN. Matrices are on one
    device. float64 is left to Gram-Schmidt, since its squares overflow."""
    answers = list(arrays)
    doubles: list[int] = []
    by_rank: dict[int, list[list[int]]] = {}
    for members in group_by(range(len(arrays)), map(call_key, arrays)):
        first = arrays[members[0]]
        if first.dtype == torch.float64:
            doubles += members
        elif first.numel():
            by_rank.setdefault(first.shape[-2], []).append(members)
    for groups in by_rank.values():
        narrow = [_room(ops, [arrays[i] for i in members]) for members in groups]
        with ops.briefly():  # what is in float64 is large, and P's and Q's memory may be the same
            wide = [_stacked(ops, [arrays[i] for i in members]) for members in groups]
            new = (
                [_stacked(ops, [fresh[i] for i in members]) for members in groups] if fresh else []
            )
            _clean(ops, wide, new)
            for room, rows in zip(narrow, _orthonormal(ops, wide), strict=True):
                room.copy_(rows.view(room.shape))
        for members, room in zip(groups, narrow, strict=True):
            for i, matrices in zip(
                members, room.view(len(members), *arrays[members[0]].shape).unbind(), strict=True
            ):
                answers[i] = matrices
    if doubles:
        some = [fresh[i] for i in doubles] if fresh else []
        for i, x in zip(
            doubles, each_shape(ops, [arrays[i] for i in doubles], some, 0.0), strict=True
        ):
            answers[i] = x
    return answers


def _room(
    ops: KernelsWithMemory, matrices: Sequence[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Memory for all of these, one after the other along their first axis."""
    first, *rest = matrices[0].shape
    return ops.temporary((len(matrices) * first, *rest), matrices[0], dtype)


def _stacked(ops: KernelsWithMemory, matrices: Sequence[Tensor]) -> Tensor:
    """(k, r, n) in float64; stacks one after the other."""
    out = _room(ops, matrices, torch.float64)
    return torch.cat(list(matrices), out=out).view(-1, *matrices[0].shape[-2:])


def _clean(ops: KernelsWithMemory, wide: list[Tensor], fresh: list[Tensor]) -> None:
    """Put rows of `fresh` in the place of negligible ones of batches (k, rank, n), or zeros in the
    place of those that are not finite."""
    largest = torch.cat(
        [torch.linalg.vector_norm(x, ord=torch.inf, dim=-1) for x in wide]
    ).unsqueeze(-1)
    if fresh:
        reliable = largest > largest.amax(dim=-2, keepdim=True) * NEGLIGIBLE
        for x, new, keep in zip(wide, fresh, _split(reliable, wide), strict=True):
            torch.where(keep, x, new, out=x)
    else:
        finite = largest < torch.inf  # a row of zeros times NaN would not be zero
        for x, keep in zip(wide, _split(finite, wide), strict=True):
            torch.where(keep, x, ops.scalar(0.0, torch.float64), out=x)


def _orthonormal(ops: KernelsWithMemory, wide: list[Tensor]) -> list[Tensor]:
    """Orthonormal rows of finite batches (k, rank, n) with different n, which are overwritten."""
    rank = wide[0].shape[-2]
    gram = _grams(wide)
    scale = _squares(gram).clamp_min(1e-290).rsqrt()  # of a row of zeros too it is finite
    if rank == 1:
        for x, factor in zip(wide, _split(scale, wide), strict=True):
            x.mul_(factor)
        return wide

    def constant(off_diagonal: float, diagonal: float) -> Tensor:
        def make() -> Tensor:
            identity = torch.eye(rank, dtype=torch.float64, device=ops.device)
            return off_diagonal + (diagonal - off_diagonal) * identity

        return ops.constant(("gram", rank, off_diagonal, diagonal), make)

    identity = constant(0.0, 1.0)
    gram = gram * scale * scale.mT
    pivots = torch.linalg.cholesky_ex(gram + constant(0.0, SHIFT))[0].diagonal(dim1=-2, dim2=-1)
    clear = (pivots > CLEAR).unsqueeze(-1)
    # The others are taken to be orthogonal to each other, and so long that this matrix is positive:
    # what the clear rows before leave of them comes out divided by about the root of this.
    longer = 1.0 + rank
    first = _inverse_factor(torch.where(clear | clear.mT, gram, constant(0.0, longer)), identity)
    once = [ops.temporary(tuple(x.shape), x) for x in wide]
    _multiply(first * scale.mT, wide, once)
    gram = _grams(once)
    squares = _squares(gram)
    left = squares > DEPENDENT**2 / longer
    second = _inverse_factor(
        torch.where(left & left.mT, gram, identity) * constant(1.0, 1.0 + SHIFT), identity
    )
    kept = (second.square() @ squares < LONGEST**2) & left
    _multiply(second * kept, once, wide)
    return wide


def _grams(wide: list[Tensor]) -> Tensor:
    return torch.cat([x @ x.mT for x in wide])


def _squares(gram: Tensor) -> Tensor:
    """The squares of the rows' norms: (k, rank, 1)."""
    return gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)


def _inverse_factor(gram: Tensor, identity: Tensor) -> Tensor:
    """L⁻¹ of G = L Lᵀ. The small triangle is inverted, since products with wide rows are what BLAS
    is good at."""
    factor = torch.linalg.cholesky_ex(gram)[0]
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity.expand_as(gram), upper=False)
    return inverse


def _multiply(small: Tensor, wide: list[Tensor], out: list[Tensor]) -> None:
    for s, x, y in zip(_split(small, wide), wide, out, strict=True):
        torch.matmul(s, x, out=y)


def _split(small: Tensor, wide: list[Tensor]) -> Sequence[Tensor]:
    return torch.split(small, [len(x) for x in wide])
