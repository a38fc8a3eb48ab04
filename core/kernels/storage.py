"""How arrays lie on a device, and what a compiler for it wants to know.

NumPy and torch keep elements in order and compile nothing: `Storage` is theirs, and wants nothing.
XLA and a TPU do (`jax_backend/ops/storage.py`). No method changes a number. Where a device has an
order of elements of its own, two methods belong together, and each names the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic

from gradwire.core.kernels.arrays import A
from gradwire.core.kernels.primitives import Primitives


class Storage(Generic[A]):
    """Elements in order, and no compiler. `ops` are the kernels whose storage it is."""

    @property
    def max_joined(self) -> int:
        """The largest total size, in elements, at which to concatenate arrays before computing,
        because a compiler takes its time for each of them. 0: never."""
        return 0

    def materialize(self, arrays: Sequence[A]) -> list[A]:
        """Compute these arrays now: a compiler does not compute them again where they are used."""
        return list(arrays)

    def to_blocks(self, ops: Primitives[A], x: A, rows: int, width: int) -> A:
        """An array as rows (rows, width), filled up with zeros. Each row has elements that lie side
        by side; the order of rows is the device's own, and `from_blocks` knows it."""
        flat, n = x.reshape((-1,)), rows * width
        return (flat if flat.shape[0] == n else ops.pad(flat, n)).reshape((rows, width))

    def from_blocks(self, x: A, shape: tuple[int, ...]) -> A:
        """The array of this shape of which `to_blocks` made the rows."""
        n = math.prod(shape)
        return (x if math.prod(x.shape) == n else x.reshape((-1,))[:n]).reshape(shape)

    def to_bytes(self, ops: Primitives[A], x: A) -> A:
        """Scales as bytes to send: float32 (n, k) → uint8 (n, 4k), in an order that `from_bytes`
        knows."""
        return ops.view_as(x, "uint8")

    def from_bytes(self, ops: Primitives[A], x: A, dtype: str) -> A:
        """The numbers of which `to_bytes` made bytes."""
        return ops.view_as(x, dtype)

    def with_layout(self, codes: A, scales: A, shape: tuple[int, ...]) -> tuple[A, A]:
        """Codes (R, m) and scales (R, 1) of the rows of an array of this shape, stored as the
        device decodes them best."""
        return codes, scales

    def reuse_sent(self, codes: A, sent: A, cut: Callable[[A], A]) -> A:
        """`codes`, read back from the message, which is `cut(sent)`, to save memory: no second copy
        is kept."""
        return codes
