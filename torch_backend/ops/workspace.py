"""The places where arrays lie. Memory is used again, by the next step or by the next rows of a
matrix, so that a step allocates next to nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.core.ops import Ops
from gradwire.torch_backend.cpu.compiled import Loops
from gradwire.torch_backend.cpu.sums import Sum, joined_sums, place_of, value_of
from gradwire.torch_backend.ops.addresses import side_by_side
from gradwire.torch_backend.ops.fused import TorchFused, available
from gradwire.torch_backend.torch_internals import foreach_copy_

#: Buffers that so many steps have not asked for are given up: steps may alternate, and DDP rebuilds
#: its buckets once.
FORGET_AFTER = 4
#: Elements whose intermediate results stay in a processor's cache.
IN_CACHE = 1 << 18
#: So many numbers may be kept for the next step.
KEPT = 1 << 16


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class _Pool:
    """Tensors of one shape, the first `taken` of which are in use. `last_used` counts steps."""

    tensors: list[Tensor] = field(default_factory=list)
    taken: int = 0
    last_used: int = 0


class Scratch:
    """Uninitialized tensors of one device, handed out once per step. A step asks for the same
    shapes as the one before, in any order."""

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.dtype, tuple[int, ...]], _Pool] = {}
        self._step = 0
        #: For what one call takes and gives back.
        self.brief = Stack(spare=0)

    def another(self) -> Scratch:
        """One of which nothing is taken, and whose brief memory is as large as this one's from the
        beginning."""
        made = Scratch()
        made.brief = Stack(spare=0, room=self.brief.room)
        return made

    def rewind(self) -> None:
        """Begin a step: everything handed out before may be handed out again."""
        self._step += 1
        for key, pool in list(self._pools.items()):
            if pool.taken:
                pool.taken, pool.last_used = 0, self._step
            elif self._step - pool.last_used >= FORGET_AFTER:
                del self._pools[key]

    def take(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A contiguous tensor of this shape, on `like`'s device and, unless another is given, of
        its dtype."""
        key = (dtype or like.dtype, shape)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(last_used=self._step)
        if pool.taken == len(pool.tensors):
            pool.tensors.append(torch.empty(shape, dtype=key[0], device=like.device))
        pool.taken += 1
        return pool.tensors[pool.taken - 1]


class Stack:
    """Uninitialized tensors of one device for a short time, one after the other in the same bytes,
    which so stay in a processor's cache.

    Args:
        spare: how much more memory is taken than is needed at first, in parts of that.
        room: bytes that are taken at first, or more.

    Attributes:
        taken: bytes in use. Set back to what it was, it gives back what was taken since.
        room: bytes that there are, or were asked for.
    """

    def __init__(self, spare: float = 1, room: int = 0) -> None:
        self.taken = 0
        self.room = room
        self._spare = 1 + spare
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._tensors: dict[tuple[int, tuple[int, ...], torch.dtype], tuple[int, Tensor]] = {}

    def take(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A contiguous tensor of this shape and, unless another is given, of `like`'s dtype."""
        key = self.taken, shape, dtype or like.dtype
        if key not in self._tensors:  # to make it takes longer than to find it
            self._tensors[key] = self._made(*key, like.device)
        self.taken, tensor = self._tensors[key]
        return tensor

    def _made(
        self, start: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[int, Tensor]:
        """The place where the next tensor begins, and this one."""
        end = start + math.prod(shape) * dtype.itemsize
        if end > self._bytes.numel():  # what was taken before keeps the memory that it has
            self.room = max(self.room, int(self._spare * end))
            self._bytes = torch.empty(self.room, dtype=torch.uint8, device=device)
            self._tensors.clear()
        return -(-end // 64) * 64, self._bytes[start:end].view(dtype).view(shape)


class Workspace(Ops[Tensor]):
    """What `gradwire.torch_backend.ops.kernels.TorchOps` overrides of `Ops` to say where arrays
    lie: in scratch memory, as rows of a matrix, on the device.

    Attributes:
        device: where all arrays are.
        host_knows: the host may look at numbers without waiting for a device.
        fused: kernels in Triton, if there are any.
        loops: what is compiled for a processor, and may be used. All replicas have the same, or
            none.
        short_lived: memory for a short time, given back by whoever takes it.
    """

    device: torch.device
    host_knows: bool
    fused: TorchFused | None
    loops: Loops = Loops()
    short_lived: Stack

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host_knows = device.type == "cpu"
        self.fused = TorchFused(self) if available(device) else None
        self.multiplies_together = self.fused is not None
        self._constants: dict[Hashable, Tensor] = {}
        self._captured = False
        self._scratch: Scratch | Stack | None = None
        self.short_lived = Stack()
        self._work = torch.empty(0, dtype=torch.float64, device=device)

    def dtype_of(self, x: Tensor) -> str:
        return dtype_name(x.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        if self._scratch is not None and len(shape):
            return self._scratch.take(tuple(shape), self._work, getattr(torch, dtype)).zero_()
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def from_host(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Numbers of the host on the device."""
        return self.on_device(torch.tensor(values, dtype=dtype, device="cpu"))

    def on_device(self, numbers: Tensor) -> Tensor:
        """An array of the host's memory on the device. Raises RuntimeError in a capture."""
        if self._captured:
            raise RuntimeError(
                "numbers of the host are put on the device, which a graph would read again where"
                " they no longer are"
            )
        # From pinned memory, since for other memory the host waits until the device has it.
        return (
            numbers
            if self.device.type == "cpu"
            else numbers.pin_memory().to(self.device, non_blocking=True)
        )

    def scalar(self, y: float, dtype: torch.dtype) -> Tensor:
        """A number on the device, made once: each time anew it is a kernel, and from host memory
        the host waits as well."""
        return self.constant(
            ("scalar", str(y), dtype), lambda: torch.full((), y, dtype=dtype, device=self.device)
        )

    def numbers(self, n: int, dtype: torch.dtype, sign: int = 1) -> Tensor:
        """0, 1, … n-1, or from the last to the first, not to be written to. Made once, unless they
        are many."""
        ends = (0, n) if sign > 0 else (n - 1, -1)

        def make() -> Tensor:
            return torch.arange(*ends, sign, dtype=dtype, device=self.device)

        return make() if n > KEPT else self.constant(("numbers", n, dtype, sign), make)

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._constants:
            with self.scratch(None):  # it stays
                self._constants[key] = make()
        return self._constants[key]

    def temporary(
        self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Uninitialized memory that a step may write to, and the next one too."""
        dtype = dtype or like.dtype
        return (
            like.new_empty(shape, dtype=dtype)
            if self._scratch is None
            else self._scratch.take(shape, like, dtype)
        )

    @contextmanager
    def briefly(self) -> Iterator[None]:
        """Take temporary memory, within, that the next such call takes too, whatever its shapes."""
        if not isinstance(self._scratch, Scratch):
            yield
            return
        brief = self._scratch.brief
        with self.scratch(brief):
            yield
        brief.taken = 0

    def _place(
        self, x: Tensor, out: Tensor | None, y: object = None, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """Memory for a result of the shape and, unless another is given, of the dtype of `x`. None:
        in new memory."""
        if out is not None or self._scratch is not self.short_lived:
            return out
        if (
            isinstance(y, Tensor)
            and x.is_floating_point()
            and y.dtype == torch.int8
            and x.shape == (*y.shape[:-1], 1)
        ):
            return self.short_lived.take(tuple(y.shape), x, dtype)
        if isinstance(y, Tensor) and (
            y.dtype != x.dtype or y.shape[:-1] != x.shape[:-1] or y.shape[-1] > x.shape[-1]
        ):
            return None  # it may have another shape
        return self.short_lived.take(tuple(x.shape), x, dtype)

    @contextmanager
    def scratch(self, memory: Scratch | Stack | None) -> Iterator[None]:
        """Put results of the size of a factor, within, into `memory`, which is used again in the
        next step. What is to last longer has to be copied, as the memory of an algorithm is when a
        step is committed."""
        before, self._scratch = self._scratch, memory
        try:
            yield
        finally:
            self._scratch = before

    def doubles(self, n: int, shape: torch.Size) -> Iterator[Tensor]:
        """`n` arrays of float64, in memory that is kept and used again by the next call."""
        needed = n * shape.numel()
        if self._work.numel() < needed:
            self._work = torch.empty(needed, dtype=torch.float64, device=self.device)
        return iter(self._work[:needed].view(n, *shape))

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Launch, within, what goes into graphs. Constants that are made are theirs: afterwards
        nobody else knows them. RuntimeError is raised where numbers of the host would be put on the
        device."""
        before, self._constants, self._captured = self._constants, dict(self._constants), True
        try:
            yield
        finally:
            self._constants, self._captured = before, False

    def rows(
        self, arrays: Sequence[Tensor], n: int, *, out: Tensor | None = None, donated: bool = False
    ) -> Tensor:
        if any(isinstance(x, Sum) for x in arrays):
            whole = (
                side_by_side([place_of(x) for x in arrays])
                if donated and out is None and n == 1
                else None
            )
            if whole is not None:
                # to programs it is an array
                return joined_sums(whole, arrays)  # type: ignore[return-value]
            arrays = [value_of(x) for x in arrays]
        if (
            out is None
            and len(arrays) == 1
            and arrays[0].is_contiguous()
            and arrays[0].numel() % n == 0
        ):
            return arrays[0].view(n, -1)
        if donated and out is None and n == 1 and (joined := side_by_side(arrays)) is not None:
            return joined.view(1, -1)
        lengths = [-(-x.numel() // n) for x in arrays]
        matrix = self.temporary((n, sum(lengths)), arrays[0]) if out is None else out
        if n == 1 and out is None:
            return torch.cat([x.reshape(1, -1) for x in arrays], dim=1, out=matrix)
        for x, columns in zip(arrays, torch.split(matrix, lengths, dim=1), strict=True):
            # else it lies there already
            if x.data_ptr() != columns.data_ptr() or x.stride() != columns.stride():
                _fill(columns, x)
        return matrix

    def from_rows(
        self,
        matrix: Tensor,
        shapes: Sequence[tuple[int, ...]],
        *,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        n = matrix.shape[0]
        arrays = [matrix.new_empty(shape) for shape in shapes] if out is None else list(out)
        places: list[Tensor] = []
        found: list[Tensor] = []
        for x, columns in zip(
            arrays, torch.split(matrix, [-(-x.numel() // n) for x in arrays], dim=1), strict=True
        ):
            if x.is_contiguous() and x.numel() == columns.numel():
                if x.data_ptr() != columns.data_ptr():  # else it lies there already
                    places.append(x.view(columns.shape))
                    found.append(columns)
            else:
                places.append(x)
                found.append(columns.reshape(-1)[: x.numel()].view(x.shape))
        if places:
            self.copy_each(places, found)
        return arrays

    def pad(self, x: Tensor | Sum, n: int) -> Tensor:
        x = value_of(x)
        padded = self.temporary((n,), x)
        padded[: x.shape[0]].copy_(x)
        padded[x.shape[0] :].zero_()
        return padded

    def stack(self, arrays: Sequence[Tensor]) -> Tensor:
        first = arrays[0]
        return torch.stack(list(arrays), out=self.temporary((len(arrays), *first.shape), first))

    def by_rows(
        self, f: Callable[..., Tensor], *arrays: Tensor, out: Tensor | None = None
    ) -> Tensor:
        n, width = arrays[0].shape[-2:]
        some = max(1, IN_CACHE // max(1, width)) if self.host_knows else n
        # Of a single row a view may have other strides, and then torch takes it for other memory
        # that overlaps.
        rows = None if out is None or not n else out if out.ndim == 2 else out.view(n, -1)
        if n <= some and self._scratch is not self.short_lived:
            return _within(rows, f(*arrays, out=rows))
        several, wholes = False, [] if rows is None else [rows]
        for i in range(0, n, some):
            with self._stacked():
                here = None if rows is None else rows[i : i + some]
                part = f(*[x.narrow(-2, i, min(some, n - i)) for x in arrays], out=here)
            several = isinstance(part, tuple)
            parts = part if several else (part,)
            if not wholes:
                wholes = [self.temporary((n, *each.shape[1:]), each) for each in parts]
            for whole, each in zip(wholes, parts, strict=True):
                _within(whole[i : i + some], each)
        return tuple(wholes) if several else wholes[0]  # type: ignore[return-value]

    @contextmanager
    def _stacked(self) -> Iterator[None]:
        """Put results, within, into memory that is given back at the end."""
        taken = self.short_lived.taken
        with self.scratch(self.short_lived):
            yield
        self.short_lived.taken = taken

    def copy_each(self, places: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """Copy each array to its place, of its shape and dtype."""
        # As vectors where they are: torch copies several at a time only where strides are the same.
        pairs = [
            (
                (place.view(-1), x.view(-1))
                if place.is_contiguous() and x.is_contiguous()
                else (place, x)
            )
            for place, x in zip(places, xs, strict=True)
        ]
        foreach_copy_([place for place, _ in pairs], [x for _, x in pairs])

    def copies(self, xs: Sequence[Tensor]) -> list[Tensor]:
        places = [self.temporary(tuple(x.shape), x) for x in xs]
        if xs:
            self.copy_each(places, xs)
        return places

    def add_in_order(self, out: Tensor, every: Tensor) -> None:
        """Add to an array on the CPU each of several (W, …), one after the other: an absent
        replica, of zeros, changes no bit, and no processor has an order of its own."""
        row = self.constant(
            ("into one row", len(every)), lambda: self.zeros((len(every),), "int64")
        )
        out.unsqueeze(0).index_add_(0, row, every)

    def add_to_slice(
        self, x: Tensor, part: Tensor, n: int, i: Any, shape: tuple[int, ...]
    ) -> Tensor:
        k = part.shape[0]
        x[i * k : (i + 1) * k] += part
        return x

    def rows_before(self, x: Tensor, i: Any) -> Tensor:
        return x.narrow(-2, 0, i)

    def row(self, x: Tensor, i: Any) -> Tensor:
        return x.narrow(-2, i, 1)

    def set_row(self, x: Tensor, i: Any, row: Tensor) -> Tensor:
        x.narrow(-2, i, 1).copy_(row)
        return x

    def join_order(self, arrays: Sequence[Tensor]) -> list[int]:
        return sorted(range(len(arrays)), key=lambda i: arrays[i].data_ptr())


def _within(out: Tensor | None, result: Tensor) -> Tensor:
    """The result in its place, where it may lie already."""
    if out is None:
        return result
    place = out.view(result.shape)
    return (
        place
        if place.data_ptr() == result.data_ptr() and place.dtype == result.dtype
        else place.copy_(result)
    )


def _fill(columns: Tensor, x: Tensor) -> None:
    """Write `x`, flattened, row by row into a matrix of at least as many elements, and zeros into
    the rest."""
    n, k = columns.shape
    if x.numel() == n * k:
        columns.copy_(x.reshape(n, k))
        return
    flat = x.reshape(-1)
    full, rest = divmod(x.numel(), k)
    columns[:full].copy_(flat[: full * k].view(full, k))
    columns[full:].zero_()
    columns[full : full + 1, :rest].copy_(flat[full * k :].view(1, rest))
