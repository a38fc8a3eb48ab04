"""The options of everything that sends codes, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gradwire.core.codecs import CODECS, Blocks, Codec
from gradwire.core.codecs.coder import Coder, Noise
from gradwire.core.kernels import random
from gradwire.core.ops import A, Ops, name_of_dtype


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """The options of everything that sends codes.

    Args:
        dtype: "int8", "float8_e4m3fn", "int4", "e3m0" (powers of two in 4 bits), "int2"; "bfloat16", "float16", and for gradients in float64
            "float32"; or as a framework has it, `torch.int8`.
        block: how many elements share a scale of 4 bytes. None: 128. A cast to a shorter float has none.
        stochastic: round up or down by chance, so that what is rounded is right on average, and not to the nearest. "int8" and "int4" alone.
        seed: of the chances.

    Raises:
        ValueError: naming the option, its value and the fix.
    """

    dtype: Any
    block: int | None = None
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", name_of_dtype(self.dtype))
        if self.dtype not in CODECS:
            raise ValueError(f"dtype={self.dtype!r} is no dtype to send in: give one of {', '.join(map(repr, CODECS))}")
        codec = CODECS[self.dtype]
        if self.block is not None and not (isinstance(codec, Blocks) and self.block >= 8 and self.block % 8 == 0):
            advice = "leave it out: a cast has no scales"
            if isinstance(codec, Blocks):
                advice = (
                    "give at least 8 elements" if self.block < 8 else "give a multiple of 8, as codes fill whole bytes"
                )
            raise ValueError(f"block={self.block} with dtype={self.dtype!r}: {advice}")
        if self.stochastic and not codec.dithers:
            raise ValueError(f"stochastic=True with dtype={self.dtype!r}: only 'int8' and 'int4' round by chance")

    @cached_property
    def codec(self) -> Codec:
        """What codes."""
        codec = CODECS[self.dtype]
        return replace(codec, block=self.block) if isinstance(codec, Blocks) and self.block else codec

    def coder(self, ops: Ops[A], name: str, step: Any) -> Coder[A]:
        """What averages in a step. Programs of other names draw other numbers."""
        return Coder(ops, self.codec, Noise(random.key(self.seed, name), step) if self.stochastic else None)
