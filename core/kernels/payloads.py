"""What stands for a tensor in a message, and what is left of the tensor: dense arrays, two thin
factors, codes.

A payload knows two things, each written once: `dense`, the tensor it stands for, and `taken_from`,
what is left of a tensor once it is sent. Error feedback (`errors_after`) and the end of a step
(`dense_or_nan`) are made of these, for all payloads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol

from gradwire.core.kernels.arrays import LARGEST, A, wide_dtype
from gradwire.core.kernels.primitives import Primitives
from gradwire.core.kernels.rounding import mean_decoded


class Payload(Protocol[A]):
    """What stands for a tensor in a message."""

    @property
    def witness(self) -> A:
        """The smallest of its arrays in which NaN throughout is NaN throughout the tensor."""

    def dense(self, ops: Primitives[A], out: A, witness: A | None = None) -> A:
        """The tensor, in the shape and the dtype of `out`, which is donated; with another array in
        the place of the `witness`, if one is given."""

    def taken_from(self, ops: Primitives[A], x: A, *, out: A | None = None) -> A:
        """`x` less the tensor, in the shape of `x`."""


class Dense(NamedTuple, Generic[A]):
    """The tensor itself."""

    x: A

    @property
    def witness(self) -> A:
        return self.x

    def dense(self, ops: Primitives[A], out: A, witness: A | None = None) -> A:
        return self.x if witness is None else witness

    def taken_from(self, ops: Primitives[A], x: A, *, out: A | None = None) -> A:
        if out is None:
            # in this shape, in which what it is made of and what is made of it are
            return x - self.x

        def rows(x: A, sent: A, out: A | None = None) -> A:
            return x - sent if out is None else ops.add(x, ops.multiply(sent, -1.0), out=out)

        flat = (math.prod(x.shape), 1)
        rest = ops.by_rows(rows, x.reshape(flat), self.x.reshape(flat), out=out.reshape(flat))
        return rest.reshape(tuple(x.shape))


class LowRank(NamedTuple, Generic[A]):
    """The matrix `p.mT @ q`, not multiplied out: `p` (r, n) and `q` (r, m); or a tensor of `n*m`
    elements in that order.

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

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """(n, m), or (b, n, m) of a stack. A tensor that is padded has fewer elements, and the last
        ones are dropped."""
        *stack, _, n = self.p.shape
        return (*stack, n, self.q.shape[-1])

    @property
    def witness(self) -> A:
        """`q`: NaN in it is NaN in the product, even where `p` is zero."""
        return self.q

    def dense(self, ops: Primitives[A], out: A, witness: A | None = None) -> A:
        """`p.mT @ q`, in the shape of `out`, which is donated; `witness`: another `q`."""
        p, q = self if witness is None else (self.p, witness)
        shape, matrix = out.shape, self.matrix_shape
        if shape == matrix:
            return ops.matmul(p.mT, q, out=out)
        size = math.prod(shape)
        if size != math.prod(matrix):
            return ops.matmul(p.mT, q).reshape((-1,))[:size].reshape(shape)
        return ops.matmul(p.mT, q, out=out.reshape(matrix)).reshape(shape)

    def taken_from(self, ops: Primitives[A], x: A, *, out: A | None = None) -> A:
        """`x - p.mT @ q`, in the shape of `x`."""
        p, q = self
        shape, matrix = x.shape, self.matrix_shape
        if shape == matrix:
            return ops.subtract_product(x, p, q, out=out)
        size = math.prod(shape)
        if size != math.prod(matrix):
            padded = ops.pad(x.reshape((-1,)), math.prod(matrix)).reshape(matrix)
            return (
                ops.subtract_product(padded, p, q, out=padded).reshape((-1,))[:size].reshape(shape)
            )
        place = None if out is None else out.reshape(matrix)
        return ops.subtract_product(x.reshape(matrix), p, q, out=place).reshape(shape)


class Coded(NamedTuple, Generic[A]):
    """A tensor as codes, uint8 (R, m), and scales, float32 (R, n), of a
    `gradwire.core.codecs.codec.BlockCodec`; or, of W replicas (W, R, m) and (W, R, n), their mean.

    Of what a replica has sent, the rows from `first` on count `lost` as well, float32 (some, B):
    see `gradwire.core.codecs.coder`.
    """

    codec: Any
    codes: A
    scales: A
    lost: A | None = None
    first: int = 0

    @property
    def witness(self) -> A:
        return self.scales

    def dense(self, ops: Primitives[A], out: A, witness: A | None = None) -> A:
        scales = self.scales if witness is None else witness
        if len(self.codes.shape) == 3:
            values = mean_decoded(ops, self.codec, (self.codes, scales)).reshape((-1,))
        else:
            values = self.codec.decode(ops, self.codes, scales).reshape((-1,))
        return ops.cast(
            values[: math.prod(out.shape)].reshape(tuple(out.shape)), ops.dtype_of(out), out=out
        )

    def taken_from(self, ops: Primitives[A], x: A, *, out: A | None = None) -> A:
        shape, dtype = tuple(x.shape), ops.dtype_of(x)
        rest = x - self.dense(ops, ops.zeros(shape, dtype))
        if self.lost is None:
            return rest
        width, flat = self.lost.shape[1], rest.reshape((-1,))
        begin = self.first * width
        end = min(begin + math.prod(self.lost.shape), flat.shape[0])
        lost = ops.cast(self.lost.reshape((-1,))[: end - begin], dtype)
        return ops.rows([flat[:begin], flat[begin:end] - lost, flat[end:]], 1).reshape(shape)


#: Anything else is an array, which stands for itself.
PAYLOADS = (LowRank, Coded, Dense)


def payloads_of(xs: Sequence[Any]) -> list[Any]:
    """Payloads as they are, and arrays as `Dense` ones."""
    return [x if isinstance(x, PAYLOADS) else Dense(x) for x in xs]


@dataclass(slots=True, eq=False)
class Residual(Generic[A]):
    """`x - sent`: the residual of `x`. Once `computed`, `x` is the residual.

    It does not need the answer, so a driver may compute it while the message travels. Otherwise its
    sender does, afterwards.

    Attributes:
        terms: gradient and error, whose sum `x` is, where they are better added again than kept:
            `Hints.recompute`.
    """

    ops: Primitives[A]
    x: A
    sent: Payload[A] | None = None
    computed: bool = False
    terms: tuple[A, A] | None = None

    def compute(self) -> None:
        """Once, in the place of `x`."""
        if self.sent is not None:
            self.x = self.sent.taken_from(self.ops, self.x, out=self.x)
            self.computed = True


def largest_error(ops: Primitives[A], error: A) -> float:
    """The largest element that a compression error keeps in a step that is not finite.

    Such a step leaves memory as it is, and if the error itself is what overflows, in a product or
    in the sum over the replicas, no later step would be finite either. Below this number neither
    squares nor 2-norms of the whole error overflow; an error that can be sent is seldom above it.
    In float16 it often is, in units of a loss scale: kernels leave an error alone whose 2-norm is
    less than `LONGEST_FLOAT16`.
    """
    largest = LARGEST[ops.dtype_of(error)]
    return min(math.sqrt(largest), largest / 4 / math.sqrt(max(math.prod(error.shape), 1)))


def decay_error(ops: Primitives[A], error: A, decay: float) -> A:
    """`error * decay`, in its place."""
    dtype = wide_dtype(ops.dtype_of(error))
    factor = ops.constant(("decay", decay, dtype), lambda: ops.asarray(decay, dtype))
    return ops.scale_each([error], factor)[0]


def errors_after(
    ops: Primitives[A],
    ok: A,
    x: Sequence[Residual[A]],
    sent: Sequence[Payload[A]],
    errors: Sequence[A],
    decay: float,
) -> list[A]:
    """`Ops.errors_after`, in primitives."""
    after = list(errors)
    early: list[int] = []
    rests: list[A] = []
    limits: list[float] = []
    for i, (left, own, error) in enumerate(zip(x, sent, errors, strict=True)):
        limit = largest_error(ops, error)
        if left.computed:
            early.append(i)
            rests.append(left.x if decay == 1 else decay_error(ops, left.x, decay))
            limits.append(limit)
        else:
            rest = partial(_error_after, ops, left.x, own, decay)
            after[i] = ops.where_lazy(ok, rest, error, limit=limit)
    if early:
        for i, error in zip(
            early, ops.where_each(ok, rests, [errors[i] for i in early], limits=limits), strict=True
        ):
            after[i] = error
    return after


def _error_after(ops: Primitives[A], x: A, sent: Payload[A], decay: float, out: A | None) -> A:
    rest = sent.taken_from(ops, x, out=out)
    return rest if decay == 1 else decay_error(ops, rest, decay)


def dense_or_nan(
    ops: Primitives[A], ok: A, received: Sequence[Payload[A]], places: Sequence[A | None]
) -> list[A]:
    """`Ops.dense_or_nan`, in primitives."""
    answers: list[Any] = list(received)
    thin: list[int] = []
    whole: list[int] = []
    small: list[A] = []
    own: list[A] = []
    out: list[A] = []
    for i, each in enumerate(received):
        if isinstance(each, Dense):
            whole.append(i)
            own.append(each.x)
            if (place := places[i]) is not None:
                out.append(place)
        else:
            thin.append(i)
            small.append(each.witness)
    for i, witness in zip(thin, ops.nan_unless(ok, small), strict=True):
        # which has a place
        answers[i] = received[i].dense(ops, places[i], witness)  # type: ignore[arg-type]
    if whole:
        for i, x in zip(
            whole, ops.nan_unless(ok, own, out=out if len(out) == len(whole) else None), strict=True
        ):
            answers[i] = x
    return answers


def cast_each(
    ops: Primitives[A], xs: Sequence[A], dtypes: Sequence[str], errors: Sequence[A], decay: float
) -> tuple[list[A], list[A]]:
    """`Ops.cast_each`, in primitives."""
    shorter = [ops.cast(x, dtype) for x, dtype in zip(xs, dtypes, strict=True)]
    after = []
    for x, y, error in zip(xs, shorter, errors, strict=True):
        taken = ops.multiply(ops.cast(y, ops.dtype_of(x)), -1.0)
        lost = ops.multiply(ops.add(x, taken, out=x), decay)
        after.append(ops.add(error, ops.where(ops.abs(lost) < math.inf, lost, 0.0), out=error))
    return shorter, after
