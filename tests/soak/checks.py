"""What all simulations compare, and quickly: with tensors this small a check that is written carelessly takes longer than the step."""

import math
from typing import Any

import numpy as np

NDArray = np.ndarray[Any, Any]


class Flat:
    """Tensors by name as one vector, so that a check is a few operations for all of them."""

    def __init__(self, shapes):
        self.place, self.size = {}, 0
        for name, shape in shapes.items():
            self.place[name] = slice(self.size, self.size + math.prod(shape))
            self.size += math.prod(shape)
        filled = [place for place in self.place.values() if place.start < place.stop]
        self._starts = np.array([place.start for place in filled], np.intp)
        self._sizes = [place.stop - place.start for place in filled]

    def zeros(self):
        """All of them zero."""
        return np.zeros(self.size)

    def of(self, tensors):
        """A row for each of these models; what it lacks is zero."""
        models = list(tensors)
        rows = np.zeros((len(models), self.size))
        for row, model in zip(rows, models, strict=True):
            for name, x in model.items():
                row[self.place[name]] = x.reshape(-1)
        return rows

    def largest(self, rows):
        """Of each tensor the largest magnitude in any of the rows, in all its places."""
        if not self._sizes:
            return self.zeros()
        return np.repeat(np.maximum.reduceat(np.maximum.reduce(np.abs(rows)), self._starts), self._sizes)

    def require(self, wrong, allowed, what):
        """Raise AssertionError unless each magnitude of `wrong` is allowed. `what` says it with {name}, {wrong} and {allowed}."""
        held = np.abs(wrong) <= allowed
        i = int(held.argmin()) if held.size else 0
        if not held.size or held[i]:
            return
        name = next(name for name, place in self.place.items() if place.start <= i < place.stop)
        raise AssertionError(what.format(name=name, wrong=abs(wrong[i]), allowed=allowed[i]))


def close(what, found, right):
    """Equal but for rounding, at the scale of the largest element; inf and NaN in the same places."""
    if found.shape == right.shape and found.tobytes() == right.tobytes():
        return
    scale = np.abs(right[np.isfinite(right)]).max(initial=1e-3)
    assert np.allclose(found, right, rtol=1e-9, atol=1e-9 * scale, equal_nan=True), f"{what} is {found} and not {right}"


def same_bits(a, b):
    return a.map(lambda x: x.tobytes()) == b.map(lambda x: x.tobytes())
