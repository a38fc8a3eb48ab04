"""Which parameters the outputs of a forward pass depend on."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.torch_backend.torch_internals import leaves_of

#: What cannot hold a tensor.
PLAIN = (
    *(
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        enum.Enum,
        range,
        slice,
        np.ndarray,
        np.generic,
    ),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator),
)


@dataclasses.dataclass
class Found:
    """Tensors in nested containers.

    Attributes:
        tensors: in order.
        opaque: type names of objects that could not be looked into: there may be tensors in them.
    """

    tensors: list[Tensor]
    opaque: set[str]


def tensors_in(outputs: Any) -> Found:
    """All tensors in any nesting of sequences, sets, mappings, dataclasses, namespaces and types
    registered with torch's pytree."""
    found, seen, stack = Found([], set()), set(), [outputs]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.tensors.append(item)
        elif isinstance(item, PLAIN) or id(item) in seen:
            continue
        else:
            seen.add(id(item))
            parts = _parts(item)
            if parts is None:
                found.opaque.add(type(item).__qualname__)
            else:
                stack.extend(reversed(parts))
    return found


def _parts(item: Any) -> list[Any] | None:
    parts: list[Any] = []
    known = False
    if isinstance(item, Mapping):
        known, parts = True, list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset)):
        known, parts = True, list(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        # Also where the dataclass is a mapping: it may hide some fields from its keys.
        known = True
        parts += [
            getattr(item, field.name)
            for field in dataclasses.fields(item)
            if hasattr(item, field.name)
        ]
    if isinstance(item, SimpleNamespace):
        known, parts = True, list(vars(item).values())
    if not known:
        parts = leaves_of(item)
        known = not any(leaf is item for leaf in parts)
    return parts if known else None


def reached(tensors: Iterable[Tensor], parameters: Mapping[Tensor, int]) -> set[int]:
    """The numbers of those parameters that some of the tensors depend on: a walk over the autograd
    graph."""
    numbers: set[int] = set()
    seen: set[Any] = set()
    stack: list[Any] = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            stack.append(tensor.grad_fn)
        elif tensor in parameters:
            numbers.add(parameters[tensor])
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # only nodes that accumulate into a leaf have it
        if leaf is not None and leaf in parameters:
            numbers.add(parameters[leaf])
        stack.extend(following for following, _ in node.next_functions if following is not None)
    return numbers
