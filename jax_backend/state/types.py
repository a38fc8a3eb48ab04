"""The state of a transformation, and where its arrays belong on the devices.

Error memory and the pieces of a sharded optimizer differ between replicas, everything else is equal
on all of them. `PerReplica` marks the part that differs; the helpers find it by that name anywhere
in a tree (an `optax.chain` state, a Flax `TrainState`, a split `nnx` module), and treat everything
else as replicated. (Under local SGD everything differs: `gradwire.jax_backend.stack_replicas` marks
a whole state.) Marked arrays have a leading axis for the replicas, which is

- 1 long on a replica, and so in what `init` returns: the **local** form;
- W long in a global array, one row per replica: the **global** form, which `shard_map` and
  checkpoints use;
- preceded by the device axis under `pmap`, which every array then has: the **pmap** form.

`gradwire.jax_backend.state.placement` brings a state from one form to another.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from gradwire.jax_backend.axes.mapped_axis import AxisName
from gradwire.jax_backend.axes.outside_meshes import outside_meshes
from gradwire.jax_backend.state.names import BARE


class PerReplica(NamedTuple):
    """Marks what differs between replicas. Found by the name of its field: nnx and checkpoint
    libraries keep keys and drop types."""

    per_replica: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["per_replica"],
    meta_fields=["axis_name", "stages", "averages", "ordered"],
)
@dataclass(frozen=True)
class Record:
    """The place of a state. `axis_name` and `stages` are part of its structure, and of no
    checkpoint.

    Attributes:
        per_replica: one row on each replica, a `place_mark`: so a state is noticed that has not
            come to its replicas by `distribute` or `replicate`. None if nothing differs between
            replicas.
        axis_name: that of the transformation.
        stages: steps from which on something else is sent: 0, and the algorithm's start. Rising.
        averages: gradients are averaged there.
        ordered: which replica is which matters: they are of nodes, or have pieces.
    """

    per_replica: Any
    axis_name: AxisName
    stages: tuple[int, ...]
    averages: bool = True
    ordered: bool = False


#: Bytes of a step that nobody knows yet. No NaN, for which `jax_debug_nans` stops a program.
UNSAID = (-1.0, -1.0, -1.0)


class Account(NamedTuple):
    """What `gradwire.jax_backend.stats` tells.

    Attributes:
        skipped: int32, how many steps changed no memory, since a replica's gradient held an inf or
            NaN. Of local SGD, how many averages of differences.
        sent: float32 (stages, 3), the bytes of a step in each stage of the record, on average over
            the algorithm's cycle: what a replica sends, as in `gradwire.plan`; with two levels what
            of it stays inside the node, and what all replicas of a node send to others. `UNSAID` in
            a new state if they depend on the number of replicas, and `init` was called outside the
            map.
        dense_bytes: float32, what an uncompressed step sends.
    """

    skipped: jax.Array
    sent: jax.Array
    dense_bytes: jax.Array


class DataParallelState(NamedTuple):
    """State of a transformation made by `average_gradients`.

    Attributes:
        configuration: {the algorithm with its options: ()}. As a key it is part of the structure,
            here and in every kind of checkpoint:
            libraries refuse to restore the memory of other options, and `update` refuses to go on
            with it. (It stands first, so that what they say names the options and not what follows
            from them.)
        step: number of updates so far, int32 scalar.
        shared: what concerns the whole model, name → scalar.
        memory: name of a memory → a tree like the parameters, with `optax.MaskedNode` where a
            parameter has none. Equal on all replicas.
        local: the same for memories that differ between replicas, each array with a leading axis
            for them.
        record: where the state belongs.
        account: what is counted.
    """

    configuration: dict[str, tuple[()]]
    step: jax.Array
    shared: dict[str, jax.Array]
    memory: Any
    local: PerReplica
    record: Record
    account: Account


class LocalSGDState(NamedTuple):
    """State of `local_sgd`.

    Attributes:
        inner: state of the inner optimizer.
        averages: `averages.step` counts calls of `average_params`. `averages.memory` holds outer
            parameters and velocities, and what a compressor keeps, as trees like the parameters; {}
            for plain averaging.
        placed: one row on each replica, none in what `init` returns outside the map, so that a
            state that has not come to its replicas by `distribute` or `replicate` is noticed.
        updates: counts calls of `update`, which are as many as those of `average_params` if neither
            is forgotten.
        wrong_turns: counts calls of `average_params` that were told the turn of another step than
            `averages.step`.
        arrived: counts averages of differences, of each fragment by itself.
            `averages.account.skipped` counts those of them that were refused, since they were not
            finite.
    """

    inner: Any
    averages: DataParallelState
    placed: PerReplica
    updates: Any = None
    wrong_turns: Any = None
    arrived: Any = None


MARK = PerReplica._fields[0]
#: The fields of `ZeroState`: what is equal on all replicas, a mark, and what shapes are to be.
SHARDED = COMMON, PIECES, LAYOUT = "common", "pieces", "layout"
#: The fields of `DataParallelState` that hold marks.
LOCAL, RECORD = "local", "record"
#: Fields of `LocalSGDState` that count.
UPDATES, WRONG_TURNS = "updates", "wrong_turns"
#: Of local SGD: the field of `LocalSGDState`, and the one of `DataParallelState` in it, that hold
#: outer parameters and velocities.
AVERAGES, MEMORY = "averages", "memory"
#: What every state of `average_gradients` counts: two keys that follow each other.
ACCOUNT = "account", "skipped"
#: Its field that holds a mark. Its rows, none in what `init` returns, say that the state has come
#: to its replicas.
PLACED = "placed"


def place_mark(*, placed: bool) -> jax.Array:
    """A row of the mark that says whether a state has come to its replicas. Its dtype says so, bool
    or int8: a program knows it while it is traced, every form of a state keeps it, and a checkpoint
    library need not save arrays of no elements."""
    return jnp.zeros((1,), bool if placed else jnp.int8)


def is_placed(mark: Any) -> bool:
    """Whether a mark says so. Arithmetic on a state, as that of `optax.contrib.sam`, makes a third
    dtype of a placed one; what is not placed is refused before anybody computes with it."""
    return bool(mark.dtype != jnp.int8)


def layout_of(replicas: int, axes: int, record: Record) -> dict[str, Record]:
    """The layout of a sharded optimizer's state: for how many replicas it is, how many axes its
    pieces have together, and its place. As a key it is part of the structure, and `jax.vmap` and
    `jax.pmap`, which give each array one axis more, leave it as it is."""
    return {f"replicas={replicas} axes={axes}": record}


def layout_in(key: str) -> tuple[int, int]:
    """Replicas and axes of a key of `layout_of`."""
    replicas, axes = (int(part.partition("=")[2]) for part in key.split())
    return replicas, axes


def may_be_legacy_keys(x: Any) -> bool:
    """Whether an array has the dtype and the last axis of what `jax.random.PRNGKey` makes."""
    return bool(x.dtype == jnp.uint32) and tuple(x.shape[-1:]) in ((2,), (4,))


def warn_of_legacy_keys(what: str, x: Any) -> None:
    """Warn of an array that may be random keys as `jax.random.PRNGKey` makes them: numbers, of
    which nothing says that they are keys."""
    if may_be_legacy_keys(x):
        warnings.warn(
            f"{what} is an array of uint32 of shape {tuple(x.shape)}, as jax.random.PRNGKey makes"
            " it. If it is a random key, replicas will draw the same numbers: nothing tells it"
            " from other integers, which are copied. Make it by jax.random.key, or"
            " jax.random.wrap_key_data of it",
            stacklevel=2,
        )


def spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def memory_kind(x: Any) -> str | None:
    """The memory of its devices in which an array lies, such as "pinned_host"; None where that is
    not known."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return None if sharding is None else sharding.memory_kind


def host_memory(x: Any) -> str | None:
    """The memory in which an array lies, if its devices do not compute with that; None for any
    other."""
    kind = memory_kind(x) if isinstance(x, jax.Array) else None
    return None if kind is None or kind == _usual_memory(x) else kind


def _usual_memory(x: jax.Array) -> str:
    device: Any = next(iter(x.sharding.device_set))
    usual: str = device.default_memory().kind
    return usual


def in_memory(kind: str | None, x: Any) -> Any:
    """An array in this memory of the devices on which it lies, one of NumPy in that of the first of
    this process. None: as it is."""
    if kind is None:
        return x
    sharding: Any = (
        x.sharding if isinstance(x, jax.Array) else SingleDeviceSharding(jax.local_devices()[0])
    )
    return jax.device_put(x, sharding.with_memory_kind(kind))


def on_devices(x: Any) -> Any:
    """An array in the memory that its devices compute with. What lies in that of the host is
    copied, in a trace too."""
    if isinstance(x, jax.core.Tracer):
        aval: Any = x.aval
        return (
            jax.device_put(x, jax.memory.Space.Device)
            if aval.memory_space == jax.memory.Space.Host
            else x
        )
    return x if host_memory(x) is None else in_memory(_usual_memory(x), x)


def in_memory_of(given: Any, made: Any) -> Any:
    """An array that stands for the rows of another, in the memory of the host where that lies
    there; else as it is. It lies on the devices of that, each of its rows on all of them."""
    kind = host_memory(given)
    if kind is None or isinstance(made, jax.core.Tracer):
        return made
    sharding: Any = given.sharding
    if isinstance(sharding, NamedSharding) and jnp.shape(made) != given.shape:
        sharding = NamedSharding(sharding.mesh, spec(None, *sharding.spec[1:]), memory_kind=kind)
    if jnp.issubdtype(jnp.result_type(made), jax.dtypes.prng_key):
        data = in_memory_of(jax.random.key_data(given), jax.random.key_data(made))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(made))
    host = np.asarray(made)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """An array as NumPy has it. One of several processes is gathered, for which all of them must
    call this."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = outside_meshes(multihost_utils.process_allgather)(on_devices(x), tiled=True)
    return np.asarray(x)


def known_number(x: Any) -> int | None:
    """The number that is equal on all replicas, without those of other processes; None while it is
    traced, or known by its shape alone."""
    if isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return None
    own = x.addressable_shards[0].data if isinstance(x, jax.Array) else x
    return int(np.ravel(own)[0])


def dotted(name: str) -> str:
    """A parameter's name as in the path of a state. An empty key is called as in the name of a
    parameter that has no other."""
    return ".".join(part or BARE for part in name.replace("/", ".").split("."))


def path_of(path: Any) -> str:
    """The path of a leaf, joined by ".", which stands for a "/" in a name too: {"a/b": x} has the
    names of {"a": {"b": x}}."""
    return dotted(str(jax.tree_util.keystr(path, simple=True, separator="."))) if path else ""


def by_path(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their paths."""
    return [(path_of(path), x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]]


def require_own_row(what: str, x: Any) -> None:
    """Raise ValueError for an array in local form that has not exactly one row."""
    if np.shape(x)[:1] != (1,):
        raise ValueError(
            f"{what} has shape {np.shape(x)}, not (1, …): every replica must be given its own row."
            " Pass the state through jax.shard_map with the specs of"
            " gradwire.jax_backend.partition_specs(state, axis_name), after distribute(state,"
            " mesh, axis_name), and through jax.pmap after gradwire.jax_backend.replicate(state)."
        )
