"""How the arrays of stacked parameters are called in a state.

    "0.mu.{layer_0.kernel|layer_1.kernel}"    of replica 0 and of replica 1
    "0.mu.{up.kernel;down.kernel}"    of replica 0 and of replica 1, each as a vector with padding:
                                      they have other shapes
    "0.mu.{layers.kernel}"                    some layers of each

In the inner state, whose tree is that of the parameters, a stack lies where the first of its
parameters lies: `"0.mu.layer_0.kernel"`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from gradwire.core.zero.stacks import StackShards
from gradwire.jax_backend.state.matching import places
from gradwire.jax_backend.state.types import by_path, dotted, path_of

OPEN, BETWEEN, OWNERS, CLOSE = "{|;}"


def require_plain(names: Iterable[str]) -> None:
    """Raise ValueError for a name with one of the signs that stand between names."""
    signs = OPEN + BETWEEN + OWNERS + CLOSE
    if bad := [name for name in names if set(name) & set(signs)]:
        raise ValueError(
            f"parameter {bad[0]!r} has one of the signs {signs} in its name, which stand between"
            " stacked names"
        )


def parameters_in(state: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, str, str]]:
    """The path of each leaf of a state, taken apart in what is before a parameter's name, the name,
    and what is after it; empty if it belongs to none.

    Args:
        state: of an optimizer.
        shapes: of all parameters in the tree, by name.
    """
    found = []
    for place in places(state, shapes):
        if place is None or not place.within:
            found.append(("", "", ""))
            continue
        name = dotted(place.name)
        before = path_of(place.before)
        found.append((before and f"{before}.", name, path_of(place.within).removeprefix(name)))
    return found


def keys_of_slots(
    init: Callable[[Any], Any],
    shards: StackShards,
    build: Callable[[Mapping[str, Any]], Any],
    names: Collection[str],
) -> list[str | None]:
    """The key of each leaf of the state that `init` makes of what a replica has, besides what has
    owners. Of what is known of layers that is divided which has one more for one layer more.

    Args:
        init: of an optimizer.
        shards: how parameters are divided.
        build: makes a tree of parameters by name.
        names: of all parameters in the tree.
    """
    plain = {name: shards.specs[name].shape if name in shards.specs else () for name in names}

    def made(more: int) -> Any:
        pieces = {}
        for name, spec in shards.specs.items():
            if shards.is_kept(name) or (
                shards.places[name][0] == name and name not in shards.ragged
            ):
                first, *rest = (
                    *(spec.shape if shards.is_kept(name) else shards.slot_shape(name)),
                    1,
                )
                shape = (first + more * (name in shards.cut), *rest)[: len(spec.shape)]
                pieces[name] = jax.ShapeDtypeStruct(shape, spec.dtype)  # type: ignore[no-untyped-call]
        return jax.eval_shape(init, build(pieces))

    state = made(0)
    longer = {path: x.shape for path, x in by_path(made(1))} if shards.cut else {}
    stacks = {stack: own for stack, own in shards.stacks.items() if stack not in shards.ragged}
    members = {dotted(stack): tuple(map(dotted, own)) for stack, own in stacks.items()}
    layers = {dotted(name): (dotted(name),) for name in shards.cut}
    keys: list[str | None] = []
    for (path, x), (before, name, after) in zip(
        by_path(state), parameters_in(state, plain), strict=True
    ):
        own = (members | layers).get(name)
        common = name in layers and longer.get(path) == x.shape
        keys.append(
            f"{before}{OPEN}{BETWEEN.join(own)}{CLOSE}{after}" if own and not common else None
        )
    return keys


def owners_key(before: str, names: Sequence[str], after: str) -> str:
    """The dotted name of each replica's own parameter, or ""."""
    return f"{before}{OPEN}{OWNERS.join(names)}{CLOSE}{after}"


def has_owners(key: str) -> bool:
    """Whether this is a key of `owners_key`."""
    return OWNERS in key


def paths_in(key: str) -> tuple[str, ...] | None:
    """The paths that the parameters of a stack have in a plain state, "" where there is none; None
    for the key of anything else."""
    before, opened, rest = key.partition(OPEN)
    names, closed, after = rest.partition(CLOSE)
    if not (opened and closed):
        return None
    return tuple(
        name and f"{before}{name}{after}"
        for name in names.split(OWNERS if has_owners(key) else BETWEEN)
    )


def path_at(key: str) -> str:
    """The path of an array with this key in the inner state."""
    return next(filter(None, paths_in(key) or (key,)))
