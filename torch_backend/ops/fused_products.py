"""Thin factors times matrices, of all that are there, in two launches: those of `triton_products.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import group_by
from gradwire.torch_backend.ops.fused import VECTOR, launch, operator
from gradwire.torch_backend.ops.tables import are_aligned, table_of, with_programs
from gradwire.torch_backend.ops.workspace import Workspace

#: Numbers that a program adds up.
PART = 2048
#: The most rows of a factor.
ROWS = 64


def _tile(size: int, *, along: bool) -> dict[str, int]:
    """Numbers that are summed, and columns of a tile: for factors of so many rows."""
    if size >= 16:
        return {"summed": 32, "columns": 64}
    return {"summed": 512 // size, "columns": 16} if along else {"summed": 16, "columns": 512 // size}


@operator("Tensor[] x, Tensor[] y, Tensor table, int programs, int size, bool along, bool aligned, *, Tensor(a!) parts")
def products(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    table: Tensor,
    programs: int,
    size: int,
    along: bool,
    aligned: bool,
    *,
    parts: Tensor,
) -> None:
    options: dict[str, Any] = {"size": size, "along": along, "aligned": aligned, "part": PART}
    options |= _tile(size, along=along) | {"enable_fp_fusion": True}
    launch("triton_products.products", programs, parts.device, x[0], table, len(table), parts, **options)


@operator("Tensor parts, Tensor table, int programs, *, Tensor(a!)[] out")
def sum_of_parts(parts: Tensor, table: Tensor, programs: int, *, out: Sequence[Tensor]) -> None:
    arguments = out[0], table, len(table), parts
    launch("triton_products.sum_of_parts", programs, parts.device, *arguments, block=VECTOR)


def takes(x: Tensor, y: Tensor) -> bool:
    """Whether the kernels multiply these."""
    return bool(x.numel() and y.numel()) and x.dtype == y.dtype and 2 <= x.ndim == y.ndim <= 3 and x.shape[-2] <= ROWS


def multiplied(ops: Workspace, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """`x @ y` of all, side by side in their order, of what `takes` says: factors (r, k) or (b, r, k), matrices (k, m) or (b, k, m)."""
    shapes = [(*x.shape[:-1], y.shape[-1]) for x, y in zip(xs, ys, strict=True)]
    out: list[Tensor] = list(xs)
    for some in group_by(range(len(xs)), [x.dtype for x in xs]):
        sizes = [math.prod(shapes[i]) for i in some]
        room = ops.temporary((sum(sizes),), xs[some[0]])
        for i, part in zip(some, torch.split(room, sizes), strict=True):
            out[i] = part.view(shapes[i])
    own = [_by_rows(x) for x in xs]
    matrices = [y if 1 in y.stride()[-2:] else y.contiguous() for y in ys]
    keys = [_key(x, y) for x, y in zip(own, matrices, strict=True)]
    for some in group_by(range(len(xs)), keys):
        _, size, along, aligned = keys[some[0]]
        x, y, z = ([each[i] for i in some] for each in (own, matrices, out))
        _of_one_kind(ops, x, y, z, size, along, aligned)
    return out


def _key(x: Tensor, y: Tensor) -> tuple[torch.dtype, int, bool, bool]:
    """dtype, rows filled up, whether numbers that are summed are side by side, and whether all begin at multiples of 16."""
    along = y.stride(-2) == 1 and y.stride(-1) != 1
    apart = y.stride(-1) if along else y.stride(-2)
    aligned = are_aligned([y], [apart, *y.shape[-2:], *y.stride()[:-2]])
    return x.dtype, max(2, 1 << (x.shape[-2] - 1).bit_length()), along, aligned


def _of_one_kind(
    ops: Workspace,
    xs: Sequence[Tensor],
    ys: Sequence[Tensor],
    out: Sequence[Tensor],
    size: int,
    along: bool,
    aligned: bool,
) -> None:
    columns, elements = _tile(size, along=along)["columns"], 0
    rows: list[tuple[int, ...]] = []
    sums: list[tuple[int, ...]] = []
    for x, y, z in zip(xs, ys, out, strict=True):
        (r, k), m = x.shape[-2:], y.shape[-1]
        number = -(-k // PART)
        for i in range(math.prod(x.shape[:-2])):
            apart = (x.stride(-2), _address(x, i), y.stride(-1) if along else y.stride(-2), _address(y, i))
            rows.append((number * -(-m // columns), r, k, m, *apart, elements))
            sums.append((-(-r * m // VECTOR), r * m, number, elements, _address(z, i)))
            elements += number * r * m
    with ops.briefly():
        wide = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
        parts = ops.temporary((elements,), xs[0], wide)
        programs, told = with_programs(rows)
        products(xs, ys, table_of(told, parts.device), programs, size, along, aligned, parts=parts)
        programs, told = with_programs(sums)
        sum_of_parts(parts, table_of(told, parts.device), programs, out=out)


def _address(x: Tensor, i: int) -> int:
    """Of the matrix of this number in a stack."""
    return x.data_ptr() + (i * x.stride(0) * x.itemsize if x.ndim == 3 else 0)


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
