"""Defaults that a program may have set for tensors of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def other_defaults(device: torch.device | str) -> Iterator[None]:
    """Within, tensors of which nobody says where and what they are come to life on `device`, in
    bfloat16: as after `torch.set_default_device("cuda")`, in this thread, and
    `torch.set_default_dtype(torch.bfloat16)`, in all."""
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
