"""A training state in its forms: nothing is lost from one to another, whatever it is wrapped in,
and no device comes to hold the memory of all replicas."""

import functools
import logging
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import torch
from flax import serialization
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding

import gradwire.jax_backend as gw
from gradwire import PowerSGD, WireDtype
from gradwire.jax_backend.state import checkpoint, placement, survey
from tests import launch
from tests.jax.replicas import AXIS, Replicas, equal, gradients, mesh_of, through_orbax
from tests.launch import LIMIT

PARAMS = {
    "w": np.linspace(-1, 1, 24 * 16, dtype=np.float32).reshape(24, 16),
    "b": np.zeros(16, np.float32),
}
ROWS = (24, 16)


@functools.cache
def transformation(axis_name):
    return optax.chain(gw.power_sgd(2, axis_name=axis_name), optax.adam(1e-2))


def train_state(axis_name=AXIS, params=PARAMS):
    return TrainState.create(apply_fn=None, params=params, tx=transformation(axis_name))


def with_errors(state, replicas=4):
    """The state in global form, with another error on each replica."""
    rows = np.arange(replicas * 384, dtype=np.float32).reshape(replicas, *ROWS)
    inner = state.opt_state[0]
    errors = inner.local.per_replica["error"] | {"w": rows}
    record = replace(inner.record, per_replica=np.zeros(replicas, bool))
    inner = inner._replace(local=gw.PerReplica({"error": errors}), record=record)
    return state.replace(opt_state=(inner, *state.opt_state[1:]))


def error_of(state):
    return state.opt_state[0].local.per_replica["error"]["w"]


def shapes_on_devices(x):
    return [shard.data.shape for shard in x.addressable_shards]


def marked(specs):
    leaves = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, jax.P))[0]
    return [jax.tree_util.keystr(path) for path, spec in leaves if spec != jax.P()]


def test_specs_mark_the_error_and_nothing_else():
    specs = gw.partition_specs(train_state(), AXIS)
    assert marked(specs) == [
        ".opt_state[0].local.per_replica['error']['w']",
        ".opt_state[0].record.per_replica",
    ]
    assert error_of(specs) == jax.P(AXIS)
    two = "hosts", AXIS
    assert error_of(gw.partition_specs(train_state(two), two)) == jax.P(two)
    of_shapes = gw.partition_specs(jax.eval_shape(train_state), AXIS)
    assert jax.tree.leaves(jax.tree.map(str, of_shapes)) == jax.tree.leaves(
        jax.tree.map(str, specs)
    )


@pytest.mark.parametrize(("replicas", "first"), [(4, 0), (2, 2)])
def test_pmap_form_and_back_keeps_every_replicas_error(replicas, first):
    """Also on some of the devices."""
    state, devices = with_errors(train_state(), replicas), jax.devices()[first:]
    spread = gw.replicate(state, devices, axis_name=AXIS)
    assert error_of(spread).shape == (replicas, 1, *ROWS)
    assert {s.device: s.data.shape for s in error_of(spread).addressable_shards} == dict.fromkeys(
        devices, (1, 1, *ROWS)
    )
    assert spread.params["w"].shape == (replicas, *ROWS)
    back = state.replace(step=jnp.asarray(0))
    assert equal(gw.unreplicate(spread), back)
    # As the compiler may lay what a step under `jax.vmap` returns.
    whole = jax.NamedSharding(jax.make_mesh((replicas,), (AXIS,), devices=devices), jax.P())
    assert equal(gw.unreplicate(jax.device_put(spread, whole)), back)


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
    """And a state that was made by `init` is the start of every replica."""
    begun = gw.distribute(train_state(), mesh_of(4), AXIS)
    assert all(
        not error_of(state).any() for state in (begun, gw.unreplicate(gw.replicate(train_state())))
    )
    first = begun.opt_state[0]
    add = jax.jit(lambda x: x + jnp.arange(4, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)))
    own = first._replace(local=jax.tree.map(add, first.local))
    placed = begun.replace(opt_state=(own, *begun.opt_state[1:]))
    back = gw.unreplicate(gw.replicate(placed, axis_name=AXIS))
    for state in (
        placed,
        back,
        gw.distribute(back, mesh_of(4), AXIS),
        gw.distribute(placed, mesh_of(4), AXIS),
    ):
        shards = error_of(state).addressable_shards
        assert {shard.device for shard in shards} == set(jax.devices())
        for i, shard in enumerate(shards):
            assert np.array_equal(shard.data, np.full((1, *ROWS), i))
        assert state.params["w"].sharding.is_fully_replicated
    smaller = gw.set_replicas(back, 2)
    assert shapes_on_devices(error_of(smaller)) == [(1, *ROWS)] * 4
    assert np.array_equal(error_of(smaller)[0], np.full(ROWS, 1.5))
    assert error_of(gw.distribute(smaller, mesh_of(2), AXIS)).shape == (2, *ROWS)
    assert error_of(gw.replicate(smaller, jax.devices()[:2])).shape == (2, 1, *ROWS)


def test_several_axes_are_replicas_together():
    mesh = jax.make_mesh((2, 2), ("hosts", AXIS), axis_types=(AxisType.Auto,) * 2)
    placed = gw.distribute(with_errors(train_state(("hosts", AXIS))), mesh, ("hosts", AXIS))
    assert [float(s.data[0, 0, 0]) for s in error_of(placed).addressable_shards] == [
        0,
        384,
        768,
        1152,
    ]
    # Over one of two axes: two replicas, each on two devices.
    placed = gw.distribute(with_errors(train_state("hosts"), 2), mesh, "hosts")
    assert [float(s.data[0, 0, 0]) for s in error_of(placed).addressable_shards] == [0, 0, 384, 384]


def test_a_step_under_pmap_is_compiled_once():
    traced = []

    def step(state):
        traced.append(1)
        return state

    mapped = jax.pmap(step, axis_name=AXIS)
    mapped(mapped(mapped(gw.replicate(transformation(AXIS).init(PARAMS), axis_name=AXIS))))
    assert len(traced) == 1


def test_checkpoints_of_flax_and_of_orbax_without_a_target(tmp_path):
    """In which types are gone; the mark is not."""
    state = with_errors(train_state())
    assert equal(
        serialization.from_bytes(
            jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state)
        ),
        state,
    )
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", gw.distribute(state, mesh_of(4), AXIS))
        checkpointer.wait_until_finished()
        plain = checkpointer.restore(tmp_path / "state")
    assert marked(gw.partition_specs(plain, AXIS)) == [
        "['opt_state'][0]['local']['per_replica']['error']['w']",
        "['opt_state'][0]['record']['per_replica']",
    ]


LATE = """
import sys, jax, jax.numpy as jnp, optax
from gradwire.jax_backend import power_sgd
state = optax.chain(power_sgd(2, axis_name="data"), optax.adam(0.1)).init({"w": jnp.ones((64, 32))})
assert "flax" not in sys.modules
from flax import serialization
again = serialization.from_bytes(jax.tree.map(jnp.zeros_like, state), serialization.to_bytes(state))
assert jax.tree.structure(again) == jax.tree.structure(state)
assert all((x == y).all() for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state)))
assert serialization.__spec__.loader.get_source("flax.serialization")
"""


def test_flax_may_be_imported_after_a_state_was_made():
    subprocess.run(
        [sys.executable, "-c", LATE], env=launch.environment("late"), check=True, timeout=LIMIT
    )


@pytest.mark.parametrize(
    "leaf", [np.float32(2), 3, jnp.bfloat16(1.5), np.arange(3), jax.random.key(3)]
)
def test_leaves_of_every_kind(leaf):
    spread = gw.replicate({"x": leaf})["x"]
    assert spread.shape == (4, *np.shape(leaf))
    for back in (
        gw.unreplicate({"x": spread})["x"],
        gw.distribute({"x": leaf}, mesh_of(4), AXIS)["x"],
    ):
        data = (
            jax.random.key_data if jnp.issubdtype(back.dtype, jax.dtypes.prng_key) else np.asarray
        )
        assert np.array_equal(data(back), data(leaf))


def test_the_state_that_was_given_survives_donation():
    state = train_state()
    forget = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for placed in (gw.distribute(state, mesh_of(4), AXIS), gw.replicate(state)):
        forget(placed)
        assert error_of(placed).is_deleted()
        assert equal(state, train_state())


# Of replicas that may be divided among devices: along "dcn" replicas, along "ici" their devices.

SPECS = {"w": jax.P(None, "ici"), "b": jax.P("ici")}


@functools.cache
def slices(replicas, devices=1, kind=AxisType.Auto):
    there = jax.devices()[: replicas * devices]
    return jax.make_mesh(
        (replicas, devices), ("dcn", "ici"), axis_types=(kind, kind), devices=there
    )


def params_on(mesh):
    return jax.device_put(PARAMS, {n: NamedSharding(mesh, spec) for n, spec in SPECS.items()})


def fresh(mesh):
    return train_state("dcn", params_on(mesh))


def batch(step):
    """12 examples, which 1, 2, 3 and 4 replicas share equally."""
    return np.random.default_rng(step).standard_normal((12, 24)).astype(np.float32)


@functools.cache
def train_step(mesh):
    state = gw.distribute(fresh(mesh), mesh, "dcn")
    specs = gw.partition_specs(state, "dcn")

    def loss(params, x):
        return jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - jnp.sin(x[:, :16])).mean()

    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss)(gw.mark_varying(state.params, "dcn"), x))

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, jax.P("dcn")), out_specs=specs, axis_names={"dcn"}
    )
    return jax.jit(mapped, out_shardings=jax.tree.map(lambda x: x.sharding, state))


def run(state, mesh, steps):
    for t in steps:
        state = train_step(mesh)(
            state, jax.device_put(batch(t), NamedSharding(mesh, jax.P(("dcn", "ici"))))
        )
    return state


@functools.cache
def trained(mesh, steps):
    return run(gw.distribute(fresh(mesh), mesh, "dcn"), mesh, range(steps))


RESTORED = [
    ((4, 1), (4, 1)),
    ((4, 1), (2, 1)),
    ((3, 1), (4, 1)),
    pytest.param((2, 2), (2, 1), marks=pytest.mark.slow),  # in smaller slices
    pytest.param((2, 2), (4, 1), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("before", "now"), RESTORED)
def test_a_fresh_run_restores_a_checkpoint_and_goes_on(before, now, tmp_path):
    """On the same devices, and on others."""
    saved, mesh = trained(slices(*before), 3), slices(*now)
    shapes = gw.abstract_state(fresh(mesh), before[0], mesh, "dcn")
    state = through_orbax(saved, tmp_path, shapes)
    assert jax.tree.structure(state) == jax.tree.structure(fresh(mesh))
    for x, y, shape in zip(*map(jax.tree.leaves, (state, saved, shapes)), strict=True):
        assert np.array_equal(x, y)
        assert x.sharding == shape.sharding
    # No device holds more than its share of the rows.
    assert {shard.data.size for shard in error_of(state).addressable_shards} == {
        before[0] * 384 // now[0] // now[1]
    }
    if now[0] != before[0]:
        state = gw.distribute(gw.set_replicas(state, now[0]), mesh, "dcn")
        assert shapes_on_devices(error_of(state)) == [(1, *ROWS)] * now[0]
    tolerance = 0 if now == before else 1e-4 if before[1] == 1 else 1e-3
    again, expected = run(state, mesh, range(3, 6)).params, trained(slices(*before), 6).params
    for name, x in expected.items():
        np.testing.assert_allclose(again[name], x, rtol=tolerance, atol=tolerance)


def test_abstract_states_are_those_that_distribute_makes():
    """Without a mesh, for pmap, but for where they lie."""
    mesh, tx = mesh_of(4), gw.diloco(optax.adam(1e-2), 4, axis_name=AXIS)
    local = gw.stack_replicas((PARAMS, tx.init(PARAMS)))
    of_one = gw.distribute(train_state(), mesh, AXIS)
    for state in (train_state(), of_one, gw.unreplicate(gw.replicate(train_state())), local):
        trees = (
            gw.distribute(state, mesh, AXIS),
            gw.abstract_state(state, 4, mesh, AXIS),
            gw.abstract_state(state, 4),
        )
        for x, shape, no_mesh in zip(*map(jax.tree.leaves, trees), strict=True):
            assert (
                (x.shape, x.dtype) == (shape.shape, shape.dtype) == (no_mesh.shape, no_mesh.dtype)
            )
            assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)
            assert no_mesh.sharding is None


def test_compiled_ahead_of_time():
    mesh = slices(4)
    shapes = gw.abstract_state(jax.eval_shape(lambda: train_state("dcn")), 4, mesh, "dcn")
    compiled = train_step(mesh).lower(shapes, jax.ShapeDtypeStruct((12, 24), jnp.float32)).compile()
    start = jax.device_put(gw.distribute(fresh(mesh), mesh, "dcn"), compiled.input_shardings[0][0])
    after = compiled(start, jax.device_put(batch(0), compiled.input_shardings[0][1]))
    for x, y in zip(*map(jax.tree.leaves, (after, trained(mesh, 1))), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.parametrize(
    ("replicas", "devices", "kind"),
    [
        (4, 1, AxisType.Auto),
        pytest.param(2, 2, AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(2, 2, AxisType.Explicit, marks=pytest.mark.slow),
    ],
)
def test_a_state_that_is_made_where_it_lies(replicas, devices, kind):
    """No device ever holds more of it than its part, and nothing is sent."""
    mesh = slices(replicas, devices, kind)
    params = params_on(mesh)

    def make(params):
        return train_state("dcn", params)

    shapes = gw.abstract_state(jax.eval_shape(make, params), replicas, mesh, "dcn", params=params)
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    program = (
        jax.jit(lambda p: gw.distribute(make(p), mesh, "dcn"), out_shardings=shardings)
        .lower(params)
        .compile()
    )
    assert not any(
        f" {c}(" in program.as_text() for c in ("all-gather", "all-to-all", "all-reduce")
    )
    for x, y in zip(
        *map(jax.tree.leaves, (program(params), gw.distribute(fresh(mesh), mesh, "dcn"))),
        strict=True,
    ):
        assert np.array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


@pytest.mark.usefixtures("no_host")
def test_memory_lies_as_its_parameter_does():
    mesh = slices(2, 2)
    params, specs = params_on(mesh), jax.P("dcn", None, "ici")
    begun = fresh(mesh)
    assert error_of(begun).sharding.spec == jax.P(None, None, "ici")
    assert begun.opt_state[0].memory["q"]["w"].sharding.is_fully_replicated
    placed = gw.distribute(gw.distribute(begun, mesh, "dcn"), mesh, "dcn")
    for state in (placed, gw.abstract_state(begun, 2, mesh, "dcn")):
        assert error_of(state).sharding.spec == specs
        adam = state.opt_state[1][0]
        for tree in (state.params, adam.mu, adam.nu):
            assert {n: x.sharding.spec for n, x in tree.items()} == SPECS
    assert error_of(gw.set_replicas(placed, 1)).sharding.spec == jax.P(None, None, "ici")
    # Shapes with shardings make the same state as arrays.
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    state = gw.power_sgd(2, axis_name="dcn").init(shapes)
    assert state.local.per_replica["error"]["w"].sharding.spec == jax.P(None, None, "ici")
    # Of three rows for two replicas each is cut along an axis that is still whole.
    error = error_of(gw.abstract_state(begun, 3, mesh, "dcn"))
    assert (error.shape, error.sharding.spec) == ((3, *ROWS), jax.P(None, "dcn", "ici"))
    # Outer parameters of DiLoCo too.
    tx = gw.diloco(optax.sgd(0.1), 4, axis_name="dcn")
    local = gw.distribute(gw.stack_replicas((params, tx.init(params))), mesh, "dcn").per_replica
    memory = local[1].averages.memory
    for tree in (local[0], memory["outer"], memory["velocity"]):
        assert tree["w"].sharding.spec == specs
    assert tx.init(params).averages.memory["outer"]["w"].sharding.spec == SPECS["w"]


def test_shapes_as_parameters_lie():
    """Under local SGD too, of which every array has a row for each replica."""
    mesh = slices(2, 2)
    params = {
        "layer": params_on(mesh),
        "w": jax.device_put(jnp.ones(ROWS), NamedSharding(mesh, jax.P("ici"))),
    }
    tx = gw.diloco(optax.adam(1e-2), 4, axis_name="dcn")

    def make(params):
        return gw.stack_replicas((params, tx.init(params)))

    shapes = gw.abstract_state(jax.eval_shape(make, params), 2, mesh, "dcn", params=params)
    own, state = shapes.per_replica
    for tree in (
        own,
        state.averages.memory["outer"],
        state.averages.memory["velocity"],
        state.inner[0].mu,
    ):
        assert tree["layer"]["w"].sharding.spec == jax.P("dcn", None, "ici")
        assert tree["layer"]["b"].sharding.spec == tree["w"].sharding.spec == jax.P("dcn", "ici")
    assert state.inner[0].count.sharding.spec == jax.P("dcn")


# The compressor's state in portable form: resized, loaded into another model, and sent through
# files.

SHAPES = {"in": (24, 32), "out": (32, 16), "bias": (16,)}
HALF = PowerSGD(2, half_step=True, start_step=3)


def init(algorithm=HALF, shapes=SHAPES):
    return gw.average_gradients(algorithm, axis_name=AXIS).init(
        {n: jnp.zeros(s) for n, s in shapes.items()}
    )


@functools.cache
def trained_compressor():
    """After six steps. (That a run goes on to the bit is in tests/composition.)"""
    replicas = Replicas(
        gw.average_gradients(HALF, axis_name=AXIS), {n: jnp.zeros(s) for n, s in SHAPES.items()}
    )
    for step in range(6):
        replicas.update(gradients(SHAPES, step))
    return jax.tree.map(jnp.asarray, replicas.global_state())


def test_a_distributed_state_is_taken_as_it_lies():
    mine, mesh = trained_compressor(), mesh_of(4)
    placed = gw.distribute(mine, mesh, AXIS)
    assert jax.tree.structure(gw.partition_specs(placed, AXIS)) == jax.tree.structure(mine)
    portable = (gw.to_portable(state, HALF, errors="all") for state in (placed, mine))
    jax.tree.map(np.testing.assert_array_equal, *portable)
    assert equal(
        jax.device_get(gw.set_replicas(placed, 2)), jax.device_get(gw.set_replicas(mine, 2))
    )


def test_a_state_that_does_not_fit_is_refused_or_gives_what_fits(caplog):
    mine = trained_compressor()
    saved = gw.to_portable(mine, HALF)
    assert saved["local"]["in"]["error"].shape == (1, *SHAPES["in"])
    assert saved["replicas"] == 4
    assert type(saved["step"]) is int
    like = init(shapes={"in": (24, 32), "new": (32, 16)})
    with pytest.raises(ValueError, match=r"'out' only there, 'new' only here.*strict=False"):
        gw.from_portable(saved, HALF, like, replicas=2)
    with pytest.raises(ValueError, match=r"is of PowerSGD\(rank=2.*not of PowerSGD\(rank=3"):
        gw.from_portable(saved, PowerSGD(3), like, replicas=2)
    with pytest.raises(ValueError, match="lacks"):
        gw.from_portable({k: v for k, v in saved.items() if k != "local"}, HALF, like, replicas=2)
    with caplog.at_level(logging.WARNING):
        got = gw.from_portable(saved, HALF, like, replicas=2, strict=False)
    assert "'out'" in caplog.text
    assert "error and p and q of 1 parameters was taken over" in caplog.text
    assert int(got.step) == 6
    assert int(got.shared["phase"]) == 1
    for tree, old in ((got.memory["q"], mine.memory["q"]), (got.memory["p"], mine.memory["p"])):
        assert np.array_equal(tree["in"], old["in"])
    assert np.array_equal(got.memory["q"]["new"], like.memory["q"]["new"])
    np.testing.assert_allclose(
        got.local.per_replica["error"]["in"][0],
        mine.local.per_replica["error"]["in"].mean(0),
        rtol=0,
        atol=1e-5,
    )


def test_units_of_a_loss_scale_are_left_behind_and_orbax_brings_back_the_rest(tmp_path):
    mine = trained_compressor()
    saved = gw.to_portable(mine, HALF, errors="all")
    expected = gw.from_portable(saved, HALF, init(), replicas=4)
    # To the bit, between the halves of a step; but for what has been sent and where it lies.
    assert mine.shared["phase"] == 1
    assert equal(expected, mine._replace(account=expected.account, record=expected.record))
    scaled = saved | {"scale": 8.0, "local": jax.tree.map(lambda x: 8 * x, saved["local"])}
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", saved)
        restored = checkpointer.restore(tmp_path / "orbax")
    assert restored["algorithm"] == repr(HALF)
    for state in (scaled, restored):
        assert equal(gw.from_portable(state, HALF, init(), replicas=4), expected)


@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(2, warm_start=False, error_feedback=False),
        WireDtype(PowerSGD(2, state_dtype="bfloat16"), "bfloat16"),
    ],
    ids=["no memory", "bfloat16"],
)
def test_every_kind_of_memory_comes_back(algorithm):
    made = init(algorithm)
    changed = jax.tree.map(lambda x: x + jnp.ones((), x.dtype) if x.ndim else x, made)
    made = changed._replace(account=made.account, record=made.record)  # which are no memory
    saved = gw.to_portable(made, algorithm)
    assert set(saved["tensors"]) == {"in", "out"}
    like = init(algorithm)
    assert equal(gw.from_portable(saved, algorithm, like, replicas=1), made)
    tensors = jax.tree.map(
        lambda x: torch.from_numpy(np.asarray(x, np.float32)).bfloat16() if np.ndim(x) > 1 else x,
        saved,
    )
    if saved["local"]:  # as torch would hand it over
        assert equal(gw.from_portable(tensors, algorithm, like, replicas=1), made)
