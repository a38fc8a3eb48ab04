"""What is done to the factors of PowerSGD, of many matrices at once, in Triton. `factors.py`
launches it.

Products: thin factors times matrices.

The sum over what is multiplied is cut in parts of `part` numbers, so that a long one is many
programs' work. `products` makes them, `sum_of_parts` adds them up in order. A row of the `table` is
of a matrix: its first program; r, k and m of x (r, k) and y (k, m); how far it is from a row of x
to the next, and the address; likewise of y, from a row or, if it is stored column by column
(`along`), from a column; where its parts begin, in elements.

Orthonormal rows: what `orthonormalize.py` does, whose formulas and decisions these are.

    grams            of chunks of columns, each by a program
    first_factors    of a matrix by a program: their sum, which rows are clearly independent, and
                     the small triangle that makes them orthonormal
    first_products   the rows times it, and Gram matrices of chunks of what that makes
    second_factors   the same again, and which rows are kept
    second_products  the rows times that

All in float64. A row of the `table` is of a matrix: its first program, r and n, the number of its
first chunk, how far it is from a row to the next and the address; the same of what replaces
negligible rows; where its rows lie in float64, in elements; where the result lies. `size` is r
filled up to a power of two, so nothing depends on which other matrices there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.core.kernels.gram_schmidt import DEPENDENT as _DEPENDENT
from gradwire.core.kernels.gram_schmidt import NEGLIGIBLE as _NEGLIGIBLE
from gradwire.torch_backend.ops.factors import multiplies_doubles as _multiplies_doubles
from gradwire.torch_backend.ops.orthonormalize import CLEAR as _CLEAR
from gradwire.torch_backend.ops.orthonormalize import LONGEST as _LONGEST
from gradwire.torch_backend.ops.orthonormalize import SHIFT as _SHIFT
from gradwire.torch_backend.ops.triton_kernels import _address, _row_of, _side

DEPENDENT, NEGLIGIBLE = tl.constexpr(_DEPENDENT), tl.constexpr(_NEGLIGIBLE)
CLEAR, LONGEST, SHIFT = tl.constexpr(_CLEAR), tl.constexpr(_LONGEST), tl.constexpr(_SHIFT)
#: Numbers in a row of the table.
COLUMNS = tl.constexpr(10)
#: On an A100 and later in its tensor cores, which round float64 as other units do.
DOUBLES = tl.constexpr(_multiplies_doubles())
#: Chunks that are read together before they are added up, one after the other.
TOGETHER = tl.constexpr(4)
#: A pivot below it is one of rounding.
LEAST = tl.constexpr(1e-290)
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
    """parts (k / part, r, m). `size` is r filled up to a power of two. Below 16 all products of a
    tile are kept until the end of the part: so few are multiplied element by element."""
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
        own = tl.load(
            x + i[:, None] * x_apart + l[None, :], mask=(i < r)[:, None] & (l < k)[None, :], other=0
        )
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
    """out = the sum of parts of n elements, one after the other. A row: first program, n, how many
    parts, where they begin, out."""
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


# ---- orthonormal rows


@triton.jit
def _sides(row):
    return tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32), tl.load(row + 3)


@triton.jit
def _matrix(row, place: tl.constexpr, dtype: tl.constexpr):
    """Its address, and how far it is from a row to the next."""
    return tl.load(row + place + 1).to(tl.pointer_type(dtype)), tl.load(row + place)


@triton.jit
def _chunks(n, chunk: tl.constexpr):
    return tl.cdiv(n, chunk)


@triton.jit
def largest(
    like, table, count, found, size: tl.constexpr, chunk: tl.constexpr, columns: tl.constexpr
):
    """The bits of the largest magnitude of each row of a chunk, int32 (chunks, size), of which NaN
    is the largest."""
    row, part, _ = _row_of(table, count, COLUMNS)
    r, n, first = _sides(row)
    x, apart = _matrix(row, 4, like.dtype.element_ty)
    i = tl.arange(0, size)
    most = tl.zeros((size,), tl.int32)
    for start in range(0, chunk, columns):
        j = part * chunk + start + tl.arange(0, columns)
        inside = (i < r)[:, None] & (j < n)[None, :]
        own = tl.load(x + i[:, None] * apart + j[None, :], mask=inside, other=0).to(tl.float32)
        most = tl.maximum(most, tl.max(own.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    tl.store(found + (first + part) * size + i, most)


@triton.jit
def _reliable(found, first, chunks, size: tl.constexpr):
    """Whether rows are more than negligible beside the longest."""
    i = tl.arange(0, size)
    most = tl.zeros((size,), tl.int32)
    for start in range(0, chunks, TOGETHER):
        for part in tl.static_range(TOGETHER):
            there = start + part < chunks
            most = tl.maximum(
                most, tl.load(found + (first + start + part) * size + i, mask=there, other=0)
            )
    limit = tl.max(most, axis=0).to(tl.float32, bitcast=True).to(tl.float64) * NEGLIGIBLE
    return most.to(tl.float32, bitcast=True).to(tl.float64) > limit


@triton.jit
def _wide(x, x_apart, new, new_apart, reliable, i, j, inside, refreshes: tl.constexpr):
    """Elements in float64: those of rows that are not reliable are others."""
    own = tl.load(x + i * x_apart + j, mask=inside, other=0).to(tl.float64)
    if refreshes:
        own = tl.where(
            reliable, own, tl.load(new + i * new_apart + j, mask=inside, other=0).to(tl.float64)
        )
    return own


@triton.jit
def _added_to_gram(gram, rows, size: tl.constexpr):
    """`gram` and the products of all rows (size, columns) with each other."""
    if size >= 16 and DOUBLES:
        gram = tl.dot(rows, tl.trans(rows), gram, input_precision="ieee", out_dtype=tl.float64)
    else:
        i = tl.arange(0, size)
        for k in range(size):
            one = tl.sum(tl.where((i == k)[:, None], rows, 0.0), axis=0)
            products = tl.sum(rows * one[None, :], axis=1)
            gram += tl.where((i == k)[None, :], products[:, None], 0.0)
    return gram


@triton.jit
def _store_gram(grams, number, gram, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(grams + number * size * size + i[:, None] * size + i[None, :], gram)


@triton.jit
def grams(
    like,
    table,
    count,
    found,
    gram_of,
    refreshes: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    columns: tl.constexpr,
):
    """The products of rows of each chunk, (chunks, size, size). A row with inf or NaN makes its own
    products NaN, and no others."""
    row, part, _ = _row_of(table, count, COLUMNS)
    r, n, first = _sides(row)
    x, apart = _matrix(row, 4, like.dtype.element_ty)
    new, new_apart = _matrix(row, 6, like.dtype.element_ty)
    i = tl.arange(0, size)
    keep = _reliable(found, first, _chunks(n, chunk), size) if refreshes else i < r
    gram = tl.zeros((size, size), tl.float64)
    for start in range(0, chunk, columns):
        j = part * chunk + start + tl.arange(0, columns)
        inside = (i < r)[:, None] & (j < n)[None, :]
        rows = _wide(
            x, apart, new, new_apart, keep[:, None], i[:, None], j[None, :], inside, refreshes
        )
        gram = _added_to_gram(gram, rows, size)
    _store_gram(gram_of, first + part, gram, size)


@triton.jit
def _sum_of_grams(gram_of, first, chunks, size: tl.constexpr):
    i = tl.arange(0, size)
    gram = tl.zeros((size, size), tl.float64)
    at = first * size * size + i[:, None] * size + i[None, :]
    for start in range(0, chunks, TOGETHER):
        for part in tl.static_range(TOGETHER):
            there = start + part < chunks
            gram += tl.load(gram_of + at + (start + part) * size * size, mask=there, other=0.0)
    return gram


@triton.jit
def _diagonal(gram, size: tl.constexpr):
    i = tl.arange(0, size)
    return tl.sum(tl.where(i[:, None] == i[None, :], gram, 0.0), axis=1)


@triton.jit
def _pivot(gram, k, size: tl.constexpr):
    """Row k, column k, and where they meet."""
    i = tl.arange(0, size)
    line = tl.sum(tl.where((i == k)[:, None], gram, 0.0), axis=0)
    column = tl.sum(tl.where((i == k)[None, :], gram, 0.0), axis=1)
    return line, column, tl.sum(tl.where(i == k, column, 0.0), axis=0)


@triton.jit
def _pivots(gram, size: tl.constexpr):
    """Squares of the diagonal of a Cholesky factor."""
    i = tl.arange(0, size)
    found = tl.zeros((size,), tl.float64)
    for k in range(size):
        line, column, pivot = _pivot(gram, k, size)
        found = tl.where(i == k, pivot, found)
        factor = tl.where(i > k, column / tl.where(pivot > LEAST, pivot, float("inf")), 0.0)
        gram -= factor[:, None] * line[None, :]
    return found


@triton.jit
def _inverse_factor(gram, size: tl.constexpr):
    """L⁻¹ of G = L Lᵀ, by elimination in G and in ones side by side."""
    i = tl.arange(0, size)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float64)
    found = tl.zeros((size,), tl.float64)
    for k in range(size):
        line, column, pivot = _pivot(gram, k, size)
        found = tl.where(i == k, pivot, found)
        factor = tl.where(i > k, column / tl.where(pivot > LEAST, pivot, float("inf")), 0.0)
        gram -= factor[:, None] * line[None, :]
        own = tl.sum(tl.where((i == k)[:, None], inverse, 0.0), axis=0)
        inverse -= factor[:, None] * own[None, :]
    return inverse / tl.sqrt(tl.maximum(found, LEAST))[:, None]


@triton.jit
def first_factors(table, gram_of, small, usable, size: tl.constexpr, chunk: tl.constexpr):
    """small (matrices, size, size), and which rows are finite, int32 (matrices, size)."""
    number = tl.program_id(0).to(tl.int64)
    r, n, first = _sides(table + number * COLUMNS)
    i = tl.arange(0, size)
    gram = _sum_of_grams(gram_of, first, _chunks(n, chunk), size)
    squares = _diagonal(gram, size)
    finite = (squares < float("inf")) & (i < r)
    gram = tl.where(finite[:, None] & finite[None, :], gram, 0.0)
    scale = 1.0 / tl.sqrt(tl.maximum(tl.where(finite, squares, 0.0), LEAST))
    gram = gram * scale[:, None] * scale[None, :]
    ones = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float64)
    clear = _pivots(gram + ones * SHIFT, size) > CLEAR * CLEAR
    # See `_orthonormal` in orthonormalize.py.
    longer = (r + 1).to(tl.float64)
    gram = tl.where(clear[:, None] | clear[None, :], gram, ones * longer)
    result = _inverse_factor(gram, size) * scale[None, :]
    tl.store(small + number * size * size + i[:, None] * size + i[None, :], result)
    tl.store(usable + number * size + i, finite.to(tl.int32))


@triton.jit
def second_factors(table, gram_of, small, size: tl.constexpr, chunk: tl.constexpr):
    """small (matrices, size, size): a row that is dropped is of zeros."""
    number = tl.program_id(0).to(tl.int64)
    r, n, first = _sides(table + number * COLUMNS)
    i = tl.arange(0, size)
    gram = _sum_of_grams(gram_of, first, _chunks(n, chunk), size)
    squares = _diagonal(gram, size)
    left = (squares * (r + 1).to(tl.float64) > DEPENDENT * DEPENDENT) & (i < r)
    ones = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float64)
    gram = tl.where(left[:, None] & left[None, :], gram, ones) * (1.0 + ones * SHIFT)
    result = _inverse_factor(gram, size)
    kept = (tl.sum(result * result * squares[None, :], axis=1) < LONGEST * LONGEST) & left
    tl.store(
        small + number * size * size + i[:, None] * size + i[None, :],
        tl.where(kept[:, None], result, 0.0),
    )


@triton.jit
def first_products(
    like,
    table,
    count,
    found,
    small,
    usable,
    once,
    gram_of,
    refreshes: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    columns: tl.constexpr,
):
    """once = the small matrix times the rows, in float64, and of each chunk the Gram matrix."""
    row, part, number = _row_of(table, count, COLUMNS)
    r, n, first = _sides(row)
    x, apart = _matrix(row, 4, like.dtype.element_ty)
    new, new_apart = _matrix(row, 6, like.dtype.element_ty)
    once += tl.load(row + 8)
    small += number * size * size
    usable += number * size
    i = tl.arange(0, size)
    keep = _reliable(found, first, _chunks(n, chunk), size) if refreshes else i < r
    gram = tl.zeros((size, size), tl.float64)
    for start in range(0, chunk, columns):
        j = part * chunk + start + tl.arange(0, columns)
        inside = (i < r)[:, None] & (j < n)[None, :]
        if size >= 16 and DOUBLES:
            used = inside & (tl.load(usable + i) > 0)[:, None]
            own = _wide(
                x, apart, new, new_apart, keep[:, None], i[:, None], j[None, :], used, refreshes
            )
            factor = tl.load(small + i[:, None] * size + i[None, :])
            rows = tl.dot(factor, own, input_precision="ieee", out_dtype=tl.float64)
        else:
            rows = tl.zeros((size, columns), tl.float64)
            for k in range(r):
                reliable = (
                    tl.sum(tl.where(i == k, keep.to(tl.int32), 0), axis=0) > 0
                    if refreshes
                    else True
                )
                used = j < tl.where(tl.load(usable + k) > 0, n, 0)
                one = _wide(x, apart, new, new_apart, reliable, k, j, used, refreshes)
                rows += tl.load(small + i * size + k)[:, None] * one[None, :]
        rows = tl.where(inside, rows, 0.0)
        tl.store(once + i[:, None].to(tl.int64) * n + j[None, :], rows, mask=inside)
        gram = _added_to_gram(gram, rows, size)
    _store_gram(gram_of, first + part, gram, size)


@triton.jit
def second_products(
    like, table, count, small, once, size: tl.constexpr, chunk: tl.constexpr, columns: tl.constexpr
):
    """The result = the small matrix times `once`, side by side."""
    row, part, number = _row_of(table, count, COLUMNS)
    r, n, _ = _sides(row)
    once += tl.load(row + 8)
    small += number * size * size
    out = tl.load(row + 9).to(tl.pointer_type(like.dtype.element_ty))
    i = tl.arange(0, size)
    for start in range(0, chunk, columns):
        j = part * chunk + start + tl.arange(0, columns)
        inside = (i < r)[:, None] & (j < n)[None, :]
        if size >= 16 and DOUBLES:
            own = tl.load(once + i[:, None].to(tl.int64) * n + j[None, :], mask=inside, other=0)
            factor = tl.load(small + i[:, None] * size + i[None, :])
            rows = tl.dot(factor, own, input_precision="ieee", out_dtype=tl.float64)
        else:
            rows = tl.zeros((size, columns), tl.float64)
            line = once
            for k in range(r):
                one = tl.load(line + j, mask=j < n, other=0)
                line += n
                rows += tl.load(small + i * size + k)[:, None] * one[None, :]
        tl.store(
            out + i[:, None].to(tl.int64) * n + j[None, :],
            rows.to(tl.float32).to(like.dtype.element_ty),
            mask=inside,
        )
