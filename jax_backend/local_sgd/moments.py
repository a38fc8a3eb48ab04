"""What is averaged along with parameters: what an optimizer remembers of them (kept, averaged as
well, or begun anew), and other trees (`Extra`).

Moments are the floating arrays of its state that stand in trees like the parameters, of their
shapes or others (`gradwire.jax_backend.state.matching`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradwire.jax_backend.axes.mapped_axis import AxisName, vary_if_tracked
from gradwire.jax_backend.local_sgd.non_finite import all_finite
from gradwire.jax_backend.state.matching import places
from gradwire.jax_backend.state.names import flatten
from gradwire.jax_backend.state.types import may_be_legacy_keys, path_of


class Moments:
    """The moments in the state of an optimizer of these parameters, which are given by name."""

    def __init__(self, state: Any, params: Mapping[str, jax.Array]) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(state)
        self._leaves = [x for _, x in leaves]
        self._paths = [path for path, _ in leaves]
        self._places = places(state, {name: jnp.shape(x) for name, x in params.items()})

    def require_any(self, what: str) -> None:
        """Raise ValueError if nothing belongs to a parameter, and there are arrays all the same: of
        `optax.flatten` one for all parameters. Or if some are codes, and there is no average of
        codes. `what` is to be done with moments."""
        for path, x, place in zip(self._paths, self._leaves, self._places, strict=True):
            if (
                what == "average"
                and place is not None
                and jnp.ndim(x)
                and jnp.issubdtype(x.dtype, jnp.integer)
            ):
                raise ValueError(
                    f"moments='average': {path_of(path)!r} in inner's state holds integers of the"
                    f" parameter {place.name!r}, of which there is no average. Use moments='reset'"
                    " or 'keep'"
                )
        rest = [
            path
            for path, x in zip(self._paths, self._leaves, strict=True)
            if jnp.ndim(x) and _is_float(x)
        ]
        if rest and not any(self._places):
            raise ValueError(
                f"moments={what!r}: inner's state holds {path_of(rest[0])!r}, and nothing that"
                " belongs to a parameter alone. Take optax.flatten out of inner, or use"
                " moments='keep'"
            )

    def by_parameter(self) -> dict[str, dict[str, jax.Array]]:
        """Parameter → number of a leaf of the state → moment."""
        found: dict[str, dict[str, jax.Array]] = {}
        for i, (place, x) in enumerate(zip(self._places, self._leaves, strict=True)):
            if place is not None and _is_float(x):
                found.setdefault(place.name, {})[str(i)] = x
        return found

    def replaced(self, values: Mapping[str, Mapping[str, jax.Array]]) -> Any:
        """The state with these moments."""
        moments = {number: x for name in self.by_parameter() for number, x in values[name].items()}
        return self._rebuilt([moments.get(str(i), x) for i, x in enumerate(self._leaves)])

    def restarted(self, fresh: Any, now: jax.Array, axis_name: AxisName) -> Any:
        """The state with the moments of a `fresh` one, if `now`.

        Counters that stand beside moments, as Adam's does for its bias correction, begin again with
        them; those that stand alone, such as a schedule's, go on.
        """
        chosen = self._begin_anew()
        new = jax.tree.leaves(fresh)
        old = vary_if_tracked([jnp.asarray(self._leaves[i]) for i in chosen], axis_name)
        begun = vary_if_tracked(
            [jnp.asarray(new[i], x.dtype) for i, x in zip(chosen, old, strict=True)], axis_name
        )
        values = dict(zip(chosen, lax.cond(now, lambda: begun, lambda: old), strict=True))
        return self._rebuilt([values.get(i, x) for i, x in enumerate(self._leaves)])

    def mended(self, fresh: Any, now: jax.Array) -> Any:
        """The state with the moments of a `fresh` one and the counters beside them, if `now` and an
        array of floats in it is not finite. What else is not finite becomes that of the fresh one
        as well.

        What begins as inf is not broken: an injected clip that is off, the best loss so far.
        """
        chosen, new = set(self._begin_anew()), jax.tree.leaves(fresh)
        broken = now & self._is_broken(new)
        leaves = []
        for i, x in enumerate(self._leaves):
            anew = broken if i in chosen else broken & ~all_finite([x])
            leaves.append(
                jnp.where(anew, jnp.asarray(new[i], jnp.result_type(x)), x)
                if _is_float(x) or i in chosen
                else x
            )
        return self._rebuilt(leaves)

    def _is_broken(self, fresh: list[Any]) -> Any:
        """Whether a float is not finite that is finite in the leaves of a fresh state. Of a number
        that stands alone inf may be a setting, given while training: NaN tells there."""
        ok: Any = jnp.asarray(True)
        for place, x, new in zip(self._places, self._leaves, fresh, strict=True):
            if _is_float(x):
                is_right = ~jnp.isnan(x) if place is None and not jnp.ndim(x) else jnp.isfinite(x)
                ok &= (is_right | ~jnp.isfinite(new)).all()
        return ~ok

    def _begin_anew(self) -> list[int]:
        """Numbers of the leaves that begin anew: moments, and the counters beside them. A random
        key is none, and would draw the same numbers again; nor are gradients that
        `optax.MultiSteps` has added up so far."""
        places = [
            None if place is None or _adds_up(place.before) else place for place in self._places
        ]
        beside = {place.before[:-1] for place in places if place is not None}
        leaves = zip(self._paths, self._leaves, places, strict=True)
        return [
            i
            for i, (path, x, place) in enumerate(leaves)
            if place is not None or (path[:-1] in beside and not _may_be_keys(x))
        ]

    def _rebuilt(self, leaves: list[Any]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)


class Extra:
    """A tree that is averaged along with parameters, such as BatchNorm's statistics, as
    `LocalSGD.average` takes it.

    Attributes:
        arrays: the floating arrays, owner → "" → array, with an owner that is no parameter. To be
            replaced by their averages.
    """

    def __init__(self, number: int, tree: Any) -> None:
        self._named = flatten(tree)
        self._owners = {
            name: f"extras[{number}]/{name}"
            for name, x in self._named.leaves.items()
            if _is_float(x)
        }
        self.arrays = {
            owner: {"": jnp.asarray(self._named.leaves[name])}
            for name, owner in self._owners.items()
        }

    def rebuilt(self) -> Any:
        return self._named.rebuild(
            {
                name: self.arrays[self._owners[name]][""] if name in self._owners else x
                for name, x in self._named.leaves.items()
            }
        )


def _adds_up(path: tuple[Any, ...]) -> bool:
    """Whether there, in the state of an optimizer, are gradients of micro-steps."""
    return getattr(path[-1], "name", None) == "acc_grads" if path else False


def _may_be_keys(x: Any) -> bool:
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or may_be_legacy_keys(x)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.floating))
