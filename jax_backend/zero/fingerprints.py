"""Which outputs of a function are computed alike: by the same operations, with the same options and
constants, of inputs that count as the same.

    def update(gradients):
        return {name: -0.1 * (g if name == "b" else 2 * g) for name, g in gradients.items()}

    fingerprints(update, inputs, ["g", "g", "g"])  ->  (2, 3, 2)    # of "a", "b" and "c"

Nothing is computed. Equal numbers mean equal computations; others may yet come to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def fingerprints(
    function: Callable[..., Any], inputs: Sequence[Any], names: Iterable[Hashable]
) -> tuple[int, ...]:
    """A number for each leaf of what a function returns.

    Args:
        function: of `inputs`, traced once.
        inputs: trees of arrays, or of `jax.ShapeDtypeStruct`s.
        names: of each of their leaves: those of one name count as the same.
    """
    return _Numbers().of_closed(jax.make_jaxpr(function)(*inputs), list(names))


class _Numbers:
    """The number of each computation that has been seen."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}
        self._inner: dict[int, Hashable] = {}

    def _number(self, what: Hashable) -> int:
        return self._seen.setdefault(what, len(self._seen))

    def of_closed(self, closed: ClosedJaxpr, names: Sequence[Hashable]) -> tuple[int, ...]:
        return self._of(closed.jaxpr, [*map(self._of_value, closed.consts)], names)

    def _of(
        self, jaxpr: Jaxpr, constants: Sequence[Hashable], names: Sequence[Hashable]
    ) -> tuple[int, ...]:
        known: dict[Any, int] = {
            variable: self._number(what)
            for variable, what in zip(
                (*jaxpr.constvars, *jaxpr.invars), (*constants, *names), strict=True
            )
        }

        def number(x: Any) -> int:
            return self._number(self._of_value(x.val)) if isinstance(x, Literal) else known[x]

        for eqn in jaxpr.eqns:
            options = tuple((key, self._of_value(x)) for key, x in sorted(eqn.params.items()))
            made = self._number((eqn.primitive.name, options, *map(number, eqn.invars)))
            for i, out in enumerate(eqn.outvars):
                known[out] = self._number((made, i))
        return tuple(map(number, jaxpr.outvars))

    def _of_value(self, x: Any) -> Hashable:
        """A constant, or an option of an operation. A computation within has places for names."""
        if isinstance(x, (ClosedJaxpr, Jaxpr)):
            if id(x) not in self._inner:  # what is called often is one object
                inner, constants = (x.jaxpr, x.consts) if isinstance(x, ClosedJaxpr) else (x, ())
                held: list[Hashable] = [*map(self._of_value, constants)]
                held += [("constant", i) for i in range(len(held), len(inner.constvars))]
                inputs = [("input", i) for i, _ in enumerate(inner.invars)]
                self._inner[id(x)] = self._of(inner, held, inputs)
            return self._inner[id(x)]
        if isinstance(x, (tuple, list)):
            return tuple(map(self._of_value, x))
        if isinstance(x, (np.ndarray, np.generic, jax.Array)):
            array = np.asarray(x)
            return array.dtype.name, array.shape, array.tobytes()
        # Rules for gradients and the like, which are functions, are made anew in each call.
        made_anew = callable(x) or hasattr(x, "call_wrapped") or not isinstance(x, Hashable)
        return type(x).__name__ if made_anew else x
