"""Codecs by name: what a payload may be sent as. A new one is a file here and a line in this table;
or a file of a user's:

@register_codec("int3")
@dataclass(frozen=True)
class ThreeBits(Scaled): ...

Quantize("int3")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gradwire.core.codecs.cast import Cast
from gradwire.core.codecs.codec import BlockCodec, Codec, Scaled
from gradwire.core.codecs.e3m0 import E3M0
from gradwire.core.codecs.float8 import Float8
from gradwire.core.codecs.integers import Integers
from gradwire.core.codecs.two_bits import TwoBits

__all__ = ["CODECS", "BlockCodec", "Codec", "Scaled", "register_codec"]

C = TypeVar("C", bound=Codec)

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


def register_codec(name: str) -> Callable[[type[C]], type[C]]:
    """Decorator: `WireDtype(x, name)` and `Quantize(name)` send codes of this class, in every
    framework, with the defaults of its fields. Every process of a training imports the file before
    it makes the method.

    Raises:
        TypeError: what is decorated is no class of codecs, or has abstract methods left.
        ValueError: another codec has the name, or codes have other than 1 to 8 bits.
    """

    def register(cls: type[C]) -> type[C]:
        if not (isinstance(cls, type) and issubclass(cls, Codec)):
            raise TypeError(
                f"register_codec({name!r}) decorates {cls!r}, which must be a subclass of Codec"
            )
        known = CODECS.get(name)
        # A cell of a notebook that runs again makes its class again.
        if known is not None and (type(known).__module__, type(known).__qualname__) != (
            cls.__module__,
            cls.__qualname__,
        ):
            raise ValueError(
                f"register_codec({name!r}): {type(known).__qualname__} has this name; take"
                " another one"
            )
        made = cls()
        bits = getattr(made, "bits", 8)
        if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
            raise ValueError(f"register_codec({name!r}): bits={bits!r}; codes have 1 to 8 bits")
        CODECS[name] = made
        return cls

    return register
