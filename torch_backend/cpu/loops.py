"""The loops that numba compiles: serial, without the interpreter's lock, over a range of rows.

Each has one order in which it adds, written out here: so any number of threads, each with rows of
its own, comes to the same bits, and so does any processor. Nothing is contracted or reordered (no
`fastmath`). A sum along a row has `LANES` accumulators, which a processor adds to side by side.

All arrays lie in rows without gaps. Loops count from 0: of an index that numba does not know to be
positive it asks whether it is negative, and then nothing is computed side by side. All are in this
file, by whose contents numba keeps what it has compiled.
"""

from __future__ import annotations

import numba
import numpy as np

#: Accumulators of a sum along a row.
LANES = 64

_inner = numba.njit(nogil=True, error_model="numpy")


def add_and_project(x, y, q, p, begin, end):
    """Rows of x (n, m), to which those of y are added, times those of q (r, m): p (r, n)."""
    r, m = q.shape
    lanes = np.zeros((r, LANES), x.dtype)
    deep, whole = m // (4 * LANES) * 4 * LANES, m // LANES * LANES
    for i in range(begin, end):
        for c in range(0, deep, 4 * LANES):
            for k in range(4 * LANES):
                x[i, c + k] += y[i, c + k]
            for j in range(r):
                for k in range(LANES):
                    first = lanes[j, k] + x[i, c + k] * q[j, c + k]
                    second = first + x[i, c + LANES + k] * q[j, c + LANES + k]
                    third = second + x[i, c + 2 * LANES + k] * q[j, c + 2 * LANES + k]
                    lanes[j, k] = third + x[i, c + 3 * LANES + k] * q[j, c + 3 * LANES + k]
        for c in range(deep, whole, LANES):
            for k in range(LANES):
                x[i, c + k] += y[i, c + k]
            for j in range(r):
                for k in range(LANES):
                    lanes[j, k] += x[i, c + k] * q[j, c + k]
        for k in range(whole, m):
            x[i, k] += y[i, k]
            for j in range(r):
                lanes[j, k - whole] += x[i, k] * q[j, k]
        for j in range(r):
            p[j, i] = _total(lanes[j])


@_inner
def _total(lanes):
    """Half of them added to the other half, until one is left; and all are zero again."""
    half = LANES // 2
    while half:
        for k in range(half):
            lanes[k] += lanes[half + k]
        half //= 2
    total = lanes[0]
    for k in range(LANES):
        lanes[k] = 0
    return total


@_inner
def _times_rows_added(t, a, w, b, x, c, y, d, z):
    for k in range(len(t)):
        t[k] = (((t[k] + a * w[k]) + b * x[k]) + c * y[k]) + d * z[k]


@_inner
def _times_row_added(t, a, w):
    for k in range(len(t)):
        t[k] += a * w[k]


@_inner
def _combined(t, p, q, i):
    """Rows of q, times the numbers of column i of p, added one after the other."""
    r = len(q)
    for k in range(len(t)):
        t[k] = p[0, i] * q[0, k]
    j = 1
    while j + 4 <= r:
        _times_rows_added(
            t, p[j, i], q[j], p[j + 1, i], q[j + 1], p[j + 2, i], q[j + 2], p[j + 3, i], q[j + 3]
        )
        j += 4
    while j < r:
        _times_row_added(t, p[j, i], q[j])
        j += 1


@_inner
def _taken_and_replaced(x, e, lost, new):
    for k in range(len(x)):
        e[k] = x[k] - lost[k]
        x[k] = new[k]


def settle(x, e, p, q, s, t, begin, end):
    """Rows of e (n, m) become those of x less p.T @ q, and those of x become s.T @ t: p and s (r,
    n), q and t (r, m)."""
    r, m = q.shape
    lost, new = np.empty(m, x.dtype), np.empty(m, x.dtype)
    for i in range(begin, end):
        xs, es = x[i], e[i]
        if r == 4:
            p0, p1, p2, p3, s0, s1, s2, s3 = (
                p[0, i],
                p[1, i],
                p[2, i],
                p[3, i],
                s[0, i],
                s[1, i],
                s[2, i],
                s[3, i],
            )
            q0, q1, q2, q3, t0, t1, t2, t3 = q[0], q[1], q[2], q[3], t[0], t[1], t[2], t[3]
            for k in range(m):
                es[k] = xs[k] - (((p0 * q0[k] + p1 * q1[k]) + p2 * q2[k]) + p3 * q3[k])
                xs[k] = ((s0 * t0[k] + s1 * t1[k]) + s2 * t2[k]) + s3 * t3[k]
            continue
        _combined(lost, p, q, i)
        _combined(new, s, t, i)
        _taken_and_replaced(xs, es, lost, new)


# --- blocks of codes: rows (R, B) of float32, of each of which codes (R, m) and a scale (R, 1) are
# made, bit for bit as in `gradwire.core.codecs`

# Of an unsigned index nobody asks whether it is negative. Rows are said by their number: a view of
# each would be counted as it comes and goes, which takes longer than a row of 128; and bits are
# those of a number, not of memory that it would be written to first.

#: Kinds of codes: odd ones are two in a byte.
INT8, INT4, E4M3, E3M0 = range(4)
#: So many codes in a loop of one length, without what is left over.
TILE = 64
#: The reciprocal of what the largest element of a block becomes.
_RECIPROCALS = np.array([1 / 127, 1 / 8, 1 / 448, 1 / 64], np.float32)
#: See `gradwire.core.kernels.rounding`.
_MAGIC, _TINY = np.float32(1.5 * 2**23), np.float32(2.0**-100)
_MAGNITUDE, _INFINITE, _ROUNDED = np.int32(0x7FFFFFFF), np.int32(0x7F800000), np.int32(-256)
_SEVEN, _EIGHT = np.float32(7), np.float32(8)
#: Of float8_e4m3fn: what is above its largest number, its least number with a full mantissa, and a
#: float32 whose last place is its least number.
_BEYOND, _NORMAL, _LAST_PLACE = np.float32(464), np.float32(2.0**-6), np.float32(2.0**14)
_LEAST, _OF_LAST_PLACE = np.float32(2.0**-9), 0x46800000
#: Times this what is halfway between two powers of two is the larger.
_THIRDS, _HALF, _ZERO = np.float32(4 / 3), np.float32(0.5), np.float32(0)
_THREE_QUARTERS, _NAN = np.float32(0.75), np.float32(np.nan)


@_inner
def _bits(x):
    return np.float32(x).view(np.int32)


@_inner
def _number(bits):
    return np.int32(bits).view(np.float32)


@_inner
def _scale(x, i, kind):
    """The scale of a row."""
    most, highest = np.int32(0), np.int32(0)
    for k in range(x.shape[1]):  # as integers, of which that of NaN is the largest
        size = np.int32(_bits(x[i, k]) & _MAGNITUDE)
        most = size if size > most else most
    scale = _number(most) * _RECIPROCALS[kind]
    if most < _INFINITE:
        scale = _number((_bits(scale if scale > _TINY else _TINY) + 255) & _ROUNDED)
    if kind != INT4:
        return scale
    for k in range(x.shape[1]):
        bits = _bits(x[i, k])
        highest = bits if bits > highest else highest
    return -scale if highest >= most else scale


@_inner
def _nearest(x, reciprocal):
    """Bits, of which the lowest eight are the nearest integer, in two's complement."""
    return _bits(x * reciprocal + _MAGIC)


@_inner
def _nibble(x, reciprocal):
    """The same, of which the lowest four are; what is nearer to 8 becomes 7."""
    times = x * reciprocal
    return _bits((times if times < _SEVEN else _SEVEN) + _MAGIC) & 15


@_inner
def _float8(x, reciprocal):
    """The bits of the nearest float8_e4m3fn; halves to the even one."""
    times = x * reciprocal
    bits, size = _bits(times), np.float32(abs(times))
    of_size = bits & _MAGNITUDE
    full = ((of_size + 0x7FFFF + ((of_size >> 20) & 1)) >> 20) - (120 << 3)
    code = full if size >= _NORMAL else _bits(size + _LAST_PLACE) - _OF_LAST_PLACE
    return (code if size <= _BEYOND else 127) | ((bits >> 24) & 128)


@_inner
def _power(x, reciprocal):
    """The sign, and the number of the nearest power of two, from 1; or of zero."""
    times = x * reciprocal
    size = np.float32(abs(times))
    small = 1 if size > _HALF else 0
    code = (_bits(size * _THIRDS) >> 23) - 126 if size > _THREE_QUARTERS else small
    return (code & 7) | (8 if times < _ZERO else 0)


@_inner
def _encode_row(x, i, codes, scales, j, kind):
    """Rows j of codes (…, m) and scales (…, 1) become those of row i of x (…, B)."""
    scale, m = _scale(x, i, kind), codes.shape[1]
    reciprocal = np.float32(1) / scale
    scales[j, 0] = scale
    if kind == INT8:
        for k in range(m):
            codes[j, k] = _nearest(x[i, k], reciprocal)
    elif kind == INT4:
        for k in range(m):
            codes[j, k] = _nibble(x[i, k], reciprocal) | (
                _nibble(x[i, np.uintp(m + k)], reciprocal) << 4
            )
    elif kind == E4M3:
        for k in range(m):
            codes[j, k] = _float8(x[i, k], reciprocal)
    else:
        for k in range(m):
            codes[j, k] = _power(x[i, k], reciprocal) | (
                _power(x[i, np.uintp(m + k)], reciprocal) << 4
            )


@_inner
def _of_nibble(code, scale):
    return scale * (np.float32(np.int32(code ^ 8)) - _EIGHT)


@_inner
def _of_float8(code, scale):
    size = code & 127
    full, small = _number((size << 20) + (120 << 23)), np.float32(np.int32(size)) * _LEAST
    value = _NAN if size == 127 else full if size >= 8 else small
    return scale * (-value if code & 128 else value)


@_inner
def _of_power(code, scale):
    size = code & 7
    value = _number((size + 126) << 23) if size else _ZERO
    return scale * (-value if code & 8 else value)


@_inner
def _decode_row(codes, scales, i, kind, out, j):
    """Row j of out (…, B) becomes what rows i of codes (…, m) and scales (…, 1) stand for."""
    scale, m = scales[i, 0], codes.shape[1]
    if kind == INT8:
        for k in range(m):
            out[j, k] = scale * np.float32(np.int8(codes[i, k]))
    elif kind == INT4:
        whole = m // TILE * TILE
        for c in range(0, whole, TILE):
            for k in range(TILE):
                out[j, c + k] = _of_nibble(codes[i, c + k] & 15, scale)
            for k in range(TILE):
                out[j, np.uintp(m + c + k)] = _of_nibble(codes[i, c + k] >> 4, scale)
        for k in range(whole, m):
            out[j, k] = _of_nibble(codes[i, k] & 15, scale)
        for k in range(whole, m):
            out[j, np.uintp(m + k)] = _of_nibble(codes[i, k] >> 4, scale)
    elif kind == E4M3:
        for k in range(m):
            out[j, k] = _of_float8(codes[i, k], scale)
    else:
        for k in range(m):
            out[j, k] = _of_power(codes[i, k] & 15, scale)
        for k in range(m):
            out[j, np.uintp(m + k)] = _of_power(codes[i, k] >> 4, scale)


@_inner
def _mean_of_rows(codes, scales, each, replicas, i, kind, out, j, one):
    """Row j of out becomes the mean of rows i of all replicas, of which each has so many rows of
    codes and scales, added one after the other. `one` (1, B) is worked in."""
    share = np.float32(1 / replicas)
    _decode_row(codes, scales, i, kind, out, j)
    for w in range(1, replicas):
        _decode_row(codes, scales, w * each + i, kind, one, 0)
        for k in range(out.shape[1]):
            out[j, k] += one[0, k]
    if replicas > 1:
        for k in range(out.shape[1]):
            out[j, k] *= share


def encode(x, codes, scales, kind, begin, end):
    """Rows of codes (R, m) and scales (R, 1) become those of x (R, B)."""
    for i in range(begin, end):
        _encode_row(x, i, codes, scales, i, kind)


def encode_sum(x, y, codes, scales, kind, begin, end):
    """The same, of x (R, B) to which those of y are added."""
    for i in range(begin, end):
        for k in range(x.shape[1]):
            x[i, k] += y[i, k]
        _encode_row(x, i, codes, scales, i, kind)


def decode_mean(codes, scales, out, kind, begin, end):
    """Rows of out (R, B) become the mean of what those of codes (W·R, m) and scales (W·R, 1) stand
    for, one replica below the other."""
    each, one = len(out), np.empty((1, out.shape[1]), np.float32)
    for i in range(begin, end):
        _mean_of_rows(codes, scales, each, len(codes) // each, i, kind, out, i, one)


def encode_mean(codes, scales, mean_codes, mean_scales, lost, kind, begin, end):
    """The same, encoded; and what that takes from the mean, times -W, in lost (R, B), if that has
    rows."""
    each, b = len(mean_codes), codes.shape[1] * (1 + kind % 2)
    replicas = len(codes) // max(1, each)
    mean, one, factor = (
        np.empty((1, b), np.float32),
        np.empty((1, b), np.float32),
        np.float32(-replicas),
    )
    for i in range(begin, end):
        _mean_of_rows(codes, scales, each, replicas, i, kind, mean, 0, one)
        _encode_row(mean, 0, mean_codes, mean_scales, i, kind)
        if len(lost):
            _decode_row(mean_codes, mean_scales, i, kind, one, 0)
            for k in range(b):
                lost[i, k] = (mean[0, k] - one[0, k]) * factor


@_inner
def _settle_bytes(x, error, sent, codes, other, i, scales, both):
    """What `settle_codes` makes of row i of integers of a byte, in one pass over it."""
    of_sent, of_codes, of_other = scales
    if both:
        for k in range(x.shape[1]):
            one = of_codes * np.float32(np.int8(codes[i, k]))
            another = of_other * np.float32(np.int8(other[i, k]))
            error[i, k] = x[i, k] - of_sent * np.float32(np.int8(sent[i, k]))
            x[i, k] = (one + another) * _HALF
    else:
        for k in range(x.shape[1]):
            error[i, k] = x[i, k] - of_sent * np.float32(np.int8(sent[i, k]))
            x[i, k] = of_codes * np.float32(np.int8(codes[i, k]))


@_inner
def _settle_nibbles(x, error, sent, codes, other, i, scales, both):
    """The same of integers of half a byte, in whole tiles."""
    of_sent, of_codes, of_other = scales
    m = sent.shape[1]
    whole = m // TILE * TILE  # of this numba knows that it is a number of tiles
    if both:
        for c in range(0, whole, TILE):
            for k in range(TILE):
                one = _of_nibble(codes[i, c + k] & 15, of_codes)
                another = _of_nibble(other[i, c + k] & 15, of_other)
                error[i, c + k] = x[i, c + k] - _of_nibble(sent[i, c + k] & 15, of_sent)
                x[i, c + k] = (one + another) * _HALF
            for k in range(TILE):
                at = np.uintp(m + c + k)
                one = _of_nibble(codes[i, c + k] >> 4, of_codes)
                another = _of_nibble(other[i, c + k] >> 4, of_other)
                error[i, at] = x[i, at] - _of_nibble(sent[i, c + k] >> 4, of_sent)
                x[i, at] = (one + another) * _HALF
    else:
        for c in range(0, whole, TILE):
            for k in range(TILE):
                error[i, c + k] = x[i, c + k] - _of_nibble(sent[i, c + k] & 15, of_sent)
                x[i, c + k] = _of_nibble(codes[i, c + k] & 15, of_codes)
            for k in range(TILE):
                at = np.uintp(m + c + k)
                error[i, at] = x[i, at] - _of_nibble(sent[i, c + k] >> 4, of_sent)
                x[i, at] = _of_nibble(codes[i, c + k] >> 4, of_codes)


def settle_codes(
    x, error, sent, sent_scales, lost, first, codes, scales, other, other_scales, kind, begin, end
):
    """Rows of error (R, B) become those of x less what was sent, codes (R, m) and scales (R, 1)
    and, from row `first` on, the rows lost (some, B); and those of x what codes and scales stand
    for that were received, or the mean of these and of others, if there are such."""
    b, both = x.shape[1], len(other) > 0
    at_once = kind == INT8 or (kind == INT4 and sent.shape[1] % TILE == 0)
    one = np.empty((1, b), np.float32)
    for i in range(begin, end):
        if at_once and not first <= i < first + len(lost):
            of_all = sent_scales[i, 0], scales[i, 0], other_scales[i, 0] if both else _ZERO
            if kind == INT8:
                _settle_bytes(x, error, sent, codes, other, i, of_all, both)
            else:
                _settle_nibbles(x, error, sent, codes, other, i, of_all, both)
            continue
        _decode_row(sent, sent_scales, i, kind, one, 0)
        if first <= i < first + len(lost):
            for k in range(b):
                one[0, k] += lost[i - first, k]
        for k in range(b):
            error[i, k] = x[i, k] - one[0, k]
        _decode_row(codes, scales, i, kind, x, i)
        if both:
            _decode_row(other, other_scales, i, kind, one, 0)
            for k in range(b):
                x[i, k] = (x[i, k] + one[0, k]) * _HALF


# --- signs: bytes (W, n / 8) in blocks of 512 elements, of which byte j has elements j, 64 + j, 128
# + j, …

#: Bytes of a block.
BYTES = 64


def sum_of_signs(bits, above, below, numbers, out, runs, begin, end):
    """Blocks of out (blocks, 512) become the sum of the numbers that bits of all replicas stand
    for, one after the other: those above (W, N), or below, of which `numbers` (1, n / runs) says
    which one each run of so many elements, a multiple of 64, has."""
    replicas, zero = len(bits), np.float32(0)
    for i in range(begin, end):
        first = np.uintp(i * BYTES)
        for w in range(replicas):
            for j in range(8):
                number = numbers[0, np.uintp((i * 8 + j) * BYTES // runs)]
                high, low = above[w, number], below[w, number]
                # A byte: what is shifted would be a word, of which eight times fewer are looked at
                # side by side.
                looked_at = np.uint8(1 << j)
                if w == 0:
                    for k in range(BYTES):
                        own = high if (bits[w, first + np.uintp(k)] & looked_at) != 0 else low
                        out[i, np.uintp(j * BYTES + k)] = own if replicas == 1 else zero + own
                else:
                    for k in range(BYTES):
                        own = high if (bits[w, first + np.uintp(k)] & looked_at) != 0 else low
                        out[i, np.uintp(j * BYTES + k)] += own


# --- the largest of rows

#: Magnitudes as integers of 31 bits, of which three digits are looked at one after the other: how
#: many bits are below each, and how many it has.
_DIGITS = ((20, 11), (10, 10), (0, 10))


@_inner
def _size(x):
    """The bits of a magnitude, whose order is theirs; NaN is as large as inf."""
    bits = np.int32(_bits(x) & _MAGNITUDE)
    return bits if bits < _INFINITE else _INFINITE


def largest(x, positions, values, begin, end):
    """Rows of positions (R, k) become the places, rising, of the k largest magnitudes in those of x
    (R, m), and rows of values (R, k) what is there; of equal ones the first are taken."""
    m, k = x.shape[1], positions.shape[1]
    sizes, counts = np.empty(m, np.int32), np.empty(1 << 11, np.int32)
    for i in range(begin, end):
        for c in range(m):
            sizes[c] = _size(x[i, c])
        # The least that is taken, digit by digit, and how many that are equal to it.
        least, left = np.int32(0), k
        for below, width in _DIGITS:
            counts[: 1 << width] = 0
            if below == 20:
                for c in range(m):
                    counts[np.uintp(sizes[c] >> 20)] += 1
            else:
                above, mask = below + width, (1 << width) - 1
                known = least >> above
                for c in range(m):
                    if sizes[c] >> above == known:
                        counts[np.uintp((sizes[c] >> below) & mask)] += 1
            digit = (1 << width) - 1
            while counts[digit] < left:
                left -= counts[digit]
                digit -= 1
            least |= np.int32(digit << below)
        at = 0
        for c in range(m):
            if sizes[c] >= least:
                if sizes[c] == least:
                    if left == 0:
                        continue
                    left -= 1
                positions[i, at] = c
                values[i, at] = x[i, c]
                at += 1
