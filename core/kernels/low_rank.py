"""A matrix as two thin factors, and the residual of a message of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple

from gradwire.core.ops import A, Fused, Ops


class LowRank(NamedTuple, Generic[A]):
    """The matrix `p.mT @ q`, not multiplied out: `p` (r, n) and `q` (r, m); or a tensor of `n*m` elements in that order.

    Or a stack of them: `p` (b, r, n) and `q` (b, r, m).

    Examples:
        >>> import numpy as np
        >>> from gradwire import LowRank
        >>> p, q = LowRank(np.ones((2, 64)), np.ones((2, 32)))
        >>> (p.T @ q).shape
        (64, 32)
    """

    p: A
    q: A


def _matrix_shape(p: A, q: A) -> tuple[int, ...]:
    """(n, m), or (b, n, m) of a stack."""
    *stack, _, n = p.shape
    return (*stack, n, q.shape[-1])


def subtracted(ops: Ops[A], x: A, sent: LowRank[A], *, out: A | None = None) -> A:
    """`x - sent`, in the shape of `x`. If the matrix has more elements than `x`, those are dropped."""
    p, q = sent
    shape, matrix = x.shape, _matrix_shape(p, q)
    if shape == matrix:
        return ops.subtract_product(x, p, q, out=out)
    size = math.prod(shape)
    if size != math.prod(matrix):
        padded = ops.pad(x.reshape((-1,)), math.prod(matrix)).reshape(matrix)
        return ops.subtract_product(padded, p, q, out=padded).reshape((-1,))[:size].reshape(shape)
    place = None if out is None else out.reshape(matrix)
    return ops.subtract_product(x.reshape(matrix), p, q, out=place).reshape(shape)


def subtracted_if(fused: Fused[A], ok: A, x: A, sent: LowRank[A], y: A) -> A | None:
    """`y`, donated, which becomes `x - sent` if `ok` holds. None, and nothing is done, if the matrix has more elements than `x`."""
    p, q = sent
    fits = math.prod(x.shape) == math.prod(_matrix_shape(p, q))
    return fused.subtract_product_if(ok, x, p, q, y) if fits else None


def multiplied(ops: Ops[A], p: A, q: A, *, out: A) -> A:
    """`p.mT @ q` in the shape of `out`, which is donated. If the matrix has more elements, those are dropped."""
    shape, matrix = out.shape, _matrix_shape(p, q)
    if shape == matrix:
        return ops.matmul(p.mT, q, out=out)
    size = math.prod(shape)
    if size != math.prod(matrix):
        return ops.matmul(p.mT, q).reshape((-1,))[:size].reshape(shape)
    return ops.matmul(p.mT, q, out=out.reshape(matrix)).reshape(shape)


@dataclass(slots=True, eq=False)
class Residual(Generic[A]):
    """`x - sent`: the residual of `x`. Once `computed`, `x` is the residual.

    It does not need the answer, so a driver may compute it while the message travels. Otherwise its sender does, afterwards.
    """

    ops: Ops[A]
    x: A
    sent: LowRank[A] | None = None
    computed: bool = False

    def compute(self) -> None:
        """Once, in the place of `x`."""
        if self.sent is not None:
            self.x = subtracted(self.ops, self.x, self.sent, out=self.x)
            self.computed = True
