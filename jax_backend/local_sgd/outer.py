"""Any Optax transformation as the outer optimizer of local SGD, made by a factory.

What it remembers of a parameter is in the memory of local SGD, by name. What it remembers of all of
them, such as a count of steps, each parameter has: fragments are at different steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]

from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.outer import OUTERS, OuterFactory
from gradwire.core.ops import A, Ops
from gradwire.jax_backend.axes.outside_meshes import outside_meshes
from gradwire.jax_backend.state.matching import places
from gradwire.jax_backend.state.types import path_of


class OptaxOuter(OuterFactory):
    """An Optax transformation, of a dictionary of parameters by name.

    Raises:
        TypeError: `factory` does not make one; or it keeps several arrays of a parameter, not in
            trees of their own; or random keys.
    """

    def __init__(self, factory: OuterFactory) -> None:
        super().__init__(factory.make)
        try:
            self._tx = factory.make()
        except Exception as error:
            raise TypeError(
                f"outer={self.name} is called without arguments, and fails: {error}. In JAX give"
                " what makes an Optax transformation, or OuterSGD(…)"
            ) from error
        if not isinstance(self._tx, optax.GradientTransformation):
            raise TypeError(
                f"outer={self.name} makes a {type(self._tx).__name__}; in JAX give what makes an"
                " Optax transformation, or OuterSGD(…)"
            )
        one = {"w": (2, 2)}
        state = _begun(self._tx, one)
        if several := [
            path_of(place.before)
            for place in places(state, one)
            if place is not None and place.of_several
        ]:
            raise TypeError(
                f"outer={self.name} keeps several arrays of each parameter, under {several[0]!r},"
                " and an outer optimizer has one of each name. Give what keeps whole arrays, such"
                " as optax.adamw, or OuterSGD(…)"
            )
        kept = [
            (key, x)
            for (key, _), x in zip(_places(state, one), jax.tree.leaves(state), strict=True)
        ]
        if keys := [key for key, x in kept if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]:
            raise TypeError(
                f"outer={self.name} keeps a random key, under {keys[0]!r}, and what an outer"
                " optimizer remembers is numbers. Give one that draws none, such as optax.adamw, or"
                " OuterSGD(…)"
            )
        self._memories = frozenset(key for key, _ in kept)
        self._infinite = frozenset(key for key, x in kept if not jnp.isfinite(x).all())

    @property
    def memories(self) -> frozenset[str]:
        return self._memories

    @property
    def infinite(self) -> frozenset[str]:
        return self._infinite

    def init(self, ops: Ops[A], outer: Mapping[str, A]) -> dict[str, dict[str, A]]:
        return _by_parameter(self._tx.init(dict(outer)), outer)

    def step(
        self,
        ops: Ops[A],
        outer: Mapping[str, A],
        averages: Mapping[str, A],
        memory: Mapping[str, Mapping[str, A]],
    ) -> tuple[dict[str, A], dict[str, dict[str, A]]]:
        parameters = dict(outer)
        shapes = jax.eval_shape(self._tx.init, parameters)
        first = next(iter(outer))
        state = jax.tree.unflatten(
            jax.tree.structure(shapes),
            [memory[name or first][key] for key, name in _places(shapes, _shapes(outer))],
        )
        updates, state = self._tx.update(
            {n: jnp.asarray(averages[n]) for n in outer}, state, parameters
        )
        return optax.apply_updates(parameters, updates), _by_parameter(state, outer)


@outside_meshes
def _begun(tx: optax.GradientTransformation, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Its state of parameters of these shapes, known also while something is traced."""
    with jax.ensure_compile_time_eval():
        return jax.tree.map(
            jnp.asarray, tx.init({name: jnp.zeros(shape) for name, shape in shapes.items()})
        )


def _places(state: Any, names: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str | None]]:
    """The places of arrays: the name of the memory, and of which parameter it is; None: of all."""
    found: list[tuple[str, str | None]] = []
    for place, (path, _) in zip(
        places(state, names), jax.tree_util.tree_flatten_with_path(state)[0], strict=True
    ):
        found.append(
            (
                OUTERS + path_of(path if place is None else place.before),
                None if place is None else place.name,
            )
        )
    return found


def _shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: jnp.shape(x) for name, x in arrays.items()}


def _by_parameter(state: Any, names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    memory: dict[str, dict[str, Any]] = {name: {} for name in names}
    for (key, name), x in zip(_places(state, _shapes(names)), jax.tree.leaves(state), strict=True):
        for own in memory if name is None else [name]:
            memory[own][key] = x
    return memory


def in_jax(local: LocalSGD) -> LocalSGD:
    """The schedule with its outer optimizer, if that is of Optax. Raises TypeError as
    `OptaxOuter`."""
    return (
        replace(local, outer=OptaxOuter(local.outer))
        if isinstance(local.outer, OuterFactory)
        else local
    )
