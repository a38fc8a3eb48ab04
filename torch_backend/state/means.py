"""Means of what each rank has for itself, over all of them, in float64: whole, or a slice for each
rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.state import checkpoint

#: Elements of float64 that are summed in one message, of 64 MiB.
SUMMED_AT_ONCE = 8 << 20


def mean_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of a tensor over the ranks of a group, summed in float64."""
    return means_over([x], group, x.device)[0].to(x.device)


def means_over(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    to: int | None = None,
    weights: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """The means of tensors over the ranks of a group, on the CPU, in messages of 64 MiB however
    many tensors there are: more memory it takes nowhere.

    Args:
        tensors: of any dtypes, anywhere. They are summed in float64, on the `device`.
        to: the rank of the group that receives them, and others nothing of use. None: all do.
        weights: of each tensor, a scalar by which this rank counts, unless that is 0 on all; None:
            all count alike. Empty: of all tensors.
    """
    counts = _Counts(weights or [None] * len(tensors), group, device, to)

    def average(lot: Sequence[tuple[int, int, int]]) -> None:
        """A message, to its places. Nothing of it is left when the next one is made."""
        addends = torch.cat(
            [counts.addend(i, tensors[i].reshape(-1)[start:stop]) for i, start, stop in lot]
        )
        total = torch.split(_sum_over(addends, group, to), [stop - start for _, start, stop in lot])
        for (i, start, stop), part in zip(lot, total, strict=True):
            means[i].view(-1)[start:stop].copy_(part.div_(counts.of[i]))

    means = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in tensors]
    for lot in _lots([x.numel() for x in tensors], SUMMED_AT_ONCE):
        average(lot)
    return means


def mean_slices(
    tensors: Sequence[Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    weights: Sequence[Tensor | None],
) -> list[Tensor]:
    """The means of tensors over the ranks of a group, (1, …), as DTensors of which each rank has a
    slice of the longest axis: nobody holds them whole, and `torch.distributed.checkpoint` writes
    each slice once.

    Messages are of 64 MiB however many tensors there are. Arguments are those of `means_over`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return [x[None] for x in means_over(tensors, group, device, None, weights)]
    counts = _Counts(weights, group, device, None)
    axes = [max(range(x.ndim + 1), key=(1, *x.shape).__getitem__) for x in tensors]
    # As torch divides: all slices of one length but for the last ones, which are shorter, or empty.
    each = [-(-(1, *x.shape)[axis] // ranks) for x, axis in zip(tensors, axes, strict=True)]

    def slice_of(i: int, rank: int) -> Tensor:
        x = tensors[i][None]
        n = x.shape[axes[i]]
        start = min(rank * each[i], n)
        return x.narrow(axes[i], start, min(each[i], n - start))

    def addend(i: int, rank: int, start: int, stop: int) -> Tensor:
        """The addend of a rank's slice, filled up to the length of all."""
        own = counts.addend(i, slice_of(i, rank).reshape(-1)[start:stop])
        return torch.nn.functional.pad(own, (0, stop - start - own.numel()))

    def average(lot: Sequence[tuple[int, int, int]]) -> None:
        given = torch.cat([addend(i, rank, *part) for rank in range(ranks) for i, *part in lot])
        received = torch.empty_like(given)
        dist.all_to_all_single(received, given, group=group)
        del given
        total = torch.split(
            received.view(ranks, -1).sum(0), [stop - start for _, start, stop in lot]
        )
        for (i, start, stop), part in zip(lot, total, strict=True):
            place = means[i].view(-1)[start:stop]
            place.copy_(part[: place.numel()].div_(counts.of[i]))

    means = [
        torch.empty(slice_of(i, here).shape, dtype=x.dtype, device=device)
        for i, x in enumerate(tensors)
    ]
    sizes = [
        x.numel() // max(1, x[None].shape[axis]) * n
        for x, axis, n in zip(tensors, axes, each, strict=True)
    ]
    for lot in _lots(sizes, max(1, SUMMED_AT_ONCE // ranks)):
        average(lot)
    mesh = DeviceMesh.from_group(group, device.type)
    return [
        DTensor.from_local(
            own,
            mesh,
            [Shard(axis)],
            run_check=False,
            shape=x[None].shape,
            stride=x[None].contiguous().stride(),
        )
        for own, x, axis in zip(means, tensors, axes, strict=True)
    ]


def put_together(x: Tensor) -> Tensor:
    """A tensor of which each rank has a slice, whole, on the CPU; any other one as it is. Every
    rank calls this."""
    return x.full_tensor().cpu() if hasattr(x, "full_tensor") else x


class _Counts:
    """What each tensor of this rank counts for, and all ranks' together: `of`."""

    def __init__(
        self,
        weights: Sequence[Tensor | None],
        group: dist.ProcessGroup,
        device: torch.device,
        to: int | None,
    ) -> None:
        self._device = device
        self._here = [
            None if w is None else w.reshape(()).to(device, torch.float64) for w in weights
        ]
        self.of: list[Any] = [dist.get_world_size(group)] * len(weights)
        weighted = [i for i, w in enumerate(self._here) if w is not None]
        if weighted:
            summed = _sum_over(torch.stack([w for w in self._here if w is not None]), group, to)
            for i, count in zip(weighted, torch.where(summed > 0, summed, 1.0), strict=True):
                self.of[i] = count

    def addend(self, i: int, part: Tensor) -> Tensor:
        """A part of a tensor, in float64, as it is added up."""
        own, weight = part.to(self._device, torch.float64), self._here[i]
        return own if weight is None else torch.where(weight > 0, own * weight, 0.0)


def _lots(sizes: Sequence[int], at_once: int) -> Iterator[list[tuple[int, int, int]]]:
    """Vectors of these sizes in messages of so many elements: of each which elements of which
    vector are in it."""
    lot, room = list[tuple[int, int, int]](), at_once
    for i, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            lot.append((i, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield lot
                lot, room = [], at_once
    if lot:
        yield lot


def _sum_over(x: Tensor, group: dist.ProcessGroup, to: int | None) -> Tensor:
    if to is None:
        dist.all_reduce(x, group=group)
    else:
        dist.reduce(x, dist.get_global_rank(group, to), group=group)
    return x


def counted(key: str, memory: Mapping[str, Tensor]) -> Tensor | None:
    """What a memory of this name counts for, beside it; None: all of them alike."""
    return memory.get(checkpoint.COUNTED.get(key, ""))
