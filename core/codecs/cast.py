"""A shorter float: no blocks, no scales."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.core.codecs.codec import Codec
from gradwire.core.ops import ITEMSIZE, A, Ops


@dataclass(frozen=True)
class Cast(Codec):
    """Elements in another dtype: "bfloat16", "float16" or "float32"."""

    dtype: str

    @property
    def itemsize(self) -> float:
        return ITEMSIZE[self.dtype]

    def layout(self, n: int) -> tuple[int, int]:
        return n, 1

    def fields(self, n: int) -> tuple[tuple[int, str], ...]:
        return ((n, self.dtype),)

    def encode(self, ops: Ops[A], x: A, dither: A | None = None) -> tuple[A, ...]:
        return (ops.cast(ops.cast(x, "float32"), self.dtype),)

    def decode(self, ops: Ops[A], *fields: A, out: A | None = None) -> A:
        return ops.cast(fields[0], "float32", out=out)

    def witness(self, *fields: A) -> A:
        return fields[0]
