"""Kernels in Triton (Tillet, Kung and Cox 2019), each of which reads and writes what is large once.
`fused.py` launches them.

They are compiled without contracted multiply-adds: each product is rounded, as by NumPy, torch and
JAX; but those of two factors, which are summed as by a library of matrix products. Loops over
replicas and over a factor's rows go in order, so results do not depend on how the device is loaded.
Offsets into what is large are int64.

What works on many tensors in one launch is given a `table` (`tables.py`): a row of each of `count`,
of the first program that works on it, sizes and addresses. `aligned` promises that all of these are
multiples of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradwire.core.kernels.rounding import MAGIC as _MAGIC
from gradwire.core.kernels.rounding import TINY as _TINY

MAGIC = tl.constexpr(_MAGIC)
TINY = tl.constexpr(_TINY)
#: The bits of inf, than which those of a NaN are more.
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _row_of(table, count, columns: tl.constexpr):
    """The row that this program works on, the last that begins with it or before it; its number
    among those that do; and that of the row."""
    program = tl.program_id(0)
    low = program * 0
    high = low + count
    while low + 1 < high:
        middle = (low + high) // 2
        before = tl.load(table + middle * columns) <= program
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    row = table + low * columns
    return row, program - tl.load(row), low


@triton.jit
def _size(place, aligned: tl.constexpr):
    n = tl.load(place)
    return tl.multiple_of(n, 16) if aligned else n


@triton.jit
def _long(n, like):
    """A number of the launch as an int64, as `like` is. Triton takes a 1 for a constant, which
    knows of no types."""
    return like * 0 + n


@triton.jit
def _side(place, aligned: tl.constexpr):
    """The side of a matrix, whose elements may be more than an int32 counts."""
    n = tl.load(place).to(tl.int32)
    return tl.multiple_of(n, 16) if aligned else n


@triton.jit
def _address(place, dtype: tl.constexpr, aligned: tl.constexpr):
    pointer = tl.load(place).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if aligned else pointer


@triton.jit
def copy_if(ok, like, table, count, aligned: tl.constexpr, block: tl.constexpr):
    """out = x, or nothing at all, if the boolean at `ok` holds. A row: first program, n elements,
    x, out, all of `like`'s dtype."""
    if tl.load(ok):
        row, part, _ = _row_of(table, count, 4)
        dtype: tl.constexpr = like.dtype.element_ty
        n = _size(row + 1, aligned)
        i = part * block + tl.arange(0, block)
        x = tl.load(_address(row + 2, dtype, aligned) + i, mask=i < n)
        tl.store(_address(row + 3, dtype, aligned) + i, x, mask=i < n)


@triton.jit
def _wide(x):
    """What is computed with: float32, or float64."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def add_to(like, table, count, aligned: tl.constexpr, block: tl.constexpr):
    """x += y. A row: first program, n elements, x, y, all of `like`'s dtype."""
    row, part, _ = _row_of(table, count, 4)
    dtype: tl.constexpr = like.dtype.element_ty
    n, x = _size(row + 1, aligned), _address(row + 2, dtype, aligned)
    i = part * block + tl.arange(0, block)
    added = _wide(tl.load(_address(row + 3, dtype, aligned) + i, mask=i < n))
    tl.store(x + i, (_wide(tl.load(x + i, mask=i < n)) + added).to(dtype), mask=i < n)


@triton.jit
def multiplied_copy(like, table, count, factor, aligned: tl.constexpr, block: tl.constexpr):
    """out = x times a float32. A row: first program, n elements, x, out, all of `like`'s dtype,
    which is no float64."""
    row, part, _ = _row_of(table, count, 4)
    dtype: tl.constexpr = like.dtype.element_ty
    n = _size(row + 1, aligned)
    i = part * block + tl.arange(0, block)
    x = tl.load(_address(row + 2, dtype, aligned) + i, mask=i < n).to(tl.float32) * factor
    tl.store(_address(row + 3, dtype, aligned) + i, x.to(dtype), mask=i < n)


@triton.jit
def finite(
    like, table, count, found, aligned: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr
):
    """found (programs,): whether all elements of so many blocks of a vector are finite. A row:
    first program, how many programs look at a vector, n elements, how far it is from a vector to
    the next, the first one."""
    row, part, _ = _row_of(table, count, 5)
    dtype: tl.constexpr = like.dtype.element_ty
    across, n = tl.load(row + 1), _size(row + 2, aligned)
    x = _address(row + 4, dtype, aligned) + part // across * _size(row + 3, aligned)
    broken = tl.zeros((block,), tl.int32)
    for k in range(blocks):
        i = (part % across * blocks + k) * block + tl.arange(0, block)
        own = _wide(tl.load(x + i, mask=i < n, other=0))
        broken += (~(tl.abs(own) < float("inf"))).to(tl.int32)
    tl.store(found + tl.program_id(0), tl.sum(broken, axis=0) == 0)


@triton.jit
def product_if(
    ok,
    like,
    like_factor,
    table,
    count,
    subtracts: tl.constexpr,
    double: tl.constexpr,
    halves: tl.constexpr,
    aligned: tl.constexpr,
    some: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
):
    """`subtracts`: out = x - pᵀ q, or nothing at all: x (b, n, m), p (b, r, n) and q (b, r, m), of
    which a program makes a tile. Otherwise out = pᵀ q, or NaN. Summed in float32, or `double`;
    products of factors that are `halves`, as x is, are exact in it. `depth` rows of the factors are
    multiplied at a time. A row: first program, n, m, r, how far it is from a matrix of p to the
    next, and from a row; likewise of q; x, p, q, out."""
    holds = tl.load(ok)
    if holds or not subtracts:
        row, tile, _ = _row_of(table, count, 12)
        tile = tile.to(tl.int32)
        n, m, r = _side(row + 1, False), _side(row + 2, aligned), _side(row + 3, False)
        p_row, q_row = _side(row + 5, False), _side(row + 7, False)
        across, down = tl.cdiv(m, columns), tl.cdiv(n, some)
        batch = (tile // (across * down)).to(tl.int64)
        i = (tile // across) % down * some + tl.arange(0, some)
        j = tile % across * columns + tl.arange(0, columns)
        wide: tl.constexpr = tl.float64 if double else tl.float32
        product = tl.zeros((some, columns), wide)
        factor: tl.constexpr = like_factor.dtype.element_ty
        p = _address(row + 9, factor, False) + batch * tl.load(row + 4)
        q = _address(row + 10, factor, False) + batch * tl.load(row + 6)
        if double:
            for _ in range(r):
                column = tl.load(p + i, mask=i < n, other=0).to(wide)
                line = tl.load(q + j, mask=j < m, other=0).to(wide)
                product += column[:, None] * line[None, :]
                p += p_row
                q += q_row
        else:
            for start in range(0, r, depth):
                k = start + tl.arange(0, depth)
                own = tl.load(
                    p + k[None, :] * p_row + i[:, None],
                    mask=(k < r)[None, :] & (i < n)[:, None],
                    other=0,
                )
                line = tl.load(
                    q + k[:, None] * q_row + j[None, :],
                    mask=(k < r)[:, None] & (j < m)[None, :],
                    other=0,
                )
                if not halves:
                    own, line = own.to(wide), line.to(wide)
                product = tl.dot(own, line, product, input_precision="ieee", out_dtype=wide)
        dtype: tl.constexpr = like.dtype.element_ty
        inside = (i < n)[:, None] & (j < m)[None, :]
        at = (batch * n + i)[:, None] * m + j[None, :]
        if subtracts:
            result = (
                tl.load(_address(row + 8, dtype, aligned) + at, mask=inside, other=0).to(wide)
                - product
            )
        else:
            result = tl.where(holds, product, float("nan"))
        tl.store(_address(row + 11, dtype, aligned) + at, result.to(dtype), mask=inside)


@triton.jit
def _quantized(x, inverse):
    """The codes and scales of float32 (R, B) by `gradwire.core.kernels.rounding.quantized`, where 1
    / `inverse` is the largest code."""
    # Magnitudes as integers have their order, and NaN is the largest.
    size = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exact = size.to(tl.float32, bitcast=True) * inverse
    exact = tl.where(exact < TINY, TINY, exact)  # NaN stays
    rounded = ((exact.to(tl.int32, bitcast=True) + 255) & -256).to(tl.float32, bitcast=True)
    scale = tl.where(size < INFINITE, rounded, exact)
    multiple = x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    return (multiple + MAGIC).to(tl.int32, bitcast=True).to(tl.int8), scale


@triton.jit
def _store(codes, scales, code, scale, row, at, inside, rows):
    tl.store(codes + at, code.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def quantize(
    x, codes, scales, rows, inverse, width: tl.constexpr, padded: tl.constexpr, some: tl.constexpr
):
    """Codes and scales of the rows x (rows, width). padded is the power of two from width on."""
    row = tl.program_id(0).to(tl.int64) * some + tl.arange(0, some)
    column = tl.arange(0, padded)
    at = row[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    code, scale = _quantized(tl.load(x + at, mask=inside, other=0).to(tl.float32), inverse)
    _store(codes, scales, code, scale, row, at, inside, rows)


@triton.jit
def quantize_mean(
    codes,
    scales,
    lost,
    mean_codes,
    mean_scales,
    rows,
    replicas,
    codes_batch,
    scales_batch,
    share,
    factor,
    inverse,
    keeps: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    some: tl.constexpr,
):
    """Codes and scales of the mean of what those of all replicas, (replicas, rows, width), stand
    for: `share` times their sum. keeps: and `factor` times what rounding takes from it."""
    row = tl.program_id(0).to(tl.int64) * some + tl.arange(0, some)
    column = tl.arange(0, padded)
    at = row[:, None] * width + column[None, :]
    inside = (row < rows)[:, None] & (column < width)[None, :]
    total = tl.zeros((some, padded), tl.float32)
    for _ in range(replicas):
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        total += code * tl.load(scales + row, mask=row < rows, other=0)[:, None]
        codes += codes_batch
        scales += scales_batch
    mean = total * share
    code, scale = _quantized(mean, inverse)
    _store(mean_codes, mean_scales, code, scale, row, at, inside, rows)
    if keeps:
        rounded = code.to(tl.float32) * scale[:, None]
        tl.store(lost + at, (mean - rounded) * factor, mask=inside)


@triton.jit
def _decoded(codes, scales, i, inside, width: tl.constexpr):
    code = tl.load(codes + i, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    return code * tl.load(scales + i // width, mask=inside, other=0)


@triton.jit
def subtract_decoded_if(
    ok, like, table, count, aligned: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    """out = x - (what codes stand for), or nothing at all. A row: first program, n elements, for
    which `lost` counts as well from element `begin` to before `end`; x, codes, scales, lost,
    out."""
    if tl.load(ok):
        row, part, _ = _row_of(table, count, 9)
        dtype: tl.constexpr = like.dtype.element_ty
        n, begin, end = _size(row + 1, aligned), _size(row + 2, aligned), _size(row + 3, aligned)
        i = part * block + tl.arange(0, block)
        inside = i < n
        sent = _decoded(
            _address(row + 5, tl.uint8, aligned),
            _address(row + 6, tl.float32, False),
            i,
            inside,
            width,
        )
        lost = _address(row + 7, tl.float32, aligned)
        sent += tl.load(lost + (i - begin), mask=inside & (i >= begin) & (i < end), other=0)
        rest = tl.load(_address(row + 4, dtype, aligned) + i, mask=inside).to(tl.float32) - sent
        tl.store(_address(row + 8, dtype, aligned) + i, rest.to(dtype), mask=inside)


@triton.jit
def decode_or_nan(ok, codes, scales, out, n, width: tl.constexpr, block: tl.constexpr):
    """What n codes stand for, or NaN if the boolean at `ok` does not hold."""
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < n
    x = _decoded(codes, scales, i, inside, width)
    x = tl.where(tl.load(ok), x, float("nan"))
    tl.store(out + i, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_signs(
    bits,
    above,
    below,
    of_run,
    out,
    n,
    whole,
    rest,
    replicas,
    bits_batch,
    numbers,
    run: tl.constexpr,
    bits_of: tl.constexpr,
    block: tl.constexpr,
):
    """out = the sum over replicas of a number from `above` where the bit of an element is set, else
    from `below`. `bits_of` elements lie in a block of an eighth of as many bytes, and what is left
    after `whole` elements in `rest` bytes."""
    start = tl.program_id(0).to(tl.int64) * block
    i = start + tl.arange(0, block)
    inside = i < n
    eighth: tl.constexpr = bits_of // 8
    # Where an element is from the beginning of the first block on; where its byte is, and which bit
    # of it. Divisions of int64, and by what is not known before, are long.
    here = (start % bits_of).to(tl.int32) + tl.arange(0, block)
    if start + block <= whole:
        byte = here // bits_of * eighth + here % eighth
        shift = here % bits_of // eighth
    else:
        at = tl.where(i < whole, here % bits_of, (i - whole).to(tl.int32))
        width = tl.where(i < whole, eighth, rest)
        before = (whole // 8 - start // bits_of * eighth).to(tl.int32)
        byte = tl.where(i < whole, here // bits_of * eighth, before) + at % width
        shift = at // width
    bits += start // bits_of * eighth
    in_run = (start % run).to(tl.int32) + tl.arange(0, block)
    number = tl.load(of_run + start // run + in_run // run, mask=inside, other=0)
    total = tl.zeros((block,), out.dtype.element_ty)
    for _ in range(replicas):
        positive = (tl.load(bits + byte, mask=inside, other=0).to(tl.int32) >> shift) & 1
        high = tl.load(above + number, mask=inside, other=0)
        low = tl.load(below + number, mask=inside, other=0)
        total += tl.where(positive != 0, high, low)
        bits += bits_batch
        above += numbers
        below += numbers
    tl.store(out + i, total, mask=inside)


@triton.jit
def take_rows(
    x,
    index,
    out,
    rows,
    n,
    batch,
    apart,
    width: tl.constexpr,
    padded: tl.constexpr,
    some: tl.constexpr,
):
    """out (rows, width) = rows of x, whose numbers are at `index`: of matrices of n rows, which are
    `batch` elements from each other, and their rows `apart`."""
    row = tl.program_id(0).to(tl.int64) * some + tl.arange(0, some)
    column = tl.arange(0, padded)
    which = tl.load(index + row, mask=row < rows, other=0).to(tl.int64)
    begin = which // n * batch + which % n * apart
    inside = (row < rows)[:, None] & (column < width)[None, :]
    taken = tl.load(x + begin[:, None] + column[None, :], mask=inside)
    tl.store(out + row[:, None] * width + column[None, :], taken, mask=inside)


@triton.jit
def search_keys(x, keys, n, m, block: tl.constexpr):
    """keys = of each of n elements of rows of m a number that is larger where its magnitude is, and
    of equal ones where it comes first: above, the bits of the magnitude; below, how many of its row
    come after it. NaN counts as inf."""
    start = tl.program_id(0).to(tl.int64) * block
    i = start + tl.arange(0, block)
    size = (
        tl.load(x + i, mask=i < n, other=0).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    size = tl.minimum(size, INFINITE)
    column = ((start % m).to(tl.int32) + tl.arange(0, block)) % m
    tl.store(keys + i, (size.to(tl.int64) << 32) | (m - 1 - column).to(tl.int64), mask=i < n)


@triton.jit
def add_at(index, rows, values, out, replicas, count, k, padded: tl.constexpr):
    """out += values (replicas, count, k) at `index` in `count` rows that begin at `rows`: a program
    for each row, one replica after the other."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, padded)
    out += tl.load(rows + row)
    for _ in range(replicas):
        place = out + tl.load(index + row * k + j, mask=j < k, other=0)
        value = tl.load(values + row * k + j, mask=j < k, other=0)
        tl.store(place, tl.load(place, mask=j < k, other=0) + value, mask=j < k)
        # Another replica's value for a place is added by another thread.
        tl.debug_barrier()
        index += _long(count, row) * k
        values += _long(count, row) * k


@triton.jit
def pack_integers(x, out, n, whole, left, bits: tl.constexpr, block: tl.constexpr):
    """out = n integers of so many bits, less than 16, int32, as bytes: if these are more than 8,
    the lowest eight of each in `whole` bytes; then `left` bytes, of which bit i of byte l is bit i
    * left + l of the bits that remain, those of all integers side by side
    (`gradwire.core.kernels.bits`)."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    byte = tl.load(x + at, mask=at < whole, other=0) & 255
    for i in tl.static_range(8):
        bit = i * left + at - whole
        has = (at >= whole) & (at < whole + left) & (bit < n * (bits % 8))
        shift = tl.where(has, bit // n, 0).to(tl.int32) + bits // 8 * 8
        byte += ((tl.load(x + bit % n, mask=has, other=0) >> shift) & 1) << i
    tl.store(out + at, byte.to(tl.uint8), mask=at < whole + left)


@triton.jit
def unpack_integers(
    data, out, n, whole, left, apart, across, bits: tl.constexpr, block: tl.constexpr
):
    """out (…, n), int32, of what `pack_integers` made of each row; `apart` bytes are from a row to
    the next."""
    row = (tl.program_id(0) // across).to(tl.int64)
    at = (tl.program_id(0) % across).to(tl.int64) * block + tl.arange(0, block)
    inside = at < n
    data += row * apart
    total = tl.zeros((block,), tl.int32)
    if bits >= 8:
        total += tl.load(data + at, mask=inside, other=0).to(tl.int32)
    for k in tl.static_range(bits % 8):
        bit = k * _long(n, row) + at
        byte = tl.load(data + whole + bit % left, mask=inside, other=0).to(tl.int32)
        total += ((byte >> (bit // left).to(tl.int32)) & 1) << (bits // 8 * 8 + k)
    tl.store(out + row * n + at, total, mask=inside)
