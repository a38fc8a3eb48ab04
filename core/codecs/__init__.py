"""Codecs by name: what a payload may be sent as. A new one is a file here and a line in this table."""

from __future__ import annotations

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.codec import BlockCodec, Codec
from gradwire.core.codecs.e3m0 import E3M0
from gradwire.core.codecs.float8 import Float8
from gradwire.core.codecs.integers import Integers
from gradwire.core.codecs.two_bits import TwoBits

__all__ = ["CODECS", "BlockCodec", "Codec"]

CODECS: dict[str, Codec] = {
    "float32": Cast("float32"),
    "bfloat16": Cast("bfloat16"),
    "float16": Cast("float16"),
    "float8_e4m3fn": Float8(),
    "int8": Integers(bits=8),
    "int4": Integers(bits=4),
    "int2": TwoBits(),
    "e3m0": E3M0(),
}
