"""On its way to the devices and back a state stays on them: no host and no device comes to hold the memory of all replicas."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding

import gradwire.jax_backend as gw
from gradwire.jax_backend.state import checkpoint, placement, survey
from tests.jax.replicas import AXIS, mesh_of

PARAMS = {"w": jnp.linspace(-1, 1, 24 * 16).reshape(24, 16), "b": jnp.zeros(16)}
TX = optax.chain(gw.power_sgd(2, axis_name=AXIS), optax.adam(1e-2))


def errors(state):
    return state[0].local.per_replica["error"]["w"]


def with_errors(state):
    """Another error on each replica, of a distributed state."""
    first = state[0]
    add = jax.jit(lambda x: x + jnp.arange(x.shape[0], dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)))
    return first._replace(local=jax.tree.map(add, first.local)), *state[1:]


@pytest.fixture
def no_host(monkeypatch):
    """Nothing that a state passes through may bring an array of a parameter's size to the host."""

    class Guarded:
        def __getattr__(self, name):
            return getattr(np, name)

        def asarray(self, x, *args, **kwargs):
            assert not (isinstance(x, jax.Array) and x.size > 8), "an array came to the host"
            return np.asarray(x, *args, **kwargs)

        array = asarray

    for module in (placement, checkpoint, survey):
        monkeypatch.setattr(module, "np", Guarded())
    for owner, name in ((jax, "device_get"), (multihost_utils, "process_allgather")):
        monkeypatch.setattr(owner, name, lambda *a, **k: pytest.fail("an array came to the host"))


@pytest.mark.usefixtures("no_host")
def test_no_array_comes_to_the_host_and_no_device_holds_all_rows():
    placed = with_errors(gw.distribute(TX.init(PARAMS), mesh_of(4), AXIS))
    spread = gw.replicate(placed, axis_name=AXIS)
    back = gw.unreplicate(spread)
    for state in (placed, back, gw.distribute(back, mesh_of(4), AXIS)):
        rows = errors(state)
        assert [shard.data.shape for shard in rows.addressable_shards] == [(1, 24, 16)] * 4
        assert {shard.device for shard in rows.addressable_shards} == set(jax.devices())
        for i, shard in enumerate(rows.addressable_shards):
            assert np.array_equal(shard.data, np.full((1, 24, 16), i))
    smaller = gw.set_replicas(back, 2)
    assert [shard.data.shape for shard in errors(smaller).addressable_shards] == [(1, 24, 16)] * 4
    assert np.array_equal(errors(smaller)[0], np.full((24, 16), 1.5))
    assert errors(gw.distribute(smaller, mesh_of(2), AXIS)).shape == (2, 24, 16)
    assert errors(gw.replicate(smaller, jax.devices()[:2])).shape == (2, 1, 24, 16)


def sharded_params():
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(AxisType.Auto,) * 2)
    shardings = {"w": NamedSharding(mesh, jax.P(None, "ici")), "b": NamedSharding(mesh, jax.P("ici"))}
    return mesh, jax.device_put(PARAMS, shardings)


@pytest.mark.usefixtures("no_host")
def test_memory_lies_as_its_parameter_does():
    mesh, params = sharded_params()
    tx = optax.chain(gw.power_sgd(2, axis_name="dcn"), optax.adam(1e-2))
    state = tx.init(params)
    assert errors(state).sharding.spec == jax.P(None, None, "ici")
    assert state[0].memory["q"]["w"].sharding.is_fully_replicated
    everything = params, gw.distribute(state, mesh, "dcn")
    (weights, (mine, (adam, _))), specs = gw.distribute(everything, mesh, "dcn"), jax.P("dcn", None, "ici")
    assert mine.local.per_replica["error"]["w"].sharding.spec == specs
    for tree in (weights, adam.mu, adam.nu):
        assert (tree["w"].sharding.spec, tree["b"].sharding.spec) == (jax.P(None, "ici"), jax.P("ici"))
    fewer = gw.set_replicas(everything, 1)[1]
    assert errors(fewer).sharding.spec == jax.P(None, None, "ici")
    # Shapes with shardings make the same state as arrays.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    assert errors((gw.power_sgd(2, axis_name="dcn").init(shapes),)).sharding.spec == jax.P(None, None, "ici")


def test_outer_parameters_of_diloco_lie_as_their_parameters_do():
    mesh, params = sharded_params()
    tx = gw.diloco(optax.sgd(0.1), 4, axis_name="dcn")
    state = tx.init(params)
    placed = gw.distribute(gw.stack_replicas((params, state)), mesh, "dcn").per_replica
    for memory in ("outer", "velocity"):
        assert state.averages.memory[memory]["w"].sharding.spec == jax.P(None, "ici")
        assert placed[1].averages.memory[memory]["w"].sharding.spec == jax.P("dcn", None, "ici")
    assert placed[0]["w"].sharding.spec == jax.P("dcn", None, "ici")


@pytest.mark.parametrize(
    ("options", "check_vma", "kind"),
    [
        ({}, False, AxisType.Explicit),
        ({"square": True}, False, AxisType.Auto),
        ({"half_step": True, "start_step": 1}, True, AxisType.Explicit),
    ],
    ids=str,
)
def test_training_with_an_axis_that_is_left_to_the_compiler(options, check_vma, kind):
    """Over "dcn" by hand, over "ici" as parameters are sharded: the numbers are those of two replicas with whole parameters."""
    mesh = jax.make_mesh((2, 2), ("dcn", "ici"), axis_types=(kind, kind))
    tx = gw.power_sgd(2, axis_name="dcn", **options)
    given = {
        "w": np.random.default_rng(0).standard_normal((2, 24, 16)).astype(np.float32),
        "b": np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32),
    }

    def run(mesh, spec, manual):
        params = jax.device_put(PARAMS, {k: NamedSharding(mesh, s) for k, s in spec.items()})
        state = gw.distribute(tx.init(params), mesh, "dcn")
        specs = gw.partition_specs(state, "dcn")
        mapped = jax.shard_map(
            lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
            mesh=mesh,
            in_specs=(jax.P("dcn"), specs),
            out_specs=(jax.P(), specs),
            axis_names=manual,
            check_vma=check_vma,
        )
        gradients = jax.device_put(given, {k: NamedSharding(mesh, jax.P("dcn", *s)) for k, s in spec.items()})
        step = jax.jit(mapped)
        for _ in range(3):
            updates, state = step(gradients, state)
        return updates, state

    explicit = kind == AxisType.Explicit
    with pytest.warns(UserWarning, match="'ici' is of AxisType.Explicit") if explicit else contextlib.nullcontext():
        updates, state = run(mesh, {"w": jax.P("ici"), "b": jax.P()}, {"dcn"})
    if kind == AxisType.Explicit:
        assert updates["w"].sharding.spec == jax.P("ici", None)
    plain = jax.make_mesh((2,), ("dcn",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    expected = run(plain, {"w": jax.P(), "b": jax.P()}, {"dcn"})
    for x, y in zip(jax.tree.leaves((updates, state)), jax.tree.leaves(expected), strict=True):
        assert np.allclose(x, y, rtol=1e-3, atol=1e-4)
