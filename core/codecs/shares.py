"""Which replica forms, and rounds, which part of a mean of quantized tensors.

What a replica has rounded it remembers (`gradwire.Quantize`). So the bits of later steps depend on
who has rounded what, and that must not depend on which tensors a message holds, nor on their order.
Each tensor is divided by itself: every replica has as many of its rows, side by side. Rows that are
left are dealt, one to a replica, from where those of the tensor before it end, in the order of the
names of a whole model. So the shares of a model differ by one row, however small its tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from gradwire.core.codecs.codec import Codec
from gradwire.core.kernels.rows import RowNumbers
from gradwire.core.ops import WIRE_ITEMSIZE

Numbers = np.ndarray[Any, np.dtype[np.int32]]

#: With so many rows for each replica none is dealt: the last share is filled up, with less than 1 %
#: of all.
MANY = 128


class Extent(NamedTuple):
    """What of a tensor decides how it is sent."""

    name: str
    size: int
    dtype: str


class Deal(NamedTuple):
    """How a model is divided, by name: the `first` replica that is dealt a row; and what is
    `dense`, sent as it is, since its codes would be no shorter."""

    first: dict[str, int]
    dense: frozenset[str]


def deal(model: Iterable[Extent], codec: Codec, replicas: int) -> Deal:
    """How a model is divided among so many replicas, in whatever order its tensors are given."""
    first: dict[str, int] = {}
    dense: set[str] = set()
    alike: dict[tuple[str, int], list[Extent]] = {}
    for each in sorted(model):
        rows, width = codec.layout(each.size)
        if rows * codec.width(width) > each.size * WIRE_ITEMSIZE[each.dtype]:
            dense.add(each.name)
        elif rows:
            alike.setdefault((each.dtype, width), []).append(each)
    for (_, width), some in alike.items():
        counts, start = [codec.layout(each.size)[0] for each in some], 0
        for each, rows in zip(some, counts, strict=True):
            first[each.name] = start
            start = (start + _dealt(rows, replicas)) % replicas
        # Two send each other everything.
        members = tuple((rows, first[each.name]) for rows, each in zip(counts, some, strict=True))
        sent = sum(counts) if replicas == 2 else replicas * Shares(replicas, members, ()).each
        if sent * codec.width(width) > sum(each.size * WIRE_ITEMSIZE[each.dtype] for each in some):
            dense |= {each.name for each in some}
    return Deal(first, frozenset(dense))


def is_even(rows: int, replicas: int) -> bool:
    """Whether a tensor of so many rows is divided in equal parts, of which zeros fill up the
    last."""
    return rows % replicas == 0 or rows >= MANY * replicas


def _dealt(rows: int, replicas: int) -> int:
    return 0 if is_even(rows, replicas) else rows % replicas


class Own(NamedTuple):
    """A replica's rows of a tensor: the first of them in the tensor, how many, and where they begin
    in the share."""

    begin: int
    rows: int
    start: int


@dataclass(frozen=True)
class Shares:
    """Rows of several tensors in one matrix, divided among `replicas`: of each tensor, of (rows,
    the first replica that is dealt one), by itself.

    All shares have as many rows, `each`: the first row of the first tensor stands where a replica
    has fewer. `starts`: where the rows of each tensor begin in the matrix, which may differ from
    replica to replica.
    """

    replicas: int
    members: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]

    @cached_property
    def each(self) -> int:
        """Rows of the largest share."""
        alike, dealt = 0, np.zeros(2 * self.replicas + 1, np.int64)
        for rows, first in self.members:
            left = _dealt(rows, self.replicas)
            alike += rows // self.replicas if left else -(-rows // self.replicas)
            dealt[first] += 1
            dealt[first + left] -= 1
        beside = np.cumsum(dealt[:-1]).reshape(2, -1).sum(0)
        return alike + int(beside.max(initial=0))

    def of(self, replica: int) -> list[Own]:
        """What a replica has of each tensor."""
        return _of(self, replica)

    def sent(self) -> RowNumbers:
        """The row in each place of the shares, one share below the other."""
        return RowNumbers(("sent", self), self.replicas * self.each, lambda: _tables(self)[0])

    def received(self) -> RowNumbers:
        """The place in the shares of each row."""
        return RowNumbers(("received", self), self._rows, lambda: _tables(self)[1])

    def own(self, replica: int) -> RowNumbers:
        """The rows of a replica, which fill the first places of its share."""
        start, count = replica * self.each, sum(own.rows for own in self.of(replica))
        return RowNumbers(
            ("own", self, replica), count, lambda: _tables(self)[0][start : start + count]
        )

    def owners(self) -> Numbers:
        """The replica that has each row, (R, 1)."""
        return (_tables(self)[1] // np.int32(max(1, self.each))).reshape(-1, 1)

    def places(self) -> RowNumbers:
        """The place of each row in the share that it is in."""
        return RowNumbers(
            ("places", self), self._rows, lambda: _tables(self)[1] % np.int32(max(1, self.each))
        )

    @cached_property
    def _rows(self) -> int:
        return sum(rows for rows, _ in self.members)

    @cached_property
    def _hash(self) -> int:
        return hash((self.replicas, self.members, self.starts))

    def __hash__(self) -> int:  # it is part of keys that are looked up in every step
        return self._hash


@lru_cache(maxsize=64)
def shares_of(
    replicas: int, members: tuple[tuple[int, int], ...], starts: tuple[int, ...]
) -> Shares:
    """Made once, for every step."""
    return Shares(replicas, members, starts)


def _counts(rows: int, first: int, replicas: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of a tensor that each replica has."""
    if is_even(rows, replicas):
        each = -(-rows // replicas)
        return np.clip(rows - each * np.arange(replicas), 0, each)
    counts = np.full(replicas, rows // replicas)
    counts[(first + np.arange(rows % replicas)) % replicas] += 1
    return counts


@lru_cache(maxsize=64)
def _of(shares: Shares, replica: int) -> list[Own]:
    found, start = [], 0
    for rows, first in shares.members:
        counts = _counts(rows, first, shares.replicas)
        found.append(Own(int(counts[:replica].sum()), int(counts[replica]), start))
        start += found[-1].rows
    return found


@lru_cache(maxsize=2)  # both are asked for, one after the other
def _tables(shares: Shares) -> tuple[Numbers, Numbers]:
    """The row in each place, and the place of each row."""
    replicas, each = shares.replicas, shares.each
    places = np.empty(sum(rows for rows, _ in shares.members), np.int32)
    filled = np.zeros(replicas, np.int64)
    for (rows, first), begin in zip(shares.members, shares.starts, strict=True):
        counts = _counts(rows, first, replicas)
        offsets = np.arange(replicas) * each + filled - (np.cumsum(counts) - counts)
        places[begin : begin + rows] = np.arange(rows) + np.repeat(offsets, counts)
        filled += counts
    rows_of = np.full(replicas * each, shares.starts[0], np.int32)
    rows_of[places] = np.arange(len(places), dtype=np.int32)
    return rows_of, places
