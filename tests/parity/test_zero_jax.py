"""`zero1` under `jax.pmap` and `jax.shard_map` against the float64 oracle, after every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradwire import AllReduce
from gradwire.jax_backend import (
    average_gradients,
    clip_by_global_norm,
    distribute,
    partition_specs,
    replicate,
    zero1,
)
from tests.parity import zero_cases as table

#: Compiling is what takes the time.
ROWS = [
    ("sgd", "pmap", 4),
    ("sgd_clipped", "shard_map_vma", 2),
    ("adamw_buckets", "shard_map", 3),
    ("power_sgd_adamw", "shard_map_vma", 2),
]


def transformation(case, replicas):
    row = table.ZERO_CASES[case]
    rates = jnp.array([row.rate(step) for step in range(table.STEPS)])
    if row.optimizer == "sgd":
        inner = optax.sgd(lambda step: rates[step], momentum=table.MOMENTUM)
    else:
        inner = optax.adamw(
            lambda step: rates[step],
            *table.BETAS,
            eps=table.EPSILON,
            weight_decay=table.WEIGHT_DECAY,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        )
    if row.max_norm:
        inner = optax.chain(clip_by_global_norm(row.max_norm, "data"), inner)
    if isinstance(row.algorithm, AllReduce):
        return zero1(
            inner, axis_name="data", replicas=replicas, bucket_bytes=row.algorithm.bucket_bytes
        )
    average = average_gradients(row.algorithm, axis_name="data")
    return optax.chain(average, zero1(inner, axis_name="data", replicas=replicas, averaged=True))


@pytest.mark.parametrize(("case", "driver", "replicas"), ROWS)
def test_equals_the_oracle(case, driver, replicas):
    tx, devices = transformation(case, replicas), jax.devices()[:replicas]
    params = {name: jnp.asarray(table.initial(name)) for name in table.SHAPES}
    state = tx.init(params)
    given = [[table.gradients(step, r) for step in range(table.STEPS)] for r in range(replicas)]
    stacked = {
        name: np.stack([[g[name] for g in steps] for steps in given]) for name in table.SHAPES
    }

    def train(given, params, state):
        def one(carry, gradients):
            params, state = carry
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return lax.scan(one, (params, state), given)[1]

    if driver == "pmap":
        mapped = jax.pmap(train, axis_name="data", devices=devices)
        after = mapped(stacked, replicate(params, devices), replicate(state, devices))
        trace = {name: np.asarray(x)[0] for name, x in after.items()}
        for name, x in after.items():  # every replica came to the same bits
            assert all(np.array_equal(row, trace[name]) for row in np.asarray(x))
    else:
        mesh = Mesh(np.array(devices), ("data",))
        specs = partition_specs(state, "data")
        mapped = jax.shard_map(
            lambda given, *rest: train(jax.tree.map(lambda x: x[0], given), *rest),
            mesh=mesh,
            in_specs=(P("data"), P(), specs),
            out_specs=P(),
            check_vma=driver == "shard_map_vma",
        )
        after = jax.jit(mapped)(stacked, params, distribute(state, mesh, "data"))
        trace = {name: np.asarray(x) for name, x in after.items()}
    table.assert_same(
        case,
        replicas,
        [{name: x[step] for name, x in trace.items()} for step in range(table.STEPS)],
    )
