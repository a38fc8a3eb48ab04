"""A gradient and its error, which are added when they are first multiplied by something, or coded:
in one pass, where a loop does that."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Terms:
    """`x`, of which `y` is to become a part once. None: it has."""

    def __init__(self, x: Tensor, y: Tensor | None) -> None:
        self.x, self.y = x, y

    @property
    def parts(self) -> list[Terms]:
        """All that lies in `x`, one below the other, each with terms of its own."""
        return [self]

    def add(self) -> None:
        """Unless it was done."""
        if self.y is not None:
            self.x.add_(self.y)
            self.y = None


class _Several(Terms):
    """Terms that lie side by side in `x`."""

    def __init__(self, x: Tensor, parts: list[Terms]) -> None:
        super().__init__(x, None)
        self._parts = parts

    @property
    def parts(self) -> list[Terms]:
        return self._parts

    def add(self) -> None:
        for each in self._parts:
            each.add()


class Sum:
    """`x + y`, in the place of `x`: to programs an array, of which they see what `Ops.add_each`
    promises, in another shape or transposed."""

    def __init__(
        self,
        x: Tensor,
        y: Tensor | None,
        *,
        terms: Terms | None = None,
        shape: torch.Size | None = None,
        swapped: bool = False,
    ) -> None:
        self._terms = terms or Terms(x, y)
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
        return Sum(
            self._terms.x, None, terms=self._terms, shape=self._shape, swapped=not self._swapped
        )

    def data_ptr(self) -> int:
        """The address at which it lies."""
        return self._terms.x.data_ptr()

    def reshape(self, shape: tuple[int, ...], /) -> Sum | Tensor:
        if self._swapped:
            return self.value.reshape(shape)
        seen = self._terms.x.view(shape).shape
        return Sum(self._terms.x, None, terms=self._terms, shape=seen)

    def __getitem__(self, index: object) -> Tensor:
        return self.value[index]  # type: ignore[index]

    @property
    def open(self) -> tuple[Tensor, Tensor] | None:
        """Both terms, in this shape, of a transposed matrix (`self.mT` is as it lies); None once
        they are added, or of anything else."""
        if self._terms.y is None or not self._swapped or self.ndim != 2:
            return None
        return self._terms.x.view(self._shape), self._terms.y.view(self._shape)

    @property
    def unadded(self) -> tuple[Tensor, list[Terms]]:
        """The array as it lies, in this shape, of which some is not added yet; and what lies in it,
        one below the other."""
        return self._terms.x.view(self._shape), self._terms.parts

    def close(self) -> None:
        """`y` has been added."""
        for each in self._terms.parts:
            each.y = None

    @property
    def value(self) -> Tensor:
        """The array."""
        self._terms.add()
        seen = self._terms.x.view(self._shape)
        return seen.mT if self._swapped else seen


def value_of(x: Tensor | Sum) -> Tensor:
    """An array as torch knows it."""
    return x.value if isinstance(x, Sum) else x


def place_of(x: Tensor | Sum) -> Tensor:
    """An array as it lies, of which some may not be added yet."""
    return x.unadded[0] if isinstance(x, Sum) else x


def joined_sums(whole: Tensor, arrays: Sequence[Tensor | Sum]) -> Sum:
    """One vector, as an array, of these, which fill it in order."""
    parts: list[Terms] = []
    for x in arrays:
        parts += x.unadded[1] if isinstance(x, Sum) else [Terms(x, None)]
    return Sum(whole, None, terms=_Several(whole, parts))
