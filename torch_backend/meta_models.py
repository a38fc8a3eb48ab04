"""Shapes of torch models and checkpoints, without memory for their weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire.core.ops import Spec
from gradwire.torch_backend.kernels import dtype_name

#: Under which of its keys a checkpoint keeps the model, in the order in which they are looked for.
MODELS = ("model", "state_dict", "model_state_dict", "module")


def on_meta() -> AbstractContextManager[Any]:
    """Where tensors have a shape and no memory."""
    return torch.device("meta")


def specs_in_checkpoint(path: Path) -> dict[str, Spec]:
    """Floating tensors of a checkpoint that `torch.save` has written; of what is in it, the model's. Nothing is read but shapes.

    Raises:
        ValueError: it cannot be read without running what is in it, or holds no tensors by name.
    """
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint of tensors: {error}") from error
    content = next((content[key] for key in MODELS if isinstance(content, dict) and key in content), content)
    found = _tensors(content) if isinstance(content, Mapping) else {}
    if not found:
        raise ValueError(f"{path} holds no tensors by name; save model.state_dict()")
    return found


def _tensors(content: Mapping[Any, Any]) -> dict[str, Spec]:
    return {
        str(name): Spec(tuple(x.shape), dtype_name(x.dtype))
        for name, x in content.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
