"""The state of a sharded optimizer, and its way to a plain state, back, and to another number of
replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from gradwire.jax_backend.engine.barrier import await_processes
from gradwire.jax_backend.state.matching import places
from gradwire.jax_backend.state.names import pure
from gradwire.jax_backend.state.survey import survey
from gradwire.jax_backend.state.types import (
    MARK,
    PerReplica,
    Record,
    by_path,
    host_memory,
    in_memory,
    on_host,
    path_of,
)
from gradwire.jax_backend.zero.stacked_names import has_owners, path_at, paths_in

T = TypeVar("T")
STRUCT: Any = jax.ShapeDtypeStruct


class ZeroState(NamedTuple):
    """State of `zero1`.

    Attributes:
        common: the state of the inner transformation, with `optax.MaskedNode` in place of each
            array that is divided. Equal on all replicas: step counts, learning rates.
        pieces: those arrays, path in the inner state (`"0.mu.Dense_0.kernel"`) → this replica's
            piece of shape (1, 1, …, 1, k), k = ⌈n/W⌉; in global form (W, 1, …, 1, k). With
            `shard="parameter"` a stack of parameters, of which each replica has one:
            `"0.mu.{Dense_0.kernel|Dense_1.kernel}"` → (1, n, m), in global form (W, n, m); what has
            owners as vectors, `"0.mu.{Dense_2.kernel;Dense_3.kernel}"` → (1, k); some layers of a
            stacked array, `"0.mu.{layers.kernel}"` → (1, ⌈L/W⌉, n, m). See
            `gradwire.jax_backend.state.types` for the forms, and `reshard`.
        layout: {for how many replicas, and of how many axes: its place}, which tells a state from
            one of several members of an ensemble, and from one along another axis.
    """

    common: Any
    pieces: PerReplica
    layout: dict[str, Record] = {}  # noqa: RUF012


def reshard(state: Any, like: T) -> T:
    """A training state with its sharded optimizer's state consolidated, sharded, or sharded for
    another number of replicas.

        tx, plain = zero1(adamw, axis_name="data", replicas=4), adamw
        whole = reshard(state, jax.eval_shape(plain.init, params))    # as adamw has it without zero
        again = reshard(whole, jax.eval_shape(tx.init, params))          # and back
        two = zero1(adamw, axis_name="data", replicas=2)
        fewer = reshard(state, jax.eval_shape(two.init, params))

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from gradwire.jax_backend import reshard, zero1
        >>> params, adam = {"w": jnp.zeros((10, 3))}, optax.scale_by_adam()
        >>> state = zero1(adam, axis_name="data", replicas=4).init(params)
        >>> reshard(state, adam.init(params)).mu["w"].shape
        (10, 3)

    Args:
        state: any tree with states of `zero1` in it in global form (from `init` outside the map,
            `unreplicate`, or a checkpoint restored into such a state), or of the optimizers inside
            them. On the host, or distributed; in several processes all must call this.
        like: a tree of the same structure, of arrays or `jax.ShapeDtypeStruct`s, in which each of
            these states has the wanted form. Of a Flax `TrainState`: one that was made with the
            other transformation. Of an `nnx.Optimizer`: its `opt_state`; the result holds arrays.

    Returns:
        The values of `state` in the form of `like`. Converted arrays are NumPy's; those that lay in
            a device's memory on the host ("pinned_host") lie in it again. Error memory is as it
            was.

    Raises:
        ValueError: the trees do not fit each other; or one is of an ensemble, made by `jax.vmap`.
        RuntimeError: see `distribute`.
    """
    state, like = pure(state), pure(like)
    for tree in (state, like):
        survey(tree).refuse_ensemble()
    await_processes("reshard", state)
    opened, wanted = (jax.tree_util.tree_flatten_with_path(_open(tree)) for tree in (state, like))
    found, expected = (_by_path(leaves) for leaves, _ in (opened, wanted))
    if different := sorted(found.keys() ^ expected.keys()):
        raise ValueError(
            f"the state does not have the structure of `like`: {different[0]} is only in one of"
            " them. Both must come from transformations that differ in `zero1` alone; restore a"
            " checkpoint into a state of its own form first."
        )
    kinds = {
        p: host_memory(_array(x)) for path, x in opened[0] for p in _paths(path_of(path), x) if p
    }

    def convert(path: str, target: Any) -> Any:
        x = _like(path, found, target)
        return (
            in_memory(_kind_of(kinds, _paths(path, target)), x) if isinstance(x, np.ndarray) else x
        )

    converted = [convert(path_of(path), target) for path, target in wanted[0]]
    places = jax.tree.leaves(like, is_leaf=_is_zero)
    structure: Any = jax.tree.structure(like, is_leaf=_is_zero)
    inner: Any = wanted[1]
    parts = structure.flatten_up_to(inner.unflatten(converted))
    closed: T = structure.unflatten(
        [
            _close(part, place) if _is_zero(place) else part
            for part, place in zip(parts, places, strict=True)
        ]
    )
    return closed


@dataclass(frozen=True)
class _Rows:
    """A divided array: one row per replica, and padding of less than a `unit` for each. A leaf to
    JAX."""

    array: Any
    unit: int = 1

    @property
    def slack(self) -> int:
        """How many elements at the end may be padding."""
        return max(len(self.array) - 1, 0) * self.unit if self.array.shape else 0


@dataclass(frozen=True)
class _Vector:
    """An array with as much padding as its owner needs."""

    array: Any

    @property
    def slack(self) -> int:
        return int(self.array.size)


@dataclass(frozen=True)
class _Stack:
    """An array of several parameters: one row per replica, and a path for each row that is no
    padding. A leaf to JAX."""

    array: Any
    paths: tuple[str, ...]
    ragged: bool

    def row(self, x: Any) -> Any:
        return _Vector(x) if self.ragged else x


def _opened(key: str, x: Any) -> _Rows | _Stack:
    paths = paths_in(key) or ("",)
    if len(paths) > 1:
        return _Stack(x, paths, has_owners(key))
    return _Rows(x, int(np.prod(x.shape[2:]))) if paths[0] else _Rows(x)


def _by_path(leaves: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Path → leaf, of stacks the row of each parameter."""
    found: dict[str, Any] = {}
    for path, x in leaves:
        if isinstance(x, _Stack):
            rows: Any = [_row_of(x)] * len(x.paths)
            if not isinstance(x.array, STRUCT):
                rows = map(x.row, on_host(x.array))
            # without padding
            found |= {p: row for p, row in zip(_paths(path_of(path), x), rows, strict=False) if p}
        else:
            found[path_of(path)] = x
    return found


def _like(path: str, found: Mapping[str, Any], target: Any) -> Any:
    """What there is at this path, in the form of the target."""
    if not isinstance(target, _Stack):
        return _convert(path, found[path], target)
    rows = np.zeros(target.array.shape, target.array.dtype)
    for r, p in enumerate(_paths(path, target)):
        if p:
            rows[r] = on_host(_convert(p, found[p], _row_of(target)))
    return rows


def _paths(path: str, x: Any) -> list[str]:
    """The paths in the whole tree of what is opened, from the path at which it lies there."""
    if not isinstance(x, _Stack):
        return [path]
    before = path.removesuffix(next(filter(None, x.paths)))
    return [each and before + each for each in x.paths]


def _array(x: Any) -> Any:
    return x.array if isinstance(x, _Rows | _Stack) else x


def _kind_of(kinds: Mapping[str, str | None], paths: Iterable[str]) -> str | None:
    """The memory of the host in which all of these lie."""
    found = {kinds.get(path) for path in paths if path}
    return found.pop() if len(found) == 1 else None


def in_memory_of_parameters(made: ZeroState, plain: Any, params: Mapping[str, Any]) -> ZeroState:
    """A new state, each array in the memory of the host where its parameters lie there.

    Args:
        made: in global form.
        plain: the inner state of whole parameters, of shapes.
        params: by name.
    """
    of = {name: host_memory(x) for name, x in params.items()}
    if not any(of.values()):
        return made
    found = places(plain, {name: jnp.shape(x) for name, x in params.items()})
    kinds = {
        path: of[place.name]
        for (path, _), place in zip(by_path(plain), found, strict=True)
        if place
    }
    common = jax.tree_util.tree_map_with_path(
        lambda path, x: in_memory(kinds.get(path_of(path)), x), made.common
    )
    pieces = {
        key: in_memory(_kind_of(kinds, paths_in(key) or (key,)), x)
        for key, x in made.pieces.per_replica.items()
    }
    return made._replace(common=common, pieces=PerReplica(pieces))


def _row_of(stack: _Stack) -> Any:
    return stack.row(STRUCT(stack.array.shape[1:], stack.array.dtype))


def _is_zero(x: Any) -> bool:
    return isinstance(x, ZeroState)


def _open(tree: Any) -> Any:
    """The tree with the inner state in place of each `ZeroState`."""

    def inner(x: Any) -> Any:
        return (
            joined_state(x, {key: _opened(key, a) for key, a in x.pieces.per_replica.items()})
            if _is_zero(x)
            else x
        )

    return jax.tree.map(inner, tree, is_leaf=_is_zero)


def _close(inner: Any, like: ZeroState) -> ZeroState:
    closed = split_state(inner, keys_of(like), lambda x: x)
    common = jax.tree.unflatten(jax.tree.structure(like.common), jax.tree.leaves(closed.common))
    return closed._replace(common=common, layout=like.layout)


def _convert(name: str, x: Any, like: Any) -> Any:
    padded = _Rows | _Vector
    if not isinstance(x, padded) and not isinstance(like, padded):
        if np.shape(x) != np.shape(like) and MARK not in name.split("."):
            raise ValueError(_misfit(name, np.shape(x), np.shape(like)))
        return x
    target = np.shape(like.array if isinstance(like, padded) else like)
    flat = on_host(x.array if isinstance(x, padded) else x)
    shape, size = flat.shape, int(np.prod(target))
    least = flat.size - (x.slack if isinstance(x, padded) else 0)
    fits = least <= size and size - (like.slack if isinstance(like, padded) else 0) <= flat.size
    # In every form an element has its place in the flattened parameter; what lies beyond its end is
    # padding.
    flat, rest = flat.reshape(-1)[:size], flat.reshape(-1)[size:]
    if not fits or (isinstance(x, _Vector) and rest.any()):
        raise ValueError(_misfit(name, shape, target))
    return np.pad(flat, (0, size - flat.size)).reshape(target)


def _misfit(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> str:
    return (
        f"{name} has shape {shape}, which cannot become {target}: the states are not of the same"
        " parameters, or not in global form (after jax.pmap: gradwire.jax_backend.unreplicate)"
    )


def joined_state(state: ZeroState, pieces: Mapping[str, Any]) -> Any:
    """The inner state, with these values where its arrays are divided, given by the keys of the
    pieces."""
    at = {path_at(key): x for key, x in pieces.items()}
    owned = [path_at(key) for key in pieces if has_owners(key)]

    def fill(path: Any, x: Any) -> Any:
        """The state of the other parameters has one `optax.MaskedNode` in their place."""
        place = path_of(path)
        if not isinstance(x, optax.MaskedNode) or place in at:
            return at.get(place, x)
        # Several arrays of one parameter: what holds them here does not matter, since their paths
        # are the same.
        return {
            path[len(place) + 1 :]: at[path] for path in owned if path.startswith(f"{place}.")
        } or x

    return jax.tree_util.tree_map_with_path(
        fill, state.common, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )


def keys_of(state: ZeroState) -> list[str | None]:
    """The key of the piece of each leaf of the inner state; None: it is common."""
    pieces = state.pieces.per_replica if jax.tree.leaves(state.pieces) else {}
    keys = {path_at(key): key for key in pieces}
    return [keys.get(path) for path, _ in by_path(joined_state(state, pieces))]


def split_state(
    state: Any, keys: Sequence[str | None], row: Callable[[jax.Array], jax.Array]
) -> ZeroState:
    """An inner state as a `ZeroState`, in which its leaves have these keys, see `keys_of`; `row`
    gives a piece its leading axis."""
    leaves, structure = jax.tree.flatten(state)
    pieces: dict[str, jax.Array] = {}
    for x, key in zip(leaves, keys, strict=True):
        if key in pieces:
            raise ValueError(
                f"two arrays of the inner state come to the same name {key!r}; rename the key that"
                " contains '.'"
            )
        if key is not None:
            pieces[key] = row(jnp.asarray(x))
    common = [x if key is None else optax.MaskedNode() for x, key in zip(leaves, keys, strict=True)]
    return ZeroState(jax.tree.unflatten(structure, common), PerReplica(pieces))
