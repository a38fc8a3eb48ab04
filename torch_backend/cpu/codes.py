"""Blocks of codes: added, scaled and coded in one pass, decoded and averaged in another; and what
was sent and received is settled in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.core.codecs.codec import Codec
from gradwire.core.kernels.payloads import Coded, Payload, Residual
from gradwire.torch_backend.cpu.compiled import Loops, compiled, kind_of
from gradwire.torch_backend.cpu.pool import over_rows
from gradwire.torch_backend.cpu.sums import Sum

#: Elements that a thread gets at least.
LARGE = 1 << 14
#: Elements of a tensor from which a pass over memory costs more than a call.
SUMMED = 1 << 14


class Memory(Protocol):
    """The kernels that these are a part of: they know which loops there are, and where results
    lie."""

    loops: Loops

    def temporary(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor: ...


def has(ops: Memory, codec: Codec, *fields: Tensor) -> bool:
    """Whether loops know a codec and what has been made with it, or is to be: rows without gaps, of
    float32 or codes."""
    return (
        ops.loops.have("encode", torch.float32)
        and kind_of(codec) is not None
        and all(map(Tensor.is_contiguous, fields))
    )


def sums(
    ops: Memory, xs: Sequence[Tensor], ys: Sequence[Tensor]
) -> tuple[list[Tensor | Sum], list[int]]:
    """`x + y` for each pair, to be added when they are coded; of those that are small, or do not
    lie in one piece, `x` and its number."""
    answers: list[Tensor | Sum] = list(xs)
    now: list[int] = []
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        fit = x.dtype == y.dtype == torch.float32 and x.is_contiguous() and y.is_contiguous()
        if fit and SUMMED <= x.numel() == y.numel() and ops.loops.have("encode_sum", x.dtype):
            answers[i] = Sum(x, y)
        else:
            now.append(i)
    return answers, now


def encode(ops: Memory, codec: Codec, x: Tensor | Sum) -> tuple[Tensor, Tensor] | None:
    """`Ops.encode_rows`, of float32. None, and nothing is done, where no loop does that."""
    own, parts = x.unadded if isinstance(x, Sum) else (x, [])
    if own.dtype != torch.float32 or not has(ops, codec, own):
        return None
    rows, width = own.shape
    fields = _places(ops, codec, rows, width, own)
    done = end = 0  # of all rows, those that are coded, and those that lie before the next sum
    for part in parts:
        begin, end = end, end + part.x.numel() // width
        if part.y is None:
            continue
        if done < begin:
            _run("encode", codec, (begin - done, width), *(y[done:begin] for y in (own, *fields)))
        error, there = part.y.view(-1, width), [y[begin:end] for y in (own, *fields)]
        _run("encode_sum", codec, (end - begin, width), there[0], error, *there[1:])
        part.y, done = None, end
    if done < rows:
        _run("encode", codec, (rows - done, width), *(y[done:] for y in (own, *fields)))
    return fields


def decode_mean(ops: Memory, codec: Codec, of_each: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """`Ops.decode_mean`, in float32."""
    codes, scales = of_each
    shape = codes.shape[1], _width(codec, codes)
    fits = (
        out is not None
        and out.dtype == torch.float32
        and out.is_contiguous()
        and out.numel() == shape[0] * shape[1]
    )
    place = out.view(shape) if out is not None and fits else ops.temporary(shape, scales)
    _run("decode_mean", codec, shape, *map(_below, of_each), place)
    return place


def encode_mean(
    ops: Memory, codec: Codec, of_each: Sequence[Tensor], *, keeps: bool
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """`Ops.encode_mean`, in float32."""
    codes, scales = of_each
    shape = codes.shape[1], _width(codec, codes)
    fields, lost = (
        _places(ops, codec, *shape, scales),
        ops.temporary((shape[0] if keeps else 0, shape[1]), scales),
    )
    _run("encode_mean", codec, shape, *map(_below, of_each), *fields, lost)
    return fields, lost if keeps else None


def settle(
    ops: Memory,
    x: Residual[Tensor],
    sent: Payload[Tensor],
    error: Tensor,
    received: Payload[Tensor],
) -> Tensor | None:
    """`error` becomes `x - sent`, and `x`, which is returned, what was received. None, and nothing
    is done, where no loop does that."""
    own = x.x
    if (
        x.computed
        or not isinstance(sent, Coded)
        or not isinstance(received, Coded)
        or not has(ops, sent.codec)
    ):
        return None
    if (
        own.dtype != torch.float32
        or error.dtype != torch.float32
        or not (own.is_contiguous() and error.is_contiguous())
    ):
        return None
    codes, scales = received.codes, received.scales
    several = codes.ndim == 3
    both = (
        (codes[0], scales[0], codes[1], scales[1])
        if several
        else (codes, scales, codes[:0], scales[:0])
    )
    rows, b = sent.codes.shape[0], _width(sent.codec, sent.codes)
    lost = own.new_empty(0, b) if sent.lost is None else sent.lost
    arrays = [sent.codes, sent.scales, lost, *both]
    if (
        received.codec != sent.codec
        or (several and len(codes) != 2)
        or not all(map(Tensor.is_contiguous, arrays))
    ):
        return None
    whole = own.numel() // b
    flat, errors = own.view(-1), error.view(-1)
    if whole:
        parts = [y[:whole] if i != 2 else y for i, y in enumerate(arrays)]
        _settle(
            sent.codec,
            flat[: whole * b].view(whole, b),
            errors[: whole * b].view(whole, b),
            parts,
            sent.first,
        )
    if whole < rows:  # the last row, which zeros fill up
        count = own.numel() - whole * b
        row, left = own.new_zeros(2, 1, b)
        row[0, :count] = flat[whole * b :]
        parts = [y[whole:] if i != 2 else y for i, y in enumerate(arrays)]
        _settle(sent.codec, row, left, parts, sent.first - whole)
        flat[whole * b :], errors[whole * b :] = row[0, :count], left[0, :count]
    return own


def _settle(codec: Codec, x: Tensor, error: Tensor, arrays: Sequence[Tensor], first: int) -> None:
    sent, sent_scales, lost, *received = (y.numpy() for y in arrays)
    loop, kind = compiled("settle_codes", torch.float32), kind_of(codec)
    given = x.numpy(), error.numpy(), sent, sent_scales, lost, first, *received, kind
    over_rows(x.shape[0], _rows_at_least(x.shape[1]), lambda begin, end: loop(*given, begin, end))


def _run(name: str, codec: Codec, shape: Sequence[int], *arrays: Tensor) -> None:
    """A loop over so many rows, of so many numbers."""
    loop, kind, given = compiled(name, torch.float32), kind_of(codec), [y.numpy() for y in arrays]
    over_rows(shape[0], _rows_at_least(shape[1]), lambda begin, end: loop(*given, kind, begin, end))


def _places(ops: Memory, codec: Codec, rows: int, n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the codes and scales of so many rows of n numbers."""
    codes, scales = (
        ops.temporary((rows, m), like, getattr(torch, dtype)) for m, dtype in codec.fields(n)
    )
    return codes, scales


def _width(codec: Any, codes: Tensor) -> int:
    """Numbers in a row."""
    return codes.shape[-1] * 8 // int(codec.bits)


def _below(x: Tensor) -> Tensor:
    """The rows of all replicas, one replica below the other."""
    return x.view(-1, x.shape[-1])


def _rows_at_least(width: int) -> int:
    return -(-LARGE // max(1, width))
