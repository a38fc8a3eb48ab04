"""A matrix as tiles of some rows, each of them a row."""

from __future__ import annotations

from gradwire.core.kernels.arrays import A


def of_tiles(x: A, rows: int, across: int) -> A:
    """The matrix of whose tiles, of so many rows and so many of them side by side, `x` holds the elements, column by column."""
    strips, width = x.shape[0] // across, across * x.shape[1] // rows
    return x.reshape((strips, width, rows)).mT.reshape((-1, width))
