"""The driver: runs an algorithm inside a traced function, over a mapped axis.

A `Mean` of any number of arrays is one `psum` per dtype: the arrays are packed into one flat buffer. Left to XLA, the two messages of
a PowerSGD step came out as three all-reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.core.collectives import Branch, Finite, Mean, Orthonormalize, Program, Request
from gradwire.jax_backend.axis import AxisName, tracked, vary, vary_if_tracked, varying_axes
from gradwire.jax_backend.pieces import pack, unpack, unstack

__all__ = ["drive"]

T = TypeVar("T")
Side = Callable[[], tuple[Any, jax.Array]]


def drive(program: Program[T], axis_name: AxisName) -> T:
    """Run a program to its end.

    Args:
        program: a coroutine over JAX arrays.
        axis_name: the mapped axis over which its averages run; must be bound.

    Returns:
        What the program returned.
    """
    return _Driver(axis_name, jnp.asarray(True)).run(program)


class _Driver:
    """Performs requests; `finite` tells whether all watched averages so far were finite."""

    def __init__(self, axis_name: AxisName, finite: jax.Array) -> None:
        self.axis_name = axis_name
        self.finite = finite

    def run(self, program: Program[T]) -> T:
        answers: Any = None
        try:
            while True:
                try:
                    request = program.send(answers)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                answers = self._answer(request)
        finally:
            program.close()

    def _answer(self, request: Request) -> tuple[Any, ...]:
        if isinstance(request, Mean):
            return self._mean(request)
        if isinstance(request, Orthonormalize):
            return request.answer(unstack)
        if isinstance(request, Finite):
            return (self.finite,)
        if isinstance(request, Branch):
            return (self._branch(request),)
        raise TypeError(f"the JAX driver cannot answer {request!r}")

    def _mean(self, request: Mean[jax.Array]) -> tuple[jax.Array, ...]:
        answers = [jnp.zeros(x.shape, x.dtype) for x in request.arrays]
        by_dtype: dict[Any, list[int]] = {}
        for i, x in enumerate(request.arrays):
            if x.size:
                by_dtype.setdefault(x.dtype, []).append(i)
        for members in by_dtype.values():
            arrays = [request.arrays[i] for i in members]
            average = self._all_reduce(pack(arrays))
            if request.watched:
                self.finite = self.finite & jnp.isfinite(average).all()
            for i, answer in zip(members, unpack(average, [x.shape for x in arrays]), strict=True):
                answers[i] = answer
        return tuple(answers)

    def _all_reduce(self, x: jax.Array) -> jax.Array:
        x = vary_if_tracked(x, self.axis_name)
        # Divided before it is summed: half precision must not overflow where the average would not.
        average: jax.Array = lax.psum(x / lax.axis_size(self.axis_name), self.axis_name)  # type: ignore[no-untyped-call]
        return average

    def _branch(self, request: Branch[Any]) -> Any:
        def side(start: Callable[..., Program[Any]]) -> Side:
            def run() -> tuple[Any, jax.Array]:
                driver = _Driver(self.axis_name, self.finite)
                return driver.run(start(*request.operands)), driver.finite

            return run

        then, otherwise = side(request.then), side(request.otherwise)
        if tracked(self.axis_name):
            then, otherwise = _equally_varying(then, otherwise)
        answer, self.finite = lax.cond(request.predicate, then, otherwise)
        return answer


def _equally_varying(then: Side, otherwise: Side) -> tuple[Side, Side]:
    """Both sides of a branch, with every result marked as varying where it varies on either side, as `lax.cond` demands."""
    results = [jax.eval_shape(side) for side in (then, otherwise)]
    leaves, structures = zip(*(jax.tree.flatten(r) for r in results), strict=True)
    if structures[0] != structures[1]:
        return then, otherwise  # `lax.cond` says it better.
    axes = [varying_axes(a) | varying_axes(b) for a, b in zip(*leaves, strict=True)]

    def marked(side: Side) -> Side:
        def run() -> tuple[Any, jax.Array]:
            values, structure = jax.tree.flatten(side())
            answer, finite = jax.tree.unflatten(structure, [vary(v, a) for v, a in zip(values, axes, strict=True)])
            return answer, finite

        return run

    return marked(then), marked(otherwise)
