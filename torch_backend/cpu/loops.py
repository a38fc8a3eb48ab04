"""The loops that numba compiles: serial, without the interpreter's lock, over a range of rows.

Each has one order in which it adds, written out here: so any number of threads, each with rows of its own, comes to the same bits, and so does any
processor. Nothing is contracted or reordered (no `fastmath`). A sum along a row has `LANES` accumulators, which a processor adds to side by side.

All arrays lie in rows without gaps. Loops count from 0: of an index that numba does not know to be positive it asks whether it is negative, and then
nothing is computed side by side. All are in this file, by whose contents numba keeps what it has compiled.
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
        _times_rows_added(t, p[j, i], q[j], p[j + 1, i], q[j + 1], p[j + 2, i], q[j + 2], p[j + 3, i], q[j + 3])
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
    """Rows of e (n, m) become those of x less p.T @ q, and those of x become s.T @ t: p and s (r, n), q and t (r, m)."""
    r, m = q.shape
    lost, new = np.empty(m, x.dtype), np.empty(m, x.dtype)
    for i in range(begin, end):
        xs, es = x[i], e[i]
        if r == 4:
            p0, p1, p2, p3, s0, s1, s2, s3 = p[0, i], p[1, i], p[2, i], p[3, i], s[0, i], s[1, i], s[2, i], s[3, i]
            q0, q1, q2, q3, t0, t1, t2, t3 = q[0], q[1], q[2], q[3], t[0], t[1], t[2], t[3]
            for k in range(m):
                es[k] = xs[k] - (((p0 * q0[k] + p1 * q1[k]) + p2 * q2[k]) + p3 * q3[k])
                xs[k] = ((s0 * t0[k] + s1 * t1[k]) + s2 * t2[k]) + s3 * t3[k]
            continue
        _combined(lost, p, q, i)
        _combined(new, s, t, i)
        _taken_and_replaced(xs, es, lost, new)
