"""What restores a checkpoint into a fresh run, and what compiles ahead of time: shapes with shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding

import gradwire.jax_backend as gw
from tests.jax.replicas import AXIS, mesh_of, through_orbax

#: 12 examples a step, which 1, 2, 3 and 4 replicas share equally.
PARAMS = {"w": np.linspace(-1, 1, 24 * 16, dtype=np.float32).reshape(24, 16), "b": np.zeros(16, np.float32)}


@functools.cache
def transformation():
    return optax.chain(gw.power_sgd(2, axis_name=AXIS), optax.adam(1e-2))


def fresh():
    return TrainState.create(apply_fn=None, params=PARAMS, tx=transformation())


def loss(params, x):
    return jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - jnp.sin(x[:, :16])).mean()


def batch(step):
    return np.random.default_rng(step).standard_normal((12, 24)).astype(np.float32)


@functools.cache
def train_step(replicas):
    specs = gw.partition_specs(fresh(), AXIS)

    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss)(state.params, x))

    specs = {"in_specs": (specs, jax.P(AXIS)), "out_specs": specs}
    mapped = jax.shard_map(step, mesh=mesh_of(replicas), **specs, check_vma=False)
    return jax.jit(mapped)


def run(state, replicas, steps):
    for t in steps:
        state = train_step(replicas)(state, batch(t))
    return state


def errors(state):
    return state.opt_state[0].local.per_replica["error"]["w"]


@functools.cache
def trained(replicas, steps):
    return run(gw.distribute(fresh(), mesh_of(replicas), AXIS), replicas, range(steps))


def close(x, y, tolerance=1e-5):
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def test_a_fresh_run_restores_its_checkpoint_and_goes_on(tmp_path):
    shapes = gw.abstract_state(fresh(), 4, mesh_of(4), AXIS)
    state = through_orbax(trained(4, 3), tmp_path, shapes)
    assert jax.tree.structure(state) == jax.tree.structure(fresh())
    for x, y, shape in zip(*map(jax.tree.leaves, (state, trained(4, 3), shapes)), strict=True):
        assert np.array_equal(x, y)
        assert x.sharding == shape.sharding
    again = run(state, 4, range(3, 6))
    assert all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (again, trained(4, 6))), strict=True))


@pytest.mark.parametrize(("before", "now"), [(4, 2), (3, 4)])
def test_on_another_number_of_devices(before, now, tmp_path):
    state = through_orbax(trained(before, 3), tmp_path, gw.abstract_state(fresh(), before, mesh_of(now), AXIS))
    assert errors(state).shape == (before, 24, 16)
    assert np.array_equal(errors(state), errors(trained(before, 3)))
    # No device holds more than its share of the rows.
    assert {shard.data.size for shard in errors(state).addressable_shards} == {before * 24 * 16 // now}
    state = gw.distribute(gw.set_replicas(state, now), mesh_of(now), AXIS)
    assert [shard.data.shape for shard in errors(state).addressable_shards] == [(1, 24, 16)] * now
    assert close(run(state, now, range(3, 6)).params, trained(before, 6).params)


def test_it_is_what_distribute_makes():
    """Without a mesh, for pmap, but for where it lies."""
    mesh, tx = mesh_of(4), gw.diloco(optax.adam(1e-2), 4, axis_name=AXIS)
    local = gw.stack_replicas((PARAMS, tx.init(PARAMS)))
    for state in (fresh(), trained(4, 3), gw.unreplicate(gw.replicate(fresh())), local):
        trees = (gw.distribute(state, mesh, AXIS), gw.abstract_state(state, 4, mesh, AXIS), gw.abstract_state(state, 4))
        for x, shape, no_mesh in zip(*map(jax.tree.leaves, trees), strict=True):
            assert (x.shape, x.dtype) == (shape.shape, shape.dtype) == (no_mesh.shape, no_mesh.dtype)
            assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)
            assert no_mesh.sharding is None


def test_compiled_ahead_of_time_and_made_where_it_lies():
    shapes = gw.abstract_state(jax.eval_shape(fresh), 4, mesh_of(4), AXIS)
    compiled = train_step(4).lower(shapes, jax.ShapeDtypeStruct((12, 24), jnp.float32)).compile()
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    made = jax.jit(lambda: gw.distribute(fresh(), mesh_of(4), AXIS), out_shardings=shardings)()
    x = jax.device_put(batch(0), compiled.input_shardings[0][1])
    expected = gw.distribute(fresh(), mesh_of(4), AXIS)
    assert close(compiled(expected, x), trained(4, 1), 0)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_what_is_sharded_over_another_axis_stays_so():
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    params = jax.device_put(PARAMS, {"w": NamedSharding(mesh, jax.P("ici")), "b": NamedSharding(mesh, jax.P())})
    state = params, optax.chain(gw.power_sgd(2, axis_name="dcn"), optax.adam(1e-3)).init(params)
    error = gw.abstract_state(state, 2, mesh, "dcn")[1][0].local.per_replica["error"]["w"]
    assert (error.shape, error.sharding.spec) == ((2, 24, 16), jax.P("dcn", "ici"))
    weights, moments = (gw.abstract_state(state, 2, mesh, "dcn")[i] for i in (0, 1))
    assert weights["w"].sharding.spec == moments[1][0].mu["w"].sharding.spec == jax.P("ici")
    # Of three rows for two replicas each is cut along an axis that is still whole.
    error = gw.abstract_state(state, 3, mesh, "dcn")[1][0].local.per_replica["error"]["w"]
    assert error.sharding.spec == jax.P(None, "ici", "dcn")
