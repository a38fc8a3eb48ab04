"""What a compiled program sends, and over which axes of its mesh: read from the text of XLA's
partitioned module.

sent = collectives(jax.jit(step).lower(*arguments).compile().as_text(), mesh)
sum(c.per_slice for c in sent if "dcn" in c.axes)      # bytes that one slice puts on the slow network
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all"
#: `%name = f32[4,8]{1,0} all-reduce(…), …`, with a tuple of types for several operands.
LINE = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ({KINDS})(?:-start)?\((.*)$")
HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
ITEMSIZE = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "f64": 8,
}


@dataclass(frozen=True)
class Sent:
    """A collective of one device.

    Attributes:
        kind: "all-reduce", "all-gather", …
        axes: of the mesh, along which the devices of a group differ.
        nbytes: what an all-gather results in; of anything else, what is handed in.
        shapes: of each array, result or operand as above.
        devices: in the mesh.
        computation: in which it stands: the entry, or a branch.
    """

    kind: str
    axes: frozenset[str]
    nbytes: int
    shapes: tuple[tuple[int, ...], ...]
    devices: int
    computation: str

    def per_slice(self, slices):
        """Bytes that all devices of one of so many slices hand in together, in the terms of
        `gradwire.plan`: all but an all-reduce count half."""
        return self.nbytes * self.devices / slices / (1 if self.kind == "all-reduce" else 2)


def collectives(text, mesh):
    """All of a module, with those in branches, in the order of the text."""
    found, computation = [], ""
    for line in text.splitlines():
        if not line.startswith(" ") and (head := HEAD.match(line)):
            computation = head[2]
        if not (match := LINE.match(line)):
            continue
        results, kind, rest = match.groups()
        groups = _groups(rest, kind)
        arrays = _arrays(results)
        size = len(groups[0])
        # The text names operands without their types. All results are as large as these, up to the
        # size of the group.
        scale = size if kind == "reduce-scatter" else 1
        found.append(
            Sent(
                kind,
                _axes(groups, mesh),
                scale * sum(math.prod(shape) * ITEMSIZE[dtype] for dtype, shape in arrays),
                tuple(shape for _, shape in arrays),
                mesh.devices.size,
                computation,
            )
        )
    return found


def _arrays(types):
    found = re.findall(rf"\b({'|'.join(ITEMSIZE)})\[([\d,]*)\]", types)
    assert found, types
    return [(dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in found]


def _groups(rest, kind):
    """Positions of the devices in the module, as they exchange."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
        assert pairs, rest
        return [[int(n) for n in pair.split(",")] for pair in re.findall(r"(\d+,\d+)", pairs[1])]
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", rest):
        return [
            [int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])
        ]
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    assert counted, rest
    numbers = np.arange(int(counted[1]) * int(counted[2])).reshape(
        [int(n) for n in counted[3].split(",")]
    )
    if counted[4]:
        numbers = numbers.transpose([int(n) for n in counted[4].split(",")])
    rows = numbers.reshape(int(counted[1]), int(counted[2])).tolist()
    return rows


def _axes(groups, mesh):
    places = [np.unravel_index(group, mesh.devices.shape) for group in groups]
    return frozenset(
        name
        for i, name in enumerate(mesh.axis_names)
        if any(len(set(place[i].tolist())) > 1 for place in places)
    )
