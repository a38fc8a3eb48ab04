"""Memory of parameters that are cut into blocks, in a saved state: each block under a name of its
own, and cut anew where blocks are others.

    "layer.weight[0:128]"      rows 0 to 127 of the parameter "layer.weight"
    "layer.weight[:, 64:128]"  columns 64 to 127
    "layer.weight"             all of it

What replicas remember each for itself, the error, lies as its parameter does: it is put together of
the blocks in a state and cut again. A factor of one block is not a part of another's. Where blocks
are others it carries over if its shape does not depend on where the parameter was cut: a block
begins with the factor of the one that it shares most with, which is a start as good as that of the
step before. Others begin anew.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.core.algorithm import State

NAME = re.compile(r"(?P<parameter>.*)\[(?P<before>(?:: *, *)*)(?P<start>\d+):(?P<stop>\d+)\]")


@dataclass(frozen=True)
class Piece:
    """A block of a parameter: the indices `start` to `stop` of the `length` along an axis."""

    axis: int
    start: int
    stop: int
    length: int | None = None

    @property
    def size(self) -> int:
        """The number of indices."""
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether it is all there is."""
        return self.size == self.length

    def name(self, parameter: str) -> str:
        """What this block of the parameter is called in a saved state."""
        return (
            parameter if self.whole else f"{parameter}[{':, ' * self.axis}{self.start}:{self.stop}]"
        )

    def common(self, other: Piece) -> int:
        """How many indices two blocks have in common."""
        return max(0, min(self.stop, other.stop) - max(self.start, other.start))


def parameter_of(name: str) -> tuple[str, Piece | None]:
    """The parameter that a name in a saved state is of, and which block of it; None: all of it."""
    found = NAME.fullmatch(name)
    if found is None:
        return name, None
    return found["parameter"], Piece(
        found["before"].count(":"), int(found["start"]), int(found["stop"])
    )


def recut(
    state: Mapping[str, Any],
    pieces: Mapping[str, Piece],
    current: State[Tensor],
    per_replica: Collection[str],
) -> dict[str, Any]:
    """A portable state of any blocks, with tensors in it, cut into these pieces of parameters; all
    of what is not named. It is under the names of the parameters. What this model has no such
    parameter for is still in it, by its own name.

    `current` is the memory here, which says what there is to find and is what begins anew; of it,
    replicas have `per_replica` each for itself.
    """
    blocks = _blocks(state, current)
    found: dict[str, Any] = {**state, "tensors": {}, "local": {}}
    for parameter in dict.fromkeys([*current.tensors, *blocks]):
        theirs, ours = blocks.get(parameter, []), current.tensors.get(parameter)
        wanted = pieces.get(parameter)
        if ours is None and (wanted is None or not _named(theirs, wanted)):
            if parameter in pieces:
                continue  # compressed in blocks of another size, and not in this one
            for name, _, memory in theirs:
                _put(found, name if len(theirs) > 1 else parameter, memory)
            continue
        exact = _named(theirs, wanted)
        if exact is not None and (
            (len(theirs) == 1 and wanted is None)
            or ours is None
            or ours.keys() <= {key for _, key in exact}
        ):
            _put(found, parameter, exact)
        elif theirs and ours is not None:
            _put(found, parameter, _cut(theirs, wanted, exact or {}, ours, per_replica))
    return found


#: (section, key) → array.
Memory = dict[tuple[str, str], Tensor]
#: Name in the state, which block, memory.
Block = tuple[str, Piece | None, Memory]


def _blocks(state: Mapping[str, Any], current: State[Tensor]) -> dict[str, list[Block]]:
    names = dict.fromkeys([*state["tensors"], *state["local"]])
    blocks: dict[str, list[Block]] = {}
    for name in names:
        parameter, piece = (name, None) if name in current.tensors else parameter_of(name)
        memory = {
            (s, key): x for s in ("tensors", "local") for key, x in state[s].get(name, {}).items()
        }
        blocks.setdefault(parameter, []).append((name, piece, memory))
    return blocks


def _named(blocks: list[Block], wanted: Piece | None) -> Memory | None:
    """The memory of just this block."""
    for _, piece, memory in blocks:
        if piece is None and (wanted is None or wanted.whole):
            return memory
        if piece is not None and wanted is not None and _place(piece) == _place(wanted):
            return memory
    return None


def _place(piece: Piece) -> tuple[int, int, int]:
    return piece.axis, piece.start, piece.stop


def _put(state: dict[str, Any], name: str, memory: Memory) -> None:
    state["tensors"].setdefault(name, {})
    for (section, key), x in memory.items():
        state[section].setdefault(name, {})[key] = x


def _cut(
    blocks: list[Block],
    wanted: Piece | None,
    exact: Memory,
    ours: Mapping[str, Tensor],
    per_replica: Collection[str],
) -> Memory:
    sections = {key: section for _, _, memory in blocks for section, key in memory}
    cut: Memory = {}
    for key, here in ours.items():
        place = sections.get(key, "local" if key in per_replica else "tensors"), key
        if place in exact:
            cut[place] = exact[place]
        elif _lies_as_its_parameter(blocks, place, wanted, here):
            if (part := _assembled(blocks, wanted, place, here.shape)) is not None:
                cut[place] = part
        elif place[0] == "tensors":
            cut[place] = _carried(blocks, wanted, key, here)
        elif key not in sections:  # blocks that were not compressed had no error
            cut[place] = torch.zeros(1, *here.shape, dtype=here.dtype, device="cpu")
    return cut


def _lies_as_its_parameter(
    blocks: list[Block], place: tuple[str, str], wanted: Piece | None, here: Tensor
) -> bool:
    """Whether what replicas have for themselves, and what else has the length of its block along
    the axis of the cut, in the state and here."""
    found = [(piece, memory[place]) for _, piece, memory in blocks if place in memory]

    def has_its_length(piece: Piece | None, x: Tensor) -> bool:
        if piece is None:  # all of it
            return (
                wanted is not None
                and x.dim() > wanted.axis
                and x.shape[wanted.axis] == wanted.length
            )
        return x.dim() > piece.axis and x.shape[piece.axis] == piece.size

    lies_here = wanted is None or has_its_length(wanted, here)
    return bool(found) and (
        place[0] == "local" or (lies_here and all(has_its_length(*each) for each in found))
    )


def _assembled(
    blocks: list[Block], wanted: Piece | None, place: tuple[str, str], shape: Sequence[int]
) -> Tensor | None:
    """What is wanted of all blocks together. Blocks that were not compressed had no error: zeros.
    None if these are not of such a parameter."""
    parts = [(piece, memory[place]) for _, piece, memory in blocks if place in memory]
    leading = int(place[0] == "local")  # an axis for the replicas
    full = list(shape)
    if wanted is not None and wanted.length is not None:
        full[wanted.axis] = wanted.length
    whole = parts[0][1].new_zeros(*parts[0][1].shape[:leading], *full)
    for piece, x in parts:
        if piece is not None and (piece.axis >= len(full) or piece.stop > full[piece.axis]):
            return None
        target = (
            whole if piece is None else whole.narrow(piece.axis + leading, piece.start, piece.size)
        )
        if target.shape != x.shape:
            return None
        target.copy_(x)
    return (
        whole if wanted is None else whole.narrow(wanted.axis + leading, wanted.start, wanted.size)
    )


def _carried(blocks: list[Block], wanted: Piece | None, key: str, here: Tensor) -> Tensor:
    """The factor of the block that has most in common with the one that is wanted; else what is
    here."""
    best, most = here.cpu(), -1
    for _, piece, memory in blocks:
        x = memory.get(("tensors", key))
        if x is None or x.shape != here.shape or (piece and wanted and piece.size == wanted.size):
            continue
        share = piece.common(wanted) if piece and wanted else piece.size if piece else 0
        if share > most:
            best, most = x, share
    return best
