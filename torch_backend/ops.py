"""The kernels in torch. `out=` is written to; large arrays are never copied."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TorchOps", "dtype_name"]


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


class TorchOps:
    """`Ops` for tensors on one device.

    On the CPU a boolean tensor is as good as a Python bool, and `where` computes one side only. On CUDA reading it would make the host
    wait for the device, so both sides exist and the device selects.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host_knows = device.type == "cpu"
        self._constants: dict[Hashable, Tensor] = {}

    def dtype_of(self, x: Tensor) -> str:
        return dtype_name(x.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def iota(self, n: int) -> Tensor:
        return torch.arange(n, dtype=torch.int32, device=self.device)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype))

    def add(self, x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.add(x, y, out=out)

    def matmul(self, x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.matmul(x, y, out=out)

    def subtract_product(self, x: Tensor, p: Tensor, q: Tensor, *, out: Tensor | None = None) -> Tensor:
        return torch.addmm(x, p.mT, q, alpha=-1, out=out)

    def where(self, ok: Tensor, x: Tensor, y: Tensor | float, *, out: Tensor | None = None) -> Tensor:
        if self._host_knows and ok.ndim == 0:
            if ok:
                return x if out is None else out.copy_(x)
            if out is None:
                return y if isinstance(y, Tensor) else torch.full_like(x, y)
            return out.copy_(y) if isinstance(y, Tensor) else out.fill_(y)
        chosen = torch.where(ok, x, y)
        return chosen if out is None else out.copy_(chosen)

    def where_lazy(self, ok: Tensor, x: Callable[[Tensor | None], Tensor], y: Tensor) -> Tensor:
        if self._host_knows:
            return x(y) if ok else y
        return torch.where(ok, x(None), y, out=y)

    def all_finite(self, x: Tensor) -> Tensor:
        return torch.isfinite(x).all()

    def max_abs(self, x: Tensor) -> Tensor:
        if not x.shape[-1]:
            return x.new_zeros((*x.shape[:-1], 1))
        return x.abs().amax(dim=-1, keepdim=True)

    def norm(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return norm

    def loop(self, n: int, body: Callable[[Any, Tensor], Tensor], start: Tensor) -> Tensor:
        for i in range(n):
            start = body(i, start)
        return start

    def row(self, x: Tensor, i: Any) -> Tensor:
        return x.narrow(-2, i, 1)

    def set_row(self, x: Tensor, i: Any, row: Tensor) -> Tensor:
        x.narrow(-2, i, 1).copy_(row)
        return x

    def stack(self, arrays: Sequence[Tensor]) -> Tensor:
        return arrays[0].unsqueeze(0) if len(arrays) == 1 else torch.stack(list(arrays))

    def pad(self, x: Tensor, n: int) -> Tensor:
        return torch.nn.functional.pad(x, (0, n - x.shape[0]))

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._constants:
            self._constants[key] = make()
        return self._constants[key]
