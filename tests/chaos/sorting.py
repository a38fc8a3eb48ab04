"""What chaos trains: a small model that learns to sort, on data of each replica and step."""

import hashlib
from collections.abc import Iterable

import torch

WIDTH = 16


def new_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, WIDTH)
    )


def batch(seed: int, number: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of this replica, at this position."""
    generator = torch.Generator().manual_seed((seed * 1000 + number) * 1_000_003 + step)
    x = torch.rand(32, WIDTH, generator=generator)
    return x, x.sort(dim=1).values


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]
