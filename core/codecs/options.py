"""The options of everything that sends codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

from gradwire.core.codecs import CODECS, BlockCodec, Codec
from gradwire.core.codecs.coder import Coder
from gradwire.core.codecs.row_coder import Noise
from gradwire.core.kernels import random
from gradwire.core.ops import A, Ops, name_of_dtype
from gradwire.core.text.options import Names, at_least, check_options

#: An option: in what is sent, by name or as a framework has it; what is kept is the name.
WireName = Annotated[Any, Names(CODECS, name_of_dtype)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Quantizer:
    """A base of what sends codes: its options, checked. `gradwire.WireDtype` says what they are."""

    dtype: WireName = field(kw_only=False)
    block: Annotated[int, at_least(8, 1 << 24)] | None = None
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        codec = CODECS[self.dtype]
        scales = isinstance(codec, BlockCodec)
        if self.block is not None and (not scales or self.block % 8):
            advice = (
                "give a multiple of 8, as codes fill whole bytes"
                if scales
                else "leave it out: a cast has no scales"
            )
            raise ValueError(f"block={self.block} with dtype={self.dtype!r}: {advice}")
        if self.stochastic and not codec.dithers:
            dither = " and ".join(repr(name) for name, each in CODECS.items() if each.dithers)
            raise ValueError(
                f"stochastic=True with dtype={self.dtype!r}: only {dither} round by chance"
            )

    @cached_property
    def _codec(self) -> Codec:
        codec = CODECS[self.dtype]
        return (
            replace(codec, block=self.block)
            if isinstance(codec, BlockCodec) and self.block
            else codec
        )

    def _coder(self, ops: Ops[A], name: str, step: Any) -> Coder[A]:
        """What averages in a step. Programs of other names draw other numbers."""
        return Coder(
            ops, self._codec, Noise(random.key(self.seed, name), step) if self.stochastic else None
        )

    def _coder_of(self, ops: Ops[A], names: Sequence[str], step: Any) -> Coder[A]:
        """What averages arrays of these names in a step: each draws numbers of its own."""
        coder = self._coder(ops, "", step)
        coder.keys = [random.key(self.seed, name) for name in names] if self.stochastic else None
        return coder
