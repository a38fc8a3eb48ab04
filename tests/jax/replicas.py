"""One way to run a transformation on W replicas, under every kind of map."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from gradwire import PowerSGD

AXIS = "data"
MODES = ("vmap", "pmap", "shard_map", "shard_map_vma")


def power(**options):
    """PowerSGD that compresses small matrices too."""
    return PowerSGD(**{"rank": 2, "min_compression_rate": 1.0} | options)


def mesh_of(replicas, kind=AxisType.Auto):
    return jax.make_mesh((replicas,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:replicas])


def mesh_of_two(kind=AxisType.Auto):
    """Two replicas along "dcn", each of two devices."""
    return jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(kind, kind))


def refused(*parts, error=ValueError):
    """A context that expects an error which says all of this, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


def one_step(tx, gradients, mode, replicas, **options):
    """`tx.update` under a map, with `options` of its compiler, and what to call it with."""
    state, devices = tx.init(gradients), jax.devices()[:replicas]
    if mode == "pmap":
        arguments = gw.replicate((gradients, state), devices, axis_name=AXIS)
        return jax.pmap(tx.update, AXIS, devices=devices, **options), arguments
    specs, mesh = (P(), gw.partition_specs(state, AXIS)), mesh_of(replicas)
    mapped = jax.shard_map(tx.update, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    return jax.jit(mapped, **options), (gradients, gw.distribute(state, mesh, AXIS))


def traced(body, params, state, mesh=None, axis=AXIS, **options):
    """The types of what `body(params, state, x)` returns on all replicas: everything but
    arithmetic."""
    mesh = mesh or mesh_of(4)
    specs, rows = gw.partition_specs(state, axis), P(mesh.axis_names)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), specs, rows), out_specs=(P(), specs), **options
    )
    return jax.eval_shape(mapped, params, gw.distribute(state, mesh, axis), jnp.ones((4, 32)))


class Replicas:
    """A transformation on W replicas; fails when what should be equal on all of them differs in a
    bit.

    Under "vmap" the equality is proved rather than observed: `out_axes=None` is refused for what
    might differ.

    Attributes:
        state: in the form of the map.
    """

    def __init__(self, tx, params, replicas=4, mode="vmap"):
        self.mode = mode
        state = tx.init(params)
        # Under pmap a state needs no specs, and may hold what has none.
        self.specs = gw.partition_specs(state, AXIS) if mode != "pmap" else None
        devices = jax.devices()[:replicas]
        if mode == "vmap":
            axes = jax.tree.map(lambda spec: 0 if spec == P(AXIS) else None, self.specs)
            flags = [spec == P(AXIS) for spec in jax.tree.leaves(self.specs)]
            leaves = zip(jax.tree.leaves(state), flags, strict=True)
            rows = [np.stack([np.asarray(x)] * replicas) if flag else x for x, flag in leaves]
            self.state = jax.tree.unflatten(jax.tree.structure(state), rows)
            self._step = jax.jit(jax.vmap(tx.update, (0, axes), (None, axes), axis_name=AXIS))
        elif mode == "pmap":
            self.state = gw.replicate(state, devices, axis_name=AXIS)
            self._step = jax.pmap(tx.update, AXIS, devices=devices)
        else:
            mesh = mesh_of(replicas, AxisType.Explicit)  # as `jax.make_mesh` makes it
            self._rows = NamedSharding(mesh, P(AXIS))
            self.state = gw.distribute(state, mesh, AXIS)

            def body(gradients, state):
                return tx.update(jax.tree.map(lambda x: x[0], gradients), state)

            shards = {
                "mesh": mesh,
                "in_specs": (P(AXIS), self.specs),
                "out_specs": (P(), self.specs),
            }
            self._step = jax.jit(jax.shard_map(body, **shards, check_vma=mode == "shard_map_vma"))

    def update(self, gradients):
        """One tree of gradients per replica → the updates, as NumPy arrays."""
        stacked = jax.tree.map(lambda *g: np.stack([np.asarray(x) for x in g]), *gradients)
        if self.mode.startswith("shard_map"):
            stacked = jax.device_put(stacked, self._rows)
        updates, self.state = self._step(stacked, self.state)
        if self.mode == "vmap":
            return jax.tree.map(np.asarray, updates)
        require_equal_shards((updates, self.state))
        if self.mode == "pmap":
            return jax.tree.map(lambda x: np.asarray(x)[0], updates)
        return jax.tree.map(np.asarray, updates)

    def global_state(self):
        """The state with one row of memory for each replica, as NumPy arrays."""
        if self.mode == "pmap":
            return jax.tree.map(np.asarray, gw.unreplicate(self.state))
        if self.mode == "vmap":
            whole = jax.tree.map(np.asarray, self.state)
            return jax.tree.map(lambda x, s: _joined(x) if s == P(AXIS) else x, whole, self.specs)
        return jax.tree.map(np.asarray, self.state)


def _joined(rows):
    """Without the axis that each replica has for itself."""
    return rows[:, 0]


def equal(a, b):
    """Trees of one structure, to the bit and in shape and dtype."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y)
        and np.shape(x) == np.shape(y)
        and jnp.result_type(x) == jnp.result_type(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def through_orbax(state, folder, like):
    """What a checkpoint of a state is restored to, as these shapes and shardings say."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(1, args=ocp.args.StandardRestore(like))


def require_equal_shards(tree):
    """Every device holds the same bits of everything that is not marked as per replica.
    (`MultiSteps` accumulates local gradients.)"""
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        if "per_replica" not in name and "acc_grads" not in name:
            shards = [np.asarray(s.data).tobytes() for s in x.addressable_shards]
            assert all(s == shards[0] for s in shards), f"{name} differs between devices"


def gradients(shapes, step, replicas=4, rank=2):
    """float32 gradients, one dictionary per replica: a common part of exactly this rank that turns
    slowly, and noise of their own.

    Of exactly the rank that is kept, and with distinct weights. Otherwise PowerSGD with error
    feedback is chaotic: a change in the last bit, of float64 too, grows to percents within 50
    steps, and no two arithmetics can be compared.
    """
    given = [{} for _ in range(replicas)]
    for name, shape in shapes.items():
        fixed = np.random.default_rng(list(name.encode()))
        fresh = np.random.default_rng([step, *name.encode()])
        n = shape[0] if shape else 1
        m = int(np.prod(shape)) // n if n else 0
        k = min(n, m, rank)
        a, b = (
            np.linalg.qr(fixed.standard_normal((length, min(n, m, 2 * k))))[0] for length in (n, m)
        )
        a, b = (
            x[:, :k] * np.cos(0.02 * step) + np.roll(x, k, 1)[:, :k] * np.sin(0.02 * step)
            for x in (a, b)
        )
        common = (a * (10 * 0.6 ** np.arange(k))) @ b.T
        for own in given:
            noise = 0.1 * fresh.standard_normal((n, m)) / max(m, 1) ** 0.5
            own[name] = (common + noise).reshape(shape).astype(np.float32)
    return given
