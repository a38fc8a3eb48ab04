"""The random generators of a process, of which each replica has its own states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: The states of those of torch on the host and on the device, of NumPy and of Python.
Generators = tuple[Tensor, Tensor | None, Any, Any]


def seed_all(seed: int) -> None:
    """Seed the generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def drawn(device: torch.device) -> Generators:
    """The states, as they are now."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def put_back(states: Generators, device: torch.device) -> None:
    """Go on with these states."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
    np.random.set_state(states[2])
    random.setstate(states[3])


def drawn_by(rank: int, seed: int, device: torch.device) -> Generators:
    """The states with which a replica begins."""
    before = drawn(device)
    seed_all(int(np.random.SeedSequence((seed, rank)).generate_state(1)[0]))
    own = drawn(device)
    put_back(before, device)
    return own
