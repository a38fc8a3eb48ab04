"""The kernels in torch. `out=` is written to; large arrays are never copied."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradwire.core.kernels import payloads
from gradwire.core.kernels.arrays import group_by
from gradwire.core.kernels.gram_schmidt import each_shape, gram_schmidt
from gradwire.core.kernels.payloads import (
    Coded,
    Dense,
    LowRank,
    Payload,
    Residual,
    decay_error,
    largest_error,
)
from gradwire.core.ops import INTEGERS, LARGEST_E4M3, LONGEST_FLOAT16
from gradwire.torch_backend.cpu import codes, thin
from gradwire.torch_backend.cpu.sums import Sum, value_of
from gradwire.torch_backend.ops import factors
from gradwire.torch_backend.ops.addresses import neighbours_joined, side_by_side
from gradwire.torch_backend.ops.coding import CodingOps
from gradwire.torch_backend.ops.fused import is_product
from gradwire.torch_backend.ops.orthonormalize import CLEAR, orthonormalized_unseen
from gradwire.torch_backend.ops.workspace import dtype_name
from gradwire.torch_backend.torch_internals import (
    foreach_add_,
    foreach_copy_,
    foreach_mul,
    foreach_mul_,
    foreach_norm,
    foreach_sub_,
)

T = TypeVar("T")

#: Elements of a matrix with which it matters how BLAS is asked.
LARGE = 1 << 16
#: Up to this rank BLAS is fast with a factor on the left.
THIN = 2
#: Above it, it is faster with the factor on the right.
WIDE = 8


class TorchOps(CodingOps):
    """`Ops` for tensors on one device.

    On the CPU a boolean tensor is as good as a Python bool, and `where` computes one side only. On
    CUDA reading it would make the host wait for the device, so both sides exist and the device
    selects.
    """

    def iota(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int32, device=self.device)

    def cast(self, x: Tensor, dtype: str, *, out: Tensor | None = None) -> Tensor:
        wanted: torch.dtype = getattr(torch, dtype)
        if x.dtype == wanted and out is None:
            return x
        cast = self._cast_by_torch(x, wanted)
        place = self._place(cast, out, dtype=wanted)
        return cast.to(wanted) if place is None else place.copy_(cast)

    def _cast_by_torch(self, x: Tensor, wanted: torch.dtype) -> Tensor:
        """What torch casts as it should."""
        if x.dtype == wanted or not x.is_floating_point():
            return x
        if x.dtype.itemsize == 1:
            x = x.to(torch.float32)
        if dtype_name(wanted) in INTEGERS:
            # C++ leaves what becomes of NaN, and of numbers that are too large, to the processor.
            limits = torch.iinfo(wanted)
            wide = x.to(torch.float64) if wanted == torch.int32 else x
            return wide.nan_to_num(nan=0.0).clamp_(limits.min, limits.max)
        if wanted == torch.float8_e4m3fn:
            x = x.masked_fill(x.abs() > LARGEST_E4M3, math.nan)  # torch would saturate
        return x

    def asarray(self, numbers: Any, dtype: str) -> Tensor:
        given = np.array(numbers)
        # a float that ml_dtypes teaches to NumPy, and not to torch
        if given.dtype.kind not in "biuf":
            given = given.astype(np.float32)
        return self.on_device(self.cast(torch.from_numpy(given), dtype))

    def add(self, x: Tensor, y: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        return torch.add(x, y, out=self._place(x, out, y))

    def multiply(self, x: Tensor, y: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        return torch.mul(x, y, out=self._place(x, out, y))

    def divide(self, x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.div(x, y, out=self._place(x, out, y))

    def matmul(self, x: Tensor, y: Tensor | Sum, *, out: Tensor | None = None) -> Tensor:
        if isinstance(y, Sum):
            place = self.temporary((*x.shape[:-1], y.shape[-1]), x) if out is None else out
            if thin.project(x, y, place):
                return place
            y = y.value
        if out is None:
            # whose allocator keeps memory, and is quicker than asking for it here
            if not self.host_knows:
                return torch.matmul(x, y)
            out = self.temporary((*x.shape[:-1], y.shape[-1]), x)
        large = self.host_knows and y.ndim == 2 and y.numel() > LARGE
        if large and THIN < x.shape[0] <= y.shape[0] and y.mT.is_contiguous():
            return self._times_transposed(x, y.mT, out)
        return torch.matmul(x, y, out=out)

    def _times_transposed(self, factor: Tensor, matrix: Tensor, out: Tensor) -> Tensor:
        """A factor times a large gradient, transposed. BLAS takes two thirds of the time if it is
        given a few rows of the gradient after the other or, for more rows of the factor, if it is
        asked for the transposed product."""
        (r, m), n = factor.shape, matrix.shape[0]
        if r > WIDE:
            return out.copy_(torch.matmul(matrix, factor.mT, out=self.temporary((n, r), factor)).mT)
        blocks = _blocks(n)
        parts = self.temporary((blocks, r, n // blocks), factor)
        torch.bmm(factor.expand(blocks, r, m), matrix.view(blocks, -1, m).mT, out=parts)
        out.view(r, blocks, -1).copy_(parts.transpose(0, 1))
        return out

    def subtract_product(
        self, x: Tensor | Sum, p: Tensor, q: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        x = x.value if isinstance(x, Sum) else x
        return (torch.addmm if x.ndim == 2 else torch.baddbmm)(x, p.mT, q, alpha=-1, out=out)

    def where(
        self, ok: Tensor, x: Tensor, y: Tensor | float, *, out: Tensor | None = None
    ) -> Tensor:
        if self.host_knows and ok.ndim == 0:
            if ok:
                return x if out is None else out.copy_(x)
            if out is None:
                return y if isinstance(y, Tensor) else torch.full_like(x, y)
            return out.copy_(y) if isinstance(y, Tensor) else out.fill_(y)
        if not isinstance(y, Tensor):
            y = self.scalar(y, x.dtype)
        return torch.where(ok, x, y) if out is None else torch.where(ok, x, y, out=out)

    def add_each(
        self,
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        *,
        multiplied: bool = False,
        coded: bool = False,
    ) -> list[Tensor]:
        if self.fused is not None and all(x.is_contiguous() for x in xs):
            self.fused.add_each(xs, ys)
            return list(xs)
        answers: list[Any] = list(xs)
        if (multiplied or coded) and self.loops.card:
            answers, now = thin.sums(self.loops, xs, ys) if multiplied else codes.sums(self, xs, ys)
            xs, ys = [xs[i] for i in now], [ys[i] for i in now]
        for donated, added in _by_dtype(xs, ys):
            foreach_add_(donated, added)
        return answers

    def where_each(
        self,
        ok: Tensor,
        xs: Sequence[Tensor],
        ys: Sequence[Tensor],
        *,
        limits: Sequence[float] = (),
    ) -> list[Tensor]:
        if self.fused is not None:
            self.fused.copy_if(ok, xs, ys)
        elif not self.host_knows:
            pairs = list(neighbours_joined(xs, ys)) if xs else []
            small = [pair for pair in pairs if pair[1].numel() <= LARGE]
            if len(small) > 4:  # to join them takes four kernels
                pairs = [pair for pair in pairs if pair[1].numel() > LARGE]
                for new, old in _by_dtype(*zip(*small, strict=True)):
                    parts = torch.split(
                        torch.where(ok, _flat(new), _flat(old)), [y.numel() for y in old]
                    )
                    foreach_copy_(old, [x.view(y.shape) for x, y in zip(parts, old, strict=True)])
            for x, y in pairs:
                torch.where(ok, x, y, out=y)
        elif ok:
            for chosen, donated in _by_dtype(xs, ys):
                foreach_copy_(donated, chosen)
        elif limits:
            for y, limit in zip(ys, limits, strict=True):
                _limit(y, limit)
        return list(ys)

    def errors_after(
        self,
        ok: Tensor,
        x: Sequence[Residual[Tensor]],
        sent: Sequence[Payload[Tensor]],
        errors: Sequence[Tensor],
        *,
        decay: float = 1.0,
    ) -> list[Tensor]:
        """The same, of all dense tensors at a time, but for large ones on the CPU; and with Triton
        of all others of one kind, where it has a kernel for that."""
        after = list(errors)
        dense: list[int] = []
        left: list[int] = []
        for i, (each, payload) in enumerate(zip(x, sent, strict=True)):
            whole = isinstance(payload, Dense) and not each.computed
            # What is large takes fewer passes over memory by itself.
            (dense if whole and not (self.host_knows and each.x.numel() > LARGE) else left).append(
                i
            )
        if dense:
            for members, taken in _by_dtype(
                [x[i].x for i in dense], [sent[i].witness for i in dense]
            ):
                foreach_sub_(members, taken)
            limits = [largest_error(self, errors[i]) for i in dense]
            rests = [x[i].x if decay == 1 else decay_error(self, x[i].x, decay) for i in dense]
            self.where_each(ok, rests, [errors[i] for i in dense], limits=limits)
        elif self.fused is None:
            return payloads.errors_after(self, ok, x, sent, errors, decay)
        if self.fused is not None and decay == 1:
            late = [i for i in left if not x[i].computed]
            own = [x[i].x for i in late], [sent[i] for i in late], [errors[i] for i in late]
            undone = {late[i] for i in self.fused.errors_after(ok, *own)}
            left = [i for i in left if x[i].computed or i in undone]
        rest = payloads.errors_after(
            self,
            ok,
            [x[i] for i in left],
            [sent[i] for i in left],
            [errors[i] for i in left],
            decay,
        )
        for i, error in zip(left, rest, strict=True):
            after[i] = error
        return after

    def dense_or_nan(
        self, ok: Tensor, received: Sequence[Payload[Tensor]], places: Sequence[Tensor | None]
    ) -> list[Tensor]:
        if self.fused is None:
            return payloads.dense_or_nan(self, ok, received, places)
        answers: list[Any] = list(places)
        triples = [
            (each.codes, each.scales, place)
            for each, place in zip(received, places, strict=True)
            if isinstance(each, Coded) and place is not None
        ]
        if triples:
            self.fused.decoded_each(ok, *zip(*triples, strict=True))
        factors: dict[int, LowRank[Tensor]] = {}
        for i, (each, place) in enumerate(zip(received, places, strict=True)):
            if place is not None and is_product(each, place):
                factors[i] = each
        self.fused.products_or_nan(ok, list(factors.values()), [answers[i] for i in factors])
        left = [
            i for i, each in enumerate(received) if not isinstance(each, Coded) and i not in factors
        ]
        rest = payloads.dense_or_nan(
            self, ok, [received[i] for i in left], [places[i] for i in left]
        )
        for i, dense in zip(left, rest, strict=True):
            answers[i] = dense
        return answers

    def settle(
        self,
        ok: Tensor,
        finite: Tensor,
        x: Sequence[Residual[Tensor]],
        sent: Sequence[Payload[Tensor]],
        errors: Sequence[Tensor],
        received: Sequence[Payload[Tensor]],
        *,
        decay: float = 1.0,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Settle by a loop for each tensor, where there is one for what was sent of it and
        received."""
        if not self.loops.card:
            after = self.errors_after(ok, x, sent, errors, decay=decay)
            return after, self.dense_or_nan(finite, received, [left.x for left in x])
        for each in x:
            each.x = value_of(each.x)
        if decay != 1 or not ok or not finite:
            return super().settle(ok, finite, x, sent, errors, received, decay=decay)
        dense: list[Any] = [
            codes.settle(self, *own) if isinstance(own[1], Coded) else thin.settle(self.loops, *own)
            for own in zip(x, sent, errors, received, strict=True)
        ]
        left = [i for i, each in enumerate(dense) if each is None]
        after = list(errors)
        some = [[each[i] for i in left] for each in (x, sent, errors, received)]
        for i, rest, other in zip(left, *super().settle(ok, finite, *some), strict=True):  # type: ignore[arg-type]
            after[i], dense[i] = rest, other
        return after, dense

    def cast_each(
        self,
        xs: Sequence[Tensor],
        dtypes: Sequence[str],
        errors: Sequence[Tensor],
        *,
        decay: float = 1.0,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Cast in place, of two dtypes at a time: three passes over memory beside the cast, and
        nothing new but what that returns."""
        shorter = [self.cast(x, dtype) for x, dtype in zip(xs, dtypes, strict=True)]
        for x, y, error in zip(xs, shorter, errors, strict=True):
            error.add_(torch.nan_to_num_(x.sub_(y), 0.0, 0.0, 0.0), alpha=decay)
        return shorter, list(errors)

    def nan_unless(
        self, ok: Tensor, xs: Sequence[Tensor], *, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        if out is not None:
            if self.host_knows:
                return [self.where(ok, x, math.nan, out=y) for x, y in zip(xs, out, strict=True)]
            ordered = sorted(zip(xs, out, strict=True), key=lambda pair: pair[1].data_ptr())
            pairs = list(neighbours_joined(*zip(*ordered, strict=True))) if ordered else []
            small = [pair for pair in pairs if pair[1].numel() <= LARGE]
            if len(small) > 3:  # together they take three kernels
                pairs = [pair for pair in pairs if pair[1].numel() > LARGE]
                for members, places in _by_dtype(*zip(*small, strict=True)):
                    factor = self._one_or_nan(ok, members[0].dtype)
                    foreach_copy_(places, foreach_mul(members, factor))
            for x, y in pairs:
                torch.where(ok, x, self.scalar(math.nan, x.dtype), out=y)
            return list(out)
        if self.host_knows:
            return list(xs) if ok else [torch.full_like(x, math.nan) for x in xs]
        answers = list(xs)
        for members, positions in _by_dtype(xs, range(len(xs))):
            factor = self._one_or_nan(ok, members[0].dtype)
            for i, x in zip(positions, foreach_mul(members, factor), strict=True):
                answers[i] = x
        return answers

    def _one_or_nan(self, ok: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.where(ok, self.scalar(1.0, dtype), self.scalar(math.nan, dtype))

    def where_lazy(
        self,
        ok: Tensor,
        x: Callable[[Tensor | None], Tensor],
        y: Tensor,
        *,
        limit: float = math.inf,
    ) -> Tensor:
        if self.host_knows:
            return x(y) if ok else _limit(y, limit)
        return self._commit(ok, x(None), y)

    def _commit(self, ok: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """`y`, on a device, which becomes `x` if `ok` holds."""
        if self.fused is None:
            return torch.where(ok, x, y, out=y)
        self.fused.copy_if(ok, [x], [y])
        return y

    def truth(self, ok: Tensor) -> bool | None:
        return bool(ok) if ok.device.type == "cpu" else None

    def all_finite(self, *arrays: Tensor) -> Tensor:
        # Not `torch.isfinite(x).all()`, whose temporaries are larger than `x`.
        if self.host_knows:  # a fifteenth of what torch takes for that norm on the CPU
            ends = [end for x in arrays if x.numel() for end in torch.aminmax(x)]
            return torch.stack(ends).isfinite().all() if ends else self.iota(1)[0] == 0
        largest = [torch.linalg.vector_norm(x, ord=math.inf) for x in arrays if x.numel()]
        if not largest:
            return self.iota(1)[0] == 0
        # both keep a NaN
        return (largest[0] if len(largest) == 1 else torch.stack(largest).amax()) < math.inf

    def are_finite(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Flags, in arrays of any shape, all of which are true if all elements of these are
        finite."""
        return [self.all_finite(*xs)] if self.fused is None else self.fused.are_finite(xs)

    def matmul_each(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
        if self.fused is None or not all(map(factors.multiplies, xs, ys)):
            return [self.matmul(x, y) for x, y in zip(xs, ys, strict=True)]
        return factors.multiplied(self, xs, ys)

    def orthonormalize(self, x: Tensor, epsilon: float) -> Tensor:
        if epsilon or x.dtype == torch.float64 or not x.numel():
            return gram_schmidt(self, x, epsilon, out=x)
        if self.host_knows:
            # One pass where all rows are clearly independent, a fraction of the cost of
            # Gram-Schmidt or QR.
            wide, rows = self.doubles(2, x.shape)
            gram = wide.copy_(x) @ wide.mT
            triangle, failed = torch.linalg.cholesky_ex(gram)
            lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt()
            # Not `failed.any()` alone: inf and NaN are not failures to LAPACK.
            if (triangle.diagonal(dim1=-2, dim2=-1) > lengths * CLEAR).all() and not failed.any():
                return x.copy_(torch.linalg.solve_triangular(triangle, wide, upper=False, out=rows))
        return x.copy_(orthonormalized_unseen(self, [x], [])[0])

    def orthonormalize_each(
        self, arrays: Sequence[Tensor], fresh: Sequence[Tensor], epsilon: float
    ) -> list[Tensor]:
        if self.host_knows or epsilon:
            return each_shape(self, arrays, fresh, epsilon)
        if self.fused is None or not all(map(factors.orthonormalizes, arrays)):
            return orthonormalized_unseen(self, arrays, fresh)
        return factors.orthonormalized(self, arrays, fresh)

    def max_abs(self, x: Tensor) -> Tensor:
        if not x.shape[-1]:
            return x.new_zeros((*x.shape[:-1], 1))
        if not self.host_knows:  # one kernel
            norms: Tensor = torch.linalg.vector_norm(x, ord=torch.inf, dim=-1, keepdim=True)
            return norms
        before = self.short_lived.taken
        # A fraction of what torch takes for that norm of a row on the CPU.
        largest = torch.abs(x, out=self._place(x, None)).amax(-1, keepdim=True)
        self.short_lived.taken = before
        return largest

    @property
    def late_residuals(self) -> bool:
        return self.fused is not None or bool(self.loops.card)

    def norm(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return norm

    def norm_of_all(self, xs: Sequence[Tensor]) -> Tensor:
        wide = torch.float64 if any(x.dtype == torch.float64 for x in xs) else torch.float32
        norms: list[Tensor] = []
        for members, _ in _by_dtype(xs, xs):
            norms += foreach_norm(members, 2, wide)
        if not norms:
            return torch.zeros((), dtype=wide, device=self.device)
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def scale_each(self, xs: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
        for members, _ in _by_dtype(xs, xs):
            if members[0].dtype.itemsize >= 4:
                foreach_mul_(members, factor.to(members[0].dtype))
                continue
            for x in members:  # half precision may not have so small a factor
                x.copy_(x.to(factor.dtype).mul_(factor))
        return list(xs)

    # As they are, with no function round them: they take more arguments.
    sqrt = staticmethod(torch.sqrt)  # type: ignore[assignment]
    abs = staticmethod(torch.abs)  # type: ignore[assignment]

    def round(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.round(x, out=self._place(x, out))

    def elementwise_each(self, f: Callable[..., Tensor], *lists: Sequence[Tensor]) -> list[Tensor]:
        answers: list[Any] = [None] * len(lists[0])
        alone: list[int] = []

        def compute(members: Sequence[int], wholes: Sequence[Tensor]) -> None:
            parts = torch.split(f(*wholes), [lists[0][i].numel() for i in members])
            for i, part in zip(members, parts, strict=True):
                answers[i] = part.view(lists[0][i].shape)

        memory = [x.untyped_storage().data_ptr() for x in lists[0]]
        for members in group_by(range(len(answers)), memory):
            ordered = [members[k] for k in self.join_order([lists[0][i] for i in members])]
            wholes = [side_by_side([xs[i] for i in ordered]) for xs in lists if len(ordered) > 1]
            if wholes and not any(x is None for x in wholes):
                compute(ordered, wholes)  # type: ignore[arg-type]
            else:
                alone += members
        small = [i for i in alone if not self.host_knows and lists[0][i].numel() <= LARGE]
        if len(small) > 1 + len(lists):  # launches to join each list, and for all of them
            compute(small, [_flat([xs[i] for i in small]) for xs in lists])
            alone = [i for i in alone if answers[i] is None]
        for i in alone:
            answers[i] = f(*[xs[i] for xs in lists])
        return answers

    # as it is, with no function round it
    unstack = staticmethod(Tensor.unbind)  # type: ignore[assignment]


def _flat(arrays: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in arrays])


def _limit(y: Tensor, limit: float) -> Tensor:
    """`y` with its elements brought into [-limit, limit], in place; see
    `gradwire.core.kernels.payloads.largest_error`."""
    short = (
        y.dtype == torch.float16
        and torch.linalg.vector_norm(y, dtype=torch.float32) < LONGEST_FLOAT16
    )
    return y if short else y.clamp_(-limit, limit)


def _by_dtype(xs: Sequence[Tensor], others: Sequence[T]) -> Iterable[tuple[list[Tensor], list[T]]]:
    """Pairs of lists of one dtype: given several, what torch does to a list it does tensor by
    tensor."""
    dtypes = [x.dtype for x in xs]
    for dtype in dict.fromkeys(dtypes):
        if dtypes.count(dtype) == len(xs):
            yield list(xs), list(others)
        else:
            members = [i for i, each in enumerate(dtypes) if each == dtype]
            yield [xs[i] for i in members], [others[i] for i in members]


@functools.cache
def _blocks(n: int) -> int:
    """The number of equal blocks, of 32 rows or more, into which `n` rows can be cut."""
    return next(blocks for blocks in range(max(1, n // 32), 0, -1) if n % blocks == 0)
