"""`jax.pmap` and `jax.shard_map` on forced CPU devices, against the float64 oracle."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state import checkpoint
from gradwire.jax_backend import (
    average_gradients,
    distribute,
    from_portable,
    mark_varying,
    partition_specs,
    replicate,
)
from gradwire.jax_backend.state.trees import NOTHING
from tests.methods import METHODS, VARIANTS
from tests.parity.cases import SHAPES, STEPS, assert_compressed, assert_same, gradients, saved

#: Compiling is what takes the time: every method once, those whose programs differ in kind under
#: another driver than the others. Of variants those that have kernels of their own.
DIFFERENT = ["half_step", "start_step", "all_reduce_buckets", "int8", "top_k"]
NUMBERS = [
    "rank_1",
    "rank_4",
    "rank_deficient",
    "no_error_feedback",
    "error_decay",
    "sometimes_zero",
]
OTHERS = [case for case in METHODS if case not in (*VARIANTS, *DIFFERENT)]
#: Of the parameters two of one shape, a tensor of four axes and two that are not compressed; all of
#: them where views are what is tested.
FEW = ("w", "v", "conv", "b", "s")
WHOLE = ("half_step", "rank_by_name", "views", "views_half_step", "views_cold_start")
ROWS = [
    *((case, "pmap", 4) for case in OTHERS),
    *((case, "shard_map_vma", 3) for case in DIFFERENT),
    *(
        pytest.param(case, "shard_map", 3, marks=pytest.mark.slow)
        for case in VARIANTS
        if case not in NUMBERS
    ),
]


def step_of(case, driver, devices, names):
    """A mapped step (parameters, given, state) → (averages, state), the parameters, the state
    before the first one, and what places a state.

    Gradients are those of a loss, found by autodiff: the sum of parameter times given gradient.

    Args:
        case: of the table.
        driver: "pmap", "shard_map" or "shard_map_vma".
        devices: one for each replica.
        names: of the parameters.
    """
    tx = average_gradients(METHODS[case].algorithm, axis_name="data")
    params = {name: np.ones(SHAPES[name], np.float32) for name in names}
    like = tx.init(params)

    def loss(p, given):
        return sum((p[name] * given[name]).sum() for name in names)

    def step(p, given, state):
        return tx.update(jax.grad(loss)(p, given), state)

    if driver == "pmap":
        one = jax.pmap(step, axis_name="data", devices=devices, in_axes=(None, 0, 0))
        return one, params, like, lambda state: replicate(state, devices, axis_name="data")
    mesh, specs = Mesh(np.array(devices), ("data",)), partition_specs(like, "data")

    def body(p, given, state):
        return step(mark_varying(p, "data"), jax.tree.map(lambda x: x[0], given), state)

    shards = {"mesh": mesh, "in_specs": (P(), P("data"), specs), "out_specs": (P(), specs)}
    mapped = jax.shard_map(body, **shards, check_vma=driver == "shard_map_vma")
    return jax.jit(mapped), params, like, lambda state: distribute(state, mesh, "data")


def run(case, driver, devices, names=tuple(SHAPES)):
    """The averages of each step, and the memory [step][replica]. Each step begins in the oracle's
    state."""
    algorithm = METHODS[case].algorithm
    one, params, like, placed = step_of(case, driver, devices, names)
    replicas = range(len(devices))

    def begun(step):
        states = [saved(case, len(devices), step, r, names) for r in replicas]
        portable = checkpoint.gather(NumpyOps(), states, algorithm.per_replica)
        return from_portable(portable, algorithm, like, replicas=len(devices))

    updates, memories = [], []
    for step in range(STEPS):
        mine = [gradients(case, step, r) for r in replicas]
        stacked = {name: np.stack([g[name] for g in mine]) for name in names}
        update, state = one(params, stacked, placed(begun(step)))
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
                        row = (
                            np.reshape(row, SHAPES[name])
                            if differs
                            else row[0]
                            if driver == "pmap"
                            else row
                        )
                        memory[i].setdefault(name, {})[key] = row
        memories.append(memory)
    return updates, memories


def _rows(x):
    """What each device holds."""
    shards = sorted(x.addressable_shards, key=lambda s: s.device.id)
    return [np.asarray(s.data) for s in shards]


@pytest.mark.parametrize(("case", "driver", "replicas"), ROWS)
def test_equals_the_oracle(case, driver, replicas):
    names = tuple(SHAPES) if case in WHOLE else FEW
    updates, memory = run(case, driver, jax.devices()[:replicas], names)
    for step in range(STEPS):
        assert_same(case, step, updates[step], memory[step], names)
    assert_compressed(case, replicas, names)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_is_typed_under_vma(case):
    """What is equal on all replicas, and what is not, as JAX knows it before XLA compiles
    anything."""
    names = tuple(SHAPES) if case in WHOLE else FEW
    step, params, state, placed = step_of(case, "shard_map_vma", jax.devices()[:2], names)
    given = {name: np.zeros((2, *SHAPES[name]), np.float32) for name in names}
    updates, _ = jax.eval_shape(step, params, given, placed(state))
    assert {name: x.shape for name, x in updates.items()} == {name: SHAPES[name] for name in names}
