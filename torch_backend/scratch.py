"""Memory that a step uses and the next step uses again, so that a step allocates next to nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["Scratch"]

#: Buffers that so many steps have not asked for are given up: steps may alternate, and DDP rebuilds its buckets once.
FORGET_AFTER = 4

_Key = tuple[torch.dtype, torch.device, int]


class Scratch:
    """Uninitialized tensors, handed out once per step. A step asks for the same sizes as the one before, in any order."""

    def __init__(self) -> None:
        self._pools: dict[_Key, list[Tensor]] = {}
        self._taken: dict[_Key, int] = {}
        self._last_used: dict[_Key, int] = {}
        self._step = 0

    def rewind(self) -> None:
        """Begin a step: everything handed out before may be handed out again."""
        self._taken.clear()
        self._step += 1
        for key in [k for k, step in self._last_used.items() if self._step - step > FORGET_AFTER]:
            del self._pools[key], self._last_used[key]

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of this shape, of `like`'s dtype and device."""
        key = (like.dtype, like.device, math.prod(shape))
        pool, taken = self._pools.setdefault(key, []), self._taken.get(key, 0)
        if taken == len(pool):
            pool.append(like.new_empty(key[2]))
        self._taken[key], self._last_used[key] = taken + 1, self._step
        return pool[taken].view(shape)
