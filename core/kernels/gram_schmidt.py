"""Gram-Schmidt, done twice, in plain array operations.

Why not QR: batched `jnp.linalg.qr` can deadlock under `pmap` on several CPU devices, neither
framework's CPU QR takes bfloat16, and surplus directions of a rank-deficient matrix come out
differently in every LAPACK. Why twice: a single pass loses orthogonality with the square of the
conditioning and reconstructs a rank-deficient gradient 17 % wrong; the second pass restores it to
rounding ("twice is enough", Giraud, Langou and Rozložník 2005).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gradwire.core.kernels.arrays import A, call_key, group_by
from gradwire.core.kernels.primitives import Primitives

#: A row that keeps no more than this part of its norm, once the rows before it are projected out,
#: is rounding noise and becomes zero.
DEPENDENT = 1e-6
#: A row whose largest element is below this part of its matrix's largest says nothing reliable:
#: `refresh` replaces it.
NEGLIGIBLE = 1e-5


def gram_schmidt(ops: Primitives[A], x: A, epsilon: float = 0.0, *, out: A | None = None) -> A:
    """Orthonormal rows for a batch of matrices.

    Args:
        x: (k, r, n), any floating dtype. Computed in float32 at least; the result has `x`'s dtype.
        out: `x`, to donate it.
        epsilon: added to each row's norm (relative to its largest element) before division. 0 gives
            unit rows.

    Returns:
        (k, r, n), always finite: row i is the part of `x`'s row i that is orthogonal to the rows
        before it, at unit norm; zero where that part is zero or rounding noise, and where row i
        holds an inf or NaN (test for those first). Rows are scaled by their largest element before
        anything is squared, so 1e-30 and 1e30 are as good as 1.
    """
    dtype = ops.dtype_of(x)
    work = ops.cast(x, dtype if dtype in ("float32", "float64") else "float32")
    largest = ops.max_abs(work)
    # Never divided by where there is nothing to divide, and into a new array unless `work` is ours
    # already.
    own = work if out is x or work is not x else None
    work = ops.divide(work, ops.where(largest > 0, largest, 1.0), out=own)
    work = ops.where(largest < math.inf, work, 0.0, out=work)
    before = ops.norm(work)

    def orthonormal_row(i: Any, rows: A) -> A:
        v, done = ops.row(work, i), ops.rows_before(rows, i)
        # before the first row there is none, which spares few rows much
        for _ in range(2 if done.shape[-2] else 0):
            v = ops.subtract_product(v, ops.matmul(done, v.mT), done, out=v)
        length = ops.norm(v)
        # Divided by infinity, what is left of a dependent row is zero.
        return ops.set_row(
            rows,
            i,
            v / ops.where(length > ops.row(before, i) * DEPENDENT, length + epsilon, math.inf),
        )

    rows = ops.loop(
        work.shape[-2], orthonormal_row, ops.zeros(tuple(work.shape), ops.dtype_of(work))
    )
    return ops.cast(rows, dtype)


def refresh(ops: Primitives[A], x: A, fresh: A) -> A:
    """Replace the negligible rows of each matrix of a batch (k, r, n), which is donated, by those
    of `fresh`.

    After a gradient of low rank the surplus rows of a warm-started factor are zero, or rounding
    noise: the first can never leave zero again by power iteration, the second would lead every
    framework along another path.
    """
    largest = ops.max_abs(x)
    return ops.where(largest > ops.max_abs(largest.mT) * NEGLIGIBLE, x, fresh, out=x)


def each_shape(ops: Any, arrays: Sequence[A], fresh: Sequence[A], epsilon: float) -> list[A]:
    """`Ops.orthonormalize_each` by `Ops.orthonormalize`, once for each distinct shape and dtype."""
    answers = list(arrays)
    for members in group_by(range(len(arrays)), map(call_key, arrays)):
        shape = tuple(arrays[members[0]].shape)
        matrices = ops.stack([arrays[i] for i in members])
        new = ops.stack([fresh[i] for i in members]) if fresh else None
        if len(shape) > 2:  # all matrices of all stacks
            batch = len(members) * math.prod(shape[:-2]), *shape[-2:]
            matrices, new = matrices.reshape(batch), None if new is None else new.reshape(batch)
        if new is not None:
            matrices = refresh(ops, matrices, new)
        orthonormal = ops.orthonormalize(matrices, epsilon)
        if len(shape) > 2:
            orthonormal = orthonormal.reshape((len(members), *shape))
        for i, rows in zip(members, ops.unstack(orthonormal), strict=True):
            answers[i] = rows
    return answers
