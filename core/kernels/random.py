"""Random numbers that are the same bits in NumPy, torch and JAX: an integer hash, one source, no
generator state.

Every number is a function of (seed, the parameter's name, step, element). It does not depend on
buckets, on the order in which gradients arrive or on the framework. Gaussians are not offered: log
and cos differ in the last bit between frameworks.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import Any

from gradwire.core.kernels.arrays import A
from gradwire.core.kernels.primitives import Primitives

_WORD = 1 << 32


def _signed(word: int) -> int:
    """The 32-bit word as a signed integer: torch has no arithmetic on uint32 CPU tensors, int32
    wraps everywhere."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


#: Shift, the bits that a logical shift leaves, factor.
ROUNDS = [(16, (1 << 16) - 1, _signed(0x7FEB352D)), (15, (1 << 17) - 1, _signed(0x846CA68B))]


def _mix(x: Any) -> Any:
    """A bijection of int32, of an array or of a number, with good avalanche: Chris Wellons'
    lowbias32 (nullprogram.com, "hash-prospector")."""
    for shift, mask, factor in ROUNDS:
        x = (x ^ ((x >> shift) & mask)) * factor
        if isinstance(x, int):  # which does not wrap by itself
            x = _signed(x)
    return x ^ ((x >> 16) & 0xFFFF)


@functools.lru_cache(maxsize=1 << 12)
def key(seed: int, name: str) -> int:
    """A signed 32-bit key for one parameter."""
    return _signed(
        int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")
    )


def uniform(ops: Primitives[A], key: int, shape: tuple[int, ...], step: Any = None) -> A:
    """float32 numbers, uniform on (-1, 1), zero excluded, a multiple of 2**-24.

    Args:
        key: from `key(seed, name)`.
        shape: of the result; fewer than 2**31 elements.
        step: an int, or an int32 scalar that may be traced. Each step gives fresh numbers. None:
            those of step 0, drawn once.
    """
    abstract = getattr(ops, "uniform", None)
    if abstract is not None:  # arrays without data: nothing has to be hashed
        drawn: A = abstract(shape, step)
        return drawn
    size = math.prod(shape)

    def elements() -> A:
        return _mix(ops.iota(size) ^ key)  # type: ignore[no-any-return]

    # Half of the work is the same at every step.
    mixed = elements() if step is None else ops.constant(("uniform", key, size), elements)
    bits = ops.cast(
        (_hashed(ops, mixed, key, 0 if step is None else step) >> 8) & 0xFFFFFF, "float32"
    )
    return (bits * 2.0**-23 - (1.0 - 2.0**-24)).reshape(shape)


def dither(ops: Primitives[A], key: Any, elements: A, step: Any) -> A:
    """float32 numbers, uniform on (-1/2, 1/2), of 16 bits: `round(x + dither)` is unbiased to
    2**-17, and whole numbers below 128 stay as they are.

    Args:
        key: from `key(seed, name)`; or an int32 array of those, one beside each row of `elements`.
        elements: int32, the number of each element, so that a part of them can be drawn by itself.
        step: as for `uniform`.
    """
    bits = ops.cast((_hashed(ops, _mix(elements ^ key), key, step) >> 16) & 0xFFFF, "float32")
    return bits * 2.0**-16 - (0.5 - 2.0**-17)


def of_replica(step: Any, replica: Any) -> Any:
    """A step number that is another one on each replica: each may be an int or a traced int32
    scalar."""
    spread = step * _signed(0x9E3779B1)
    if isinstance(step, int):
        spread = _signed(spread)
    mixed = spread + replica
    return _signed(mixed) if isinstance(mixed, int) else mixed


def _hashed(ops: Primitives[A], mixed: A, key: Any, step: Any) -> A:
    """The hash of a step, from the elements mixed with the key."""
    # Mixed once more than the elements: else element i of step s would equal element s of step i,
    # and element s of step s be 0. The step is a number on the host in torch and NumPy: mixing that
    # takes no kernels. JAX can be told to refuse operands of different numbers of axes.
    one = (1,) * len(mixed.shape)
    salted = (
        key ^ _signed(step) if isinstance(step, int) else (ops.iota(1) + step).reshape(one) ^ key
    )
    hashed: A = _mix(mixed ^ _mix(_mix(salted)))
    return hashed
