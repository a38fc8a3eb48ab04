"""How a tensor is a batch of matrices: (batch axes | row axes | column axes), its elements in the
order in which they lie.

By default three and more axes are cut into rows and columns where the two factors of a matrix are
smallest, with n + m least:

    torch   (out, in, kh, kw)   →  out | in·kh·kw
    Flax    (kh, kw, in, out)   →  kh·kw·in | out
            (d, heads, hd)      →  d | heads·hd
            (heads, hd, d)      →  heads·hd | d

No shape tells a stack of layers or experts, (12, 512, 2048), from a matrix (12·512, 2048). A
pattern of names does (`PowerSGD(stacked=…)`), or what the framework knows of the tensor
(`StackedShape`). A stack is 12 matrices that share one request and one product, and no direction.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from gradwire.core.ops import A, Ops


class StackedShape(tuple[int, ...]):
    """A shape of which the framework says that its first `stacked` axes count layers or experts.

    Equal to the tuple of its lengths.
    """

    stacked: int

    def __new__(cls, shape: tuple[int, ...], stacked: int = 0) -> StackedShape:
        made = super().__new__(cls, shape)
        made.stacked = stacked
        return made


@dataclass(frozen=True)
class View:
    """A tensor as matrices.

    Attributes:
        batch: lengths of the axes that count matrices; () for one matrix.
        rows, columns: lengths of the axes that are joined into its n rows and m columns.
        transposed: whether it is the transposed matrices (m, n) that are compressed.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    transposed: bool = False

    # Read in every step for every tensor.
    @functools.cached_property
    def n(self) -> int:
        """Rows as they lie in memory."""
        return math.prod(self.rows)

    @functools.cached_property
    def m(self) -> int:
        """Columns as they lie in memory."""
        return math.prod(self.columns)

    @functools.cached_property
    def stack(self) -> tuple[int, ...]:
        """(number of matrices,) of a stack; () for one matrix."""
        return (math.prod(self.batch),) if self.batch else ()

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """(n, m), or (number, n, m) of a stack."""
        return (*self.stack, self.n, self.m)

    @functools.cached_property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of what is compressed: the lengths of the factors p and q."""
        return (self.m, self.n) if self.transposed else (self.n, self.m)

    def matrices(self, ops: Ops[A], x: A) -> A:
        """`x` as (n, m), or (number, n, m) of a stack, transposed if this view is; padded with
        zeros where it is the square that holds `x`."""
        shape = self.shape
        if x.shape != shape:
            if math.prod(shape) != math.prod(x.shape):
                x = ops.pad(x.reshape((-1,)), math.prod(shape))
            x = x.reshape(shape)
        return x.mT if self.transposed else x

    def __str__(self) -> str:
        matrix = f"{_joined(self.rows)} | {_joined(self.columns)}"
        if self.batch or self.transposed:
            matrix = f"({matrix})" + "ᵀ" * self.transposed
        return f"{_joined(self.batch)} × {matrix}" if self.batch else matrix


def _joined(axes: tuple[int, ...]) -> str:
    return "·".join(map(str, axes))


@functools.lru_cache(maxsize=4096)
def default_rows(shape: tuple[int, ...]) -> int:
    """How many of these axes, two or more, are rows: so many that n + m is least, and of those the
    fewest."""
    return min(range(1, len(shape)), key=lambda k: math.prod(shape[:k]) + math.prod(shape[k:]))


def view_of(
    name: str,
    shape: tuple[int, ...],
    stacked: int = 0,
    rows: int | None = None,
    transposed: bool = False,
) -> View | None:
    """How a tensor is seen; None for a vector, a scalar, or a stack of those, which have no
    columns.

    Args:
        name: of the parameter, for messages.
        shape: of the tensor.
        stacked: how many of its first axes count matrices.
        rows: how many axes after them are rows; means nothing to a vector. None: `default_rows`.
        transposed: see `View`.

    Raises:
        ValueError: there are no so many axes, named with the option that asks for them.
    """
    shape = tuple(shape)
    if stacked > len(shape):
        raise ValueError(
            f"stacked says that the first {stacked} axes of parameter {name!r} are a stack, which"
            f" has the shape {shape}; put a pattern before it that leaves this one out: {{{name!r}:"
            " 0, …}"
        )
    batch, matrix = shape[:stacked], shape[stacked:]
    if len(matrix) < 2:
        return None
    if rows is not None and rows >= len(matrix):
        raise ValueError(
            f"rows gives parameter {name!r} {rows} row axes, and the shape of its matrix is"
            f" {matrix}: leave at least one axis for the columns, or put a pattern before it for"
            " this one"
        )
    cut = default_rows(matrix) if rows is None else rows
    return View(batch, matrix[:cut], matrix[cut:], transposed)


@functools.lru_cache(maxsize=4096)
def square_view(shape: tuple[int, ...], transposed: bool = False) -> View:
    """The smallest square matrix that holds a tensor's elements, the rest zeros."""
    size = math.prod(shape)
    side = math.isqrt(size - 1) + 1 if size else 0
    return View((), (side,), (side,), transposed)


def all_views(shape: tuple[int, ...]) -> Iterator[tuple[int, int, View]]:
    """Every view of a tensor of two or more axes: (stacked, rows, view), the fewest stacked axes
    first."""
    for stacked in range(len(shape) - 1):
        for rows in range(1, len(shape) - stacked):
            cut = stacked + rows
            yield stacked, rows, View(shape[:stacked], shape[stacked:cut], shape[cut:])


def reproducing(name: str, shape: tuple[int, ...], factor: tuple[int, ...]) -> str:
    """The options under which the factor q of a tensor has this shape: (r, m), (r, n) if
    transposed, or (number, r, …) of a stack. "" if there are none."""
    for transposed in (False, True):
        for stacked, rows, view in all_views(tuple(shape)):
            if (*view.stack, view.n if transposed else view.m) == (*factor[:-2], factor[-1]):
                options = [f"stacked={{{name!r}: {stacked}}}"] * bool(factor[2:]) + [
                    f"rows={{{name!r}: {rows}}}"
                ]
                return ", ".join(options)
    return ""
