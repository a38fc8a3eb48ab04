"""Error memory for another number of replicas, and compressor state in the form that all backends share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gradwire.core import checkpoint
from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.jax_backend.axis import AxisName
from gradwire.jax_backend.parameter_names import flatten
from gradwire.jax_backend.state import (
    MARK,
    DataParallelState,
    PerReplica,
    is_error_memory,
    is_marked,
    is_placement,
    is_whole_marked,
    on_host,
    path_of,
    refuse_missed_averages,
    refuse_pmap_form,
    spec,
)
from gradwire.jax_backend.state_trees import NOTHING
from gradwire.jax_backend.two_levels import nodes_of

T = TypeVar("T")

logger = logging.getLogger(__name__)
OPS = NumpyOps()


def set_replicas(state: T, replicas: int) -> T:
    """A training state for another number of replicas: what compression left out becomes its mean, one row for all of them.

        state = replicate(set_replicas(restored, jax.device_count()), axis_name="data")

    A run on the same global batches then follows the one that was not interrupted, up to rounding. With the number of replicas unchanged
    nothing is, and it follows bit for bit. Means are formed where the rows lie, and no device receives those of all replicas.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire.jax_backend import power_sgd, set_replicas
        >>> state = power_sgd(2, axis_name="data").init({"w": jnp.zeros((64, 32))})
        >>> set_replicas(state, 4).local.per_replica["error"]["w"].shape
        (1, 64, 32)

    Args:
        state: any tree that holds states of `average_gradients` transformations, in global form: from `unreplicate`, or a checkpoint. In several
            processes all must call this.
        replicas: there are from now on.

    Returns:
        The state in global form, for `replicate` and `distribute`.

    Raises:
        TypeError: for shapes in place of arrays, of which `abstract_state` knows more.
        ValueError: a sharded optimizer's state, which `reshard` converts, or one of local SGD, of another number of replicas; or the state is
            in pmap form.
    """
    refuse_pmap_form(state)
    refuse_missed_averages(state)

    def fewer_rows(path: Any, x: Any) -> Any:
        if not is_marked(path):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{path_of(path)} is a ShapeDtypeStruct, and set_replicas takes the mean of arrays. For shapes of {replicas} replicas: "
                f"gradwire.jax_backend.abstract_state(state, {replicas}, mesh, axis_name)"
            )
        if is_placement(path) and x.shape[0] != replicas and not is_whole_marked(path):
            return x[:0]  # What was given to those replicas is not yet given to these.
        if x.shape[0] in (1, replicas) or not x.shape[0]:
            return x
        if not is_error_memory(path):
            raise ValueError(
                f"{path_of(path)} has {x.shape[0]} rows for {replicas} replicas and is no error memory, whose mean would do. Convert "
                "sharded states with gradwire.jax_backend.reshard. Of local SGD, where every replica has its own, take the mean of all: "
                f"jax.tree.map(lambda x: numpy.repeat(x.mean(0, keepdims=True), {replicas}, 0).astype(x.dtype), state)"
            )
        return _mean(x)

    resized: T = jax.tree_util.tree_map_with_path(fewer_rows, state)
    return resized


def to_portable(
    state: DataParallelState | Mapping[str, Any], algorithm: Algorithm, *, errors: str = "mean"
) -> dict[str, Any]:
    """Compressor state as plain nested dictionaries of NumPy arrays and numbers, by parameter name: see `gradwire.core.checkpoint`.

    For `torch` (`CommHook.load_state_dict` takes it), for safetensors (`gradwire.core.checkpoint.flatten`), or to be loaded into another
    model. A whole training state, this in it, needs no conversion: Flax and orbax save it as it is.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire import PowerSGD
        >>> from gradwire.jax_backend import from_portable, power_sgd, to_portable
        >>> tx, params = power_sgd(2, axis_name="data"), {"w": jnp.zeros((64, 32))}
        >>> saved = to_portable(tx.init(params), PowerSGD(2))
        >>> saved["algorithm"], saved["tensors"]["w"]["q"].shape
        ('PowerSGD(rank=2)', (2, 32))
        >>> from_portable(saved, PowerSGD(2), tx.init(params), replicas=4).memory["q"]["w"].shape
        (2, 32)

    Args:
        state: of an `average_gradients` transformation, in global form (after `jax.pmap`: `unreplicate`). In several processes all must call this.
            Also as the plain dictionaries that a checkpoint gives that is restored into nothing: so an older version's state comes back,
            `from_portable(to_portable(restored, algorithm), algorithm, tx.init(params), replicas=…)`.
        algorithm: the one that was given to `average_gradients`; of `power_sgd(2, …)`, `PowerSGD(2)`.
        errors: "mean" keeps one copy of what compression left out, "all" that of every replica.

    Raises:
        ValueError: `errors` is none of these, or the state is in pmap form or no such state: of a chain, give the part.
    """
    if errors not in ("mean", "all"):
        raise ValueError(f"errors={errors!r} must be 'mean', one copy, or 'all', one of each replica")
    refuse_pmap_form(state)
    if not isinstance(state, DataParallelState):
        state = _with_types(state)
    given: tuple[Any, ...] = state
    if state.record is None and not isinstance(given[0], Mapping):  # an older version's, from a pickle, of these fields
        state = _with_types(dict(zip(("step", "shared", "memory", "local"), given, strict=False)))
    tensors: dict[str, dict[str, Any]] = {}
    local: dict[str, dict[str, Any]] = {}
    replicas = 1
    for key, name, x in _arrays(state.memory):
        tensors.setdefault(name, {}).update({} if key == NOTHING else {key: on_host(x)})
    for key, name, x in _arrays(state.local.per_replica):
        rows = on_host(x)
        if rows.shape[0] > 1:  # the replicas of a node have the same
            rows = rows[[members[0] for members in nodes_of(algorithm, _axis_of(state), rows.shape[0])]]
        replicas = max(replicas, rows.shape[0])
        tensors.setdefault(name, {})
        local.setdefault(name, {})[key] = _mean(rows) if errors == "mean" else rows
    return {
        **checkpoint.head("compressor", repr(without_levels(algorithm)), int(on_host(state.step))),
        "replicas": replicas,
        "shared": {key: on_host(x) for key, x in state.shared.items()},
        "tensors": tensors,
        "local": local,
    }


def from_portable(
    state: Mapping[str, Any], algorithm: Algorithm, like: DataParallelState, *, replicas: int, strict: bool = True
) -> DataParallelState:
    """The compressor state that `to_portable`, or torch's `gathered_state_dict`, has taken out.

        moved = from_portable(saved, algorithm, tx.init(params), replicas=jax.device_count())

    Args:
        state: in portable form, with any arrays; of any number of replicas.
        algorithm: the one that was given to `average_gradients`.
        like: from its `init`; not changed.
        replicas: there are from now on. Of as many, each gets its own error back if the state has all of them; else the mean.
        strict: raise for a state of another configuration, other parameters or other shapes. Otherwise take over what fits, leave the rest as
            in `like`, and log what was dropped.

    Returns:
        A state in global form, for `replicate` and `distribute`.

    Raises:
        ValueError: it is no portable state, or does not fit, said how.
    """
    nodes = nodes_of(algorithm, _axis_of(like), replicas)
    checkpoint.require_kind(state, "compressor", (*checkpoint.COMMON, "replicas", "local"))
    checkpoint.step_in(state)
    given = checkpoint.spread(OPS, _to_numpy(state), len(nodes))
    node_of = [node for _, node in sorted((replica, node) for node, members in enumerate(nodes) for replica in members)]
    current: State[Any] = State(dict(like.shared))
    for key, name, x in _arrays(like.memory):
        current.tensors.setdefault(name, {}).update({} if key == NOTHING else {key: x})
    for key, name, x in _arrays(like.local.per_replica):
        current.tensors.setdefault(name, {})[key] = np.broadcast_to(np.zeros((), x.dtype), x.shape[1:])
    # Shapes are compared without the axis of the replicas, of which one is as good as another.
    one = checkpoint.of_replica(OPS, given, 0, len(nodes))
    loaded, difference = checkpoint.fit(one, repr(without_levels(algorithm)), current)
    if difference and strict:
        raise ValueError(f"{difference}. Load it with strict=False to keep what fits")
    if difference:
        taken = sorted({key for memory in loaded.tensors.values() for key in memory})
        logger.warning(
            "Of a saved state, %s of %d parameters was taken over and the rest was left out: %s",
            " and ".join(taken) or "nothing",
            len(loaded.tensors),
            difference,
        )
    scale = checkpoint.scale_in(state)

    def kept(name: str, key: str, old: Any) -> Any:
        return jnp.asarray(loaded.tensors[name][key], old.dtype) if key in loaded.tensors.get(name, {}) else old

    def rows(name: str, key: str, old: Any) -> Any:
        if key not in loaded.tensors.get(name, {}):
            return old
        found = given["local"].get(name, {}).get(key)
        found = np.asarray(loaded.tensors[name][key])[None] if found is None else found
        if len(found) > 1:
            found = found[node_of]
        return (np.asarray(found, np.result_type(found.dtype, np.float32)) / scale).astype(old.dtype)

    def filled(trees: Any, value: Any) -> Any:
        if not isinstance(trees, Mapping):
            return trees
        result = {}
        for key, tree in trees.items():
            named = flatten(tree)
            result[key] = named.rebuild({name: value(name, key, old) for name, old in named.leaves.items()})
        return result

    return like._replace(
        step=jnp.asarray(state["step"], jnp.int32),
        shared={k: jnp.asarray(loaded.shared[k], x.dtype) if k in loaded.shared else x for k, x in like.shared.items()},
        memory=filled(like.memory, kept),
        local=PerReplica(filled(like.local.per_replica, rows)),
    )


def _axis_of(state: DataParallelState) -> AxisName:
    return "" if state.record is None else state.record.axis_name


def _with_types(state: Mapping[str, Any]) -> DataParallelState:
    missing = [key for key in ("step", "shared", "memory", "local") if key not in state]
    if missing:
        leaves = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, DataParallelState))[0]
        parts = [jax.tree_util.keystr(path) for path, x in leaves if isinstance(x, DataParallelState)]
        if parts:
            raise ValueError(
                f"a {type(state).__name__} that holds the state of an average_gradients transformation: give that part of it, "
                f"{' or '.join('state' + part for part in parts)}"
            )
        raise ValueError(
            f"not the state of an average_gradients transformation: it lacks {', '.join(map(repr, missing))}"
        )
    rows = state["local"]
    rows = rows.get(MARK, {}) if isinstance(rows, Mapping) else rows.per_replica
    return DataParallelState({}, state["step"], state["shared"] or {}, state["memory"] or {}, PerReplica(rows))


def _arrays(trees: Any) -> list[tuple[str, str, Any]]:
    """(memory, parameter, array) of each."""
    if not isinstance(trees, Mapping):
        return []  # A state without parameters.
    return [(key, name, x) for key, tree in trees.items() for name, x in flatten(tree).leaves.items()]


def _mean(rows: Any) -> Any:
    """One row, sharded as the rows are in themselves."""
    if not isinstance(rows, jax.Array):
        return np.asarray(rows.mean(axis=0, keepdims=True, dtype=np.float64)).astype(rows.dtype)
    sharding = rows.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, spec(None, *sharding.spec[1:]))
    return jax.jit(_mean_of_rows, out_shardings=sharding)(rows)


def _mean_of_rows(rows: jax.Array) -> jax.Array:
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return rows.astype(wide).mean(axis=0, keepdims=True).astype(rows.dtype)


def _to_numpy(state: Any) -> Any:
    """With NumPy arrays in place of other libraries'."""
    if isinstance(state, Mapping):
        return {key: _to_numpy(value) for key, value in state.items()}
    if not hasattr(state, "shape") or isinstance(state, np.ndarray):
        return state
    if str(state.dtype) == "torch.bfloat16":  # which torch does not hand to NumPy
        state = state.float()
    return np.asarray(state)
