"""What NumPy forgives and torch or JAX do not: positions before the first and after the last element, dtypes that differ, truths that are counted."""

from __future__ import annotations

from typing import Any

import numpy as np

#: An operator on an array without axes gives a scalar of NumPy.
ARRAY = (np.ndarray, np.generic)


def require_positions(kernel: str, index: Any, n: int) -> None:
    """NumPy counts a negative position from the end; torch raises, and JAX drops what lies outside, or gives NaN.

    Raises:
        TypeError: positions are not int32.
        ValueError: one is none of 0, …, n-1.
    """
    if not isinstance(index, ARRAY) or index.dtype != np.int32:
        raise TypeError(f"ops.{kernel}: positions are {_dtype(index)}; make them int32, ops.cast(index, 'int32')")
    least, most = int(index.min(initial=0)), int(index.max(initial=0))
    if index.size and (least < 0 or most >= n):
        wrong = least if least < 0 else most
        raise ValueError(f"ops.{kernel}: position {wrong} is none of the {n} elements of a row, 0 to {n - 1}")


#: Kernels that torch does on one dtype only. Others take integers beside floats, and give floats.
ONE_DTYPE = ("matmul", "subtract_product", "scatter_add", "set_row")


def require_alike(kernel: str, x: Any, *others: Any) -> None:
    """Frameworks differ in what becomes of floats of two dtypes, and of truths that are added or multiplied. Numbers of Python go with any dtype.

    Raises:
        TypeError: `x` is no array or holds truths; or another array has another dtype.
    """
    if not isinstance(x, ARRAY):
        raise TypeError(f"ops.{kernel}: {x!r} is a {type(x).__name__}; give an array, ops.asarray({x!r}, 'float32')")
    for each in (x, *others):
        if isinstance(each, ARRAY) and each.dtype == np.bool_:
            raise TypeError(f"ops.{kernel}: bool is no number here; cast it, ops.cast(x, 'float32')")
        if isinstance(each, ARRAY) and _differ(x, each) and (kernel in ONE_DTYPE or not _integers(x, each)):
            raise TypeError(f"ops.{kernel}: {_dtype(x)} and {_dtype(each)}; cast one of them, ops.cast(x, dtype)")


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
