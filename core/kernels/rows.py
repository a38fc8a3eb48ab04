"""Rows of a matrix: by numbers that are the same in every step, and those that hold a tile of
another matrix each."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from gradwire.core.kernels.arrays import A


class RowNumbers(NamedTuple):
    """`n` numbers of rows, int32, which depend on `key` alone: a kernel may keep what `make`
    makes."""

    key: Hashable
    n: int
    make: Callable[[], np.ndarray[Any, np.dtype[np.int32]]]


def of_tiles(x: A, rows: int, across: int) -> A:
    """The matrix of whose tiles, of so many rows and so many of them side by side, `x` holds the
    elements, column by column."""
    strips, width = x.shape[0] // across, across * x.shape[1] // rows
    return x.reshape((strips, width, rows)).mT.reshape((-1, width))
