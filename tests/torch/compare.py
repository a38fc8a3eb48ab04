"""What is seen of models, and compared."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from tests import bounds


def relative(x: Any, y: Any) -> float:
    """Distance of `x` from `y` in units of `y`'s norm. Dictionaries are compared as one long
    vector."""
    if isinstance(x, Mapping):
        assert x.keys() == y.keys()
        x = np.concatenate([np.ravel(_numpy(x[k])) for k in y])
        y = np.concatenate([np.ravel(_numpy(y[k])) for k in y])
    return bounds.relative(_numpy(x), _numpy(y))


def _numpy(x: Any) -> np.ndarray:
    return x.detach().double().numpy() if isinstance(x, Tensor) else np.asarray(x, np.float64)


#: What a saved state says of messages, which is no memory.
COUNTS = {"sent", "counted"}


def same_bits(x: Any, y: Any) -> bool:
    """Equal in structure, dtype and every bit of every tensor (NaN equals itself), whatever was
    sent until then."""
    if isinstance(x, Tensor):
        if not isinstance(y, Tensor) or x.dtype != y.dtype or x.shape != y.shape:
            return False
        return (
            x.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(y.contiguous().view(-1).view(torch.uint8))
        )
    if isinstance(x, Mapping):
        return x.keys() == y.keys() and all(same_bits(x[k], y[k]) for k in x.keys() - COUNTS)
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same_bits, x, y))
    return bool(x == y)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """A copy of those that there are, by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def said(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The class and the words of what the call raises; nothing if it raises nothing."""
    try:
        function(*args, **kwargs)
    except BaseException as error:  # of which torch.distributed.checkpoint has its own
        return f"{type(error).__name__}: {error}"
    return ""


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def alive(parts: Mapping[str, ref[Any]]) -> list[str]:
    """Names of those that nothing frees. The thread that notes where a rank is may look at one for
    a moment."""
    end = time.monotonic() + 60
    while True:
        gc.collect()
        left = [name for name, part in parts.items() if part() is not None]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)
