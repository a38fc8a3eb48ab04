"""What a run logs of its compression is what the plan says, and what is in the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gradwire
import gradwire.jax_backend as gw
from gradwire import AllReduce, PowerSGD, WireDtype
from gradwire.torch_backend import Stats
from tests.jax.replicas import AXIS, Replicas, gradients, mesh_of

SHAPES = {"w": (32, 24), "b": (24,), "v": (16, 4, 8)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "algorithm", [PowerSGD(2), PowerSGD(2, half_step=True), AllReduce(), WireDtype(PowerSGD(1), "bfloat16")], ids=repr
)
def test_bytes_are_those_of_the_plan(algorithm):
    found = gw.stats({"opt": (gw.average_gradients(algorithm, axis_name=AXIS).init(PARAMS), optax.EmptyState())})
    plan = gradwire.plan(SHAPES, algorithm)
    assert found.wire_bytes == plan.wire_bytes
    assert (found.steps, found.error_norm, found.skipped_steps, found.bytes_sent) == (0, 0, 0, 0)
    assert found.compression_ratio == 1


def test_before_the_start_everything_is_sent():
    run = Replicas(gw.power_sgd(2, axis_name=AXIS, start_step=2), PARAMS)
    sent, total = [], []
    for step in range(4):
        found = gw.stats(run.state)
        sent.append(float(found.wire_bytes))
        total.append((float(found.bytes_sent), float(found.dense_bytes)))
        run.update(gradients(SHAPES, step))
    plan = gradwire.plan(SHAPES, PowerSGD(2))
    assert sent == [plan.dense_bytes, plan.dense_bytes, plan.wire_bytes, plan.wire_bytes]
    whole, wire = plan.dense_bytes, plan.wire_bytes
    assert total == [(0, 0), (whole, whole), (2 * whole, 2 * whole), (2 * whole + wire, 3 * whole)]
    assert np.isclose(found.compression_ratio, 3 * whole / (2 * whole + wire))


def test_what_torch_has_too_is_called_the_same():
    run = Replicas(gw.power_sgd(2, axis_name=AXIS), PARAMS)
    run.update(gradients(SHAPES, 0))
    found = gw.stats(run.state)
    theirs = Stats(1, 0, 2, 100, 200, error_norms=((100, 1.0),))
    assert found.scalars().keys() == theirs.scalars().keys()
    assert {"wire_bytes", "error_norm"} == {name for name in found._fields if not hasattr(theirs, name)}
    assert found.steps == 1


@pytest.mark.parametrize("algorithm", [PowerSGD(2), PowerSGD(2, error_feedback=False)], ids=repr)
def test_averages_are_compared_with_those_of_what_went_in(algorithm):
    tx = gw.average_gradients(algorithm, axis_name=AXIS)

    def update(g, state):
        averages, after = tx.update(g, state)
        return (averages, gw.relative_error(g, averages, state, axis_name=AXIS)), after

    run = Replicas(optax.GradientTransformation(tx.init, update), PARAMS)
    for step in range(2):
        given, errors = gradients(SHAPES, step), run.global_state().local.per_replica.get("error", {})
        averages, found = run.update(given)
    off, norms = {}, {}
    for name in SHAPES:
        left_out = errors.get(name)
        mean = np.mean([g[name] for g in given], 0, dtype=np.float64)
        mean += np.mean(left_out, 0, dtype=np.float64) if isinstance(left_out, np.ndarray) else 0
        off[name], norms[name] = np.linalg.norm(averages[name] - mean), np.linalg.norm(mean)
        assert np.isclose(found.by_parameter[name], off[name] / norms[name], rtol=1e-4, atol=1e-6)
    whole = np.linalg.norm(list(off.values())) / np.linalg.norm(list(norms.values()))
    assert np.isclose(found.whole, whole, rtol=1e-4)
    assert found.by_parameter["b"] < 1e-6 < 0.01 < found.whole < 1


def test_of_the_state_as_a_whole_and_inside_the_training_step():
    tx = gw.power_sgd(2, axis_name=AXIS)
    state = gw.distribute(tx.init(PARAMS), mesh_of(4), AXIS)
    specs = gw.partition_specs(state, AXIS)

    def step(g, state):
        _, state = tx.update(jax.tree.map(lambda x: x[0], g), state)
        return state, jax.tree.map(lambda x: gw.mark_varying(x, AXIS)[None], gw.stats(state))

    shards = {"in_specs": (jax.P(AXIS), specs), "out_specs": (specs, jax.P(AXIS))}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh_of(4), **shards))
    for t in range(3):
        given = gradients(SHAPES, t)
        if t == 1:
            given[2]["b"][3] = np.nan
        state, inside = mapped(jax.tree.map(lambda *x: jnp.stack(x), *given), state)
    whole = jax.jit(gw.stats)(state)
    rows = jax.tree.leaves(jax.tree.map(np.asarray, state.local))
    norms = np.sqrt(sum((x.astype(np.float64) ** 2).reshape(4, -1).sum(1) for x in rows))
    assert norms.min() > 0
    assert np.allclose(inside.error_norm, norms, rtol=1e-5)
    assert np.isclose(whole.error_norm, np.sqrt((norms**2).mean()), rtol=1e-5)
    assert (int(whole.steps), int(whole.skipped_steps)) == (3, 1)
    assert inside.skipped_steps.tolist() == [1] * 4


def test_of_several_transformations_and_of_nnx():
    low, dense = gw.power_sgd(2, axis_name=AXIS), gw.average_gradients(AllReduce(), axis_name=AXIS)
    tx = optax.partition({"low": low, "dense": dense}, {"w": "low", "b": "dense", "v": "low"})
    assert gw.stats(tx.init(PARAMS)).wire_bytes == gradwire.plan(SHAPES, PowerSGD(2)).wire_bytes
    model = nnx.Linear(32, 24, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(gw.power_sgd(2, axis_name=AXIS), optax.adam(1e-3)), wrt=nnx.Param)
    plan = gradwire.plan(gw.parameter_shapes(nnx.state(model, nnx.Param)), PowerSGD(2))
    assert gw.stats(optimizer.opt_state).wire_bytes == plan.wire_bytes
