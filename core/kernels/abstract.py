"""Arrays with a shape and no data: how a plan runs an algorithm without computing anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from gradwire.core.kernels.rows import RowNumbers
from gradwire.core.ops import WIRE_ITEMSIZE, Ops, Spec, wide_dtype


class NotPortable(AttributeError):
    """A method computes with what arrays of one framework alone have, and its class does not say
    `portable = False`."""


#: What methods of one framework's arrays are in portable terms, where no kernel has their name.
FORMS = {
    "sum": "ops.matmul with a column of ones",
    "mean": "ops.matmul with a column of ones, divided by their number",
    "max": "ops.max_abs(x)",
    "norm": "ops.norm(x)",
    "linalg_norm": "ops.norm(x)",
    "linalg_vector_norm": "ops.norm(x)",
    "linalg_qr": "orthonormalize(ops, x)",
    "view": "x.reshape(shape)",
    "flatten": "x.reshape((-1,))",
    "T": "x.mT",
    "t": "x.mT",
    "transpose": "x.mT",
    "to": "ops.cast(x, dtype)",
    "astype": "ops.cast(x, dtype)",
    "clone": "x * 1.0",
    "size": "x.shape",
}


def not_portable(name: str, said: str) -> NotPortable:
    """The error for a call of `name`, as somebody has `said` it."""
    known = f"ops.{name}(x)" if hasattr(Ops, name) else "operators of arrays and kernels of ops"
    return NotPortable(
        f"{said} is not in every framework; the portable form is {FORMS.get(name, known)}"
    )


@dataclass(frozen=True)
class AbstractArray:
    """A shape and a dtype that answer to the operators of `Array`."""

    shape: tuple[int, ...]
    dtype: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what Python and tools ask for
            raise AttributeError(name)
        raise not_portable(name, f"x.{name}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """A function of torch, `torch.linalg.norm(x)`."""
        name = getattr(function, "__name__", repr(function))
        raise not_portable(name, f"torch.{name.replace('linalg_', 'linalg.')}(x)")

    def __abs__(self) -> Any:
        raise not_portable("abs", "abs(x)")

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        itemsize = (
            WIRE_ITEMSIZE[self.dtype]
            if self.dtype in WIRE_ITEMSIZE
            else np.dtype(self.dtype).itemsize
        )
        return math.prod(self.shape) * itemsize

    @property
    def mT(self) -> Self:  # noqa: N802
        return self._with((*self.shape[:-2], self.shape[-1], self.shape[-2]))

    def reshape(self, shape: tuple[int, ...], /) -> Self:
        if -1 in shape:
            known = math.prod(n for n in shape if n != -1)
            shape = tuple(math.prod(self.shape) // known if n == -1 else n for n in shape)
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"cannot reshape {self.shape} to {shape}")
        return self._with(shape)

    def __bool__(self) -> bool:
        """Numbers are not known before a step runs, nor where JAX compiles it."""
        raise NotPortable(
            "a condition on what x holds is not in every framework; the portable form is"
            " ops.where(condition, x, y)"
        )

    def __getitem__(self, index: Any, /) -> Self:
        indices = index if isinstance(index, tuple) else (index,)
        for i in indices:
            if not (
                isinstance(i, int) or (isinstance(i, slice) and (i.step is None or i.step > 0))
            ):
                said = (
                    "a slice that goes backwards"
                    if isinstance(i, slice)
                    else f"an index of type {type(i).__name__}"
                )
                raise NotPortable(
                    f"{said} is not in every framework; the portable form is ops.take(x, positions)"
                )
        first = zip(indices, self.shape, strict=False)
        kept = [len(range(*i.indices(n))) for i, n in first if isinstance(i, slice)]
        return self._with((*kept, *self.shape[len(indices) :]))

    def _with(self, shape: tuple[int, ...]) -> Self:
        return type(self)(shape, self.dtype)

    def _broadcast(self, other: Any, /) -> Self:
        if not isinstance(other, AbstractArray) or other.shape in (self.shape, ()):
            return self
        theirs = other.shape
        longest = max(len(self.shape), len(theirs))
        a, b = ((1,) * (longest - len(s)) + s for s in (self.shape, theirs))
        for i, j in zip(a, b, strict=True):
            if i != j and 1 not in (i, j):
                raise ValueError(f"cannot broadcast {self.shape} with {theirs}")
        return self._with(tuple(max(i, j) if min(i, j) else 0 for i, j in zip(a, b, strict=True)))

    def _compare(self, other: Any, /) -> Self:
        return type(self)(self._broadcast(other).shape, "bool")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        _broadcast
    )
    __xor__ = __and__ = __rshift__ = __mod__ = _broadcast
    __gt__ = __ge__ = __lt__ = __le__ = _compare
    __eq__ = _compare  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def abstract_arrays(specs: Mapping[str, Spec]) -> dict[str, AbstractArray]:
    """Arrays of these shapes and dtypes, by name."""
    return {name: AbstractArray(tuple(spec.shape), spec.dtype) for name, spec in specs.items()}


class AbstractOps(Ops[AbstractArray]):
    """Kernels that compute shapes."""

    def dtype_of(self, x: AbstractArray) -> str:
        return x.dtype

    def zeros(self, shape: tuple[int, ...], dtype: str) -> AbstractArray:
        return AbstractArray(tuple(shape), dtype)

    def iota(self, n: int) -> AbstractArray:
        return AbstractArray((n,), "int32")

    def uniform(self, shape: tuple[int, ...], step: Any) -> AbstractArray:
        """What `gradwire.core.kernels.random.uniform` draws."""
        if step is not None:
            step + 0  # a number of a step may note that it matters
        return AbstractArray(tuple(shape), "float32")

    def cast(
        self, x: AbstractArray, dtype: str, *, out: AbstractArray | None = None
    ) -> AbstractArray:
        return AbstractArray(x.shape, dtype)

    def asarray(self, numbers: Any, dtype: str) -> AbstractArray:
        return AbstractArray(np.shape(numbers), dtype)

    def add(
        self, x: AbstractArray, y: AbstractArray | float, *, out: AbstractArray | None = None
    ) -> AbstractArray:
        return x + y

    multiply = divide = add

    def matmul(
        self, x: AbstractArray, y: AbstractArray, *, out: AbstractArray | None = None
    ) -> AbstractArray:
        if x.shape[-1] != y.shape[-2]:
            raise ValueError(f"cannot multiply {x.shape} by {y.shape}")
        return AbstractArray((*x.shape[:-1], y.shape[-1]), x.dtype)

    def subtract_product(
        self,
        x: AbstractArray,
        p: AbstractArray,
        q: AbstractArray,
        *,
        out: AbstractArray | None = None,
    ) -> AbstractArray:
        return x - self.matmul(p.mT, q)

    def where(
        self,
        ok: AbstractArray,
        x: AbstractArray,
        y: AbstractArray | float,
        *,
        out: AbstractArray | None = None,
    ) -> AbstractArray:
        return AbstractArray((x * y * ok).shape, x.dtype)

    def where_lazy(
        self,
        ok: AbstractArray,
        x: Callable[[AbstractArray | None], AbstractArray],
        y: AbstractArray,
        *,
        limit: float = math.inf,
    ) -> AbstractArray:
        return x(None)

    def orthonormalize_each(
        self, arrays: Sequence[AbstractArray], fresh: Sequence[AbstractArray], epsilon: float
    ) -> list[AbstractArray]:
        return list(arrays)

    def all_finite(self, *arrays: AbstractArray) -> AbstractArray:
        return AbstractArray((), "bool")

    def max_abs(self, x: AbstractArray) -> AbstractArray:
        return AbstractArray((*x.shape[:-1], 1), x.dtype)

    norm = max_abs

    def scales(
        self, x: AbstractArray, largest: float, *, signed: bool = False
    ) -> tuple[AbstractArray, AbstractArray]:
        scale = AbstractArray((x.shape[0], 1), "float32")
        return scale, scale

    def nearest_bytes(self, x: AbstractArray, *, out: AbstractArray | None = None) -> AbstractArray:
        return AbstractArray(x.shape, "uint8")

    def sum_of_each(self, f: Callable[..., AbstractArray], *arrays: AbstractArray) -> AbstractArray:
        one = f(*[x[0] for x in arrays])  # the others are alike
        return one + one if arrays[0].shape[0] > 1 else one

    def mean_abs(self, x: AbstractArray) -> AbstractArray:
        return AbstractArray((*x.shape[:-1], 1), wide_dtype(x.dtype))

    def norm_of_all(self, xs: Sequence[AbstractArray]) -> AbstractArray:
        return AbstractArray((), wide_dtype(*(x.dtype for x in xs)))

    def scale_each(self, xs: Sequence[AbstractArray], factor: AbstractArray) -> list[AbstractArray]:
        return list(xs)

    def sqrt(self, x: AbstractArray) -> AbstractArray:
        return x

    abs = sign = sqrt

    def round(self, x: AbstractArray, *, out: AbstractArray | None = None) -> AbstractArray:
        return x

    def top_k(self, x: AbstractArray, k: int) -> AbstractArray:
        if not 0 <= k <= x.shape[-1]:
            raise ValueError(f"top_k: there are no {k} largest of {x.shape[-1]} elements")
        return AbstractArray((*x.shape[:-1], k), "int32")

    def take(self, x: AbstractArray, index: AbstractArray) -> AbstractArray:
        if index.shape[:-1] != x.shape[:-1]:
            raise ValueError(f"take: positions {index.shape} for rows {x.shape}")
        return AbstractArray(index.shape, x.dtype)

    def take_rows(self, x: AbstractArray, which: RowNumbers) -> AbstractArray:
        return AbstractArray((which.n, x.shape[-1]), x.dtype)  # and no number is made

    def add_rows(self, x: AbstractArray, which: RowNumbers, rows: AbstractArray) -> AbstractArray:
        if rows.shape != (which.n, x.shape[1]) or rows.dtype != x.dtype:
            raise ValueError(
                f"add_rows: {rows.dtype} {rows.shape} cannot be added to {which.n} rows of"
                f" {x.dtype} {x.shape}"
            )
        return x

    def scatter_add(
        self, x: AbstractArray, index: AbstractArray, values: AbstractArray
    ) -> AbstractArray:
        if (
            index.shape != values.shape
            or index.shape[:-1] != x.shape[:-1]
            or values.dtype != x.dtype
        ):
            raise ValueError(
                f"scatter_add: {values.dtype} {values.shape} at {index.shape} cannot be added to"
                f" {x.dtype} {x.shape}"
            )
        return x

    def pack_bits(self, x: AbstractArray, *, of: AbstractArray | None = None) -> AbstractArray:
        if x.dtype != "bool":
            raise ValueError(f"pack_bits: {x.dtype} are no booleans; of signs, give x > 0")
        return AbstractArray((-(-math.prod(x.shape) // 8),), "uint8")

    def unpack_bits(self, x: AbstractArray, shape: tuple[int, ...]) -> AbstractArray:
        if x.dtype != "uint8" or x.shape != (-(-math.prod(shape) // 8),):
            raise ValueError(
                f"unpack_bits: {x.dtype} {x.shape} do not hold the booleans of {shape}"
            )
        return AbstractArray(shape, "bool")

    def view_as(self, x: AbstractArray, dtype: str) -> AbstractArray:
        nbytes = x.shape[-1] * WIRE_ITEMSIZE[x.dtype]
        if nbytes % WIRE_ITEMSIZE[dtype]:
            raise ValueError(f"view_as: rows of {nbytes} bytes are no {dtype}")
        return AbstractArray((*x.shape[:-1], nbytes // WIRE_ITEMSIZE[dtype]), dtype)

    def add_to_slice(
        self, x: AbstractArray, part: AbstractArray, n: int, i: Any, shape: tuple[int, ...]
    ) -> AbstractArray:
        return x

    def loop(
        self,
        n: int,
        body: Callable[[Any, AbstractArray], AbstractArray],
        start: AbstractArray,
        *,
        fused: bool = False,
    ) -> AbstractArray:
        return body(0, start) if n else start

    def scatter_sum(
        self,
        n: int,
        of: Callable[..., tuple[AbstractArray, AbstractArray]],
        *every: AbstractArray,
        tiles: tuple[int, int] | None = None,
        after: AbstractArray | None = None,
    ) -> AbstractArray:
        one = (AbstractArray((1, *x.shape[1:]), x.dtype) for x in every)  # all replicas send alike
        return super().scatter_sum(n, of, *one, tiles=tiles, after=after)

    def rows_before(self, x: AbstractArray, i: Any) -> AbstractArray:
        return x

    def row(self, x: AbstractArray, i: Any) -> AbstractArray:
        return AbstractArray((*x.shape[:-2], 1, x.shape[-1]), x.dtype)

    def set_row(self, x: AbstractArray, i: Any, row: AbstractArray) -> AbstractArray:
        return x

    def stack(self, arrays: Sequence[AbstractArray]) -> AbstractArray:
        return AbstractArray((len(arrays), *arrays[0].shape), arrays[0].dtype)

    def pad(self, x: AbstractArray, n: int) -> AbstractArray:
        return AbstractArray((n,), x.dtype)

    def rows(
        self,
        arrays: Sequence[AbstractArray],
        n: int,
        *,
        out: AbstractArray | None = None,
        donated: bool = False,
    ) -> AbstractArray:
        return AbstractArray((n, sum(-(-math.prod(x.shape) // n) for x in arrays)), arrays[0].dtype)

    def from_rows(
        self,
        matrix: AbstractArray,
        shapes: Sequence[tuple[int, ...]],
        *,
        out: Sequence[AbstractArray] | None = None,
    ) -> list[AbstractArray]:
        return [AbstractArray(tuple(shape), matrix.dtype) for shape in shapes]
