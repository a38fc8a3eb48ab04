"""A twin of NumPy's kernels that catches what is right in one framework and wrong in another.

It never writes where it was allowed to, and fills the donated array with NaN instead. And it
refuses what NumPy forgives and torch or JAX do not: positions before the first and after the last
element, dtypes that differ, truths that are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradwire.core.kernels.numpy import NDArray, NumpyOps, limited, name_of
from gradwire.core.kernels.rows import RowNumbers
from gradwire.core.ops import FLOATS

#: An operator on an array without axes gives a scalar of NumPy.
ARRAY = (np.ndarray, np.generic)
#: Kernels that torch does on one dtype only. Others take integers beside floats, and give floats.
ONE_DTYPE = ("matmul", "subtract_product", "scatter_add", "set_row")


def _poisoned(donated: NDArray | None, result: NDArray) -> NDArray:
    if donated is None:
        return result
    result = result.copy()
    poison(donated)
    return result


def poison(donated: NDArray) -> None:
    """Nobody may look at this array any more."""
    # which no integer of a test happens to be
    donated[...] = np.nan if name_of(donated.dtype) in FLOATS else 85


def _poisoning(kernel: Any, alike: bool = True) -> Any:
    """A kernel that poisons its `out`. Its arrays are `alike`: of one dtype, and numbers."""

    def poisoning(ops: NumpyOps, *args: Any, out: NDArray | None = None) -> NDArray:
        if alike:
            require_alike(kernel.__name__, *args)
        return _poisoned(out, kernel(ops, *args))

    return poisoning


class PoisonOps(NumpyOps):
    """NumPy kernels that never write where they were allowed to, and fill the donated array with
    NaN instead; and that refuse what NumPy alone forgives.

    A program that uses an array after donating it, or positions that do not exist, is right in one
    framework and wrong in another. Here it fails.
    """

    add = _poisoning(NumpyOps.add)
    multiply = _poisoning(NumpyOps.multiply)
    round = _poisoning(NumpyOps.round)
    cast = _poisoning(NumpyOps.cast, alike=False)
    divide = _poisoning(NumpyOps.divide)
    matmul = _poisoning(NumpyOps.matmul)
    subtract_product = _poisoning(NumpyOps.subtract_product)
    by_rows = _poisoning(NumpyOps.by_rows, alike=False)

    def where(
        self, ok: NDArray, x: NDArray, y: NDArray | float, *, out: NDArray | None = None
    ) -> NDArray:
        require_truths("where", ok)
        if not isinstance(x, ARRAY) or x.dtype != np.bool_:
            require_alike("where", x, y)
        return _poisoned(out, super().where(ok, x, y))

    def take(self, x: NDArray, index: NDArray) -> NDArray:
        require_positions("take", index, x.shape[-1])
        return super().take(x, index)

    def row(self, x: NDArray, i: Any) -> NDArray:
        require_row("row", i, x.shape[-2])
        return super().row(x, i)

    def rows(
        self,
        arrays: Sequence[NDArray],
        n: int,
        *,
        out: NDArray | None = None,
        donated: bool = False,
    ) -> NDArray:
        matrix = _poisoned(out, super().rows(arrays, n))
        if donated:
            matrix = matrix.copy()
            for x in arrays:
                poison(x)
        return matrix

    def where_lazy(
        self,
        ok: NDArray,
        x: Callable[[NDArray | None], NDArray],
        y: NDArray,
        *,
        limit: float = math.inf,
    ) -> NDArray:
        return _poisoned(y, x(None) if ok else limited(y, limit))

    def scale_each(self, xs: Sequence[NDArray], factor: NDArray) -> list[NDArray]:
        return [_poisoned(x, super(PoisonOps, self).scale_each([x.copy()], factor)[0]) for x in xs]

    def set_row(self, x: NDArray, i: Any, row: NDArray) -> NDArray:
        require_row("set_row", i, x.shape[-2])
        require_alike("set_row", x, row)
        return _poisoned(x, super().set_row(x.copy(), i, row))

    def scatter_add(self, x: NDArray, index: NDArray, values: NDArray) -> NDArray:
        require_positions("scatter_add", index, x.shape[-1])
        require_alike("scatter_add", x, values)
        return _poisoned(x, super().scatter_add(x.copy(), index, values))

    def add_rows(self, x: NDArray, which: RowNumbers, rows: NDArray) -> NDArray:
        return _poisoned(x, super().add_rows(x.copy(), which, rows))

    def from_rows(
        self,
        matrix: NDArray,
        shapes: Sequence[tuple[int, ...]],
        *,
        out: Sequence[NDArray] | None = None,
    ) -> list[NDArray]:
        arrays = super().from_rows(matrix, shapes)
        for donated in out or ():
            poison(donated)
        return arrays


def require_positions(kernel: str, index: Any, n: int) -> None:
    """NumPy counts a negative position from the end; torch raises, and JAX drops what lies outside,
    or gives NaN.

    Raises:
        TypeError: positions are not int32.
        ValueError: one is none of 0, …, n-1.
    """
    if not isinstance(index, ARRAY) or index.dtype != np.int32:
        raise TypeError(
            f"ops.{kernel}: positions are {_dtype(index)}; make them int32, ops.cast(index,"
            " 'int32')"
        )
    least, most = int(index.min(initial=0)), int(index.max(initial=0))
    if index.size and (least < 0 or most >= n):
        wrong = least if least < 0 else most
        raise ValueError(
            f"ops.{kernel}: position {wrong} is none of the {n} elements of a row, 0 to {n - 1}"
        )


def require_alike(kernel: str, x: Any, *others: Any) -> None:
    """Frameworks differ in what becomes of floats of two dtypes, and of truths that are added or
    multiplied. Numbers of Python go with any dtype.

    Raises:
        TypeError: `x` is no array or holds truths; or another array has another dtype.
    """
    if not isinstance(x, ARRAY):
        raise TypeError(
            f"ops.{kernel}: {x!r} is a {type(x).__name__}; give an array, ops.asarray({x!r},"
            " 'float32')"
        )
    for each in (x, *others):
        if isinstance(each, ARRAY) and each.dtype == np.bool_:
            raise TypeError(
                f"ops.{kernel}: bool is no number here; cast it, ops.cast(x, 'float32')"
            )
        if (
            isinstance(each, ARRAY)
            and _differ(x, each)
            and (kernel in ONE_DTYPE or not _integers(x, each))
        ):
            raise TypeError(
                f"ops.{kernel}: {_dtype(x)} and {_dtype(each)}; cast one of them, ops.cast(x,"
                " dtype)"
            )


def require_truths(kernel: str, ok: Any) -> None:
    """NumPy takes numbers other than 0 for truths; torch does not. Raises TypeError."""
    if not isinstance(ok, ARRAY) or ok.dtype != np.bool_:
        raise TypeError(f"ops.{kernel}: the condition is {_dtype(ok)}; compare, as in x > 0")


def require_row(kernel: str, i: Any, n: int) -> None:
    """A slice of NumPy beyond the last row is empty. Raises ValueError."""
    if not 0 <= int(i) < n:
        raise ValueError(f"ops.{kernel}: row {int(i)} is none of {n}, 0 to {n - 1}")


def _differ(x: Any, y: Any) -> bool:
    """Operators on bfloat16, a dtype that NumPy does not know by itself, come out as float32."""
    return x.dtype != y.dtype and "V" not in (x.dtype.kind, y.dtype.kind)


def _integers(*arrays: Any) -> bool:
    return any(x.dtype.kind in "iu" for x in arrays)


def _dtype(x: Any) -> str:
    return str(x.dtype) if isinstance(x, ARRAY) else f"a {type(x).__name__}"
