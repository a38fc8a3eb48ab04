"""Training states on their way to the devices, from one form to another, and back.

    state = distribute(state, mesh, "data")                        # for jax.shard_map: global form
    state = replicate(state, axis_name="data")                     # for jax.pmap: pmap form
    state = unreplicate(state)                             # and back: global form, for checkpoints
    shapes = abstract_state(state, jax.device_count(), mesh, "data")    # for orbax, `out_shardings`

Arrays stay on the devices, and nothing here gathers the memory of all replicas in one place. Arrays
that are sharded over other axes of the mesh stay so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gradwire.core.text.options import Replicas, checked
from gradwire.jax_backend.axes.mapped_axis import AxisName, axes_of
from gradwire.jax_backend.axes.outside_meshes import automatic, outside_meshes
from gradwire.jax_backend.engine.barrier import await_processes, meet
from gradwire.jax_backend.engine.self_check import check_noted
from gradwire.jax_backend.state.matching import places
from gradwire.jax_backend.state.names import flatten
from gradwire.jax_backend.state.same_state import require_same
from gradwire.jax_backend.state.skipped_steps import note_skipped_steps
from gradwire.jax_backend.state.survey import Leaf, Survey, survey
from gradwire.jax_backend.state.types import (
    PIECES,
    host_memory,
    is_placed,
    memory_kind,
    on_devices,
    place_mark,
    spec,
)

T = TypeVar("T")
NDArray = np.ndarray[Any, Any]


def partition_specs(state: Any, axis_name: AxisName) -> Any:
    """`PartitionSpec`s of a training state in global form, for `jax.shard_map`.

        specs = partition_specs(state, "data")
        places = {"in_specs": (specs, P("data")), "out_specs": (specs, P())}
        step = jax.jit(jax.shard_map(train_step, mesh=mesh, **places, check_vma=False))

    Examples:
        >>> import jax.numpy as jnp
        >>> from jax.sharding import PartitionSpec as P
        >>> from gradwire.jax_backend import partition_specs, power_sgd
        >>> tx = power_sgd(2, axis_name="data")
        >>> specs = partition_specs(tx.init({"w": jnp.zeros((64, 32))}), "data")
        >>> specs.memory["q"]["w"] == P(), specs.local.per_replica["error"]["w"] == P("data")
        (True, True)

    Args:
        state: any tree that holds states of `average_gradients` and `zero1`, of arrays or
            `jax.ShapeDtypeStruct`s.
        axis_name: the axis (or axes) of the replicas.

    Returns:
        A tree of the same structure: `P(axis_name)` for what is per replica, `P()` for the rest.

    Raises:
        ValueError: the transformation is inside `optax.apply_if_finite`,
            `optax.contrib.mechanize` or `optax.conditionally_transform`, or inside
            `optax.MultiSteps`, whose accumulated gradients differ between replicas and have no axis
            for them; or it is one of local SGD, and not all of the state is marked by
            `stack_replicas`. Or it belongs to replicas along another axis, or is in pmap form.

    Warns of an `optax.chain` in which moments precede what averages gradients, or in which a mask
    leaves gradients to nobody.
    """
    found = survey(state)
    _require_sound(found, axis_name)
    axes = axes_of(axis_name)
    own = spec(axes if len(axes) > 1 else axes[0])
    return found.map(lambda leaf: own if leaf.marks else spec())


def _require_sound(found: Survey, axis_name: AxisName | None) -> None:
    """What `partition_specs` raises and warns of. `axis_name` None: for pmap, under which each
    array has an axis for the replicas."""
    found.refuse_skipped_steps()
    found.refuse_tuned_outside()
    found.refuse_conditional()
    if axis_name is not None:
        found.refuse_accumulated()
        found.refuse_other_axis(axis_name)
    found.refuse_unmarked()
    found.refuse_pmap_form()
    found.warn_of_chains()
    found.warn_of_mixtures()


@checked
@outside_meshes
def distribute(state: T, mesh: Mesh, axis_name: AxisName) -> T:
    """Put a training state on the devices of a mesh, in global form.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gradwire.jax_backend import distribute, power_sgd
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> tx = power_sgd(2, axis_name="data")
        >>> state = distribute(tx.init({"w": jnp.zeros((64, 32))}), mesh, "data")
        >>> error = state.local.per_replica["error"]["w"]
        >>> error.sharding.spec == jax.sharding.PartitionSpec("data")
        True

    Args:
        state: in local form, as `init` made it (every replica then begins with this memory), or in
            global form, as `unreplicate` or a checkpoint gives it. In several processes each must
            call this with the same state. May be called inside `jax.jit`.
        mesh: with the axis of the replicas.
        axis_name: that axis (or axes), W devices long.

    Returns:
        The state as global arrays: what is per replica one row on each, everything else equal along
        `axis_name`. What was sharded along other axes of the mesh stays so, and what was not comes
        to lie whole on every device. Inside `jax.jit` the compiler chooses how arrays
        lie along axes of `jax.sharding.AxisType.Auto`: tell it by `out_shardings`, see
            `abstract_state`.

    Raises:
        ValueError: the mesh has no such axis; the memory is that of another number of replicas than
            W, or of one of them alone; the state is in pmap form; parameters, or anything else that
            is equal on all replicas, differ between processes; `average_params` of local SGD was
            not called as often as `update`, or was told a wrong turn; or see `partition_specs`.
        RuntimeError: some processes have not called it in half an hour, or call something else.
    """
    found = survey(state)
    _require_sound(found, axis_name)
    found.refuse_missed_averages()
    note_skipped_steps(state)
    check_noted(mesh.devices.flat[0])
    axes = _axes_in(mesh, axis_name)
    processes = {device.process_index for device in mesh.devices.flat}
    if processes == set(range(jax.process_count())):
        require_same(found, "distribute")
    elif jax.process_index() in processes and not any(
        isinstance(x.value, jax.core.Tracer) for x in found.leaves
    ):
        meet("distribute", processes)  # what JAX compares itself, it compares among all of these
    replicas = math.prod(mesh.shape[a] for a in axes)
    rows = axes if len(axes) > 1 else axes[0]

    def put(leaf: Leaf) -> Any:
        x, rest, kind = leaf.value, _kept_spec(leaf.value, mesh, axes), memory_kind(leaf.value)
        if leaf.marks:
            _check_rows(leaf, replicas)
            x, rest = _as_placed(leaf), rest[1:]
            whole, one = (
                NamedSharding(mesh, spec(row, *rest), memory_kind=kind) for row in (rows, None)
            )
            return _through_data(x, lambda data: _spread(data, replicas, whole, one))
        return _through_data(
            x, lambda data: _move(data, NamedSharding(mesh, spec(*rest), memory_kind=kind))
        )

    result: T = found.map(put)
    return result


@checked
@outside_meshes
def replicate(
    state: T, devices: Sequence[jax.Device] | None = None, *, axis_name: str | None = None
) -> T:
    """Put a training state on the devices of `jax.pmap`, in pmap form.

        state = replicate(state, axis_name="data")

    Use it in place of `flax.jax_utils.replicate`, which cannot take a state in global form.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from gradwire.jax_backend import power_sgd, replicate, unreplicate
        >>> state = power_sgd(2, axis_name="data").init({"w": jnp.zeros((64, 32))})
        >>> on_devices = replicate(state, jax.local_devices()[:1], axis_name="data")
        >>> on_devices.memory["q"]["w"].shape, unreplicate(on_devices).memory["q"]["w"].shape
        ((1, 2, 32), (2, 32))

    Args:
        state: in local form, as `init` made it (every replica then begins with this memory), or in
            global form, as `unreplicate` or a checkpoint gives it. In several processes each must
            call this with the same state.
        devices: of this process; all of them by default. In several processes, as many in each.
        axis_name: the one given to `jax.pmap`. Arrays that lie on an axis of another name are
            averaged just as well, but make JAX compile the training step a second time, at its
            second call.

    Returns:
        The state with a leading device axis on every array, in the memory of the devices:
        `jax.pmap` takes no other.

    Raises:
        ValueError: the memory is that of another number of replicas, or of one of them alone; the
            state is in pmap form already; what is equal on all replicas differs between processes;
            `average_params` of local SGD was not called as often as `update`, or was told a wrong
            turn; the transformation is inside `optax.apply_if_finite`; or it is one of local SGD,
            and not all of the state is marked by `stack_replicas`.
        RuntimeError: see `distribute`.
    """
    found = survey(state)
    _require_sound(found, None)
    found.refuse_missed_averages()
    note_skipped_steps(state)
    require_same(found, "replicate")
    devices = list(devices) if devices is not None else jax.local_devices()
    if not devices:
        raise ValueError(
            "devices=[] leaves no replica; give those of jax.pmap, or None for all of this process"
        )
    check_noted(devices[0])
    axis = axis_name or "replica"
    sharding = NamedSharding(Mesh(np.array(devices), (axis,)), spec(axis))
    first, replicas = jax.process_index() * len(devices), jax.process_count() * len(devices)

    def put(leaf: Leaf) -> Any:
        x = leaf.value
        if leaf.marks:
            _check_rows(leaf, replicas)
            x = on_devices(_as_placed(leaf))
            return _through_data(x, lambda data: joined(own_rows(data)))
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            x = _whole_everywhere(x).addressable_data(0)
        row = automatic(on_devices(jnp.asarray(x)))[None]
        return joined([jax.device_put(row, device) for device in devices])

    def own_rows(x: Any) -> list[jax.Array]:
        if x.shape[0] == 1:
            row = _row(x, 0)[None]
            return [jax.device_put(row, device) for device in devices]
        numbers = range(first, first + len(devices))
        return [
            jax.device_put(_row(x, i)[None], device)
            for i, device in zip(numbers, devices, strict=True)
        ]

    def joined(pieces: list[jax.Array]) -> jax.Array:
        shape = (len(devices), *pieces[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces)

    placed: T = found.map(put)
    return placed


@outside_meshes
def unreplicate(state: T) -> T:
    """Bring a training state back from `jax.pmap`, from pmap form to global form, with the memory
    of **every** replica.

    What is equal on all replicas is taken from the first device. (`flax.jax_utils.unreplicate` does
    that to everything and drops all error memory but one replica's.) The result is what
    `distribute`, `replicate` and checkpoints take.

    Args:
        state: in pmap form. In several processes all must call this.

    Returns:
        The state in global form. Memory that is per replica stays where it is, one row on each
        device: in several processes a global array, of which each process has its own rows.

    Raises:
        ValueError: the state is not in pmap form; or it holds half-accumulated gradients of
            `optax.MultiSteps`, which differ between replicas; or it is an ensemble; or
            `average_params` of local SGD was not called as often as `update`, or was told a wrong
            turn.
        RuntimeError: see `distribute`.
    """
    found = survey(state)
    found.refuse_skipped_steps()
    found.refuse_accumulated(half=True)
    found.refuse_missed_averages()
    note_skipped_steps(state)
    await_processes("unreplicate", state)
    # Replicas that `jax.vmap` maps may all begin with what `init` returned, members of an ensemble
    # differ.
    mark = found.ensemble
    if mark is not None and not (
        mark.placement and all(_is_repeated(x.value) for x in found.leaves if x.equal_everywhere)
    ):
        found.refuse_ensemble()
    # by process; found once, and only if anything is per replica
    device_of: list[list[jax.Device]] = []

    def take(leaf: Leaf) -> Any:
        x = leaf.value
        if not leaf.marks:
            if np.ndim(x) == 0:
                raise ValueError(
                    f"{leaf.name} has no device axis: unreplicate takes a state in the form of"
                    " jax.pmap"
                )
            return x.addressable_shards[0].data[0] if isinstance(x, jax.Array) else x[0]
        # Under `jax.vmap` every replica may have what `init` returned.
        if leaf.placement and not is_placed(x):
            return jnp.zeros(x.shape[:1], bool)
        if np.ndim(x) < 2 or x.shape[1] != 1:
            raise ValueError(
                f"{leaf.name} has shape {x.shape}, not (devices, 1, …): unreplicate takes a state"
                " in the form of jax.pmap"
            )
        return _through_data(x, lambda data: _without_device_axis(data, device_of))

    taken: T = found.map(take)
    return taken


@checked
def abstract_state(
    state: Any,
    replicas: Replicas,
    mesh: Mesh | None = None,
    axis_name: AxisName | None = None,
    *,
    params: Any = None,
) -> Any:
    """Shapes, dtypes and shardings of a training state in global form: what restores a checkpoint,
    and what compiles ahead of time.

        shapes = abstract_state(state, 4, mesh, "data")    # `state` fresh, the checkpoint of 4
        state = manager.restore(step, args=orbax.checkpoint.args.StandardRestore(shapes))
        state = distribute(set_replicas(state, 8), mesh, "data")  # the mesh has 8 now

        step.lower(abstract_state(state, 8, mesh, "data"), batch).compile()
        jax.jit(step, out_shardings=jax.tree.map(lambda x: x.sharding, shapes))

    Examples:
        >>> import jax.numpy as jnp
        >>> from gradwire.jax_backend import abstract_state, power_sgd
        >>> tx = power_sgd(2, axis_name="data")
        >>> shapes = abstract_state(tx.init({"w": jnp.zeros((64, 32))}), 4)
        >>> shapes.local.per_replica["error"]["w"].shape
        (4, 64, 32)

    Args:
        state: in local or global form, of any number of replicas; arrays, or the
            `jax.ShapeDtypeStruct`s of `jax.eval_shape`.
        replicas: as many as the state is wanted of. Of a checkpoint: as many as it was saved with.
        mesh: on which it is wanted. None: shapes without shardings, for `replicate`.
        axis_name: of the replicas in that mesh.
        params: the parameters, arrays or shapes with shardings. Trees like them in the state are
            found by their structure; what has the shape of its parameter there, moments and errors
            and outer parameters, is wanted as that lies. The pieces of a sharded optimizer are
            wanted in their memory, if all lie in one ("pinned_host"). None: every array as it lies
            in `state`; shapes from `jax.eval_shape` lie nowhere.

    Returns:
        A tree of `jax.ShapeDtypeStruct`s. On a mesh of `replicas` replicas they are those that
        `distribute` would make, arrays that are sharded along other axes keep that. On one of
        another number, rows lie on as many devices as divide them evenly, or else each row is cut
        along another axis of the array, so that no device holds more than it must.

    Raises:
        ValueError: `replicas` below 1; a mesh without `axis_name`; a sharded optimizer's state of
            another number of replicas; the state is in pmap form; or see `partition_specs`.
    """
    if (mesh is None) != (axis_name is None):
        raise ValueError(
            f"axis_name={axis_name!r} with mesh={mesh!r}: give both, mesh and the name of its axis,"
            " or neither"
        )
    axes: tuple[str, ...] = ()
    found = survey(state)
    found.refuse_pmap_form()
    if mesh is not None and axis_name is not None:
        _require_sound(found, axis_name)
        axes = _axes_in(mesh, axis_name)

    lies_like = _parameters_of(found, params)
    kinds = set(map(memory_kind, jax.tree.leaves(params)))
    of_all = kinds.pop() if len(kinds) == 1 else None

    def struct(leaf: Leaf) -> Any:
        x, shape = leaf.value, tuple(np.shape(leaf.value))
        like = lies_like.get(leaf.path)
        if leaf.marks:
            if leaf.of == PIECES and shape[0] != replicas:
                raise ValueError(
                    f"{leaf.name} is a sharded state of {shape[0]} replicas, and"
                    f" replicas={replicas}: give the state of zero1(…, replicas={replicas}), whose"
                    " pieces have the sizes of those in the checkpoint"
                )
            shape = (replicas, *shape[1:])
        kind: Any = jax.ShapeDtypeStruct
        dtype = jnp.dtype(bool) if leaf.placement else jnp.result_type(x)
        if mesh is None:
            return kind(shape, dtype)
        row = 1 if leaf.marks and like is None else 0
        given = x if like is None else like
        rest = _kept_spec(given, mesh, axes)[row:]
        wanted = _spec_of_rows(shape, rest, mesh, axes) if leaf.marks else spec(*rest)
        memory = of_all if leaf.of == PIECES and of_all else memory_kind(given)
        return kind(shape, dtype, sharding=NamedSharding(mesh, wanted, memory_kind=memory))

    return found.map(struct)


def _axes_in(mesh: Mesh, axis_name: AxisName) -> tuple[str, ...]:
    axes = axes_of(axis_name)
    missing = [a for a in axes if a not in mesh.shape]
    if missing:
        raise ValueError(
            f"axis_name={axis_name!r}: the mesh has no axis {missing[0]!r}, its axes are"
            f" {', '.join(map(repr, mesh.axis_names))}"
        )
    return axes


def _parameters_of(found: Survey, params: Any) -> dict[Any, Any]:
    """The path of each array that belongs to a parameter and has its shape, without the axis of the
    replicas → the parameter."""
    if params is None:
        return {}
    named = flatten(params).leaves
    one = found.map(_shape_of_one)
    owners = places(one, {name: np.shape(x) for name, x in named.items()})
    return {
        leaf.path: named[owner.name]
        for leaf, owner, x in zip(found.leaves, owners, jax.tree.leaves(one), strict=True)
        if owner is not None and x.shape == np.shape(named[owner.name])
    }


def _shape_of_one(leaf: Leaf) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(np.shape(leaf.value)[1 if leaf.marks else 0 :], jnp.result_type(leaf.value))


def _kept_spec(x: Any, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Any, ...]:
    """How an array is sharded along those axes of the mesh that are not of the replicas; () if it
    is not."""
    sharding = getattr(x, "sharding", None)
    if isinstance(x, jax.core.Tracer):
        if AxisType.Explicit not in mesh.axis_types:
            return tuple([PartitionSpec.UNCONSTRAINED] * x.ndim)
        sharding = jax.typeof(x).sharding
    if not isinstance(sharding, NamedSharding):
        return ()
    kept: list[Any] = []
    for entry, size in zip(sharding.spec, np.shape(x), strict=False):
        names = entry if isinstance(entry, tuple) else (entry,)
        names = tuple(n for n in names if isinstance(n, str) and n in mesh.shape and n not in axes)
        fits = size % math.prod(mesh.shape[n] for n in names) == 0
        kept.append((names if len(names) > 1 else names[0]) if names and fits else None)
    return tuple(kept)


def _spec_of_rows(
    shape: tuple[int, ...], rest: tuple[Any, ...], mesh: Mesh, axes: tuple[str, ...]
) -> PartitionSpec:
    """The place of rows on a mesh, be they as many as its replicas or not."""
    name = axes if len(axes) > 1 else axes[0]
    devices = math.prod(mesh.shape[a] for a in axes)
    if shape[0] % devices == 0:
        return spec(name, *rest)
    entries: list[Any] = [None, *rest, *[None] * (len(shape) - 1 - len(rest))]
    free = [
        i
        for i in range(1, len(shape))
        if entries[i] is None and shape[i] and shape[i] % devices == 0
    ]
    if free:
        entries[free[0]] = name
    return spec(*entries)


def _check_rows(leaf: Leaf, replicas: int) -> None:
    """Raise ValueError for memory that cannot be given to so many replicas."""
    rows = np.shape(leaf.value)[0]
    if leaf.of == PIECES and rows != replicas:
        raise ValueError(
            f"{leaf.name} is a sharded state of {rows} replicas and there are {replicas} now."
            " Convert it: gradwire.jax_backend.reshard(state, like), where `like` comes from"
            f" zero1(…, replicas={replicas})."
        )
    if leaf.placement:
        if not is_placed(leaf.value):
            return
        if rows == 1 and replicas > 1:
            raise ValueError(
                f"{leaf.name} has one row: the state is what one replica alone has, and the memory"
                " of the others is not in it. flax.jax_utils.unreplicate drops them; use"
                " gradwire.jax_backend.unreplicate. If the state is of a run of one replica:"
                f" gradwire.jax_backend.set_replicas(state, {replicas}) gives its memory to all."
            )
        if rows == replicas:
            return
    if rows not in (1, replicas):
        raise ValueError(
            f"{leaf.name} is the memory of {rows} replicas and there are {replicas} now. What"
            f" matters is its mean: gradwire.jax_backend.set_replicas(state, {replicas}) goes on"
            " from that."
        )


def _as_placed(leaf: Leaf) -> Any:
    """The rows of an array that comes to its replicas."""
    return place_mark(placed=True) if leaf.placement and not is_placed(leaf.value) else leaf.value


def _through_data(x: Any, move: Callable[[Any], Any]) -> Any:
    """`move(x)`. NumPy knows nothing of random keys; their data are moved."""
    if not jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        return move(x)
    return jax.random.wrap_key_data(
        jnp.asarray(move(jax.random.key_data(x))), impl=jax.random.key_impl(x)
    )


def _spread(x: Any, replicas: int, whole: NamedSharding, one: NamedSharding) -> jax.Array:
    """One row for each replica, of as many or of one."""
    if isinstance(x, jax.core.Tracer):
        return _placed(jnp.broadcast_to(x, (replicas, *x.shape[1:])), whole)
    if x.shape[0] == replicas:
        return _move(x, whole)
    # Along the axis of the replicas every device holds the one row, and that is its row.
    pieces = [shard.data for shard in _move(x, one).addressable_shards]
    return jax.make_array_from_single_device_arrays((replicas, *x.shape[1:]), whole, pieces)


def _placed(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Inside `jax.jit`."""
    mesh = sharding.mesh
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    placed: jax.Array
    if AxisType.Explicit not in kinds.values():
        placed = lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]
    elif set(kinds.values()) == {AxisType.Explicit}:
        placed = jax.device_put(x, sharding)  # which needs no mesh in context, as `reshard` does
    else:
        each = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
        each += [()] * (x.ndim - len(each))

        def along(kind: AxisType, otherwise: Any) -> NamedSharding:
            names = [tuple(name for name in entry if kinds.get(name) == kind) for entry in each]
            return NamedSharding(mesh, spec(*(entry or otherwise for entry in names)))

        placed = jax.sharding.reshard(x, along(AxisType.Explicit, None))  # type: ignore[no-untyped-call]
        # Along axes that the compiler manages it may keep what nothing is said of.
        unsaid = PartitionSpec.UNCONSTRAINED
        placed = lax.with_sharding_constraint(placed, along(AxisType.Auto, unsaid))  # type: ignore[no-untyped-call]
    return placed


def _move(x: Any, sharding: NamedSharding) -> jax.Array:
    """A copy of an array on other devices: the caller's must outlive the donation of this one."""
    if isinstance(x, jax.core.Tracer):
        return _placed(x, sharding)
    # An array of this process alone that lies on the host goes to others as one of NumPy does: JAX
    # cuts it on the devices.
    kept = isinstance(x, jax.Array) and x.is_fully_addressable and host_memory(x) is not None
    if not isinstance(x, jax.Array) or (kept and not sharding.is_fully_addressable):
        host = np.asarray(x, jnp.result_type(x))
        # Made piece by piece: no device ever holds more than its own.
        return jax.make_array_from_callback(
            host.shape, sharding, lambda index: np.array(host[index], order="C")
        )
    copied = jnp.array(automatic(x), copy=True)  # `device_put(may_alias=False)` is not heard
    if sharding.is_fully_addressable or not x.is_fully_addressable:
        moved: jax.Array = jax.device_put(copied, sharding)
        return moved
    # Between processes JAX moves nothing that is committed to a device; each process has it all,
    # and its devices take their part.
    places = sharding.addressable_devices_indices_map(x.shape)
    pieces = [
        jax.device_put(
            copied[index], SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        )
        for device, index in places.items()
    ]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)


def _is_repeated(x: Any) -> bool:
    """Whether all rows hold the same, but for what a compiler may round otherwise in one of
    them."""
    keys = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    rows = np.asarray(jax.random.key_data(x) if keys else x)
    wide = rows.astype(np.float64) if jnp.issubdtype(rows.dtype, jnp.floating) else rows
    return bool(
        np.allclose(
            wide, wide[:1], rtol=1e-2, atol=1e-2 * np.abs(wide).max(initial=0), equal_nan=True
        )
    )


def _whole_everywhere(x: jax.Array) -> jax.Array:
    """An array of several processes, whole on every device."""
    if x.is_fully_replicated or not isinstance(x.sharding, NamedSharding):
        return x
    whole: jax.Array = jax.device_put(x, NamedSharding(x.sharding.mesh, spec()))
    return whole


def _row(x: Any, i: int) -> Any:
    """Row i, (1, …). Of an array of several processes all must call this for their own, equally
    often."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return automatic(x)[i : i + 1]
    for shard in x.addressable_shards:
        first, last, _ = shard.index[0].indices(x.shape[0])
        whole = shard.data.shape[1:] == x.shape[1:]
        if whole and first <= i < last:
            return shard.data[i - first : i - first + 1]
    raise ValueError(
        f"row {i} of a state is needed by process {jax.process_index()} and lies in another: bring"
        " the state to the replicas' own devices first, distribute(state, mesh, axis_name) with a"
        " mesh of jax.devices()"
    )


def _without_device_axis(x: Any, device_of: list[list[jax.Device]]) -> Any:
    """(devices, 1, …) → (W, …), each row on the device where it was."""
    shape = (x.shape[0], *x.shape[2:])
    if not isinstance(x, jax.Array):
        return np.reshape(x, shape)
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].indices(x.shape[0])[0])
    if (
        any(shard.data.shape[0] != 1 for shard in shards) or len(shards) != x.shape[0]
    ):  # as the compiler lays what `jax.vmap` makes
        return automatic(x).reshape(shape)
    if not device_of:
        meet("unreplicate", range(jax.process_count()))
        ids = np.array([shard.device.id for shard in shards])
        every = multihost_utils.process_allgather(ids) if jax.process_count() > 1 else ids[None]
        by_id = {device.id: device for device in jax.devices()}
        device_of.extend(
            [by_id[int(i)] for i in process] for process in np.reshape(every, (-1, len(shards)))
        )
    axis = x.sharding.mesh.axis_names[0] if isinstance(x.sharding, NamedSharding) else "replica"
    devices = [device for process in device_of for device in process]
    rows = NamedSharding(Mesh(np.array(devices), (axis,)), spec(axis))
    pieces = [shard.data.reshape((1, *shape[1:])) for shard in shards]
    return jax.make_array_from_single_device_arrays((len(devices), *shape[1:]), rows, pieces)
