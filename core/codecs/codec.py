"""What a codec is: rows of numbers to rows of bytes and back, with no communication in it.

A `BlockCodec` has a scale for each block of elements, so that a large element costs precision in
its own block only. Codes and scales are arrays of their own: rows of a length that no accelerator
likes, such as 132 bytes, would be moved about at every step.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradwire.core.ops import WIRE_ITEMSIZE, A, Ops


class Codec(abc.ABC):
    """Encode and decode, row by row: a row (B,) of floats becomes a row (m,) of a dtype that can be
    sent."""

    #: Whether a dither makes rounding unbiased.
    dithers = False

    @property
    @abc.abstractmethod
    def itemsize(self) -> float:
        """Bytes of an element, without scales."""

    @abc.abstractmethod
    def layout(self, n: int) -> tuple[int, int]:
        """(rows, elements in a row) for n elements, of which the last row is filled up. It depends
        on nothing else: so no code depends on what is sent beside it, nor on how many replicas
        there are."""

    @abc.abstractmethod
    def fields(self, n: int) -> tuple[tuple[int, str], ...]:
        """(m, dtype) of each array that a matrix of rows of n elements becomes: the length of its
        rows, and its dtype."""

    def width(self, n: int) -> int:
        """Bytes of the code of a row of n elements."""
        return sum(m * WIRE_ITEMSIZE[dtype] for m, dtype in self.fields(n))

    @abc.abstractmethod
    def encode(self, ops: Ops[A], x: A, dither: A | None = None) -> tuple[A, ...]:
        """Floats (R, B), cast to float32 → (R, m), one for each of `fields`. An inf or NaN in a row
        makes all of it NaN when it is decoded.

        `dither`, (R, B) on (-1/2, 1/2), is added before rounding, in units of what is rounded to.
        """

    @abc.abstractmethod
    def decode(self, ops: Ops[A], *fields: A, out: A | None = None) -> A:
        """(…, R, m), … → float32 (…, R, B). `out` for (R, B) alone."""

    @abc.abstractmethod
    def witness(self, *fields: A) -> A:
        """What is finite if and only if everything decoded is."""


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Blocks of at most `block` elements, quantized to `bits` bits (1 to 8) each, with `scales`
    numbers of float32 to each block."""

    block: int = 128
    scales = 1

    @property
    @abc.abstractmethod
    def bits(self) -> int: ...

    @abc.abstractmethod
    def coded(self, ops: Ops[A], x: A, dither: A | None) -> tuple[A, A]:
        """float32 (R, B) → codes below 2**bits, uint8 (R, B), and float32 (R, scales), of which one
        is inf or NaN if an element is."""

    @abc.abstractmethod
    def decoded(self, ops: Ops[A], codes: A, scales: A, out: A | None) -> A:
        """The elements, float32 (R, B), that codes stand for."""

    @property
    def itemsize(self) -> float:
        return self.bits / 8

    def layout(self, n: int) -> tuple[int, int]:
        # Of what is shorter than a block, rows of few lengths can lie in one array.
        width = self.block
        while width >= max(2 * n, 16) and width % 2 == 0:
            width //= 2
        return -(-n // width), width

    def fields(self, n: int) -> tuple[tuple[int, str], ...]:
        return (n * self.bits // 8, "uint8"), (self.scales, "float32")

    def encode(self, ops: Ops[A], x: A, dither: A | None = None) -> tuple[A, ...]:
        codes, scales = self.coded(ops, ops.cast(x, "float32"), dither)
        return _pack(ops, codes, self.bits), scales

    def decode(self, ops: Ops[A], *fields: A, out: A | None = None) -> A:
        codes, scales = fields
        if self.bits == 8:
            return self.decoded(ops, codes, scales, out)
        lead = tuple(codes.shape[:-1])
        codes, scales = (y.reshape((math.prod(lead), y.shape[-1])) for y in fields)
        x = self.decoded(ops, _unpack(ops, codes, self.bits), scales, out)
        return x.reshape((*lead, x.shape[1]))

    def witness(self, *fields: A) -> A:
        return fields[1]


class Scaled(BlockCodec):
    """Blocks with a scale by which their largest element is `largest`."""

    @property
    @abc.abstractmethod
    def largest(self) -> float: ...

    @abc.abstractmethod
    def codes(self, ops: Ops[A], y: A, dither: A | None) -> A:
        """uint8 below 2**bits, for elements between -largest and largest, which are donated."""

    @abc.abstractmethod
    def values(self, ops: Ops[A], codes: A) -> A:
        """The elements, float32 in an array of their own, that codes stand for."""

    def coded(self, ops: Ops[A], x: A, dither: A | None) -> tuple[A, A]:
        scale, reciprocal = ops.scales(x, self.largest)
        # Times the reciprocal: into that XLA turns the division by what is the same along a row,
        # and a code in a million would be another.
        return self.codes(ops, ops.multiply(x, reciprocal), dither), scale

    def decoded(self, ops: Ops[A], codes: A, scales: A, out: A | None) -> A:
        values = self.values(ops, codes)
        return ops.multiply(values, scales, out=values if out is None else out)


def _pack(ops: Ops[A], codes: A, bits: int) -> A:
    """Codes (R, B) of so many bits → bytes (R, B · bits / 8). The first part of the codes is in the
    lowest bits. What fills no byte evenly goes in slices of 4, 2 and 1 bits, one after the other,
    the lowest bits first."""
    if 8 % bits == 0:
        return _pack_evenly(codes, bits)
    slices = [_pack_evenly((codes >> low) & (2**width - 1), width) for low, width in _slices(bits)]
    return ops.rows(slices, codes.shape[0])


def _pack_evenly(codes: A, bits: int) -> A:
    parts = 8 // bits
    n = codes.shape[1] // parts
    packed = codes[:, :n]
    for i in range(1, parts):
        packed = packed + codes[:, i * n : (i + 1) * n] * 2 ** (bits * i)
    return packed


def _unpack(ops: Ops[A], packed: A, bits: int) -> A:
    if 8 % bits == 0:
        return ops.rows(
            [(packed >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)], packed.shape[0]
        )
    n = packed.shape[1] // bits
    codes: A | None = None
    for low, width in _slices(bits):
        part = _unpack(ops, packed[:, low * n : (low + width) * n], width) * 2**low
        codes = part if codes is None else codes + part
    assert codes is not None
    return codes


def _slices(bits: int) -> list[tuple[int, int]]:
    """The slices of codes of so many bits that fill bytes evenly: the lowest bit of each, and how
    many bits."""
    widths = [width for width in (4, 2, 1) if bits & width]
    return list(zip(accumulate([0, *widths]), widths, strict=False))


def as_sent(ops: Ops[A], fields: Sequence[A]) -> list[A]:
    """Codes and scales as bytes, so that both travel in one message; what has no scales as it
    is."""
    return (
        list(fields)
        if len(fields) == 1
        else [fields[0], ops.storage.to_bytes(ops, fields[1].reshape((1, -1)))]
    )


def from_sent(ops: Ops[A], codec: Codec, n: int, sent: Sequence[A]) -> list[A]:
    """The fields (W, R, m) of rows of n elements, of which `as_sent` has made what has arrived of W
    replicas, (W, …)."""
    answers, replicas = [], sent[0].shape[0]
    for y, (m, dtype) in zip(sent, codec.fields(n), strict=True):
        y = y.reshape((replicas, -1))
        answers.append(
            (
                y if len(sent) == 1 or dtype == "uint8" else ops.storage.from_bytes(ops, y, dtype)
            ).reshape((replicas, -1, m))
        )
    return answers
