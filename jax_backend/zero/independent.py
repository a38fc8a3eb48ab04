"""Does an optimizer treat each parameter by itself? Found out by trying it: on all parameters together, and on those of each replica.

A replica that owns some whole parameters may run an optimizer on them if what comes out for one depends on no other, and not on its name, under
which each replica has a parameter of its own. What mixes parameters, as a global norm does, comes to something else on a part of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from gradwire.core.ops import Spec
from gradwire.core.zero.stacks import StackShards
from gradwire.jax_backend.axes.mapped_axis import AxisName
from gradwire.jax_backend.state.types import path_of
from gradwire.jax_backend.zero.elementwise import (
    OPS,
    DifferentError,
    Trial,
    compare,
    on_host,
    quietly,
    shortened,
)
from gradwire.jax_backend.zero.stacked_names import paths_in, stacked_keys

#: Elements of one parameter of each shape, together: matrices that are orthogonalized take much longer than what treats each element by itself.
LARGEST = 1 << 14


def require_independent(
    inner: optax.GradientTransformationExtraArgs, structure: Any, shards: StackShards, axis_name: AxisName
) -> None:
    """Raise ValueError if parameters, optimized apart, come to other numbers than all together, or cannot be optimized.

    Args:
        inner: an optimizer.
        structure: of the tree of parameters.
        shards: how they are divided, in the order of the tree. Two of each stacked shape are tried on two replicas, and one of those that are kept,
            shortened if they are large.
        axis_name: the axes that `inner` may sum over.
    """
    if not any(spec.size for spec in shards.specs.values()) or not shards.stacks:
        return
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(quietly, lambda: WholeTrial(inner, structure, shards, axis_name).run()).result()
    except DifferentError as error:
        raise ValueError(_refusal(str(error))) from None
    except Exception as error:  # of any optimizer
        raise ValueError(_refusal(f"it raised {type(error).__name__}: {error}")) from error


def _refusal(reason: str) -> str:
    return (
        f"zero1: inner cannot work on some of the parameters alone (tried on random numbers, {reason}). With shard='parameter' each replica has one "
        "parameter of each stack of W of one shape, under the name of the first of them. So inner must not mix parameters, as global norms do: put that "
        "before, optax.chain(all_reduce_mean(axis_name=…), transformation, zero1(inner, averaged=True, …)). Nor must it treat parameters of one "
        "shape differently by their names: put optax.multi_transform around, with a zero1 in each of its parts."
    )


class WholeTrial(Trial):
    """An optimizer on all parameters, which one replica has, beside the same on those of two replicas."""

    def _tried(self, shards: StackShards) -> StackShards:
        self._all = list(shards.specs)
        return StackShards(_thinned(shards), 2)

    def _tree(self, leaves: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self._structure, [leaves.get(name, optax.MaskedNode()) for name in self._all])

    def _whole(self, arrays: Sequence[Any]) -> Any:
        return self._tree({name: jnp.asarray(x)[None] for name, x in zip(self._shards.specs, arrays, strict=True)})

    def _cut(self, arrays: Sequence[Any]) -> Any:
        given = {name: jnp.asarray(x) for name, x in zip(self._shards.specs, arrays, strict=True)}
        kept = {name: jnp.stack([x, x]) for name, x in given.items() if self._shards.is_kept(name)}
        stacked = self._shards.stacked(OPS, {name: x for name, x in given.items() if name not in kept})
        return self._tree(stacked | kept)

    def _gradients(self, kind: str) -> list[np.ndarray[Any, Any]]:
        gradients = self._numbers(lambda place: (1 + 9 * place) * (place >= 0.5 if kind == "sparse" else 1))
        if kind == "not finite":  # in one parameter alone, which another replica does not have
            stacked = next((i for i, name in enumerate(self._shards.specs) if name in self._shards.stacks), 0)
            gradients[stacked].reshape(-1)[:1] = np.nan
        return gradients

    def _compare_updates(self, new: Any, cut: Any) -> np.ndarray[Any, Any]:
        updates = dict(zip(self._shards.specs, (on_host(x)[0] for x in jax.tree.leaves(new)), strict=True))
        here = [name for name in self._shards.specs if name in self._shards.stacks or self._shards.is_kept(name)]
        for name, rows in zip(here, map(on_host, jax.tree.leaves(cut)), strict=True):
            for member, row in zip(self._shards.stacks.get(name, (name, name)), rows, strict=True):
                compare(f"the update of {member!r}", updates[member], row)
        return np.array([(x != 0).any() for x in updates.values()])

    def _check_state(self, whole: Any, pieces: Any) -> None:
        paths = [path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(pieces)[0]]
        keys = stacked_keys(paths, self._shards.stacks, self._all)
        self._paths = [paths_in(key) if key else (path, path) for path, key in zip(paths, keys, strict=True)]
        self._compare_states(whole, pieces)

    def _compare_states(self, whole: Any, pieces: Any) -> None:
        expected = {path_of(path): on_host(x)[0] for path, x in jax.tree_util.tree_flatten_with_path(whole)[0]}
        for paths, rows in zip(self._paths, map(on_host, jax.tree.leaves(pieces)), strict=True):
            for path, row in zip(paths or (), rows, strict=True):
                if path not in expected or expected[path].shape != row.shape:
                    raise DifferentError(f"the state {path!r} is not there, or has another shape")
                compare(f"the state {path!r}", expected[path], row)


def _thinned(shards: StackShards) -> dict[str, Spec]:
    """Two parameters of each stacked shape, and of those that are kept one that is left over on two replicas, made small."""
    shapes = list(dict.fromkeys(shards.specs.values()))
    small: dict[Spec, Spec] = {}
    for spec, short in zip(shapes, shortened({str(i): s for i, s in enumerate(shapes)}, LARGEST).values(), strict=True):
        while short in small.values():  # what is not alike stays so
            short = Spec((*short.shape[:-1], short.shape[-1] + 1), short.dtype)
        small[spec] = short
    taken: dict[str, Spec] = {}
    for spec in shapes:
        alike = [name for name, other in shards.specs.items() if other == spec]
        stacked = [name for name in alike if not shards.is_kept(name)]
        # Of a kept shape alone one, for two would be a stack here.
        names = [*stacked[:2], *[name for name in alike if shards.is_kept(name)][:1]]
        taken |= dict.fromkeys(names, small[spec])
    return {name: taken[name] for name in shards.specs if name in taken}
