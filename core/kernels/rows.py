"""Rows of a matrix by numbers that are the same in every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np


class RowNumbers(NamedTuple):
    """`n` numbers of rows, int32, which depend on `key` alone: a kernel may keep what `make` makes."""

    key: Hashable
    n: int
    make: Callable[[], np.ndarray[Any, np.dtype[np.int32]]]
