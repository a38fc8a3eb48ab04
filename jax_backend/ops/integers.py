"""Small integers as bytes, made of the integers themselves: as rows of booleans XLA takes a second
or two to compile them for a TPU."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from gradwire.jax_backend.ops.packing import LANES


def pack_integers(x: jax.Array, bits: int) -> jax.Array | None:
    """What `gradwire.core.kernels.bits.pack_integers` makes of them; None where they fill no whole
    bytes."""
    whole, left, pieces = _bytes_of(bits)
    if not bits or x.size % pieces:
        return None
    numbers = _in_lanes(x, x.size // pieces)
    parts = jnp.split(numbers, pieces)
    made = [_byte([numbers] * 8, places) for places in whole]
    made += [_byte([parts[i] for _, i in places], [bit for bit, _ in places]) for places in left]
    return jnp.concatenate(made).reshape(-1)


def unpack_integers(data: jax.Array, bits: int, n: int) -> jax.Array | None:
    """The n integers, int32, of which `pack_integers` made these bytes."""
    whole, left, pieces = _bytes_of(bits)
    if not bits or n % pieces:
        return None
    every = _in_lanes(data, n // pieces)
    ends = np.cumsum([n] * len(whole) + [n // pieces] * len(left)) * len(every) // data.size
    numbers = [x.astype(jnp.int32) for x in jnp.split(every, ends[:-1])]
    found = [
        (x >> i & 1) << bit
        for x, places in zip(numbers, whole, strict=False)
        for i, bit in enumerate(places)
    ]
    if left:
        parts: list[list[jax.Array]] = [[] for _ in range(pieces)]
        for x, both in zip(numbers[len(whole) :], left, strict=True):
            for i, (bit, piece) in enumerate(both):
                parts[piece].append((x >> i & 1) << bit)
        found.append(jnp.concatenate([_or(part) for part in parts]))
    return _or(found).reshape(-1)


@functools.cache
def _bytes_of(bits: int) -> tuple[list[list[int]], list[list[tuple[int, int]]], int]:
    """The bits that each byte of an integer has, and each of those that several share: their
    numbers, and there of which piece, of how many."""
    k, rest = divmod(bits, 8)
    pieces = 8 // math.gcd(rest, 8)
    shared = rest * pieces // 8
    whole = [[i * k + j for i in range(8)] for j in range(k)]
    left = [
        [(8 * k + u // pieces, u % pieces) for u in range(j, 8 * shared, shared)]
        for j in range(shared)
    ]
    return whole, left, pieces


def _in_lanes(x: jax.Array, part: int) -> jax.Array:
    """The array as rows of a TPU's registers, which a message has too, if parts of so many elements
    are whole ones; else as a vector."""
    return x.reshape(-1) if part % LANES else x.reshape(-1, LANES)


def _byte(numbers: list[jax.Array], places: list[int]) -> jax.Array:
    return _or(
        [(x >> bit & 1) << i for i, (x, bit) in enumerate(zip(numbers, places, strict=True))]
    ).astype(jnp.uint8)


def _or(numbers: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.bitwise_or, numbers)
