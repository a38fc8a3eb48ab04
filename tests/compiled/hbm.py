"""What a compiled program for a TPU reads and writes in the memory of the device (HBM), by its
text.

XLA's "bytes accessed" also counts what lies in the fast memory of the chip: an array that is copied
there, and read three times there, as five passes. Here that is one.
"""

from __future__ import annotations

import math
import re

BYTES = {"f32": 4, "s32": 4, "u32": 4, "u8": 1, "s8": 1, "pred": 1, "bf16": 2}
#: An array and its layout. `S(1)` in it: it lies in fast memory.
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%(?P<name>[\w.-]+) = (?P<type>.*?[\])}]) (?P<kind>[a-z][\w-]*)\((?P<rest>.*)"
)
#: What only names a value, or ends what has begun.
_FREE = re.compile(r"parameter|tuple|get-tuple-element|bitcast|constant|after-all|.*-done")


def size(dtype: str, shape: str) -> int:
    """Bytes of an array, as a program has them: "f32", "512,1024"."""
    return BYTES[dtype] * math.prod(map(int, filter(None, shape.split(","))))


def nbytes(text: str) -> int:
    """Of the entry's instructions, each with all of its arguments and results; of a loop those
    once."""
    lies: dict[str, list[int]] = {}
    total = 0
    for line in text[text.index("ENTRY") :].splitlines():
        if not (found := _INSTRUCTION.match(line)):
            continue
        arrays = _ARRAY.findall(found["type"])
        sizes = [size(dtype, shape) if dtype in BYTES else 0 for dtype, shape, _ in arrays]
        results = [
            0 if "S(1)" in layout else n for n, (_, _, layout) in zip(sizes, arrays, strict=True)
        ]
        lies[found["name"]] = results
        kind, arguments = found["kind"], re.findall(r"%([\w.-]+)", found["rest"].split("), ")[0])
        if _FREE.fullmatch(kind):
            continue
        read = [n for name in arguments for n in lies.get(name, [])]
        if kind == "copy-start":  # (the copy, the original, …)
            results = results[:1]
        elif kind == "slice-start":  # ((the whole), the part, …)
            results, read = results[1:2], sizes[1:2] if any(read) else []
        total += sum(results) + sum(read)
    return total
