"""Kernels of codes, bits, signs and positions, in torch: what an average of full precision, or of
low rank, never asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.core.codecs.integers import Integers
from gradwire.core.kernels.bits import bytes_of_rows
from gradwire.core.kernels.rounding import TINY, scales
from gradwire.core.kernels.rows import RowNumbers
from gradwire.torch_backend.cpu import codes
from gradwire.torch_backend.cpu.sums import Sum, value_of
from gradwire.torch_backend.ops import signs, sparse
from gradwire.torch_backend.ops.workspace import IN_CACHE, Workspace
from gradwire.torch_backend.torch_internals import foreach_norm

#: Elements that are decoded at a time, of as many replicas as these are: of the smallest lot, a
#: block each, of 4,096.
DECODED = 2 * IN_CACHE


class CodingOps(Workspace):
    """What `gradwire.torch_backend.ops.kernels.TorchOps` overrides of `Ops` for methods that send
    codes, signs, or some elements."""

    def scales(self, x: Tensor, largest: float, *, signed: bool = False) -> tuple[Tensor, Tensor]:
        if not x.shape[-1]:
            return scales(self, x, largest, signed=signed)
        # What `scales` does, call by call in one place: rows are few, and what a call costs counts.
        size = self.max_abs(x)
        exact = torch.mul(size, 1.0 / largest).clamp_min_(TINY)
        bits = exact.view(torch.int32).add(255).bitwise_and_(-256)
        # Rounding up makes a number of some NaNs, which the larger of the two is not.
        scale = torch.maximum(bits.view(torch.float32), exact)
        if signed:
            scale = torch.where(x.amax(-1, keepdim=True) >= size, -scale, scale)
        return scale, scale.reciprocal()

    def codes_stay(self, codec: Any, x: Tensor, each: int | None = None) -> bool:
        if self.fused is not None:
            of_bytes = type(codec) is Integers and codec.bits == 8
            return of_bytes and x.shape[1] <= self.fused.widest and x.dtype != torch.float64
        if each is not None and each < self.loops.large:  # a loop takes longer to call than to run
            return False
        return x.dtype == torch.float32 and codes.has(self, codec)

    def quantize(self, x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
        if self.fused is None or x.shape[1] > self.fused.widest:
            return super().quantize(x, largest)
        return self.fused.quantized(x, largest)

    def encode_rows(self, codec: Any, x: Tensor | Sum) -> tuple[Tensor, ...]:
        if (fields := codes.encode(self, codec, x)) is not None:
            return fields
        return super().encode_rows(codec, value_of(x))

    def decode_rows(self, codec: Any, *fields: Tensor, out: Tensor | None = None) -> Tensor:
        if codes.has(self, codec, *fields):
            return codes.decode_mean(self, codec, [x.unsqueeze(0) for x in fields], out)
        if (
            self.fused is not None
            and self.codes_stay(codec, fields[0])
            and (out is None or out.dtype == torch.float32)
        ):
            own, of_rows = fields
            if own.is_contiguous() and of_rows.is_contiguous():
                place = (
                    self.temporary(tuple(own.shape), of_rows)
                    if out is None
                    else out.view(own.shape)
                )
                return self.fused.decoded_each(
                    self.scalar(True, torch.bool), [own], [of_rows], [place]
                )[0]
        return super().decode_rows(codec, *fields, out=out)

    def decode_mean(
        self, codec: Any, *of_each: Tensor, dtype: str = "float32", out: Tensor | None = None
    ) -> Tensor:
        if dtype == "float32" and codes.has(self, codec, *of_each):
            return codes.decode_mean(self, codec, of_each, out)
        return super().decode_mean(codec, *of_each, dtype=dtype, out=out)

    def encode_mean(
        self, codec: Any, *of_each: Tensor, dtype: str = "float32", keeps: bool
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if dtype == "float32" and codes.has(self, codec, *of_each):
            return codes.encode_mean(self, codec, of_each, keeps=keeps)
        if self.fused is None or not self.codes_stay(codec, of_each[0][0]):
            return super().encode_mean(codec, *of_each, dtype=dtype, keeps=keeps)
        stored, scales = of_each
        mean_codes, mean_scales, lost = self.fused.quantize_mean_of_codes(
            stored, scales, codec.largest, keeps=keeps
        )
        return (mean_codes, mean_scales), lost

    def nearest_bytes(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        place = self.temporary(tuple(x.shape), x, torch.uint8) if out is None else out
        place.view(torch.int8).copy_(x.round_())
        return place

    def sign(self, x: Tensor) -> Tensor:
        signs = torch.sign(x)  # 0 for NaN
        return signs.masked_fill_(x.isnan(), math.nan) if x.is_floating_point() else signs

    def top_k(self, x: Tensor, k: int) -> Tensor:
        n = x.shape[-1]
        if x.is_floating_point():
            x = x.masked_fill(x.isnan(), math.inf)
        if x.dtype == torch.float64:
            return x.sort(dim=-1, descending=True, stable=True).indices[..., :k].to(torch.int32)
        # `topk` promises nothing about equal elements, and is many times quicker than a sort. So no
        # two are equal: one integer holds the number, as one that has the same order, and below it
        # the position.
        if x.is_floating_point():
            bits = (x.to(torch.float32) + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
            x = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        backwards = self.numbers(n, torch.int64, -1)
        return ((x.to(torch.int64) << 32) | backwards).topk(k, dim=-1).indices.to(torch.int32)

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        return x.gather(-1, index.long())

    def scatter_add(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        if self.host_knows:
            return x.scatter_add_(-1, index.long(), values)
        # On CUDA `scatter_add_` adds in any order, so that ranks may differ in the last bit; this
        # sorts the positions.
        rows = [
            self.numbers(m, torch.int64).view(-1, *[1] * (x.ndim - 1 - i))
            for i, m in enumerate(x.shape[:-1])
        ]
        return x.index_put_((*rows, index.long()), values, accumulate=True)

    def take_rows(self, x: Tensor, which: RowNumbers) -> Tensor:
        dtype = x.dtype
        # a device moves words sooner than bytes
        if not x.shape[-1] * x.itemsize % 8 and _can_be_viewed(x, 8):
            x = x.view(torch.int64)
        if (
            self.fused is not None
            and x.ndim <= 3
            and x.stride(-1) == 1
            and 0 < x.shape[-1] <= self.fused.widest
        ):
            return self.fused.take_rows(x, self._row_numbers_of(which)).view(dtype)
        if x.ndim == 3 and not x.is_contiguous():  # parts of messages
            n = x.shape[1]
            return x[
                self._row_numbers_of(
                    RowNumbers((which.key, n, 0), which.n, lambda: which.make() // np.int32(n))
                ),
                self._row_numbers_of(
                    RowNumbers((which.key, n, 1), which.n, lambda: which.make() % np.int32(n))
                ),
            ].view(dtype)
        place = self.temporary((which.n, x.shape[-1]), x)
        rows = x.view(-1, x.shape[-1])
        return torch.index_select(rows, 0, self._row_numbers_of(which), out=place).view(dtype)

    def add_rows(self, x: Tensor, which: RowNumbers, rows: Tensor) -> Tensor:
        return x.index_add_(0, self._row_numbers_of(which), rows)

    def _row_numbers_of(self, which: RowNumbers) -> Tensor:
        return self.constant(which.key, lambda: self.on_device(torch.from_numpy(which.make())))

    def pack_bits(self, x: Tensor, *, of: Tensor | None = None) -> Tensor:
        whole, left = bytes_of_rows(tuple(x.shape))
        bits = x.contiguous().view(torch.uint8).view(-1)
        parts = [bits[: 8 * whole]] * (whole > 0)
        if left:
            parts.append(
                torch.nn.functional.pad(bits[8 * whole :], (0, 8 * (whole + left) - len(bits)))
            )
        shifts = self.numbers(8, torch.uint8).unsqueeze(-1)
        packed = [(part.view(8, -1) << shifts).sum(0, dtype=torch.uint8) for part in parts]
        return packed[0] if len(packed) == 1 else torch.cat([bits[:0], *packed])

    def unpack_bits(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        whole, _ = bytes_of_rows(shape)
        shifts = self.numbers(8, torch.uint8).unsqueeze(-1)
        parts = [((part >> shifts) & 1).view(-1) for part in (x[:whole], x[whole:]) if len(part)]
        bits = parts[0] if len(parts) == 1 else torch.cat([x[:0], *parts])
        return bits[: math.prod(shape)].view(shape).view(torch.bool)

    def pack_integers(self, x: Tensor, bits: int) -> Tensor:
        if self.fused is not None and x.numel() and 0 < bits < 16:
            return self.fused.pack_integers(x, bits)
        data = sparse.pack_integers(self, x, bits)
        return super().pack_integers(x, bits) if data is None else data

    def unpack_integers(self, data: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
        n = math.prod(shape)
        if self.fused is not None and n and 0 < bits < 16:
            return self.fused.unpack_integers(data, bits, n).view(*data.shape[:-1], *shape)
        found = sparse.unpack_integers(self, data, bits, n)
        return (
            super().unpack_integers(data, bits, shape)
            if found is None
            else found.view(*data.shape[:-1], *shape)
        )

    def largest_each(self, xs: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor]:
        return sparse.largest_each(self, xs, k)

    def scatter_sum_each(
        self,
        parts: Sequence[tuple[int, int, tuple[int, int] | None]],
        of: Callable[..., tuple[Tensor, Tensor]] | None,
        *every: Tensor,
        order: Sequence[int] | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        if of is None:
            of, every = lambda *own: own, tuple(x.unsqueeze(0) for x in every)
        found = sparse.scatter_sum_each(self, parts, of, every, order)
        return found if finish is None else self.elementwise_each(finish, found)

    def mean_abs(self, x: Tensor) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        # Not a 1-norm, which is added up in one go, and has lost four digits at a million.
        return x.abs().mean(-1, keepdim=True, dtype=wide)

    def mean_abs_each(self, xs: Sequence[Tensor]) -> Tensor:
        if self.host_knows or any(len(x) > 1 for x in xs):
            return super().mean_abs_each(xs)
        # A device adds up parts of a 1-norm, so that it keeps its digits.
        wide = torch.float64 if xs[0].dtype == torch.float64 else torch.float32
        sizes = [x.shape[1] for x in xs]
        counts = self.constant(("sizes", wide, *sizes), lambda: self.from_host(sizes, wide))
        return torch.stack(foreach_norm(list(xs), 1, wide)).div_(counts)

    def pack_signs(self, xs: Sequence[Tensor], sharing: Sequence[tuple[int, ...]]) -> list[Tensor]:
        if not self._along_rows([tuple(x.shape) for x in xs], sharing):
            return super().pack_signs(xs, sharing)
        return signs.pack_signs(self, xs, sharing)

    def signed(
        self,
        xs: Sequence[Tensor],
        bits: Sequence[Tensor],
        above: Sequence[Tensor],
        below: Sequence[Tensor],
        sharing: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        shapes = [tuple(x.shape) for x in xs]
        if not self._along_rows(shapes, sharing):
            return super().signed(xs, bits, above, below, sharing)
        every, high, low = ([x.unsqueeze(0) for x in each] for each in (bits, above, below))
        return self.sum_of_signs(every, high, low, shapes, sharing)

    def sum_of_signs(
        self,
        every: Sequence[Tensor],
        above: Sequence[Tensor],
        below: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        sharing: Sequence[tuple[int, ...]],
    ) -> list[Tensor]:
        if not self._along_rows(shapes, sharing):
            return super().sum_of_signs(every, above, below, shapes, sharing)
        high, low = (x[0] if len(x) == 1 else torch.cat(list(x), 1) for x in (above, below))
        return signs.sum_of_signs(self, every, high, low, shapes, sharing)

    def _along_rows(
        self, shapes: Sequence[tuple[int, ...]], sharing: Sequence[tuple[int, ...]]
    ) -> bool:
        return all(map(signs.shares_along_rows, shapes, sharing))

    def view_as(self, x: Tensor, dtype: str) -> Tensor:
        wanted: torch.dtype = getattr(torch, dtype)
        if _can_be_viewed(x, wanted.itemsize):
            return x.view(wanted)
        last = x.shape[-1] * x.itemsize // wanted.itemsize
        flat = x.reshape(-1)
        if flat.storage_offset() * flat.itemsize % wanted.itemsize:
            flat = flat.clone()
        return flat.view(wanted).view(*x.shape[:-1], last)

    def sum_of_each(self, f: Callable[..., Tensor], *arrays: Tensor) -> Tensor:
        if not self.host_knows:  # two kernels, whatever the number of replicas
            return f(*arrays).sum(0)
        replicas, total = len(arrays[0]), None
        some = max(1, DECODED // max(1, arrays[0][0].numel()))
        for i in range(0, replicas, some):
            taken = self.short_lived.taken
            each = f(*[x[i : i + some] for x in arrays])
            if total is None:
                total, each = each[0], each[1:]
            else:
                self.short_lived.taken = taken
            if len(each) == 1:
                total.add_(each[0])
            elif len(each):
                self.add_in_order(total, each)
        assert total is not None
        return total

    def sum_in_order(self, x: Tensor) -> Tensor:
        if not self.host_knows:  # in float64, where the order of a device changes no bit of the sum
            return x.sum(dtype=torch.float64).to(x.dtype)
        total = x[0].clone()
        self.add_in_order(total, x[1:])
        return total


def _can_be_viewed(x: Tensor, itemsize: int) -> bool:
    """Whether torch views it, as it lies, as elements of another size: not if one would begin
    between two of a larger size."""
    if itemsize == x.itemsize or (itemsize < x.itemsize and x.is_contiguous()):
        return True
    offsets = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    return (
        x.numel() > 0 and x.stride(-1) == 1 and not any(n * x.itemsize % itemsize for n in offsets)
    )
