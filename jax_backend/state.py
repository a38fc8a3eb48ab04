"""The state of a transformation, and where its arrays belong on the devices.

Error memory and the pieces of a sharded optimizer differ between replicas, everything else is equal on all of them. `PerReplica` marks
the part that differs; the helpers find it by that name anywhere in a tree (an `optax.chain` state, a Flax `TrainState`, a split `nnx`
module), and treat everything else as replicated. (Under local SGD everything differs: `gradwire.jax_backend.stack_replicas` marks a whole state.)
Marked arrays have a leading axis for the replicas, which is

- 1 long on a replica, and so in what `init` returns: the **local** form;
- W long in a global array, one row per replica: the **global** form, which `shard_map` and checkpoints use;
- preceded by the device axis under `pmap`, which every array then has: the **pmap** form.

`gradwire.jax_backend.placement` brings a state from one form to another.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from gradwire.jax_backend.axis import AxisName, axes_of


class PerReplica(NamedTuple):
    """Marks what differs between replicas. Found by the name of its field: nnx and checkpoint libraries keep keys and drop types."""

    per_replica: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["per_replica"], meta_fields=["axis_name", "start_step", "unsaid"]
)
@dataclass(frozen=True)
class Record:
    """Where a state belongs. `axis_name` and `start_step` are part of its structure, and of no checkpoint.

    Attributes:
        per_replica: one row on each replica, none in what `init` returns outside the map: so a state is noticed that has not come to its
            replicas by `distribute` or `replicate`. None if nothing differs between replicas.
        axis_name: that of the transformation.
        start_step: of the algorithm.
        unsaid: what is sent depends on the number of replicas, which nobody had said in `init`.
    """

    per_replica: Any
    axis_name: AxisName
    start_step: int
    unsaid: bool = False


class Account(NamedTuple):
    """What `gradwire.jax_backend.stats` tells.

    Attributes:
        skipped: int32, how many steps changed no memory, since a replica's gradient held an inf or NaN.
        wire_bytes: float32, what a replica sends in a step after the algorithm's start, on average over its cycle, as in `gradwire.plan`.
            NaN in a new state if it depends on the number of replicas, and `init` was called outside the map.
        dense_bytes: float32, what an uncompressed step sends.
    """

    skipped: jax.Array
    wire_bytes: jax.Array
    dense_bytes: jax.Array


class DataParallelState(NamedTuple):
    """State of a transformation made by `average_gradients`.

    Attributes:
        configuration: {the algorithm with its options: ()}. As a key it is part of the structure, here and in every kind of checkpoint:
            libraries refuse to restore the memory of other options, and `update` refuses to go on with it. (It stands first, so that what they
            say names the options and not what follows from them.)
        step: number of updates so far, int32 scalar.
        shared: what concerns the whole model, name → scalar.
        memory: name of a memory → a tree like the parameters, with `optax.MaskedNode` where a parameter has none. Equal on all
            replicas.
        local: the same for memories that differ between replicas, each array with a leading axis for them.
        record: where the state belongs. None in a state that was made before it existed.
        account: what is counted.
    """

    configuration: dict[str, tuple[()]]
    step: jax.Array
    shared: dict[str, jax.Array]
    memory: Any
    local: PerReplica = PerReplica({})
    record: Record | None = None
    account: Account | None = None


MARK = PerReplica._fields[0]
#: The field of `ZeroState` that holds a mark.
PIECES = "pieces"
#: The fields of `DataParallelState` that hold marks.
LOCAL, RECORD = "local", "record"
#: The field of `LocalSGDState` that counts.
UPDATES = "updates"
#: Of local SGD: the field of `LocalSGDState`, and the one of `DataParallelState` in it, that hold anchors and velocities.
AVERAGES, MEMORY = "averages", "memory"
#: What every state of `average_gradients` counts: two keys that follow each other.
ACCOUNT = "account", "skipped"
#: Its field that holds a mark. Its rows, none in what `init` returns, say that the state has come to its replicas.
PLACED = "placed"


def partition_specs(state: Any, axis_name: AxisName) -> Any:
    """`PartitionSpec`s of a training state in global form, for `jax.shard_map`.

        specs = partition_specs(state, "data")
        step = jax.jit(jax.shard_map(train_step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), check_vma=False))

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from gradwire.jax_backend import partition_specs, power_sgd
        >>> specs = partition_specs(power_sgd(2, axis_name="data").init({"w": jnp.zeros((64, 32))}), "data")
        >>> specs.memory["q"]["w"] == P(), specs.local.per_replica["error"]["w"] == P("data")
        (True, True)

    Args:
        state: any tree that holds states of `average_gradients` and `zero1`, of arrays or `jax.ShapeDtypeStruct`s.
        axis_name: the axis (or axes) of the replicas.

    Returns:
        A tree of the same structure: `P(axis_name)` for what is per replica, `P()` for the rest.

    Raises:
        ValueError: the transformation stands inside `optax.apply_if_finite`, or inside `optax.MultiSteps`, whose accumulated
            gradients differ between replicas and have no axis for them; or it is one of local SGD, and not all of the state is marked
            by `stack_replicas`. Or it belongs to replicas along another axis, or is in pmap form.

    Warns of an `optax.chain` in which moments stand before what averages gradients, or in which a mask leaves gradients to nobody.
    """
    refuse_apply_if_finite(state)
    _refuse_multi_steps(state)
    refuse_local_sgd_unmarked(state)
    refuse_pmap_form(state)
    _refuse_other_axis(state, axis_name)
    warn_of_chain(state)
    axes = axes_of(axis_name)
    own = spec(axes if len(axes) > 1 else axes[0])
    return jax.tree_util.tree_map_with_path(lambda path, _: own if is_marked(path) else spec(), state)


def _wrappers(state: Any, sign: str, inner: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Paths of the nodes that have a key `sign`, and one of our transformations below their key `inner` → a path in its state."""
    paths = [tuple(map(_key, path)) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    nodes = {path[: path.index(sign)] for path in paths if sign in path}
    # A transformation that has no memory has the mark all the same, and nothing below it; without types, its account tells.
    for path, x in jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, PerReplica))[0]:
        if isinstance(x, PerReplica):
            paths.append((*map(_key, path), MARK))
    return {
        n: path
        for n in nodes
        for path in reversed(paths)
        if path[: len(n) + 1] == (*n, inner)
        and (MARK in path[len(n) :] or ACCOUNT in itertools.pairwise(path[len(n) :]))
    }


def _refuse_skipping_alone(state: Any) -> None:
    """Raise ValueError for a transformation inside one that leaves steps out on a replica whose gradients are not finite, and not on others."""
    for node, memory in _wrappers(state, "skip_state", "inner_opt_state").items():
        if MARK in node:
            continue  # Under local SGD each replica steps by itself.
        raise ValueError(
            f"the transformation with the memory {'.'.join(memory)} stands inside optax.MultiSteps(should_skip_update_fn=…), which decides on "
            "each replica by itself: others average without it, or wait for it forever. Accumulate inside the training step (jax.lax.scan "
            "over micro-batches): a step that is not finite is then skipped on all replicas"
        )


def refuse_apply_if_finite(state: Any) -> None:
    """Raise ValueError for a transformation inside one that skips steps: by `optax.apply_if_finite`, or by `optax.MultiSteps` if told to."""
    _refuse_skipping_alone(state)
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


def refuse_half_accumulated(state: Any) -> None:
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


def refuse_local_sgd_unmarked(state: Any) -> None:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    placed = [path for path in paths if (PLACED, MARK) in itertools.pairwise(map(_key, path))]
    # Its own mark aside.
    bare = [p for p in paths if not is_marked(p) or (p in placed and [_key(k) for k in p].count(MARK) == 1)]
    if placed and bare:
        others = [p for p in bare if p not in placed]
        raise ValueError(
            f"{path_of(placed[0])} belongs to local SGD, under which every array differs between replicas, and "
            f"{path_of((others or placed)[0])} is not marked as one that does. Mark the whole state once, state = stack_replicas(state), and "
            "take it apart in the training step: mine = this_replica(state)"
        )


def refuse_pmap_form(state: Any) -> None:
    """Raise ValueError for a state with a device axis."""
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        if is_placement(path) and np.ndim(x) == 2:
            raise ValueError(
                f"{path_of(path)} has shape {np.shape(x)}: the state is in the form of jax.pmap, with a device axis on every array. Bring it "
                "back first: gradwire.jax_backend.unreplicate(state)"
            )


def refuse_missed_averages(state: Any) -> None:
    """Raise ValueError for a state of local SGD, of arrays, whose halves were not called equally often."""
    counts = {tuple(map(_key, path)): x for path, x in jax.tree_util.tree_flatten_with_path(state)[0]}
    for keys, x in counts.items():
        if UPDATES not in keys:
            continue
        at = keys.index(UPDATES)
        other = counts.get((*keys[:at], AVERAGES, "step", *keys[at + 1 :]))
        if other is None or any(isinstance(a, (jax.core.Tracer, jax.ShapeDtypeStruct)) for a in (x, other)):
            continue
        updates, averages = (_first(a) for a in (x, other))
        # Inside `optax.MultiSteps` there is an update for several averages.
        accumulated = "inner_opt_state" in keys[:at]
        if updates > averages or (updates < averages and not accumulated):
            happened = (
                "parameters were not averaged when it was time to, and replicas have trained alone"
                if updates > averages
                else "parameters were averaged sooner than the period says"
            )
            raise ValueError(
                f"update of local SGD was called {updates} times and average_params {averages} times: {happened}. Call params, opt_state = "
                "tx.average_params(params, opt_state) in every training step, once, after optax.apply_updates. To go on with this state none the "
                f"less, set {'.'.join(keys[: at + 1])} to {averages}"
            )


def warn_of_chain(state: Any) -> None:
    """Say what `update` of a transformation cannot see, and the state of the chain round it tells: moments of gradients that are not averaged yet, and
    parameters that a mask leaves to nobody."""

    def is_chain(x: Any) -> bool:
        return type(x) is tuple and any(isinstance(part, DataParallelState) or _masks_ours(part) for part in x)

    for chain in filter(is_chain, jax.tree.leaves(state, is_leaf=is_chain)):
        first = next(i for i, part in enumerate(chain) if isinstance(part, DataParallelState) or _masks_ours(part))
        before = next(filter(None, map(_moments, chain[:first])), None)
        if before is not None:
            warnings.warn(
                f"{before} stands before the transformation that averages gradients in optax.chain: its moments are those of one "
                "replica's gradients, differ between replicas, and a checkpoint keeps those of the first. Put power_sgd(…), "
                "all_reduce_mean(…) or average_gradients(…) first: optax.chain(power_sgd(…), optax.adam(…))",
                stacklevel=4,
            )
        masked = [part for part in chain if type(part).__name__ == "MaskedState"]
        if len(masked) == 1 and _masks_ours(masked[0]) and not any(isinstance(x, DataParallelState) for x in chain):
            warnings.warn(
                "optax.masked round the transformation that averages gradients, and nothing in the chain for the parameters that are masked out: "
                "nobody averages their gradients, and replicas drift apart. Average the rest as it is: optax.chain(optax.masked(power_sgd(…), "
                "mask), optax.masked(all_reduce_mean(axis_name=…), the_opposite_mask), …)",
                stacklevel=4,
            )


def _masks_ours(x: Any) -> bool:
    return type(x).__name__ == "MaskedState" and isinstance(getattr(x, "inner_state", None), DataParallelState)


def _moments(part: Any) -> str | None:
    """The name of a state of optax in this part of a chain that holds more than numbers."""

    def holds(x: Any) -> bool:
        return isinstance(x, tuple) and hasattr(x, "_fields") and type(x).__module__.startswith("optax")

    for x in jax.tree.leaves(part, is_leaf=holds):
        if holds(x) and any(np.ndim(leaf) for leaf in jax.tree.leaves(x)):
            return type(x).__name__
    return None


def _first(x: Any) -> int:
    """One of numbers that are equal on all replicas, without those of other processes."""
    own = x.addressable_shards[0].data if isinstance(x, jax.Array) else x
    return int(np.ravel(own)[0])


def _refuse_other_axis(state: Any, axis_name: AxisName) -> None:
    for record in jax.tree.leaves(state, is_leaf=_is_record):
        if not _is_record(record) or record.per_replica is None:
            continue
        if set(axes_of(record.axis_name)) != set(axes_of(axis_name)):
            raise ValueError(
                f"axis_name={axis_name!r}, but the state is of a transformation with axis_name={record.axis_name!r}: its memory differs along "
                f"that axis, and would be lost. Give axis_name={record.axis_name!r} here, or make the state anew for another axis"
            )


def _is_record(x: Any) -> bool:
    return isinstance(x, Record)


def spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def is_marked(path: Any) -> bool:
    return any(_key(k) == MARK for k in path)


def is_sharded(path: Any) -> bool:
    """Whether this lies in the pieces of a `ZeroState`: then each row is another part of one array."""
    return (PIECES, MARK) in itertools.pairwise(map(_key, path))


def is_error_memory(path: Any) -> bool:
    """Whether this is memory of one replica, whose mean over all of them is as good."""
    keys = [_key(k) for k in path]
    return (LOCAL, MARK) in itertools.pairwise(keys) and not is_whole_marked(path)


def is_whole_marked(path: Any) -> bool:
    """Whether this lies in a state that is marked as a whole, by `stack_replicas`."""
    return [_key(k) for k in path].count(MARK) > 1


def is_equal_everywhere(path: Any) -> bool:
    """Whether this begins equal on all replicas: what is not marked; and of local SGD, under which all is marked, what its averages begin with."""
    keys = [_key(k) for k in path]
    if MARK not in keys:
        return True
    return keys.count(MARK) == 1 and (AVERAGES, MEMORY) in itertools.pairwise(keys)


def is_placement(path: Any) -> bool:
    """Whether this says where the state has come to: no rows, or one for each replica."""
    pairs = set(itertools.pairwise(map(_key, path)))
    return (RECORD, MARK) in pairs or (PLACED, MARK) in pairs


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """An array as NumPy has it. One of several processes is gathered, for which all of them must call this."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def path_of(path: Any) -> str:
    """The path of a leaf, joined by "."."""
    return str(jax.tree_util.keystr(path, simple=True, separator="."))


def require_own_row(what: str, x: Any) -> None:
    """Raise ValueError for an array in local form that has not exactly one row."""
    if np.shape(x)[:1] != (1,):
        raise ValueError(
            f"{what} has shape {np.shape(x)}, not (1, …): every replica must be given its own row. Pass the state through jax.shard_map with "
            "the specs of gradwire.jax_backend.partition_specs(state, axis_name), after distribute(state, mesh, axis_name), and through "
            "jax.pmap after gradwire.jax_backend.replicate(state)."
        )
