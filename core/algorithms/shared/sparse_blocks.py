"""A tensor as blocks of equal length, and positions in them packed to the bits that they need.

Sparse methods keep a few elements of each block. All shapes are then known before anything runs, and a position is a small number: 12 bits in a block
of 4096 elements, whatever the size of the tensor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from gradwire.core.algorithms.shared.views import view_of
from gradwire.core.ops import A, Ops, shaped

#: Positions are put together from their bits in float32, which has every integer up to here.
LARGEST_BLOCK = 1 << 24


@dataclass(frozen=True)
class Blocks:
    """How a tensor is cut.

    Attributes:
        shape: of the tensor.
        strips, rows, columns: it is seen as so many strips of so many rows; a block holds columns of a strip, one after the other. With one
            row, elements as they lie.
        count, length: of the blocks. The last rows and the last block may be filled up with zeros.
    """

    shape: tuple[int, ...]
    strips: int
    rows: int
    columns: int
    count: int
    length: int

    def cut(self, ops: Ops[A], x: A) -> A:
        """The blocks of a tensor, (count, length)."""
        flat = x.reshape((-1,))
        if self.rows > 1:
            strips = _filled(ops, flat, self.strips * self.rows * self.columns)
            flat = strips.reshape((self.strips, self.rows, self.columns)).mT.reshape((-1,))
        return _filled(ops, flat, self.count * self.length).reshape((self.count, self.length))

    def joined(self, blocks: A) -> A:
        """The tensor of which `cut` made these blocks."""
        flat = _first(blocks.reshape((-1,)), self.strips * self.rows * self.columns)
        if self.rows > 1:
            flat = flat.reshape((self.strips, self.columns, self.rows)).mT.reshape((-1,))
        return shaped(_first(flat, math.prod(self.shape)), self.shape)

    def are_those_of(self, piece: Blocks, axis: int) -> bool:
        """Whether these are the blocks of equal pieces of the tensor, cut along an axis, of which `piece` are those of one."""
        if self.rows == 1:
            return math.prod(piece.shape[axis:]) % self.length == 0
        for each in (self, piece):  # in a strip are whole blocks, of columns that are those of the tensor
            if each.columns != each.shape[-1] or each.rows * each.columns % self.length:
                return False
        return axis == len(self.shape) - 1 or math.prod(piece.shape[axis:-1]) % self.rows == 0


@functools.lru_cache(maxsize=4096)
def blocks_of(name: str, shape: tuple[int, ...], per: int | tuple[int, int]) -> Blocks:
    """Blocks of about so many elements, all of one length, with as little filled up as can be.

    Args:
        name: of the parameter, for messages.
        shape: of a tensor that is not empty.
        per: elements of a block, as they lie; or rows and columns of a tile of the matrix that `gradwire.core.algorithms.shared.views` sees. Tiles whose
            sides divide those of the matrix are exact; others hold as many elements, of neighbouring columns. A vector has no tiles.
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


def packed(ops: Ops[A], index: A, length: int) -> A:
    """Positions below `length`, int32 of any shape, as one vector of bytes: the lowest bits of all, then the next. Only the last byte may have bits
    to spare."""
    shifts = ops.iota(bits_of(length)).reshape((-1, 1))
    return ops.pack_bits(((index.reshape((1, -1)) >> shifts) & 1) > 0)


def unpacked(ops: Ops[A], data: A, length: int, shape: tuple[int, ...]) -> A:
    """The positions that `packed` packed, as int32 of this shape."""
    n, bits = math.prod(shape), bits_of(length)
    each = ops.cast(ops.unpack_bits(data, (bits, n)), "float32")
    worth = ops.constant(("worth of bits", bits), lambda: ops.asarray([[2**i for i in range(bits)]], "float32"))
    return ops.cast(ops.matmul(worth, each), "int32").reshape(shape)


def _filled(ops: Ops[A], x: A, n: int) -> A:
    return x if tuple(x.shape) == (n,) else ops.pad(x, n)


def _first(x: A, n: int) -> A:
    return x if tuple(x.shape) == (n,) else x[:n]
