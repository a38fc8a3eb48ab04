"""Training steps that are exported: with the state as it is, and for another platform than the one
that traces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export

import gradwire.jax_backend as gw
from tests.jax.replicas import AXIS, mesh_of

PARAMS = {f"w{i}": jnp.linspace(-1, 1, 32 * 24).reshape(32, 24) for i in range(9)} | {
    "b": jnp.ones(24)
}


def step_of(tx, state):
    """One step of four replicas. Its gradients differ between them."""
    whole = isinstance(tx, type(gw.diloco(optax.sgd(1.0), 2, axis_name=AXIS)))

    def step(state, x):
        params, opt_state = gw.this_replica(state) if whole else state
        gradients = jax.tree.map(lambda p: p * x.sum(), params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (
            gw.stack_replicas(tx.average_params(params, opt_state))
            if whole
            else (params, opt_state)
        )

    specs = gw.partition_specs(state, AXIS)
    shards = {"in_specs": (specs, jax.P(AXIS)), "out_specs": specs, "check_vma": False}
    return jax.jit(jax.shard_map(step, mesh=mesh_of(4), **shards))


def state_of(tx, params):
    """On four devices, and a batch."""
    state = (params, tx.init(params))
    if hasattr(tx, "average_params"):
        state = gw.stack_replicas(state)
    x = jax.device_put(np.arange(4, dtype=np.float32), jax.NamedSharding(mesh_of(4), jax.P(AXIS)))
    return gw.distribute(state, mesh_of(4), AXIS), x


POWER = optax.chain(gw.power_sgd(2, axis_name=AXIS, half_step=True), optax.adam(1e-2))


@pytest.mark.parametrize(
    "tx",
    [
        POWER,
        gw.zero1(optax.adam(1e-2), axis_name=AXIS, replicas=4),
        gw.diloco(optax.adam(1e-2), 2, axis_name=AXIS),
        optax.chain(gw.power_sgd(2, axis_name=AXIS, within=2), optax.adam(1e-2)),
    ],
    ids=["power_sgd", "zero", "diloco", "two levels"],
)
def test_a_step_is_stored_and_called_with_the_state(tx):
    """Of one the numbers are compared; of the others what is there before XLA compiles it."""
    state, x = state_of(tx, {"w": PARAMS["w0"], "b": PARAMS["b"]})
    step = step_of(tx, state)
    gw.register_for_export(state)
    gw.register_for_export(state)  # once more changes nothing
    again = export.deserialize(export.export(step)(state, x).serialize())
    one, other = (jax.eval_shape(call, state, x) for call in (step, again.call))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), one) == jax.tree.map(
        lambda x: (x.shape, x.dtype), other
    )
    if tx is POWER:
        for a, b in zip(*map(jax.tree.leaves, (step(state, x), again.call(state, x))), strict=True):
            assert np.allclose(a, b, rtol=1e-5, atol=1e-5)


def host_branches(module):
    """Branches whose side is known when they are run, not when they are compiled."""
    return len(re.findall(r"stablehlo\.convert %\S+ : \(tensor<i1>\) -> tensor<i32>", module))


def test_a_step_for_a_tpu_has_no_branches_that_pay_on_cpu():
    tx = gw.power_sgd(2, axis_name=AXIS)
    state, x = state_of(tx, PARAMS)
    step = step_of(tx, state)
    counts = {
        p: host_branches(export.export(step, platforms=[p])(state, x).mlir_module())
        for p in ("cpu", "tpu")
    }
    assert counts["cpu"] > 0
    assert counts["tpu"] == 0
