"""One case through `jax.pmap` or `jax.shard_map`."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state import checkpoint
from gradwire.jax_backend import average_gradients, distribute, from_portable, mark_varying, partition_specs, replicate
from gradwire.jax_backend.state.trees import NOTHING
from tests.methods import METHODS
from tests.parity.cases import SHAPES, STEPS, gradients, saved


def run(case, driver, devices, names=tuple(SHAPES)):
    """The averages of each step, and the memory [step][replica]. Each step begins in the oracle's state.

    Gradients are those of a loss, found by autodiff: the sum of parameter times given gradient.

    Args:
        case: of the table.
        driver: "pmap", "shard_map" or "shard_map_vma".
        devices: one for each replica.
        names: of the parameters.
    """
    algorithm = METHODS[case].algorithm
    tx = average_gradients(algorithm, axis_name="data")
    params = {name: np.ones(SHAPES[name], np.float32) for name in names}
    like = tx.init(params)
    replicas = range(len(devices))

    def begun(step):
        states = [saved(case, len(devices), step, r, names) for r in replicas]
        portable = checkpoint.gather(NumpyOps(), states, algorithm.per_replica)
        return from_portable(portable, algorithm, like, replicas=len(devices))

    def loss(p, given):
        return sum((p[name] * given[name]).sum() for name in names)

    def step_of(p, given, state):
        return tx.update(jax.grad(loss)(p, given), state)

    if driver == "pmap":
        one = jax.pmap(step_of, axis_name="data", devices=devices, in_axes=(None, 0, 0))

        def placed(state):
            return replicate(state, devices, axis_name="data")
    else:
        mesh = Mesh(np.array(devices), ("data",))
        vma = driver == "shard_map_vma"

        def body(p, given, state):
            mine = jax.tree.map(lambda x: x[0], given)
            return step_of(mark_varying(p, "data"), mine, state)

        def placed(state):
            return distribute(state, mesh, "data")

        specs = partition_specs(like, "data")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data"), specs), out_specs=(P(), specs), check_vma=vma)
        one = jax.jit(mapped)

    updates, memories = [], []
    for step in range(STEPS):
        mine = [gradients(case, step, r) for r in replicas]
        stacked = {name: np.stack([g[name] for g in mine]) for name in names}
        given = stacked if driver == "pmap" else jax.device_put(stacked, NamedSharding(mesh, P("data")))
        update, state = one(params, given, placed(begun(step)))
        rows = {n: _rows(x) for n, x in update.items()}
        for name in names:  # every replica received the same bits
            assert all(np.array_equal(rows[name][0], row) for row in rows[name])
        shape = (lambda x: x[0]) if driver == "pmap" else (lambda x: x)
        updates.append({n: shape(x[0]) for n, x in rows.items()})
        memory = [{} for _ in replicas]
        for trees in (state.memory, state.local.per_replica):
            for key, tree in trees.items():
                for name, x in tree.items() if key != NOTHING else ():
                    for i in replicas if not isinstance(x, tuple) else ():
                        rows_of = _rows(x)
                        row = rows_of[i % len(rows_of)]
                        differs = trees is state.local.per_replica
                        row = np.reshape(row, SHAPES[name]) if differs else row[0] if driver == "pmap" else row
                        memory[i].setdefault(name, {})[key] = row
        memories.append(memory)
    return updates, memories


def _rows(x):
    """What each device holds."""
    shards = sorted(x.addressable_shards, key=lambda s: s.device.id)
    return [np.asarray(s.data) for s in shards]
