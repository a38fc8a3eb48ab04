"""Which buffers are averaged with the parameters, and where they are by now: modules may assign
them anew in each forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.core.ops import ITEMSIZE
from gradwire.core.text.name_patterns import matches
from gradwire.core.text.wording import some
from gradwire.torch_backend.ops.workspace import dtype_name


class AveragedBuffers(Mapping[str, Tensor]):
    """Name → buffer, as the module has it now.

    Args:
        module: of which they are.
        names: of those that are averaged.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._module = module
        self._specs = {
            name: (b.shape, b.dtype) for name in names for b in [module.get_buffer(name)]
        }

    @classmethod
    def of(cls, module: nn.Module, buffers: str | Sequence[str]) -> tuple[AveragedBuffers, str]:
        """Those that somebody has asked for: "average", "keep", or patterns of names; and why that
        cannot be, "" if it can."""
        floating = {n: b for n, b in module.named_buffers() if dtype_name(b.dtype) in ITEMSIZE}
        if isinstance(buffers, str):
            return (
                cls(
                    module,
                    [
                        n
                        for n, b in floating.items()
                        if buffers == "average" and averaged_by_default(b)
                    ],
                ),
                "",
            )
        for pattern in buffers:
            if not any(matches(name, pattern) for name in floating):
                return (
                    cls(module, []),
                    (
                        f"buffers pattern {pattern!r} matches no floating buffer; there are"
                        f" {some(list(floating))}"
                    ),
                )
        return (
            cls(
                module,
                [name for name in floating if any(matches(name, pattern) for pattern in buffers)],
            ),
            "",
        )

    def __getitem__(self, name: str) -> Tensor:
        """Raises RuntimeError for one that is gone, or is another one."""
        shape, dtype = self._specs[name]
        try:
            buffer = self._module.get_buffer(name)
        except AttributeError:
            buffer = None
        if buffer is not None and buffer.shape == shape and buffer.dtype == dtype:
            return buffer
        now = "gone" if buffer is None else f"{tuple(buffer.shape)} {dtype_name(buffer.dtype)}"
        raise RuntimeError(
            f"buffer {name!r} was {tuple(shape)} {dtype_name(dtype)} when the averages of buffers"
            f" were registered, and is {now}; unregister, and register anew"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def averaged_by_default(buffer: Tensor) -> bool:
    """Whether it may be a running statistic: a floating one, but for vectors of length 1, which
    those of spectral norm are all their lives."""
    if dtype_name(buffer.dtype) not in ITEMSIZE:
        return False
    if buffer.numel() < 2 or buffer.numel() != max(buffer.shape):
        return True
    return abs(float(torch.linalg.vector_norm(buffer.detach().float())) - 1) > 1e-3
