"""Orthonormal rows of all factors that are there, of any shapes, in five launches, or six: those of `triton_orthonormalize.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import group_by
from gradwire.torch_backend.ops.fused import launch, operator
from gradwire.torch_backend.ops.tables import table_of, with_programs
from gradwire.torch_backend.ops.workspace import Workspace

#: Columns of a program, and elements of what it has in registers.
CHUNK, ELEMENTS = 1024, 4096
#: The most rows of a factor: its Gram matrix is in a processor's registers.
ROWS = 64
#: Of so many, more threads have what is in them.
MANY = 16


def _launch(name: str, programs: int, like: Tensor, *arguments: Any, size: int, **options: Any) -> None:
    """One of these kernels, for matrices of so many rows. What goes over columns is told how many it takes at a time."""
    if name not in ("first_factors", "second_factors"):
        options["columns"] = min(CHUNK, ELEMENTS // size)
    options["num_warps"] = 8 if size >= MANY else 4
    launch(f"triton_orthonormalize.{name}", programs, like.device, *arguments, size=size, chunk=CHUNK, **options)


@operator("Tensor[] x, Tensor table, int programs, int size, *, Tensor(a!) found")
def largest_of_rows(x: Sequence[Tensor], table: Tensor, programs: int, size: int, *, found: Tensor) -> None:
    _launch("largest", programs, table, x[0], table, len(table), found, size=size)


@operator("Tensor[] x, Tensor[] fresh, Tensor table, Tensor found, int programs, int size, *, Tensor(a!) grams")
def grams(
    x: Sequence[Tensor],
    fresh: Sequence[Tensor],
    table: Tensor,
    found: Tensor,
    programs: int,
    size: int,
    *,
    grams: Tensor,
) -> None:
    arguments = x[0], table, len(table), found, grams
    _launch("grams", programs, table, *arguments, refreshes=bool(fresh), size=size)


@operator("Tensor table, Tensor grams, int size, *, Tensor(a!) small, Tensor(b!) usable")
def first_factors(table: Tensor, grams: Tensor, size: int, *, small: Tensor, usable: Tensor) -> None:
    _launch("first_factors", len(table), table, table, grams, small, usable, size=size)


@operator(
    "Tensor[] x, Tensor[] fresh, Tensor table, Tensor found, Tensor small, Tensor usable, int programs, int size, *, "
    "Tensor(a!) once, Tensor(b!) grams"
)
def first_products(
    x: Sequence[Tensor],
    fresh: Sequence[Tensor],
    table: Tensor,
    found: Tensor,
    small: Tensor,
    usable: Tensor,
    programs: int,
    size: int,
    *,
    once: Tensor,
    grams: Tensor,
) -> None:
    arguments = x[0], table, len(table), found, small, usable, once, grams
    _launch("first_products", programs, table, *arguments, refreshes=bool(fresh), size=size)


@operator("Tensor table, Tensor grams, int size, *, Tensor(a!) small")
def second_factors(table: Tensor, grams: Tensor, size: int, *, small: Tensor) -> None:
    _launch("second_factors", len(table), table, table, grams, small, size=size)


@operator("Tensor table, Tensor small, Tensor once, int programs, int size, *, Tensor(a!)[] out")
def second_products(
    table: Tensor, small: Tensor, once: Tensor, programs: int, size: int, *, out: Sequence[Tensor]
) -> None:
    _launch("second_products", programs, table, out[0], table, len(table), small, once, size=size)


def takes(x: Tensor) -> bool:
    """Whether the kernels know such a factor."""
    return bool(x.numel()) and x.dtype.itemsize <= 4 and x.shape[-2] <= ROWS


def orthonormalized(ops: Workspace, arrays: Sequence[Tensor], fresh: Sequence[Tensor]) -> list[Tensor]:
    """`gradwire.torch_backend.ops.orthonormalize.orthonormalized_unseen`, of what `takes` says: new matrices, side by side."""
    keys = [(x.dtype, max(2, 1 << (x.shape[-2] - 1).bit_length())) for x in arrays]
    answers = list(arrays)
    for members in group_by(range(len(arrays)), keys):
        own = [_by_rows(arrays[i]) for i in members]
        new = [_by_rows(fresh[i].to(own[0].dtype)) for i in members] if fresh else []
        for i, rows in zip(members, _of_one_size(ops, own, new, keys[members[0]][1]), strict=True):
            answers[i] = rows
    return answers


def _of_one_size(ops: Workspace, arrays: Sequence[Tensor], fresh: Sequence[Tensor], size: int) -> list[Tensor]:
    first, total = arrays[0], sum(x.numel() for x in arrays)
    room = ops.temporary((total,), first)
    out = [part.view(x.shape) for part, x in zip(torch.split(room, [x.numel() for x in arrays]), arrays, strict=True)]
    rows: list[tuple[int, ...]] = []
    chunks = elements = 0
    for x, new, y in zip(arrays, fresh or arrays, out, strict=True):
        for r, n, *places, place in _matrices(x, new, y):
            rows.append((-(-n // CHUNK), r, n, chunks, *places, elements, place))
            chunks, elements = chunks + rows[-1][0], elements + r * n
    programs, told = with_programs(rows)
    table = table_of(told, first.device)
    with ops.briefly():
        wide = torch.float64
        found = ops.temporary((chunks if fresh else 1, size), first, torch.int32)
        of_chunks = ops.temporary((chunks, size, size), first, wide)
        small = ops.temporary((len(rows), size, size), first, wide)
        usable = ops.temporary((len(rows), size), first, torch.int32)
        once = ops.temporary((total,), first, wide)
        if fresh:
            largest_of_rows(arrays, table, programs, size, found=found)
        grams(arrays, fresh, table, found, programs, size, grams=of_chunks)
        first_factors(table, of_chunks, size, small=small, usable=usable)
        first_products(arrays, fresh, table, found, small, usable, programs, size, once=once, grams=of_chunks)
        second_factors(table, of_chunks, size, small=small)
        second_products(table, small, once, programs, size, out=out)
    return out


def _matrices(x: Tensor, new: Tensor, out: Tensor) -> Iterator[tuple[int, ...]]:
    """Sides; strides and addresses of it and of what its negligible rows become; the address of the result."""
    r, n = x.shape[-2:]
    for i in range(math.prod(x.shape[:-2])):
        yield r, n, *_place(x, i), *_place(new, i), out.data_ptr() + i * r * n * out.itemsize


def _place(x: Tensor, i: int) -> tuple[int, int]:
    between = x.stride(0) if x.ndim == 3 else 0
    return x.stride(-2), x.data_ptr() + i * between * x.itemsize


def _by_rows(x: Tensor) -> Tensor:
    return x if x.ndim <= 3 and x.stride(-1) == 1 else x.contiguous().view(-1, *x.shape[-2:])
