"""States of replicas that are divided among devices: made where they belong, saved, and restored on another mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradwire.jax_backend as gw
from tests.jax.replicas import through_orbax

pytestmark = pytest.mark.slow

SPECS = {"up": P(None, "ici"), "down": P("ici"), "bias": P("ici")}
TX = optax.chain(gw.power_sgd(2, axis_name="dcn"), optax.adam(1e-2))


def mesh_of(replicas, devices, kind=AxisType.Auto):
    there = jax.devices()[: replicas * devices]
    return jax.make_mesh((replicas, devices), ("dcn", "ici"), axis_types=(kind, kind), devices=there)


def params_on(mesh):
    shapes = {"up": (16, 32), "down": (32, 16), "bias": (32,)}
    values = {n: np.random.default_rng(len(n)).normal(size=s).astype(np.float32) / 4 for n, s in shapes.items()}
    return {n: jax.device_put(x, NamedSharding(mesh, SPECS[n])) for n, x in values.items()}


def fresh(mesh):
    params = params_on(mesh)
    return params, TX.init(params)


def alike(x, y):
    """Equal, and equally divided among the same devices."""
    assert jax.tree.structure(x) == jax.tree.structure(y)
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(x)[0], jax.tree.leaves(y), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), jax.tree_util.keystr(path)
        assert np.array_equal(a, b)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_a_state_that_is_made_where_it_lies(kind):
    """No device ever holds more of it than its part, and nothing is sent."""
    mesh = mesh_of(2, 2, kind)
    params = params_on(mesh)

    def make(params):
        return params, TX.init(params)

    shapes = gw.abstract_state(jax.eval_shape(make, params), 2, mesh, "dcn", params=params)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    program = jax.jit(lambda p: gw.distribute(make(p), mesh, "dcn"), out_shardings=shardings).lower(params).compile()
    assert not any(f" {c}(" in program.as_text() for c in ("all-gather", "all-to-all", "all-reduce"))
    alike(program(params), gw.distribute(fresh(mesh), mesh, "dcn"))


def test_shapes_as_parameters_lie():
    """A parameter is known by the end of a path and by its shape, under local SGD too."""
    mesh = mesh_of(2, 2)
    params = {"layer": params_on(mesh), "up": jax.device_put(jnp.ones((16, 32)), NamedSharding(mesh, P("ici")))}
    tx = gw.diloco(optax.adam(1e-2), 4, axis_name="dcn")

    def make(params):
        return gw.stack_replicas((params, tx.init(params)))

    shapes = gw.abstract_state(jax.eval_shape(make, params), 2, mesh, "dcn", params=params)
    own, state = shapes.per_replica
    for tree in (own, state.averages.memory["outer"], state.averages.memory["velocity"], state.inner[0].mu):
        assert tree["layer"]["up"].sharding.spec == P("dcn", None, "ici")
        assert tree["layer"]["down"].sharding.spec == tree["up"].sharding.spec == P("dcn", "ici")
    assert state.inner[0].count.sharding.spec == P("dcn")


def batch(step):
    return np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)


@functools.cache
def trainer(mesh):
    """A compiled step on this mesh."""
    state = gw.distribute(fresh(mesh), mesh, "dcn")
    specs = gw.partition_specs(state, "dcn")

    def loss(params, x):
        return jnp.square(jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - x).mean()

    def step(state, x):
        params, opt_state = state
        g = jax.grad(loss)(gw.mark_varying(params, "dcn"), x)
        updates, opt_state = TX.update(g, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P("dcn")), out_specs=specs, axis_names={"dcn"})
    return jax.jit(mapped, out_shardings=jax.tree.map(lambda x: x.sharding, state))


def run(state, mesh, steps):
    for t in steps:
        state = trainer(mesh)(state, jax.device_put(batch(t), NamedSharding(mesh, P(("dcn", "ici")))))
    return state


@functools.cache
def trained_on_two():
    """Replicas of two devices, for three steps."""
    mesh = mesh_of(2, 2)
    return run(gw.distribute(fresh(mesh), mesh, "dcn"), mesh, range(3))


@pytest.mark.parametrize("shape", [(2, 1), (4, 1)], ids=str)
def test_saved_and_restored_on_another_mesh(shape, tmp_path):
    """The same replicas in smaller slices, and more replicas."""
    before, trained = mesh_of(2, 2), trained_on_two()
    now = mesh_of(*shape)
    shapes = gw.abstract_state(fresh(now), 2, now, "dcn")
    state = through_orbax(trained, tmp_path, shapes)
    for x, y, wanted in zip(*map(jax.tree.leaves, (state, trained, shapes)), strict=True):
        assert np.array_equal(x, y)
        assert x.sharding == wanted.sharding
    if shape[0] != 2:
        state = gw.distribute(gw.set_replicas(state, shape[0]), now, "dcn")
    again, expected = run(state, now, range(3, 5)), run(trained, before, range(3, 5))
    for x, y in zip(*(jax.tree.leaves(s[0]) for s in (again, expected)), strict=True):
        assert np.allclose(x, y, atol=1e-3)
    error = again[1][0].local.per_replica["error"]["up"]
    assert error.sharding.shard_shape(error.shape) == (1, 16, 32 // shape[1])
