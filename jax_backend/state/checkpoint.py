"""Error memory for another number of replicas, and compressor state in the form that all backends
share."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from gradwire.core.algorithm import Algorithm, State, require_algorithm
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.kernels.arrays import wide_dtype
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state import checkpoint
from gradwire.core.text.options import OWN_CHECK, Replicas, checked
from gradwire.jax_backend.axes.outside_meshes import automatic, outside_meshes, with_axes_like
from gradwire.jax_backend.axes.two_levels import nodes_of
from gradwire.jax_backend.checks import configuration_of
from gradwire.jax_backend.engine.barrier import await_processes
from gradwire.jax_backend.state.skipped_steps import note_skipped_steps
from gradwire.jax_backend.state.survey import Keys, Leaf, survey
from gradwire.jax_backend.state.trees import by_parameter, rebuilt
from gradwire.jax_backend.state.types import (
    AVERAGES,
    MEMORY,
    PIECES,
    DataParallelState,
    PerReplica,
    in_memory_of,
    memory_kind,
    on_devices,
    on_host,
    place_mark,
    spec,
    warn_of_legacy_keys,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)
OPS = NumpyOps()


@checked
@outside_meshes
def set_replicas(state: T, replicas: Replicas) -> T:
    """A training state for another number of replicas: the compression error becomes its mean, one
    row for all of them. So does, under local SGD, everything.

        state = replicate(set_replicas(restored, jax.device_count()), axis_name="data")

    A run on the same global batches then follows the one that was not interrupted, up to rounding.
    With the number of replicas unchanged nothing is, and it follows bit for bit. Means are formed
    where the rows lie, and no device receives those of all replicas. A row that holds inf or NaN is
    left out, unless all do; what local SGD has on its way counts by the weights that it left with.
    Numbers that are no floats are those of the first replica, and its random keys are split, so
    that each new replica draws for itself.

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire.jax_backend import power_sgd, set_replicas
        >>> state = power_sgd(2, axis_name="data").init({"w": jnp.zeros((64, 32))})
        >>> set_replicas(state, 4).local.per_replica["error"]["w"].shape
        (1, 64, 32)

    Args:
        state: any tree that holds states of `average_gradients` or `local_sgd` transformations, in
            global form: from `unreplicate`, or a checkpoint. In several processes all must call
            this.
        replicas: there are from now on.

    Returns:
        The state in global form, for `replicate` and `distribute`.

    Raises:
        TypeError: for shapes in place of arrays, of which `abstract_state` knows more.
        ValueError: a sharded optimizer's state of another number of replicas, which `reshard`
            converts; or the state is in pmap form.
        RuntimeError: see `distribute`.
    """
    found = survey(state)
    found.refuse_skipped_steps()
    found.refuse_pmap_form()
    found.refuse_missed_averages()
    note_skipped_steps(state)
    await_processes("set_replicas", state)
    arrays = {leaf.keys: leaf.value for leaf in found.leaves}

    def fewer_rows(leaf: Leaf) -> Any:
        x = leaf.value
        if not leaf.marks:
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{leaf.name} is a ShapeDtypeStruct, and set_replicas takes the mean of arrays. For"
                f" shapes of {replicas} replicas: gradwire.jax_backend.abstract_state(state,"
                f" {replicas}, mesh, axis_name)"
            )
        if leaf.placement and x.shape[0] != replicas:
            return in_memory_of(
                x, place_mark(placed=False)
            )  # What was given to those replicas is not yet given to these.
        if x.shape[0] in (1, replicas):
            return x
        if leaf.of == PIECES:
            raise ValueError(
                f"{leaf.name} is a sharded state of {x.shape[0]} replicas, and replicas={replicas}."
                " Convert it: gradwire.jax_backend.reshard(state, like), where `like` comes from"
                f" zero1(…, replicas={replicas})"
            )
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return in_memory_of(x, _split(x, replicas))
        if x.ndim > 1:
            warn_of_legacy_keys(leaf.name, x)
        return _mean(x, _weights(leaf, arrays))

    resized: T = found.map(fewer_rows)
    return resized


@checked
def to_portable(
    state: Annotated[DataParallelState, OWN_CHECK],
    algorithm: Annotated[Algorithm, require_algorithm],
    *,
    errors: Literal["mean", "all"] = "mean",
) -> dict[str, Any]:
    """Compressor state as plain nested dictionaries of NumPy arrays and numbers, by parameter name:
    see `gradwire.core.state.checkpoint`.

    For `torch` (`CommHook.load_state_dict` takes it), for safetensors
    (`gradwire.core.state.checkpoint.flatten`), or to be loaded into another model. A whole training
    state, this in it, needs no conversion: Flax and orbax save it as it is.

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
        state: of an `average_gradients` transformation, in global form (after `jax.pmap`:
            `unreplicate`). In several processes all must call this.
        algorithm: the one that was given to `average_gradients`; of `power_sgd(2, …)`,
            `PowerSGD(2)`.
        errors: "mean" keeps one copy of the compression error, "all" that of every replica.

    Raises:
        ValueError: `errors` is none of these, or the state is of another algorithm, or in pmap form
            or no such state: of a chain, give the part.
        RuntimeError: see `distribute`.
    """
    _require_ours(state)
    _require_configuration("state", state, algorithm)
    survey(state).refuse_pmap_form()
    note_skipped_steps(state)
    await_processes("to_portable", state)
    tensors = {
        name: {key: on_host(x) for key, x in memory.items()}
        for name, memory in by_parameter(state.memory).items()
    }
    local: dict[str, dict[str, Any]] = {}
    replicas = 1
    for name, memory in by_parameter(state.local.per_replica).items():
        tensors.setdefault(name, {})
        local[name] = {}
        for key, x in memory.items():
            rows = on_host(x)
            if rows.shape[0] > 1:  # the replicas of a node have the same
                rows = rows[
                    [
                        members[0]
                        for members in nodes_of(algorithm, state.record.axis_name, rows.shape[0])
                    ]
                ]
            replicas = max(replicas, rows.shape[0])
            local[name][key] = _mean_on_host(rows) if errors == "mean" else rows
    return {
        **checkpoint.head("compressor", repr(without_levels(algorithm)), int(on_host(state.step))),
        "replicas": replicas,
        "shared": {key: on_host(x) for key, x in state.shared.items()},
        "tensors": tensors,
        "local": local,
    }


@checked
def from_portable(
    state: Mapping[str, Any],
    algorithm: Annotated[Algorithm, require_algorithm],
    like: DataParallelState,
    *,
    replicas: Replicas,
    strict: bool = True,
) -> DataParallelState:
    """The compressor state that `to_portable`, or torch's `gathered_state_dict`, has taken out.

        moved = from_portable(saved, algorithm, tx.init(params), replicas=jax.device_count())

    Args:
        state: in portable form, with any arrays; of any number of replicas.
        algorithm: the one that was given to `average_gradients`.
        like: from its `init`; not changed.
        replicas: there are from now on. Of as many, each gets its own error back if the state has
            all of them; else the mean.
        strict: raise for a state of another configuration, other parameters or other shapes.
            Otherwise take over what fits, leave the rest as in `like`, and log what was dropped.

    Returns:
        A state in global form, for `replicate` and `distribute`.

    Raises:
        ValueError: it is no portable state, or does not fit, said how; or `like` is of another
            algorithm.
    """
    nodes = nodes_of(algorithm, like.record.axis_name, replicas)
    checkpoint.require_kind(state, "compressor", (*checkpoint.COMMON, "replicas", "local"))
    step, scale = checkpoint.step_in(state), checkpoint.scale_in(state)
    given = checkpoint.spread(OPS, _to_numpy(state), len(nodes))
    # Shapes are compared without the axis of the replicas, of which one is as good as another.
    one = checkpoint.of_replica(OPS, given, 0, len(nodes))
    loaded, difference = checkpoint.fit(one, repr(without_levels(algorithm)), _of_one_replica(like))
    if difference and strict:
        raise ValueError(f"{difference}. Load it with strict=False to keep what fits")
    _require_configuration("like", like, algorithm)
    if difference:
        taken = sorted({key for memory in loaded.tensors.values() for key in memory})
        logger.warning(
            "Of a saved state, %s of %d parameters was taken over and the rest was left out: %s",
            " and ".join(taken) or "nothing",
            len(loaded.tensors),
            difference,
        )
    node_of = [
        node
        for _, node in sorted(
            (replica, node) for node, members in enumerate(nodes) for replica in members
        )
    ]

    def kept(name: str, key: str, old: Any) -> Any:
        found = loaded.tensors.get(name, {})
        if key not in found:
            return old
        own = np.asarray(found[key]).astype(old.dtype)
        return _lying_like(old, own, jnp.asarray)

    def rows(name: str, key: str, old: Any) -> Any:
        if key not in loaded.tensors.get(name, {}):
            return old
        found = given["local"].get(name, {}).get(key, np.asarray(loaded.tensors[name][key])[None])
        if len(found) > 1:
            found = found[node_of]
        own = np.asarray(found, np.result_type(found.dtype, np.float32)) / scale
        return _lying_like(old, own.astype(old.dtype))

    return like._replace(
        step=jnp.asarray(step, jnp.int32),
        shared={
            k: jnp.asarray(loaded.shared[k], x.dtype) if k in loaded.shared else x
            for k, x in like.shared.items()
        },
        memory=rebuilt(like.memory, kept),
        local=PerReplica(rebuilt(like.local.per_replica, rows)),
    )


def _lying_like(
    old: Any, made: np.ndarray[Any, Any], otherwise: Callable[[Any], Any] = lambda x: x
) -> Any:
    """An array that stands for another, divided along other axes as that is; with another number of
    rows on all devices, but for that."""
    sharding = None if isinstance(old, jax.core.Tracer) else getattr(old, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return in_memory_of(old, otherwise(made))
    along = sharding.spec if made.shape == old.shape else spec(None, *sharding.spec[1:])
    place = NamedSharding(sharding.mesh, along, memory_kind=sharding.memory_kind)
    return jax.make_array_from_callback(made.shape, place, lambda index: made[index])


def _of_one_replica(like: DataParallelState) -> State[Any]:
    """Shapes and dtypes, as the algorithm knows them."""
    current = by_parameter(like.memory)
    for name, memory in by_parameter(like.local.per_replica).items():
        own = {
            key: np.broadcast_to(np.zeros((), x.dtype), x.shape[1:]) for key, x in memory.items()
        }
        current[name] = current.get(name, {}) | own
    return State(dict(like.shared), current)


def _require_ours(state: Any) -> None:
    if isinstance(state, DataParallelState):
        return
    leaves = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, DataParallelState)
    )[0]
    parts = [
        "state" + jax.tree_util.keystr(path)
        for path, x in leaves
        if isinstance(x, DataParallelState)
    ]
    inside = f" that holds one: give that part of it, {' or '.join(parts)}" if parts else ""
    of_nnx = (
        ""
        if parts
        else (
            ". Of what nnx.split returned, in which types are gone, give nnx.merge(graphdef,"
            " state)[1].opt_state[…]"
        )
    )
    raise ValueError(
        f"state is a {type(state).__name__}, not the state of an average_gradients"
        f" transformation,{inside}".rstrip(",")
        + of_nnx
    )


def _require_configuration(what: str, state: DataParallelState, algorithm: Algorithm) -> None:
    """Raise ValueError for a state of other options than the algorithm's. Two levels are compared
    as one: memory does not depend on them."""
    own = [_of_one_level(each) for each in state.configuration]
    if _of_one_level(configuration_of(algorithm)) not in own:
        raise ValueError(
            f"algorithm={algorithm!r}, but {what} is of {', '.join(state.configuration)}. Both must"
            " be of one algorithm, the one that was given to average_gradients"
        )


def _of_one_level(configuration: str) -> str:
    """What `configuration_of` says of an algorithm, without two levels around it."""
    return re.sub(r"^TwoLevel\(algorithm=(.*?)(, within=.*)?\)$", r"\1", configuration)


def _weights(leaf: Leaf, arrays: Mapping[Keys, Any]) -> Any:
    """What the rows of a difference on its way count by, (W,); None: all alike."""
    for i, key in enumerate(leaf.keys):
        if leaf.keys[max(i - 2, 0) : i] == (AVERAGES, MEMORY) and key in checkpoint.COUNTED:
            # An array may be in a box, and its weight is in none.
            paths = (
                (*leaf.keys[:i], checkpoint.COUNTED[key], *leaf.keys[i + 1 : end])
                for end in range(len(leaf.keys), i, -1)
            )
            return next((arrays[path] for path in paths if path in arrays), None)
    return None


def _mean(rows: Any, weights: Any) -> Any:
    """One row, sharded as the rows are in themselves: of those that are finite, if any is."""
    floats = jnp.issubdtype(rows.dtype, jnp.floating)
    if not isinstance(rows, jax.Array):
        return _mean_on_host(rows, _counts(np, rows, weights) if floats else None)
    given, rows = rows, automatic(rows)
    sharding: Any = rows.sharding
    kind = memory_kind(rows)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, spec(None, *sharding.spec[1:]))
    rows, weights = jax.tree.map(lambda x: on_devices(automatic(x)), (rows, weights))
    mean = jax.jit(_mean_of_rows, out_shardings=sharding.with_memory_kind(memory_kind(rows)))(
        rows, weights
    )
    return with_axes_like(jax.device_put(mean, sharding.with_memory_kind(kind)), given)


def _mean_on_host(rows: Any, weights: Any = None) -> Any:
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        return rows[:1]
    return checkpoint.mean_of_rows(OPS, rows, weights)


def _split(keys: jax.Array, replicas: int) -> jax.Array:
    """Random keys for so many replicas, drawn from the first row, (W, …) → (replicas, …)."""
    data = jnp.asarray(on_host(jax.random.key_data(keys))[0])
    first = jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
    return jax.vmap(
        lambda i: jax.vmap(lambda key: jax.random.fold_in(key, i))(first.reshape(-1)).reshape(
            first.shape
        )
    )(jnp.arange(replicas))


def _mean_of_rows(rows: jax.Array, weights: Any) -> jax.Array:
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        return rows[:1]
    each = rows.astype(wide_dtype(rows.dtype.name))
    counts = _counts(jnp, rows, weights).reshape(-1, *[1] * (rows.ndim - 1)).astype(each.dtype)
    total, counted = counts.sum(), jnp.where(counts > 0, each * counts, 0)
    mean = counted.sum(axis=0, keepdims=True) / jnp.where(total > 0, total, 1)
    return mean.astype(rows.dtype)


def _counts(xp: Any, rows: Any, weights: Any) -> Any:
    """What each row counts for, (W,) of float32, by functions of NumPy or JAX: those that are not
    finite nothing, unless all are."""
    finite = xp.isfinite(rows).all(axis=tuple(range(1, rows.ndim)))
    counts = finite if weights is None else finite * weights
    return xp.where(finite.any(), counts, True).astype(np.float32)


def _to_numpy(state: Any) -> Any:
    """The tree with NumPy arrays in place of other libraries'."""
    if isinstance(state, Mapping):
        return {key: _to_numpy(value) for key, value in state.items()}
    if not hasattr(state, "shape") or isinstance(state, np.ndarray):
        return state
    if str(state.dtype) == "torch.bfloat16":  # which torch does not hand to NumPy
        state = state.float()
    return np.asarray(state)
