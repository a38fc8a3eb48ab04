"""A tensor as blocks of equal length, and the bits that positions in them need.

Sparse methods keep a few elements of each block. All shapes are then known before anything runs,
and a position is a small number: 12 bits in a block of 4096 elements, whatever the size of the
tensor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from gradwire.core.algorithms.shared.views import view_of
from gradwire.core.ops import A, Ops, reshape_if_needed

#: Positions are put together from their bits in float32, which has every integer up to here.
LARGEST_BLOCK = 1 << 24


@dataclass(frozen=True)
class Blocks:
    """How a tensor is cut.

    Attributes:
        shape: of the tensor.
        strips, rows, columns: it is seen as so many strips of so many rows; a block holds columns
            of a strip, one after the other. With one row, elements as they lie.
        count, length: of the blocks. The last rows and the last block may be filled up with zeros.
    """

    shape: tuple[int, ...]
    strips: int
    rows: int
    columns: int
    count: int
    length: int

    @property
    def width(self) -> int:
        """Columns of the tensor as a matrix whose rows hold these blocks, one after the other."""
        if self.rows > 1:
            return self.columns
        return self.shape[-1] if len(self.shape) > 1 else self.length

    def and_below(self, other: Blocks) -> Blocks | None:
        """The blocks of two matrices of one width, one below the other; None if nothing of a block
        may be filled up."""
        if (self.rows, self.width) != (other.rows, other.width) or not (self.exact and other.exact):
            return None
        shape = (math.prod(self.shape) + math.prod(other.shape)) // self.width, self.width
        if self.rows > 1:
            strips, columns = self.strips + other.strips, self.columns
        else:
            strips, columns = 1, self.columns + other.columns
        return Blocks(shape, strips, self.rows, columns, self.count + other.count, self.length)

    def times(self, n: int) -> Blocks:
        """The blocks of n such matrices, one below the other, where `and_below` has them."""
        below = self
        for _ in range(n - 1):
            below = self.and_below(below) or self
        return below

    @property
    def exact(self) -> bool:
        """Whether nothing is filled up."""
        return (
            self.strips * self.rows * self.columns
            == self.count * self.length
            == math.prod(self.shape)
        )

    def cut(self, ops: Ops[A], x: A) -> A:
        """The blocks of a tensor, (count, length)."""
        flat = x.reshape((-1,))
        if self.rows > 1:
            strips = _filled(ops, flat, self.strips * self.rows * self.columns)
            flat = strips.reshape((self.strips, self.rows, self.columns)).mT.reshape((-1,))
        return _filled(ops, flat, self.count * self.length).reshape((self.count, self.length))

    @property
    def tiles(self) -> tuple[int, int] | None:
        """(rows, tiles side by side), where blocks are the tiles of a matrix
        (`Ops.scatter_sum`)."""
        across, rest = divmod(self.rows * self.columns, self.length)
        return (
            None
            if self.rows == 1 or rest or self.length % self.rows or not self.exact
            else (self.rows, across)
        )

    def whole(self, found: A) -> A:
        """The tensor of which `cut` makes the blocks that are `found`, as `Ops.scatter_sum` returns
        them with these `tiles`."""
        return self.joined(found) if self.tiles is None else reshape_if_needed(found, self.shape)

    def joined(self, blocks: A) -> A:
        """The tensor of which `cut` made these blocks."""
        flat = _first(blocks.reshape((-1,)), self.strips * self.rows * self.columns)
        if self.rows > 1:
            flat = flat.reshape((self.strips, self.columns, self.rows)).mT.reshape((-1,))
        return reshape_if_needed(_first(flat, math.prod(self.shape)), self.shape)

    def are_those_of(self, piece: Blocks, axis: int) -> bool:
        """Whether these are the blocks of equal pieces of the tensor, cut along an axis, of which
        `piece` are those of one."""
        if self.rows == 1:
            return math.prod(piece.shape[axis:]) % self.length == 0
        # in a strip are whole blocks, of columns that are those of the tensor
        for each in (self, piece):
            if each.columns != each.shape[-1] or each.rows * each.columns % self.length:
                return False
        return axis == len(self.shape) - 1 or math.prod(piece.shape[axis:-1]) % self.rows == 0


@functools.lru_cache(maxsize=4096)
def blocks_of(name: str, shape: tuple[int, ...], per: int | tuple[int, int]) -> Blocks:
    """Blocks of about so many elements, all of one length, with as little filled up as can be.

    Args:
        name: of the parameter, for messages.
        shape: of a tensor that is not empty.
        per: elements of a block, as they lie; or rows and columns of a tile of the matrix that
            `gradwire.core.algorithms.shared.views` sees. Tiles whose sides divide those of the
            matrix are exact; others hold as many elements, of neighbouring columns. A vector has no
            tiles.
    """
    size, view = math.prod(shape), view_of(name, shape)
    strips, rows, columns, most = 1, 1, size, per
    if isinstance(per, tuple):
        most = per[0] * per[1]
        if view is not None and per[0] > 1:
            tall = size // view.m
            strips = -(-tall // per[0])
            rows, columns = -(-tall // strips), view.m
    assert isinstance(most, int)
    elements = strips * rows * columns
    count = -(-elements // most)
    return Blocks(tuple(shape), strips, rows, columns, count, -(-elements // count))


def bits_of(length: int) -> int:
    """How many bits a position in a block of this length needs."""
    return (length - 1).bit_length()


def _filled(ops: Ops[A], x: A, n: int) -> A:
    return x if tuple(x.shape) == (n,) else ops.pad(x, n)


def _first(x: A, n: int) -> A:
    return x if tuple(x.shape) == (n,) else x[:n]
