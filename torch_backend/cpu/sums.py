"""A gradient and its error, which are added when they are first multiplied by something: in one pass, where a loop does that."""

from __future__ import annotations

import torch
from torch import Tensor


class _Terms:
    """`x`, of which `y` is to become a part once."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.added = x, y, False


class Sum:
    """`x + y`, in the place of `x`: to programs an array, of which they see what `Ops.add_each` promises, in another shape or transposed."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        *,
        terms: _Terms | None = None,
        shape: torch.Size | None = None,
        swapped: bool = False,
    ) -> None:
        self._terms = terms or _Terms(x, y)
        self._shape = x.shape if shape is None else shape
        self._swapped = swapped

    @property
    def shape(self) -> torch.Size:
        if not self._swapped:
            return self._shape
        *stack, n, m = self._shape
        return torch.Size([*stack, m, n])

    @property
    def dtype(self) -> torch.dtype:
        return self._terms.x.dtype

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def mT(self) -> Sum:  # noqa: N802
        return Sum(self._terms.x, self._terms.y, terms=self._terms, shape=self._shape, swapped=not self._swapped)

    def reshape(self, shape: tuple[int, ...], /) -> Sum | Tensor:
        if self._swapped:
            return self.value.reshape(shape)
        seen = self._terms.x.view(shape).shape
        return Sum(self._terms.x, self._terms.y, terms=self._terms, shape=seen)

    def __getitem__(self, index: object) -> Tensor:
        return self.value[index]  # type: ignore[index]

    @property
    def open(self) -> tuple[Tensor, Tensor] | None:
        """Both terms, in this shape, of a transposed matrix (`self.mT` is as it lies); None once they are added, or of anything else."""
        if self._terms.added or not self._swapped or self.ndim != 2:
            return None
        return self._terms.x.view(self._shape), self._terms.y.view(self._shape)

    def close(self) -> None:
        """`y` has been added."""
        self._terms.added = True

    @property
    def value(self) -> Tensor:
        """The array."""
        if not self._terms.added:
            self._terms.x.add_(self._terms.y)
            self.close()
        seen = self._terms.x.view(self._shape)
        return seen.mT if self._swapped else seen


def value_of(x: Tensor | Sum) -> Tensor:
    """An array as torch knows it."""
    return x.value if isinstance(x, Sum) else x
