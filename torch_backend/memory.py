"""Where an algorithm's memory lies: factors side by side, as they do in a message, so that one kernel takes them all over."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from gradwire.core.algorithm import State


def factors_side_by_side(state: State[Tensor], apart: Collection[str]) -> State[Tensor]:
    """The same memory, of which all arrays of one key and dtype are views of one array, in order.

    Args:
        state: fresh.
        apart: keys of memories that stay as they are, because they are large.
    """
    places: dict[tuple[str, torch.dtype], list[tuple[str, Tensor]]] = {}
    for name, memory in state.tensors.items():
        for key, x in memory.items():
            if key not in apart:
                places.setdefault((key, x.dtype), []).append((name, x))
    tensors = {name: dict(memory) for name, memory in state.tensors.items()}
    for (key, _), arrays in places.items():
        flat = torch.cat([x.reshape(-1) for _, x in arrays])
        for (name, x), piece in zip(arrays, torch.split(flat, [x.numel() for _, x in arrays]), strict=True):
            tensors[name][key] = piece.view(x.shape)
    return State(state.shared, tensors)
