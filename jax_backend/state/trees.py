"""An algorithm's memory, by parameter name, as trees shaped like the parameters, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax  # type: ignore[import-untyped]
from jax.sharding import NamedSharding

from gradwire.core.algorithm import State
from gradwire.core.algorithms.compressor import ERROR
from gradwire.jax_backend.state.names import BARE, NamedTree, filled, flatten, pure
from gradwire.jax_backend.state.types import (
    Account,
    DataParallelState,
    PerReplica,
    Record,
    host_memory,
    require_own_row,
    spec,
)

#: Stands in for the memory of a tensor that is compressed but remembers nothing: the state must
#: tell it from one that is not.
NOTHING = "nothing"


def pack(
    params: Any,
    state: State[jax.Array],
    per_replica: frozenset[str],
    configuration: str,
    record: Record,
    sent: Sequence[Sequence[float]],
    dense_bytes: int,
    memories: frozenset[str] | None = None,
) -> DataParallelState:
    """The state before the first step, in local form. `sent`, `dense_bytes`: see `Account`.
    `memories`: of each tensor that has one, if the algorithm can name them."""
    named = flatten(params)
    tensors = {
        name: memory or {NOTHING: jnp.zeros((), bool)} for name, memory in state.tensors.items()
    }
    keys = {key for memory in tensors.values() for key in memory}
    if not named.leaves and memories is not None:
        keys |= memories or {NOTHING}

    def tree(key: str) -> Any:
        leaves = [tensors.get(name, {}).get(key, optax.MaskedNode()) for name in named.leaves]
        return filled(
            params,
            leaves,
            lambda leaf, x: key not in per_replica and jnp.shape(leaf) == jnp.shape(x),
        )

    return DataParallelState(
        configuration={configuration: ()},
        step=jnp.zeros((), jnp.int32),
        shared=state.shared,
        # `optax.tree.map_params` looks in the state for the very tree that it gave to `init`. One
        # without parameters has no memory to name: where the algorithm cannot either, it stands
        # here itself. A mapping would be read as memories by name, and stands in a tuple.
        memory=(
            _no_mapping(pure(params))
            if not named.leaves and memories is None
            else {key: tree(key) for key in sorted(keys - per_replica)}
        ),
        local=PerReplica(
            jax.tree.map(lambda x: x[None], {key: tree(key) for key in sorted(per_replica)})
        ),
        record=record,
        account=Account(
            jnp.zeros((), jnp.int32), *(jnp.asarray(n, jnp.float32) for n in (sent, dense_bytes))
        ),
    )


def _no_mapping(tree: Any) -> Any:
    return (tree,) if isinstance(tree, Mapping) else tree


def by_parameter(trees: Any) -> dict[str, dict[str, Any]]:
    """Parameter → memory → array, of trees like the parameters by the name of the memory."""
    found: dict[str, dict[str, Any]] = {}
    for key, tree in _trees(trees):
        for name, x in tree.leaves.items():
            found.setdefault(name, {}).update({} if key == NOTHING else {key: x})
    return found


def rebuilt(trees: Any, value: Callable[[str, str, Any], Any]) -> Any:
    """The same trees, with `value(parameter, memory, array)` in place of each array; what a state
    without parameters has for them as it is."""
    if not isinstance(trees, Mapping):
        return trees
    return {
        key: tree.rebuild({name: value(name, key, x) for name, x in tree.leaves.items()})
        for key, tree in _trees(trees)
    }


def unpack(state: DataParallelState) -> State[jax.Array]:
    """The state as the algorithm knows it."""
    tensors = by_parameter(state.memory)
    for name, memory in by_parameter(state.local.per_replica).items():
        for key, x in memory.items():
            require_own_row(f"memory {key!r} of parameter {name!r}", x)
            tensors.setdefault(name, {})[key] = x.reshape(x.shape[1:])
    return State(dict(state.shared), tensors)


def repack(
    before: DataParallelState, after: State[jax.Array], finite: jax.Array | bool = True
) -> DataParallelState:
    """`before` after one more step. Parameters that took no part in it keep their memory. Not
    `finite`: all of them kept it."""

    def new(name: str, key: str, old: jax.Array) -> jax.Array:
        return after.tensors.get(name, {}).get(key, old).reshape(old.shape).astype(old.dtype)

    account = before.account
    return before._replace(
        step=optax.safe_increment(before.step),
        shared=after.shared,
        memory=rebuilt(before.memory, new),
        local=PerReplica(rebuilt(before.local.per_replica, new)),
        account=account._replace(skipped=account.skipped + jnp.where(finite, 0, 1)),
    )


def check_gradients(gradients: NamedTree, state: DataParallelState) -> None:
    """Raise ValueError if the gradients are not those of the parameters that the state was made
    for."""
    trees = dict(_trees(state.memory)) | dict(_trees(state.local.per_replica))
    if not trees:
        return  # Without memory there is nothing to fit.
    known = next(iter(trees.values()))
    expected = known.leaves.keys() | {path or BARE for path in known.holes}
    extra = [name for name in gradients.leaves if name not in expected and not known.is_hole(name)]
    missing = sorted(
        name for name in expected if name not in gradients.leaves and not gradients.is_hole(name)
    )
    if extra or missing:
        differing = [*(f"{x!r} is new" for x in extra), *(f"{x!r} is missing" for x in missing)]
        raise ValueError(
            "the gradients are not those of the parameters given to init:"
            f" {', '.join(differing)}."
            " Make the state anew for another model; give None for a parameter that has no"
            " gradient in this step."
        )
    for name, x in trees[ERROR].leaves.items() if ERROR in trees else ():
        if name in gradients.leaves and jnp.shape(gradients.leaves[name]) != x.shape[1:]:
            raise ValueError(
                f"the gradient of {name!r} has shape {jnp.shape(gradients.leaves[name])}; init was"
                f" given a parameter of shape {x.shape[1:]}"
            )


def shardings_like(params: Any, make: Callable[[], DataParallelState]) -> Any:
    """The shardings of the state that `make` makes: what has the shape of a parameter lies as the
    parameter does, everything else whole on each of its devices. A tree like the state; None if no
    parameter is laid out on a mesh, or lies in the memory of the host."""
    named = {
        name: x for name, x in flatten(params).leaves.items() if not isinstance(x, jax.core.Tracer)
    }
    on_meshes = {
        n: x for n, x in named.items() if isinstance(getattr(x, "sharding", None), NamedSharding)
    }
    lying = on_meshes or {n: x for n, x in named.items() if host_memory(x) is not None}
    if not lying:
        return None
    shapes = jax.eval_shape(make)

    def alike(sharding: Any, axes: Sequence[Any] = ()) -> Any:
        """The sharding in the same memory of the same devices, of a mesh divided along these
        axes."""
        if not isinstance(sharding, NamedSharding):
            return sharding
        return NamedSharding(sharding.mesh, spec(*axes), memory_kind=sharding.memory_kind)

    everywhere = alike(next(iter(lying.values())).sharding)

    def like(trees: Any, rows: int) -> Any:
        def lies(name: str, key: str, x: Any) -> Any:
            if name not in lying or x.shape[rows:] != jnp.shape(lying[name]):
                return everywhere
            sharding = lying[name].sharding
            return alike(sharding, [*[None] * rows, *getattr(sharding, "spec", ())])

        return (
            rebuilt(trees, lies)
            if isinstance(trees, Mapping)
            else jax.tree.map(lambda _: everywhere, trees)
        )

    rest = jax.tree.map(lambda _: everywhere, shapes)
    return rest._replace(
        memory=like(shapes.memory, 0), local=PerReplica(like(shapes.local.per_replica, 1))
    )


def _trees(memory: Any) -> Iterator[tuple[str, NamedTree]]:
    if isinstance(memory, Mapping):
        for key, tree in memory.items():
            yield key, flatten(tree)
