"""Thin factors with Triton, all that are there at once: products with their matrices in two
launches, orthonormal rows in five, or six. The programs are in `triton_factors.py`.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.core.kernels.arrays import group_by
from gradwire.torch_backend.ops.addresses import are_aligned, side_by_side, table_of, with_programs
from gradwire.torch_backend.ops.fused import VECTOR, launch, operator
from gradwire.torch_backend.ops.workspace import Workspace

#: Numbers that a program of a product adds up.
PART = 2048
#: Columns of a program that orthonormalizes, and elements that it multiplies at a time: so few that
#: a handful of matrices is work for all of a GPU.
CHUNK, ELEMENTS = 128, 1024
#: The most rows of a factor: its Gram matrix is in a processor's registers.
ROWS = 64
#: Factors of so many rows are multiplied in tiles.
MANY = 16
#: Of which so many numbers are summed at a time, in so many columns.
TILES = {"summed": 32, "columns": 128}


def _tile(size: int, *, along: bool) -> dict[str, int]:
    """Numbers that are summed, and columns of a tile: for factors of so many rows."""
    if size >= MANY:
        return TILES
    return (
        {"summed": 512 // size, "columns": 16} if along else {"summed": 16, "columns": 512 // size}
    )


@operator(
    "Tensor[] x, Tensor[] y, Tensor table, int programs, int size, bool along, bool aligned, *,"
    " Tensor(a!) parts"
)
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
    launch(
        "triton_factors.products", programs, parts.device, x[0], table, len(table), parts, **options
    )


@operator("Tensor parts, Tensor table, int programs, *, Tensor(a!)[] out")
def sum_of_parts(parts: Tensor, table: Tensor, programs: int, *, out: Sequence[Tensor]) -> None:
    arguments = out[0], table, len(table), parts
    launch("triton_factors.sum_of_parts", programs, parts.device, *arguments, block=VECTOR)


@functools.cache
def multiplies_doubles() -> bool:
    """Whether this Triton multiplies tiles in float64."""
    version: str = importlib.import_module("triton").__version__
    return tuple(int(part) for part in version.split(".")[:2]) >= (3, 6)


def multiplies(x: Tensor, y: Tensor) -> bool:
    """Whether the kernels multiply these."""
    if not (x.numel() and y.numel() and x.dtype == y.dtype and 2 <= x.ndim == y.ndim <= 3):
        return False
    return x.shape[-2] <= (ROWS if x.dtype != torch.float64 or multiplies_doubles() else MANY // 2)


def multiplied(ops: Workspace, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
    """`x @ y` of all, side by side in their order, of what `multiplies` says: factors (r, k) or (b,
    r, k), matrices (k, m) or (b, k, m)."""
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
    """dtype, rows filled up, whether numbers that are summed are side by side, and whether all
    begin at multiples of 16."""
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
            apart = (
                x.stride(-2),
                _address(x, i),
                y.stride(-1) if along else y.stride(-2),
                _address(y, i),
            )
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
    """The address of the matrix of this number in a stack."""
    return x.data_ptr() + (i * x.stride(0) * x.itemsize if x.ndim == 3 else 0)


def _by_rows(x: Tensor) -> Tensor:
    return x if x.ndim <= 3 and x.stride(-1) == 1 else x.contiguous().view(-1, *x.shape[-2:])


# ---- orthonormal rows


def _options(name: str, size: int) -> dict[str, int]:
    """The options of one of these kernels, for matrices of so many rows: how many columns it takes
    at a time, if it goes over columns, and how many threads have what is in them."""
    if name not in ("first_factors", "second_factors"):
        return {"columns": min(CHUNK, ELEMENTS // size), "num_stages": 1}
    return {"num_warps": 8 if size == ROWS else 4}


def _launch(
    name: str, programs: int, like: Tensor, *arguments: Any, size: int, **options: Any
) -> None:
    options |= _options(name, size) | {"size": size, "chunk": CHUNK}
    launch(f"triton_factors.{name}", programs, like.device, *arguments, **options)


@operator("Tensor[] x, Tensor table, int programs, int size, *, Tensor(a!) found")
def largest_of_rows(
    x: Sequence[Tensor], table: Tensor, programs: int, size: int, *, found: Tensor
) -> None:
    _launch("largest", programs, table, x[0], table, len(table), found, size=size)


@operator(
    "Tensor[] x, Tensor[] fresh, Tensor table, Tensor found, int programs, int size, *, Tensor(a!)"
    " grams"
)
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
def first_factors(
    table: Tensor, grams: Tensor, size: int, *, small: Tensor, usable: Tensor
) -> None:
    _launch("first_factors", len(table), table, table, grams, small, usable, size=size)


@operator(
    "Tensor[] x, Tensor[] fresh, Tensor table, Tensor found, Tensor small, Tensor usable, int"
    " programs, int size, *, Tensor(a!) once, Tensor(b!) grams"
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


def orthonormalizes(x: Tensor) -> bool:
    """Whether the kernels make rows of such a factor orthonormal."""
    return bool(x.numel()) and x.dtype.itemsize <= 4 and x.shape[-2] <= ROWS


def orthonormalized(
    ops: Workspace, arrays: Sequence[Tensor], fresh: Sequence[Tensor]
) -> list[Tensor]:
    """`gradwire.torch_backend.ops.orthonormalize.orthonormalized_unseen`, of what `orthonormalizes`
    says: new matrices, side by side."""
    keys = [(x.dtype, max(2, 1 << (x.shape[-2] - 1).bit_length())) for x in arrays]
    answers = list(arrays)
    for members in group_by(range(len(arrays)), keys):
        dtype, size = keys[members[0]]
        own = [_by_rows(arrays[i]) for i in members]
        new = [_by_rows(fresh[i].to(dtype)) for i in members] if fresh else []
        if (
            dtype.itemsize < 4 and size >= MANY
        ):  # of which Triton 3.6 and 3.7 cannot make the float64 that tiles are multiplied in
            own, new = _in_float32(ops, own), _in_float32(ops, new)
        for i, rows in zip(members, _of_one_size(ops, own, new, dtype, size), strict=True):
            answers[i] = rows
    return answers


def _in_float32(ops: Workspace, arrays: list[Tensor]) -> list[Tensor]:
    if not arrays:
        return []
    sizes = [x.numel() for x in arrays]
    flat = side_by_side(arrays)
    if flat is None:
        flat = torch.cat(
            [x.reshape(-1) for x in arrays], out=ops.temporary((sum(sizes),), arrays[0])
        )
    wide = ops.temporary(flat.shape, flat, torch.float32).copy_(flat)
    return [part.view(x.shape) for part, x in zip(torch.split(wide, sizes), arrays, strict=True)]


def _of_one_size(
    ops: Workspace, arrays: Sequence[Tensor], fresh: Sequence[Tensor], dtype: torch.dtype, size: int
) -> list[Tensor]:
    first, total = arrays[0], sum(x.numel() for x in arrays)
    room = ops.temporary((total,), first, dtype)
    out = [
        part.view(x.shape)
        for part, x in zip(torch.split(room, [x.numel() for x in arrays]), arrays, strict=True)
    ]
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
        first_products(
            arrays, fresh, table, found, small, usable, programs, size, once=once, grams=of_chunks
        )
        second_factors(table, of_chunks, size, small=small)
        second_products(table, small, once, programs, size, out=out)
    return out


def _matrices(x: Tensor, new: Tensor, out: Tensor) -> Iterator[tuple[int, ...]]:
    """Sides; strides and addresses of it and of what its negligible rows become; the address of the
    result."""
    r, n = x.shape[-2:]
    for i in range(math.prod(x.shape[:-2])):
        yield r, n, *_place(x, i), *_place(new, i), out.data_ptr() + i * r * n * out.itemsize


def _place(x: Tensor, i: int) -> tuple[int, int]:
    return x.stride(-2), _address(x, i)
