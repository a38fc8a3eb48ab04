"""The kernels in NumPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.core.kernels.bits import bytes_of_rows
from gradwire.core.kernels.rows import RowNumbers
from gradwire.core.ops import FLOATS, INTEGERS, LONGEST_FLOAT16, Ops

NDArray = npt.NDArray[Any]


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Its name, which NumPy makes up anew each time: that is a good part of what simulating a small
    model takes."""
    return dtype.name


@functools.cache
def dtype_named(name: str) -> np.dtype[Any]:
    """NumPy's dtype of this name; those that ml_dtypes teaches to NumPy, "bfloat16" and
    "float8_e4m3fn" among them, too.

    Raises:
        ImportError: it is one of those, and ml_dtypes is not installed.
        TypeError: it is no dtype.
    """
    try:
        return np.dtype(name)
    except TypeError:
        if name not in FLOATS:
            raise
        try:
            import ml_dtypes
        except ImportError as error:
            raise ImportError(
                f"NumPy has no {name} without ml_dtypes, which is not installed: pip install"
                " ml_dtypes"
            ) from error
        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


class NumpyOps(Ops[NDArray]):
    """`Ops` for NumPy arrays. bfloat16 and floats of 8 bits need ml_dtypes, which is imported when
    they are asked for.

    With ml_dtypes some operations on bfloat16 (`matmul`, times a Python float, a norm) come out
    wider: kernels cast back.
    """

    def __init__(self) -> None:
        self._constants: dict[Hashable, NDArray] = {}

    def dtype_of(self, x: NDArray) -> str:
        return name_of(x.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> NDArray:
        return np.zeros(shape, dtype_named(dtype))

    def iota(self, n: int) -> NDArray:
        return np.arange(n, dtype=np.int32)

    def cast(self, x: NDArray, dtype: str, *, out: NDArray | None = None) -> NDArray:
        source = name_of(x.dtype)
        if dtype in INTEGERS and source in FLOATS:
            limits = np.iinfo(dtype)
            x = np.clip(np.nan_to_num(x.astype(np.float64), nan=0), limits.min, limits.max)
        if out is not None:
            out[...] = x.astype(dtype_named(dtype), copy=False)
            return out
        return x if source == dtype else x.astype(dtype_named(dtype))

    def asarray(self, numbers: Any, dtype: str) -> NDArray:
        given = np.array(numbers)
        return self.cast(given, dtype)

    def add(self, x: NDArray, y: NDArray | float, *, out: NDArray | None = None) -> NDArray:
        return np.asarray(np.add(x, _like(y, x), out=out))

    def multiply(self, x: NDArray, y: NDArray | float, *, out: NDArray | None = None) -> NDArray:
        return np.asarray(np.multiply(x, _like(y, x), out=out))

    def divide(self, x: NDArray, y: NDArray, *, out: NDArray | None = None) -> NDArray:
        return np.asarray(np.divide(x, y, out=out))

    def matmul(self, x: NDArray, y: NDArray, *, out: NDArray | None = None) -> NDArray:
        product: NDArray = np.matmul(x, y, out=out, casting="unsafe")
        return product if product.dtype is x.dtype else product.astype(x.dtype)

    def subtract_product(
        self, x: NDArray, p: NDArray, q: NDArray, *, out: NDArray | None = None
    ) -> NDArray:
        return np.subtract(x, self.matmul(p.mT, q), out=out)

    def where(
        self, ok: NDArray, x: NDArray, y: NDArray | float, *, out: NDArray | None = None
    ) -> NDArray:
        # np.where would take the dtype of a 0-d float `y` into account.
        other = np.asarray(y, x.dtype)
        # the usual case: all of the one or all of the other
        if not ok.shape and other.shape in (x.shape, ()):
            if out is None:
                return np.array(x) if ok else np.full(x.shape, other)
            chosen = x if ok else other
        elif x is out and other.shape == ():
            np.copyto(out, other, where=np.logical_not(ok))
            return out
        else:
            chosen = np.where(ok, x, other)
            if out is None:
                return chosen
        if chosen is not out:
            out[...] = chosen
        return out

    def where_lazy(
        self,
        ok: NDArray,
        x: Callable[[NDArray | None], NDArray],
        y: NDArray,
        *,
        limit: float = math.inf,
    ) -> NDArray:
        return x(y) if ok else limited(y, limit, y)

    def truth(self, ok: NDArray) -> bool | None:
        return bool(ok)

    def all_finite(self, *arrays: NDArray) -> NDArray:
        return np.asarray(all(np.isfinite(x).all() for x in arrays))

    def max_abs(self, x: NDArray) -> NDArray:
        return np.asarray(np.maximum.reduce(np.abs(x), axis=-1, keepdims=True, initial=0))

    def mean_abs(self, x: NDArray) -> NDArray:
        wide = np.float64 if x.dtype == np.float64 else np.float32
        return np.asarray(np.mean(np.abs(x), axis=-1, keepdims=True, dtype=wide))

    def norm(self, x: NDArray) -> NDArray:
        if x.dtype.kind != "f":  # bfloat16
            return np.asarray(np.linalg.vector_norm(x, axis=-1, keepdims=True)).astype(
                x.dtype, copy=False
            )
        # What vector_norm does, without what it takes to find that out.
        return np.asarray(np.sqrt(np.add.reduce(x * x, axis=-1, keepdims=True)))

    def norm_of_all(self, xs: Sequence[NDArray]) -> NDArray:
        dtype = np.float64 if any(x.dtype == np.float64 for x in xs) else np.float32
        squares: NDArray = np.zeros((), dtype)
        for x in xs:
            flat: NDArray = x.reshape(-1).astype(dtype, copy=False)
            squares = squares + np.dot(flat, flat)
        return np.asarray(np.sqrt(squares), dtype)

    def scale_each(self, xs: Sequence[NDArray], factor: NDArray) -> list[NDArray]:
        return [np.asarray(np.multiply(x, factor, out=x, casting="unsafe")) for x in xs]

    def sqrt(self, x: NDArray) -> NDArray:
        return np.asarray(np.sqrt(x))

    def abs(self, x: NDArray) -> NDArray:
        return np.asarray(np.abs(x))

    def sign(self, x: NDArray) -> NDArray:
        return np.asarray(np.sign(x))

    def round(self, x: NDArray, *, out: NDArray | None = None) -> NDArray:
        return np.asarray(np.rint(x, out=out))

    def top_k(self, x: NDArray, k: int) -> NDArray:
        n = x.shape[-1]
        if k > n:
            raise ValueError(f"top_k: there are no {k} largest of {n} elements")
        if name_of(x.dtype) in FLOATS:
            x = np.where(np.isnan(x), np.asarray(np.inf, x.dtype), x)
        # Backwards, since a stable sort that ascends puts the first of equal elements first.
        ascending = np.argsort(x[..., ::-1], axis=-1, kind="stable")
        return np.asarray(n - 1 - ascending[..., n - k :][..., ::-1], np.int32)

    def take(self, x: NDArray, index: NDArray) -> NDArray:
        return np.take_along_axis(x, index, axis=-1)

    def take_rows(self, x: NDArray, which: RowNumbers) -> NDArray:
        return np.asarray(x.reshape((-1, x.shape[-1]))[self.constant(which.key, which.make)])

    def add_rows(self, x: NDArray, which: RowNumbers, rows: NDArray) -> NDArray:
        x[self.constant(which.key, which.make)] += rows
        return x

    def scatter_add(self, x: NDArray, index: NDArray, values: NDArray) -> NDArray:
        np.add.at(x, (*np.indices(index.shape, sparse=True)[:-1], index), values)
        return x

    def pack_bits(self, x: NDArray, *, of: NDArray | None = None) -> NDArray:
        whole, left = bytes_of_rows(x.shape)
        flat = self.pad(x.reshape(-1), 8 * (whole + left))
        parts = flat[: 8 * whole].reshape(8, whole), flat[8 * whole :].reshape(8, left)
        return np.concatenate(
            [np.packbits(part, axis=0, bitorder="little")[0] for part in parts if part.size]
            or [flat.astype("uint8")]
        )

    def unpack_bits(self, x: NDArray, shape: tuple[int, ...]) -> NDArray:
        whole, _ = bytes_of_rows(shape)
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        parts = [((part >> shifts) & 1).reshape(-1) for part in (x[:whole], x[whole:])]
        return np.concatenate(parts)[: math.prod(shape)].reshape(shape).astype(bool)

    def view_as(self, x: NDArray, dtype: str) -> NDArray:
        return np.ascontiguousarray(x).view(dtype_named(dtype))

    def add_to_slice(
        self, x: NDArray, part: NDArray, n: int, i: Any, shape: tuple[int, ...]
    ) -> NDArray:
        k, total = part.shape[0], x.copy()
        total[i * k : (i + 1) * k] += part
        return total

    def by_rows(
        self, f: Callable[..., NDArray], *arrays: NDArray, out: NDArray | None = None
    ) -> NDArray:
        result = f(*arrays)
        if out is None:
            return result
        out[...] = result.reshape(out.shape)
        return out.reshape(result.shape)

    def row(self, x: NDArray, i: Any) -> NDArray:
        return x[..., i : i + 1, :]

    def set_row(self, x: NDArray, i: Any, row: NDArray) -> NDArray:
        x[..., i : i + 1, :] = row
        return x

    def stack(self, arrays: Sequence[NDArray]) -> NDArray:
        return np.array(arrays)

    def pad(self, x: NDArray, n: int) -> NDArray:
        padded = np.zeros(n, x.dtype)
        padded[: x.shape[0]] = x
        return padded

    def rows(
        self,
        arrays: Sequence[NDArray],
        n: int,
        *,
        out: NDArray | None = None,
        donated: bool = False,
    ) -> NDArray:
        if (
            out is None and len(arrays) == 1 and arrays[0].size % n == 0
        ):  # a view, as in torch, so that a program that writes into it is noticed
            return arrays[0].reshape((n, -1))
        return np.concatenate(
            [
                self.pad(x.reshape(-1), -(-x.size // n) * n).reshape(n, -(-x.size // n))
                for x in arrays
            ],
            axis=1,
            out=out,
        )

    def from_rows(
        self,
        matrix: NDArray,
        shapes: Sequence[tuple[int, ...]],
        *,
        out: Sequence[NDArray] | None = None,
    ) -> list[NDArray]:
        n, start, arrays = matrix.shape[0], 0, []
        for i, shape in enumerate(shapes):
            size = math.prod(shape)
            k = -(-size // n)
            array = matrix[:, start : start + k].reshape(-1)[:size].reshape(shape)
            start += k
            if out is None:
                arrays.append(array.copy())
            else:
                out[i][...] = array
                arrays.append(out[i])
        return arrays

    def constant(self, key: Hashable, make: Callable[[], NDArray]) -> NDArray:
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]


def limited(x: NDArray, limit: float, out: NDArray | None = None) -> NDArray:
    if limit == math.inf:
        return x if out is x else x.copy()
    if x.dtype == np.float16 and np.linalg.norm(x.astype(np.float32)) < LONGEST_FLOAT16:
        return x if out is x else x.copy()
    bound = np.asarray(limit, x.dtype)
    # `np.clip` knows no bfloat16
    return np.asarray(np.minimum(np.maximum(x, -bound, out=out), bound, out=out))


def _like(y: NDArray | float, x: NDArray) -> NDArray:
    """`y` in the dtype of `x`."""
    return y if isinstance(y, np.ndarray) and y.dtype is x.dtype else np.asarray(y, x.dtype)
