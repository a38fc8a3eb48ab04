"""Thin factors of large matrices: a gradient and its error are added and projected in one pass, and
what was sent and received is settled in another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from gradwire.core.kernels.payloads import LowRank, Payload, Residual
from gradwire.torch_backend.cpu.compiled import Loops, compiled
from gradwire.torch_backend.cpu.pool import over_rows
from gradwire.torch_backend.cpu.sums import Sum

#: Elements that a thread gets at least.
PER_THREAD = 1 << 14
#: The largest rank with which one pass takes less time than torch's operations: in projecting, and
#: in settling.
PROJECTED, SETTLED = 4, 8


def sums(
    loops: Loops, xs: Sequence[Tensor], ys: Sequence[Tensor]
) -> tuple[list[Tensor | Sum], list[int]]:
    """`x + y` for each pair, to be added later; of those that are small, or do not lie in one
    piece, `x` and its number."""
    answers: list[Tensor | Sum] = list(xs)
    now: list[int] = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if (
            x.numel() >= loops.large
            and x.ndim > 1
            and loops.have("add_and_project", x.dtype)
            and _fit(x, y)
        ):
            answers[i] = Sum(x, y)
        else:
            now.append(i)
    return answers, now


def project(q: Tensor, y: Sum, out: Tensor) -> bool:
    """`out` (r, n) becomes q (r, m) times `y` (m, n), a transposed matrix. False, and nothing is
    done, where no loop does that."""
    terms = y.open
    if terms is None or q.ndim != 2 or len(q) > PROJECTED or not _fit(q, terms[0], same_size=False):
        return False
    x, error, factor, p = terms[0].numpy(), terms[1].numpy(), q.numpy(), out.numpy()
    loop = compiled("add_and_project", q.dtype)
    _by_rows(x, lambda begin, end: loop(x, error, factor, p, begin, end))
    y.close()
    return True


def settle(
    loops: Loops,
    x: Residual[Tensor],
    sent: Payload[Tensor],
    error: Tensor,
    received: Payload[Tensor],
) -> Tensor | None:
    """`error` becomes `x - sent`, and `x`, which is returned, what was received. None, and nothing
    is done, where no loop does that."""
    if x.computed or not isinstance(sent, LowRank) or not isinstance(received, LowRank):
        return None
    own = x.x
    shape, r = sent.matrix_shape, sent.p.shape[-2]
    if (
        r > SETTLED
        or own.numel() < loops.large
        or not loops.have("settle", own.dtype)
        or math.prod(shape) != own.numel()
        or received.matrix_shape != shape
    ):
        return None
    factors = [
        factor if factor.is_contiguous() else factor.contiguous() for factor in (*sent, *received)
    ]
    if (
        received.p.shape[-2] != r
        or not _fit(own, error)
        or any(factor.dtype != own.dtype for factor in factors)
    ):
        return None
    loop = compiled("settle", own.dtype)
    stack = shape if len(shape) == 3 else (1, *shape)
    each = [
        y.numpy().reshape((stack[0], -1, y.shape[-1]))
        for y in (own.view(stack), error.view(stack), *factors)
    ]
    for i in range(stack[0]):
        matrices = [y[i] for y in each]
        _by_rows(matrices[0], lambda begin, end, matrices=matrices: loop(*matrices, begin, end))
    return own


def _fit(x: Tensor, y: Tensor, *, same_size: bool = True) -> bool:
    fits = x.dtype == y.dtype and x.is_contiguous() and y.is_contiguous()
    return fits and (not same_size or x.numel() == y.numel())


def _by_rows(x: np.ndarray, loop: object) -> None:
    over_rows(x.shape[0], -(-PER_THREAD // max(1, x.shape[1])), loop)  # type: ignore[arg-type]
