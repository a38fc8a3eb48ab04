"""What is asked how it grows: methods, and a model of many small tensors."""

from __future__ import annotations

from gradwire import AllReduce, PowerSGD, Quantize, Sign, TopK, TwoLevel, WireDtype
from gradwire.core.algorithm import Algorithm

#: On every axis.
METHODS: dict[str, Algorithm] = {
    "AllReduce": AllReduce(),
    "PowerSGD": PowerSGD(4),
    "int8": WireDtype(AllReduce(), "int8"),
    "Quantize": Quantize("int8"),
    "TopK": TopK(16),
    "Sign": Sign(),
}
#: What sends more bytes the more replicas there are.
GATHERED = ("TopK", "Sign")


def methods(ranks: int) -> dict[str, Algorithm]:
    """Those, and what is made for a number of ranks: nodes of a quarter of them each, of at most
    eight."""
    return METHODS | {"TwoLevel": TwoLevel(PowerSGD(4), within=min(8, max(2, ranks // 4)))}


def shapes(tensors: int, width: int = 64) -> dict[str, tuple[int, ...]]:
    """Matrices and vectors in turn."""
    return {
        f"{i // 2}_{'bias' if i % 2 else 'weight'}": (width,) if i % 2 else (width, width)
        for i in range(tensors)
    }
