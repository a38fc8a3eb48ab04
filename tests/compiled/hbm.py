"""What a compiled program for a TPU reads and writes in the memory of the device (HBM), by its text.

XLA's "bytes accessed" also counts what lies in the fast memory of the chip: an array that is copied there, and read three times there, as five passes.
Here that is one.
"""

from __future__ import annotations

import math
import re

BYTES = {"f32": 4, "s32": 4, "u32": 4, "u8": 1, "s8": 1, "pred": 1, "bf16": 2}
#: An array and its layout. `S(1)` in it: it lies in fast memory.
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%(?P<name>[\w.-]+) = (?P<type>.*?[\])}]) (?P<kind>[a-z][\w-]*)\((?P<rest>.*)")
#: What only names a value, or ends what has begun.
_FREE = re.compile(r"parameter|tuple|get-tuple-element|bitcast|constant|after-all|.*-done")


def nbytes(text: str) -> float:
    """Of the entry's instructions, each with all of its arguments and results; of a loop those once."""
    lies: dict[str, list[float]] = {}
    total = 0.0
    for line in text[text.index("ENTRY") :].splitlines():
        if not (found := _INSTRUCTION.match(line)):
            continue
        results = _in_hbm(found["type"])
        lies[found["name"]] = results
        kind, arguments = found["kind"], re.findall(r"%([\w.-]+)", found["rest"].split("), ")[0])
        if _FREE.fullmatch(kind):
            continue
        read = [size for name in arguments for size in lies.get(name, [])]
        if kind == "copy-start":  # (the copy, the original, …)
            results = results[:1]
        elif kind == "slice-start":  # ((the whole), the part, …)
            results, read = results[1:2], [_sizes(found["type"])[1]] if any(read) else []
        total += sum(results) + sum(read)
    return total


def _in_hbm(kind: str) -> list[float]:
    return [
        0 if "S(1)" in layout else size for size, (_, _, layout) in zip(_sizes(kind), _ARRAY.findall(kind), strict=True)
    ]


def _sizes(kind: str) -> list[float]:
    return [
        BYTES.get(dtype, 0) * math.prod(map(int, filter(None, shape.split(","))))
        for dtype, shape, _ in _ARRAY.findall(kind)
    ]
