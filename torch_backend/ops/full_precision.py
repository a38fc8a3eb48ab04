"""Arithmetic as it is without the user's settings, which a backward pass inherits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

#: Sums of products that are in half precision throughout, where torch has that.
QUICK = ("allow_fp16_accumulation",)
#: Dtypes of which sums may be made in parts.
HALVES = ("bf16", "fp16")


def plain_arithmetic(device: torch.device) -> AbstractContextManager[None]:
    """Arithmetic without autocast, and without TF32 or bfloat16 passes in float32 products: a
    backward pass inherits both from the user. On CUDA partial sums of products in half precision
    are in float32 too, which torch leaves to cuBLAS unless told otherwise."""
    plain = _full_precision_already() and not torch.is_autocast_enabled(device.type)
    if device.type != "cuda":
        # As usual: entering and leaving autocast takes as long as sending a small bucket.
        return nullcontext() if plain else _plain_arithmetic(device)
    return _whole_sums(nullcontext() if plain else _plain_arithmetic(device))


def _full_precision_already() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # the user has set it with `torch.backends.*.fp32_precision`, as torch advises from 2.9 on
        return not {"tf32", "bf16"} & {backend.fp32_precision for backend in _matmul_backends()}


def _matmul_backends() -> list[Any]:
    """What has a precision of its own; nothing before torch 2.9."""
    cuda, mkldnn = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    return [backend for backend in (cuda, mkldnn) if hasattr(backend, "fp32_precision")]


def arithmetic(device: torch.device) -> Callable[[], None]:
    """How the process computes products on a device now, without autocast, which is a thread's.
    What is returned sets it again."""
    settings = [_precision(), _sums()] if device.type == "cuda" else [_precision()]

    def put_back() -> None:
        for each in settings:
            each()

    return put_back


@contextmanager
def _whole_sums(within: AbstractContextManager[None]) -> Iterator[None]:
    """Products of half precision on CUDA that are summed in float32, whatever the number of
    addends: many parts of a long sum may be summed apart, and the parts be rounded, or overflow,
    before they meet."""
    put_back = _sums()
    try:
        for name in HALVES:
            _set_reduction(name, False)
        for name in _quick():
            setattr(torch.backends.cuda.matmul, name, False)
        with within:
            yield
    finally:
        put_back()


def _sums() -> Callable[[], None]:
    """How products of half precision are summed. What is returned sets it again."""
    before = {name: _reduction(name) for name in HALVES}
    quick = {name: getattr(torch.backends.cuda.matmul, name) for name in _quick()}

    def put_back() -> None:
        for name, value in before.items():
            _set_reduction(name, value)
        for name, value in quick.items():
            setattr(torch.backends.cuda.matmul, name, value)

    return put_back


def _quick() -> list[str]:
    return [name for name in QUICK if hasattr(torch.backends.cuda.matmul, name)]


def _reduction(name: str) -> Any:
    """Whether parts may be in half precision; and, where torch has a second part to it, whether
    there may be any."""
    option, matmul = f"allow_{name}_reduced_precision_reduction", torch.backends.cuda.matmul
    found, split = getattr(matmul, option), getattr(matmul, f"{option}_split_k", None)
    return found if split is None else (found, split)


def _set_reduction(name: str, value: Any) -> None:
    setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", value)


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False):
        if _full_precision_already():
            yield
            return
        put_back = _precision()
        try:
            try:
                torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("highest")
            except RuntimeError:
                for backend in _matmul_backends():
                    backend.fp32_precision = "ieee"
            yield
        finally:
            put_back()


def _precision() -> Callable[[], None]:
    """How products of float32 are computed. What is returned sets it again."""
    backends = _matmul_backends()
    before = [backend.fp32_precision for backend in backends]
    try:
        legacy: str | None = torch.get_float32_matmul_precision()
    except RuntimeError:
        legacy = None

    def put_back() -> None:
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = "none"  # what is set for all kinds of operations holds again
            if backend.fp32_precision != precision:  # this one was set by itself
                backend.fp32_precision = precision

    return put_back
