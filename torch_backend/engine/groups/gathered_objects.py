"""Any Python objects from all ranks of a group, for what is checked or saved, and not for what
trains."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def gathered_by_all(
    mine: T, group: dist.ProcessGroup | None, device: torch.device | None
) -> list[T]:
    """What each rank gives, on all ranks. `device`: where NCCL moves it, this rank's own."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    with _on(device):
        dist.all_gather_object(everyone, mine, group=group)
    return everyone


def gathered_by(
    to: int | None, mine: T, group: dist.ProcessGroup, device: torch.device | None
) -> list[T] | None:
    """What each rank gives, on rank `to` of the group; None elsewhere. `to` None: on all ranks."""
    if to is None:
        return gathered_by_all(mine, group, device)
    received: list[Any] | None = [None] * group.size() if group.rank() == to else None
    with _on(device):
        dist.gather_object(mine, received, dist.get_global_rank(group, to), group=group)
    return received


def _on(device: torch.device | None) -> Any:
    return (
        torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext()
    )
