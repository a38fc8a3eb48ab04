"""Memory that is used again, by the next step or by the next rows of a matrix, so that a step allocates next to nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gradwire.core.ops import Ops
from gradwire.torch_backend.cpu.compiled import Loops
from gradwire.torch_backend.ops.fused import TorchFused

#: Buffers that so many steps have not asked for are given up: steps may alternate, and DDP rebuilds its buckets once.
FORGET_AFTER = 4
#: Elements whose intermediate results stay in a processor's cache.
IN_CACHE = 1 << 18


@dataclass(slots=True)
class _Pool:
    """Tensors of one shape, the first `taken` of which are in use. `last_used` counts steps."""

    tensors: list[Tensor] = field(default_factory=list)
    taken: int = 0
    last_used: int = 0


class Scratch:
    """Uninitialized tensors of one device, handed out once per step. A step asks for the same shapes as the one before, in any order."""

    def __init__(self) -> None:
        self._pools: dict[tuple[torch.dtype, tuple[int, ...]], _Pool] = {}
        self._step = 0
        #: For what one call takes and gives back.
        self.brief = Stack(spare=0)

    def another(self) -> Scratch:
        """One of which nothing is taken, and whose brief memory is as large as this one's from the beginning."""
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

    def take(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous tensor of this shape, on `like`'s device and, unless another is given, of its dtype."""
        key = (dtype or like.dtype, shape)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(last_used=self._step)
        if pool.taken == len(pool.tensors):
            pool.tensors.append(torch.empty(shape, dtype=key[0], device=like.device))
        pool.taken += 1
        return pool.tensors[pool.taken - 1]


class Stack:
    """Uninitialized tensors of one device for a short time, one after the other in the same bytes, which so stay in a processor's cache.

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

    def take(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous tensor of this shape and, unless another is given, of `like`'s dtype."""
        key = self.taken, shape, dtype or like.dtype
        if key not in self._tensors:  # to make it takes longer than to find it
            self._tensors[key] = self._made(*key, like.device)
        self.taken, tensor = self._tensors[key]
        return tensor

    def _made(self, start: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[int, Tensor]:
        """Where the next tensor begins, and this one."""
        end = start + math.prod(shape) * dtype.itemsize
        if end > self._bytes.numel():  # what was taken before keeps the memory that it has
            self.room = max(self.room, int(self._spare * end))
            self._bytes = torch.empty(self.room, dtype=torch.uint8, device=device)
            self._tensors.clear()
        return -(-end // 64) * 64, self._bytes[start:end].view(dtype).view(shape)


class Workspace(Ops[Tensor], Protocol):
    """Kernels for one device, and memory to work in: `gradwire.torch_backend.ops.kernels.TorchOps`.

    Attributes:
        device: where all arrays are.
        host_knows: the host may look at numbers without waiting for a device.
        fused: kernels in Triton, if there are any.
        loops: what is compiled for a processor, and may be used. All replicas have the same, or none.
        short_lived: memory for a short time, given back by whoever takes it.
    """

    device: torch.device
    host_knows: bool
    fused: TorchFused | None
    loops: Loops
    short_lived: Stack

    def temporary(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialized memory that a step may write to, and the next one too."""

    def briefly(self) -> AbstractContextManager[None]:
        """Within, temporary memory is what the next such call takes too, whatever its shapes."""

    def scalar(self, y: float, dtype: torch.dtype) -> Tensor:
        """A number on the device, made once."""

    def numbers(self, n: int, dtype: torch.dtype, sign: int = 1) -> Tensor:
        """0, 1, … n-1, or from the last to the first, not to be written to."""

    def from_host(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Numbers of the host on the device."""

    def on_device(self, numbers: Tensor) -> Tensor:
        """An array of the host's memory on the device."""

    def add_in_order(self, out: Tensor, every: Tensor) -> None:
        """Add to an array on the CPU each of several (W, …), one after the other."""

    def copy_each(self, places: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """Copy each array to its place, of its shape and dtype."""
