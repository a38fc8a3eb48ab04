"""Thin factors times matrices, of many at once, in Triton: the factors of PowerSGD.

The sum over what is multiplied is cut in parts of `part` numbers, so that a long one is many programs' work. `products` makes them, `sum_of_parts` adds them up in order.
A row of the `table` is of a matrix: its first program; r, k and m of x (r, k) and y (k, m); how far it is from a row of x to the next, and the address; likewise of y, from
a row or, if it is stored column by column (`along`), from a column; where its parts begin, in elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.torch_backend.ops.triton_kernels import _address, _row_of, _side

#: Numbers in a row of the tables.
PRODUCT, SUM = tl.constexpr(9), tl.constexpr(5)


@triton.jit
def products(
    like,
    table,
    count,
    parts,
    along: tl.constexpr,
    aligned: tl.constexpr,
    size: tl.constexpr,
    part: tl.constexpr,
    summed: tl.constexpr,
    columns: tl.constexpr,
):
    """parts (k / part, r, m). `size` is r filled up to a power of two. Below 16 all products of a tile are kept until the end of the part: so few are multiplied element by element."""
    row, program, _ = _row_of(table, count, PRODUCT)
    dtype: tl.constexpr = like.dtype.element_ty
    wide: tl.constexpr = parts.dtype.element_ty
    r, k, m = _side(row + 1, False), _side(row + 2, aligned), _side(row + 3, aligned)
    x, x_apart = _address(row + 5, dtype, False), tl.load(row + 4)
    y, y_apart = _address(row + 7, dtype, aligned), tl.load(row + 6)
    if aligned:
        y_apart = tl.multiple_of(y_apart, 16)
    across = tl.cdiv(m, columns)
    number = program // across
    i, j = tl.arange(0, size), program % across * columns + tl.arange(0, columns)
    if size >= 16:
        total = tl.zeros((size, columns), wide)
    elif along:
        total = tl.zeros((size, columns, summed), wide)
    else:
        total = tl.zeros((size, summed, columns), wide)
    for start in range(0, part, summed):
        l = number * part + start + tl.arange(0, summed)
        own = tl.load(x + i[:, None] * x_apart + l[None, :], mask=(i < r)[:, None] & (l < k)[None, :], other=0)
        if along:
            inside = (j < m)[:, None] & (l < k)[None, :]
            matrix = tl.load(y + j[:, None] * y_apart + l[None, :], mask=inside, other=0)
            if size >= 16:
                total = tl.dot(own, tl.trans(matrix), total, input_precision="ieee", out_dtype=wide)
            else:
                total += own.to(wide)[:, None, :] * matrix.to(wide)[None, :, :]
        else:
            inside = (l < k)[:, None] & (j < m)[None, :]
            matrix = tl.load(y + l[:, None] * y_apart + j[None, :], mask=inside, other=0)
            if size >= 16:
                total = tl.dot(own, matrix, total, input_precision="ieee", out_dtype=wide)
            else:
                total += own.to(wide)[:, :, None] * matrix.to(wide)[None, :, :]
    if size >= 16:
        result = total
    elif along:
        result = tl.sum(total, axis=2)
    else:
        result = tl.sum(total, axis=1)
    place = parts + tl.load(row + 8) + number.to(tl.int64) * r * m
    tl.store(place + i[:, None] * m + j[None, :], result, mask=(i < r)[:, None] & (j < m)[None, :])


@triton.jit
def sum_of_parts(like, table, count, parts, block: tl.constexpr):
    """out = the sum of parts of n elements, one after the other. A row: first program, n, how many parts, where they begin, out."""
    row, program, _ = _row_of(table, count, SUM)
    n, number = tl.load(row + 1), _side(row + 2, False)
    dtype: tl.constexpr = like.dtype.element_ty
    i = program * block + tl.arange(0, block)
    parts += tl.load(row + 3)
    total = tl.load(parts + i, mask=i < n, other=0)
    for _ in range(1, number):
        parts += n
        total += tl.load(parts + i, mask=i < n, other=0)
    tl.store(_address(row + 4, dtype, False) + i, total.to(dtype), mask=i < n)
