"""Where booleans lie in bytes: eight rows apart, so that no element changes its place in a row.

Eight neighbours in a byte would be eight lanes of an accelerator's vector, or every eighth byte of a processor's: both move all of them to pack them.
"""

from __future__ import annotations

import math


def bytes_of_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many bytes hold the rows of an array in eights, along its last axis, and how many the elements of the rows that are left."""
    row = shape[-1] if len(shape) > 1 else 1
    size = math.prod(shape)
    whole = size // row // 8 * row if size else 0
    return whole, -(-(size - 8 * whole) // 8)
