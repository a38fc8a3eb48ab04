"""Arithmetic as it is without the user's settings, which a backward pass inherits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def plain_arithmetic(device: torch.device) -> AbstractContextManager[None]:
    """Without autocast, and without TF32 or bfloat16 passes in float32 products: a backward pass inherits both from the user."""
    if _full_precision_already() and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # as usual: entering and leaving autocast takes as long as sending a small bucket
    return _plain_arithmetic(device)


def _full_precision_already() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the user has set it with `torch.backends.*.fp32_precision`, as torch advises from 2.9 on
        return not {"tf32", "bf16"} & {backend.fp32_precision for backend in _matmul_backends()}


def _matmul_backends() -> list[Any]:
    """What has a precision of its own; nothing before torch 2.9."""
    cuda, mkldnn = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    return [backend for backend in (cuda, mkldnn) if hasattr(backend, "fp32_precision")]


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False):
        if _full_precision_already():
            yield
            return
        backends = _matmul_backends()
        before = [backend.fp32_precision for backend in backends]
        try:
            legacy: str | None = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
        except RuntimeError:
            legacy = None
            for backend in backends:
                backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            if legacy is not None:
                torch.set_float32_matmul_precision(legacy)
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = "none"  # what is set for all kinds of operations holds again
                if backend.fp32_precision != precision:  # this one was set by itself
                    backend.fp32_precision = precision
