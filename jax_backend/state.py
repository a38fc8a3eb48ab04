"""The state of a transformation, and how a whole training state is laid out over devices.

Error memory and the pieces of a sharded optimizer differ between replicas, everything else is equal on all of them. `PerReplica` marks
the part that differs; the helpers find it by that name anywhere in a tree (an `optax.chain` state, a Flax `TrainState`, a split `nnx`
module), and treat everything else as replicated. (Under local SGD everything differs: `gradwire.jax_backend.per_replica` marks a whole state.)
Marked arrays have a leading axis for the replicas, which is

- 1 long on a replica, and so in what `init` returns: the **local** form;
- W long in a global array, one row per replica: the **global** form, which `shard_map` and checkpoints use;
- preceded by the device axis under `pmap`, which every array then has: the **pmap** form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gradwire.jax_backend.axis import AxisName, axes_of

__all__ = [
    "PLACED",
    "DataParallelState",
    "PerReplica",
    "distribute",
    "is_marked",
    "partition_specs",
    "path_of",
    "replicate",
    "unreplicate",
]

T = TypeVar("T")


class PerReplica(NamedTuple):
    """Marks what differs between replicas. Found by the name of its field: nnx and checkpoint libraries keep keys and drop types."""

    per_replica: Any


class DataParallelState(NamedTuple):
    """State of a transformation made by `data_parallel`.

    Attributes:
        step: number of updates so far, int32 scalar.
        shared: what concerns the whole model, name → scalar.
        memory: name of a memory → a tree like the parameters, with `optax.MaskedNode` where a parameter has none. Equal on all
            replicas.
        local: the same for memories that differ between replicas, each array with a leading axis for them.
    """

    step: jax.Array
    shared: dict[str, jax.Array]
    memory: Any
    local: PerReplica


MARK = PerReplica._fields[0]
#: The field of `ZeroState` that holds a mark.
PIECES = "pieces"
#: The field of `LocalSGDState` that holds a mark. Its rows, none in what `init` returns, say that the state has come to its replicas.
PLACED = "placed"


def partition_specs(state: Any, axis_name: AxisName) -> Any:
    """`PartitionSpec`s of a training state in global form, for `jax.shard_map`.

        specs = partition_specs(state, "data")
        step = jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), check_vma=False))

    Args:
        state: any tree that holds states of `data_parallel` and `zero`, of arrays or `jax.ShapeDtypeStruct`s.
        axis_name: the axis (or axes) of the replicas.

    Returns:
        A tree of the same structure: `P(axis_name)` for what is per replica, `P()` for the rest.

    Raises:
        ValueError: the transformation stands inside `optax.apply_if_finite`, or inside `optax.MultiSteps`, whose accumulated
            gradients differ between replicas and have no axis for them; or it is one of local SGD, and not all of the state is marked
            by `per_replica`.
    """
    _refuse_apply_if_finite(state)
    _refuse_multi_steps(state)
    _refuse_local_sgd_unmarked(state)
    axes = axes_of(axis_name)
    own = _spec(axes if len(axes) > 1 else axes[0])
    return jax.tree_util.tree_map_with_path(lambda path, _: own if is_marked(path) else _spec(), state)


def distribute(state: T, mesh: Mesh, axis_name: AxisName) -> T:
    """Put a training state on the devices of a mesh, in global form.

    Args:
        state: in local form, as `init` made it (every replica then begins with this memory), or in global form, as `unreplicate` or
            a checkpoint gives it.
        mesh: with the axis of the replicas. What is not per replica comes to lie whole on every device. In several processes each
            must call this with the same state.
        axis_name: that axis (or axes), W devices long.

    Returns:
        The state as global arrays, laid out by `partition_specs`.

    Raises:
        ValueError: the memory is that of another number of replicas than W; or see `partition_specs`.
    """
    specs = partition_specs(state, axis_name)
    replicas = math.prod(mesh.shape[a] for a in axes_of(axis_name))

    def put(path: Any, x: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        if is_marked(path):
            return _through_data(x, lambda data: _from_host(_rows(path, data, replicas), sharding))
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            moved: jax.Array = jax.device_put(x, sharding)
            return moved
        if sharding.is_fully_addressable:
            # Of a copy: the caller's array must outlive the donation of this one, which may share its memory (`may_alias` is not heard).
            placed: jax.Array = jax.device_put(jnp.array(x, copy=True), sharding)
            return placed
        # Between processes JAX moves nothing that is committed to a device.
        return _through_data(x, lambda data: _from_host(np.asarray(data, jnp.result_type(data)), sharding))

    result: T = jax.tree_util.tree_map_with_path(put, state, specs)
    return result


def replicate(state: T, devices: Sequence[jax.Device] | None = None, *, axis_name: str | None = None) -> T:
    """Put a training state on the devices of `jax.pmap`, in pmap form.

        state = replicate(state, axis_name="data")

    Use it in place of `flax.jax_utils.replicate`, which cannot take a state in global form.

    Args:
        state: in local form, as `init` made it (every replica then begins with this memory), or in global form, as `unreplicate` or
            a checkpoint gives it. In several processes each must call this with the same state.
        devices: of this process; all of them by default. In several processes, as many in each.
        axis_name: the one given to `jax.pmap`. Arrays that lie on an axis of another name are averaged just as well, but make JAX
            compile the training step a second time, at its second call.

    Returns:
        The state with a leading device axis on every array.

    Raises:
        ValueError: the memory is that of another number of replicas; the transformation stands inside `optax.apply_if_finite`; or it
            is one of local SGD, and not all of the state is marked by `per_replica`.
    """
    _refuse_apply_if_finite(state)
    _refuse_local_sgd_unmarked(state)
    devices = list(devices) if devices is not None else jax.local_devices()
    axis = axis_name or "replica"
    sharding = NamedSharding(Mesh(np.array(devices), (axis,)), _spec(axis))
    first = jax.process_index() * len(devices)

    def put(path: Any, x: Any) -> Any:
        if is_marked(path):
            return _through_data(x, lambda data: joined(own_rows(path, data)))
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            x = x.addressable_data(0)
        return joined([jax.device_put(jnp.asarray(x)[None], device) for device in devices])

    def own_rows(path: Any, x: Any) -> list[jax.Array]:
        rows = _rows(path, x, jax.process_count() * len(devices))
        return [jax.device_put(rows[first + i][None, None], device) for i, device in enumerate(devices)]

    def joined(pieces: list[jax.Array]) -> jax.Array:
        shape = (len(devices), *pieces[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

    placed: T = jax.tree_util.tree_map_with_path(put, state)
    return placed


def unreplicate(state: T) -> T:
    """Bring a training state back from `jax.pmap`, from pmap form to global form, with the memory of **every** replica.

    What is equal on all replicas is taken from the first device. (`flax.jax_utils.unreplicate` does that to everything and drops all
    error memory but one replica's.) The result is what `distribute`, `replicate` and checkpoints take.

    Args:
        state: in pmap form. In several processes all must call this: memory is gathered.

    Returns:
        The state in global form. Memory that is per replica comes as NumPy arrays, since no device needs to hold all of it.

    Raises:
        ValueError: the state is not in pmap form; or it holds half-accumulated gradients of `optax.MultiSteps`, which differ between
            replicas.
    """
    _refuse_half_accumulated(state)

    def take(path: Any, x: Any) -> Any:
        if not is_marked(path):
            if np.ndim(x) == 0:
                raise ValueError(
                    f"{path_of(path)} has no device axis: unreplicate takes a state in the form of jax.pmap"
                )
            return x.addressable_shards[0].data[0] if isinstance(x, jax.Array) else x[0]
        if np.ndim(x) < 2 or x.shape[1] != 1:
            raise ValueError(
                f"{path_of(path)} has shape {x.shape}, not (devices, 1, …): unreplicate takes a state in the form of jax.pmap"
            )

        def gathered(data: Any) -> Any:
            rows = np.asarray(data).reshape((data.shape[0], *data.shape[2:]))
            return multihost_utils.process_allgather(rows, tiled=True) if jax.process_count() > 1 else rows

        return _through_data(x, gathered)

    taken: T = jax.tree_util.tree_map_with_path(take, state)
    return taken


def _through_data(x: Any, move: Callable[[Any], Any]) -> Any:
    """`move(x)`. NumPy knows nothing of random keys; their data are moved."""
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return move(x)
    return jax.random.wrap_key_data(jnp.asarray(move(jax.random.key_data(x))), impl=jax.random.key_impl(x))


def _from_host(x: np.ndarray[Any, Any], sharding: NamedSharding) -> jax.Array:
    """Made piece by piece: no device ever holds more than its own."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: np.array(x[index], order="C"))


def _rows(path: Any, x: Any, replicas: int) -> np.ndarray[Any, Any]:
    """One row of memory per replica, on the host."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    rows = np.asarray(x)
    if _is_sharded(path) and rows.shape[0] != replicas:
        raise ValueError(
            f"{path_of(path)} is a sharded state of {rows.shape[0]} replicas and there are {replicas} now. Convert it: "
            f"gradwire.jax_backend.reshard(state, like), where `like` comes from zero(…, replicas={replicas})."
        )
    if not rows.shape[0]:  # `PLACED`
        return np.zeros((replicas, *rows.shape[1:]), rows.dtype)
    if rows.shape[0] not in (1, replicas):
        raise ValueError(
            f"{path_of(path)} is the memory of {rows.shape[0]} replicas and there are {replicas} now. What matters is its mean: "
            f"gradwire.jax_backend.resize(state, {replicas}) goes on from that."
        )
    return np.broadcast_to(rows, (replicas, *rows.shape[1:]))


def _wrappers(state: Any, sign: str, inner: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Paths of the nodes that have a key `sign`, and per-replica memory below their key `inner` → the path of that memory."""
    paths = [tuple(map(_key, path)) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    nodes = {path[: path.index(sign)] for path in paths if sign in path}
    return {n: path for n in nodes for path in paths if path[: len(n) + 1] == (*n, inner) and MARK in path[len(n) :]}


def _refuse_apply_if_finite(state: Any) -> None:
    for memory in _wrappers(state, "notfinite_count", "inner_state").values():
        raise ValueError(
            f"the transformation with the memory {'.'.join(memory)} stands inside optax.apply_if_finite: if one replica's gradients "
            "hold an inf or NaN, the others wait for it forever. Put it after: "
            "optax.chain(power_sgd(...), optax.apply_if_finite(optimizer, ...)), or give zero(...) skip_non_finite=True"
        )


def _refuse_multi_steps(state: Any) -> None:
    for node, memory in _wrappers(state, "acc_grads", "inner_opt_state").items():
        if MARK in node:
            continue  # Everything has an axis for the replicas, accumulated gradients too.
        raise ValueError(
            f"the transformation with the memory {'.'.join(memory)} stands inside optax.MultiSteps, which accumulates gradients that "
            "differ between replicas in an array that has no axis for them. Accumulate inside the training step (jax.lax.scan over "
            "micro-batches), or use jax.pmap"
        )


def _refuse_half_accumulated(state: Any) -> None:
    for node in _wrappers(state, "acc_grads", "inner_opt_state"):
        if MARK in node:
            continue
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
            keys = tuple(map(_key, path))
            if keys[: len(node) + 1] == (*node, "mini_step") and np.any(np.asarray(x)):
                raise ValueError(
                    f"{'.'.join(keys)} is not 0: optax.MultiSteps holds gradients that differ between replicas and would be lost. Take "
                    "the state after a whole number of accumulations"
                )


def _refuse_local_sgd_unmarked(state: Any) -> None:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    placed = [path for path in paths if (PLACED, MARK) in itertools.pairwise(map(_key, path))]
    # Its own mark aside.
    bare = [p for p in paths if not is_marked(p) or (p in placed and [_key(k) for k in p].count(MARK) == 1)]
    if placed and bare:
        others = [p for p in bare if p not in placed]
        raise ValueError(
            f"{path_of(placed[0])} belongs to local SGD, under which every array differs between replicas, and "
            f"{path_of((others or placed)[0])} is not marked as one that does. Mark the whole state once, state = per_replica(state), and "
            "take it apart in the training step: mine = own(state)"
        )


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def is_marked(path: Any) -> bool:
    return any(_key(k) == MARK for k in path)


def _is_sharded(path: Any) -> bool:
    """Whether this lies in the pieces of a `ZeroState`: then each row is another part of one array."""
    keys = [_key(k) for k in path]
    return any(pair == (PIECES, MARK) for pair in itertools.pairwise(keys))


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def path_of(path: Any) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator="."))
