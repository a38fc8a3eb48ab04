"""A training state in its three forms: nothing is lost on the way from one to another, whatever it is wrapped in."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import gradwire.jax_backend as gw
from tests.jax.replicas import AXIS, equal, mesh_of

PARAMS = {"w": jnp.ones((12, 8)), "b": jnp.ones(8)}
TX = optax.chain(gw.power_sgd(2, axis_name=AXIS), optax.adam(1e-2))


def train_state(axis_name=AXIS):
    tx = TX if axis_name == AXIS else optax.chain(gw.power_sgd(2, axis_name=axis_name), optax.adam(1e-2))
    return TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


def with_errors(state, replicas=4):
    """The state in global form, with another error on each replica."""
    rows = np.arange(replicas * 96, dtype=np.float32).reshape(replicas, 12, 8)
    inner = state.opt_state[0]
    errors = inner.local.per_replica["error"] | {"w": rows}
    record = replace(inner.record, per_replica=np.zeros(replicas, bool))
    inner = inner._replace(local=gw.PerReplica({"error": errors}), record=record)
    return state.replace(opt_state=(inner, *state.opt_state[1:]))


def error_of(state):
    return state.opt_state[0].local.per_replica["error"]["w"]


def test_specs_mark_the_error_and_nothing_else():
    specs = gw.partition_specs(train_state(), AXIS)
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, jax.P))[0]
    marked = [jax.tree_util.keystr(path) for path, spec in leaves if spec != jax.P()]
    assert marked == [".opt_state[0].local.per_replica['error']['w']", ".opt_state[0].record.per_replica"]
    assert error_of(specs) == jax.P(AXIS)
    two = "hosts", AXIS
    assert error_of(gw.partition_specs(train_state(two), two)) == jax.P(two)
    of_shapes = gw.partition_specs(jax.eval_shape(train_state), AXIS)
    assert jax.tree.leaves(jax.tree.map(str, of_shapes)) == jax.tree.leaves(jax.tree.map(str, specs))


@pytest.mark.parametrize(("replicas", "first"), [(4, 0), (2, 2)])
def test_pmap_form_and_back_keeps_every_replicas_error(replicas, first):
    """Also on some of the devices."""
    state, devices = with_errors(train_state(), replicas), jax.devices()[first:]
    spread = gw.replicate(state, devices, axis_name=AXIS)
    assert error_of(spread).shape == (replicas, 1, 12, 8)
    assert {s.device: s.data.shape for s in error_of(spread).addressable_shards} == dict.fromkeys(
        devices, (1, 1, 12, 8)
    )
    assert spread.params["w"].shape == (replicas, 12, 8)
    assert equal(gw.unreplicate(spread), state.replace(step=jnp.asarray(0)))


def test_local_form_becomes_the_start_of_every_replica():
    for state in (gw.unreplicate(gw.replicate(train_state())), gw.distribute(train_state(), mesh_of(4), AXIS)):
        assert error_of(state).shape == (4, 12, 8)
        assert not error_of(state).any()


def test_global_form_lies_one_row_on_each_device():
    state = with_errors(train_state())
    placed = gw.distribute(state, mesh_of(4), AXIS)
    assert equal(jax.tree.map(np.asarray, placed), jax.tree.map(np.asarray, state))
    for i, shard in enumerate(error_of(placed).addressable_shards):
        assert np.array_equal(shard.data, error_of(state)[i : i + 1])
    assert placed.params["w"].sharding.is_fully_replicated
    assert equal(gw.distribute(placed, mesh_of(4), AXIS), placed)
    assert equal(gw.unreplicate(gw.replicate(placed)), jax.tree.map(jnp.asarray, state))


def test_several_axes_are_replicas_together():
    mesh = jax.make_mesh((2, 2), ("hosts", AXIS), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = gw.distribute(with_errors(train_state(("hosts", AXIS))), mesh, ("hosts", AXIS))
    assert [float(s.data[0, 0, 0]) for s in error_of(placed).addressable_shards] == [0, 96, 192, 288]
    # Over one of two axes: two replicas, each on two devices.
    placed = gw.distribute(with_errors(train_state("hosts"), 2), mesh, "hosts")
    assert [float(s.data[0, 0, 0]) for s in error_of(placed).addressable_shards] == [0, 0, 96, 96]


def test_a_step_under_pmap_is_compiled_once():
    traced = []

    def step(state):
        traced.append(1)
        return state

    mapped = jax.pmap(step, axis_name=AXIS)
    state = gw.replicate(gw.power_sgd(2, axis_name=AXIS).init(PARAMS), axis_name=AXIS)
    mapped(mapped(mapped(state)))
    assert len(traced) == 1


def test_flax_serialization_round_trip():
    state = with_errors(train_state())
    blank = jax.tree.map(jnp.zeros_like, state)
    assert equal(serialization.from_bytes(blank, serialization.to_bytes(state)), state)


def test_orbax_round_trip_of_a_distributed_state(tmp_path):
    placed = gw.distribute(with_errors(train_state()), mesh_of(4), AXIS)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", placed)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, placed))
        plain = checkpointer.restore(tmp_path / "state")
    assert equal(restored, placed)
    # Restored with no target, types are gone; the mark is not.
    specs = jax.tree_util.tree_flatten_with_path(
        gw.partition_specs(plain, AXIS), is_leaf=lambda x: isinstance(x, jax.P)
    )[0]
    assert [jax.tree_util.keystr(p) for p, s in specs if s != jax.P()] == [
        "['opt_state'][0]['local']['per_replica']['error']['w']",
        "['opt_state'][0]['record']['per_replica']",
    ]


@pytest.mark.parametrize("leaf", [np.float32(2), 3, jnp.bfloat16(1.5), np.arange(3), jax.random.key(3)])
def test_leaves_of_every_kind(leaf):
    spread = gw.replicate({"x": leaf})["x"]
    assert spread.shape == (4, *np.shape(leaf))
    for back in gw.unreplicate({"x": spread})["x"], gw.distribute({"x": leaf}, mesh_of(4), AXIS)["x"]:
        data = jax.random.key_data if jnp.issubdtype(back.dtype, jax.dtypes.prng_key) else np.asarray
        assert np.array_equal(data(back), data(leaf))


def test_the_state_that_was_given_survives_donation():
    state = train_state()
    forget = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for placed in (gw.distribute(state, mesh_of(4), AXIS), gw.replicate(state)):
        forget(placed)
        assert error_of(placed).is_deleted()
        assert equal(state, train_state())
