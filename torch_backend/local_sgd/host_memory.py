"""Memory of local SGD in the host's: outer parameters, velocities and differences are needed after
a few of all steps, and take no room on the device in between.

It is copied through pinned memory on a stream of its own, so that the host waits for none of it,
and what is copied back travels while training goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.core.algorithm import State
from gradwire.core.local_sgd.algorithm import OUTER
from gradwire.torch_backend.engine.step import owned

K = TypeVar("K", bound=Hashable)


class HostMemory:
    """Copies between a device and pinned memory. On the CPU they are copies as well.

    Args:
        device: where parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_cpu = device.type == "cpu"
        self._stream: Any = None if on_cpu else torch.Stream(device)
        self._copied: Any = None if on_cpu else torch.Event(device)

    def place(self, state: State[Tensor]) -> State[Tensor]:
        """A memory on the host with what is in this one, which is on the device. What a program
        shares stays there."""
        sizes = {
            (name, key): x.nbytes
            for name, memory in state.tensors.items()
            for key, x in memory.items()
        }
        tensors: dict[str, dict[str, Tensor]] = {name: {} for name in state.tensors}
        for size, places in in_buffers(sizes):
            buffer = torch.empty(
                size, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None
            )
            for (name, key), start in places.items():
                x = state.tensors[name][key]
                # No view, which would count writes to its neighbours as its own.
                place = torch.empty(0, dtype=x.dtype, device="cpu")
                strides = torch.empty(x.shape, dtype=x.dtype, device="meta").stride()
                tensors[name][key] = place.set_(
                    buffer.untyped_storage(), start // x.itemsize, x.shape, strides
                )
        host = State(
            state.shared,
            {n: {key: tensors[n][key] for key in kept} for n, kept in state.tensors.items()},
        )
        self.store(state, host, host.tensors)
        return host

    def fetch(
        self, host: State[Tensor], names: Collection[str], outer: Collection[str] = ()
    ) -> State[Tensor]:
        """The memory with copies on the device of what is remembered of `names`, and of the
        parameters in `outer` the outer ones."""
        tensors: dict[str, dict[str, Tensor]] = dict(host.tensors)
        with self._on_stream():
            for name in {*names, *outer} & host.tensors.keys():
                tensors[name] = {
                    key: (
                        x.to(self._device, non_blocking=True, copy=True)
                        if name in names or key == OUTER
                        else x
                    )
                    for key, x in host.tensors[name].items()
                }
        if self._stream is not None:
            now = torch.accelerator.current_stream(self._device)
            now.wait_stream(self._stream)
            for memory in tensors.values():
                for x in memory.values():
                    if not x.is_cpu:
                        x.record_stream(now)
        return State(host.shared, tensors)

    def store(self, state: State[Tensor], host: State[Tensor], names: Collection[str]) -> None:
        """Copy what is remembered of `names` from the device to the host. The device's may be let
        go of, and not be written to."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._on_stream():
            for name in names:
                for key, x in state.tensors.get(name, {}).items():
                    host.tensors[name][key].copy_(x, non_blocking=True)
                    if self._stream is not None:
                        x.record_stream(self._stream)
        if self._stream is not None:
            self._copied.record(self._stream)

    def keep(self, state: State[Tensor], host: State[Tensor], names: Collection[str]) -> None:
        """Take over a memory after an average in which what is remembered of `names` was used."""
        host.shared.update(owned(state.shared, host.shared))
        self.store(state, host, names)

    def wait(self) -> None:
        """Wait until the host has what was copied to it."""
        if self._copied is not None:
            self._copied.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else self._stream


def in_buffers(sizes: Mapping[K, int]) -> Iterator[tuple[int, dict[K, int]]]:
    """Buffers for arrays of so many bytes: the size of each, a power of two, and where in it which
    arrays begin.

    torch rounds each allocation of pinned memory up to a power of two (CachingHostAllocator.h):
    arrays by themselves take up to twice their bytes, and so does a single buffer for all. The
    larger arrays are placed first, so that those of a model fill all buffers but the last.
    """
    left = sorted(sizes, key=sizes.__getitem__, reverse=True)
    while left:
        needed = sum(_aligned(sizes[array]) for array in left)
        at_most, at_least = (
            1 << (needed.bit_length() - 1),
            1 << (_aligned(sizes[left[0]]) - 1).bit_length(),
        )
        size, end, places = max(at_most, at_least), 0, {}
        for array in left:
            if end + sizes[array] <= size:
                places[array], end = end, end + _aligned(sizes[array])
        left = [array for array in left if array not in places]
        yield size, places


def _aligned(nbytes: int) -> int:
    """What an array takes in a buffer: the next one begins where a line of the cache does."""
    return max(-(-nbytes // 64), 1) * 64
