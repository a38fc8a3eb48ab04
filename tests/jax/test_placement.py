"""States as other tools make and keep them: saved before they come to their replicas, in the memory
of the host, and laid out by the names of axes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen
from jax.sharding import NamedSharding

import gradwire.jax_backend as gw
from gradwire import LocalSGD, PowerSGD, TwoLevel
from tests.jax.replicas import AXIS, mesh_of, power, through_orbax

PARAMS = {"w": jnp.ones((64, 32))}
TX, LOCAL = (
    gw.average_gradients(power(), axis_name=AXIS),
    gw.diloco(optax.adam(1e-2), 4, axis_name=AXIS),
)


def portable():
    state = gw.distribute(TX.init(PARAMS), mesh_of(4), AXIS)
    return gw.from_portable(gw.to_portable(state, power()), power(), TX.init(PARAMS), replicas=4)


STATES = {
    "init": lambda: TX.init(PARAMS),
    "resized": lambda: gw.set_replicas(gw.distribute(TX.init(PARAMS), mesh_of(4), AXIS), 2),
    "portable": portable,
    "stacked": lambda: gw.stack_replicas((PARAMS, LOCAL.init(PARAMS))),
}


@pytest.mark.parametrize("name", STATES)
def test_orbax_saves_a_state_that_has_not_come_to_its_replicas(name, tmp_path):
    state = STATES[name]()
    back = through_orbax(state, tmp_path, state)
    placed = gw.distribute(back, mesh_of(2), AXIS)
    marks = [x for path, x in jax.tree_util.tree_flatten_with_path(placed)[0] if x.dtype == bool]
    assert [x.shape for x in marks] == [(2,)]
    # and as a run of one replica begins
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        one = checkpointer.restore(tmp_path / "state", gw.abstract_state(state, 1))
    gw.replicate(gw.set_replicas(one, 4), axis_name=AXIS)


def kinds(tree, name):
    """Of arrays that have a shape of parameters, or rows of it, and of marks."""
    return {(name, x.sharding.memory_kind) for x in jax.tree.leaves(tree) if x.ndim}


def test_what_lies_in_the_memory_of_the_host_stays_there():
    mesh = mesh_of(4)
    params = jax.device_put(PARAMS, NamedSharding(mesh, jax.P(), memory_kind="pinned_host"))
    tx = optax.chain(TX, optax.adam(1e-2))
    begun = params, tx.init(params)
    on_no_mesh = jax.sharding.SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host")
    alone = jax.device_put(PARAMS, on_no_mesh)
    keys = jax.device_put(
        jax.random.split(jax.random.key(0), 4),
        NamedSharding(mesh, jax.P(), memory_kind="pinned_host"),
    )
    local = gw.stack_replicas((params, LOCAL.init(params).averages.memory))
    placed = gw.distribute(begun, mesh, AXIS)
    saved = gw.to_portable(placed[1][0], power(), errors="all")
    found = {
        "init": (begun[0], begun[1][0].local, begun[1][1]),
        "outer": LOCAL.init(params).averages.memory,
        "alone": (TX.init(alone).memory, TX.init(alone).local, LOCAL.init(alone).averages.memory),
        "local": gw.distribute(local, mesh, AXIS),
        "placed": (placed[0], placed[1][0].local),
        "again": gw.distribute(placed, mesh, AXIS)[1][0].local,
        "shapes": gw.abstract_state(placed, 4, mesh, AXIS, params=params)[1][0].local,
        "resized": gw.set_replicas((placed, gw.PerReplica(keys)), 2),
        "portable": [gw.from_portable(saved, power(), begun[1][0], replicas=n) for n in (4, 2)],
    }
    for name, tree in found.items():
        assert kinds(tree, name) == {(name, "pinned_host")}
    # What computes, and what pmap takes, lies on the devices.
    whole = gw.stack_replicas((params, LOCAL.init(params)))
    for state in (placed, gw.distribute(whole, mesh, AXIS)):
        assert gw.stats(state).local_error_norm == 0
        assert kinds(gw.replicate(state, jax.devices()[:4], axis_name=AXIS), "") == {("", "device")}


def test_rows_stay_in_the_memory_of_the_host_on_a_mesh_of_mixed_axes():
    types = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"), axis_types=types, devices=jax.devices()[:4])
    lies = NamedSharding(mesh, jax.P("fsdp"), memory_kind="pinned_host")
    state = gw.stack_replicas(jax.device_put(PARAMS, lies))
    for name, tree in {"stacked": state, "placed": gw.distribute(state, mesh, AXIS)}.items():
        (x,) = jax.tree.leaves(tree)
        assert kinds((x, x.addressable_shards[0].data), name) == {(name, "pinned_host")}
        assert x.sharding.mesh == mesh


@pytest.mark.parametrize(
    ("shard", "axis_type"),
    [("element", jax.sharding.AxisType.Explicit), ("parameter", jax.sharding.AxisType.Auto)],
)
def test_what_a_divided_optimizer_keeps_stays_in_the_memory_of_the_host(shard, axis_type):
    """Stacks, what has owners, what all replicas keep; moments, and what is made of the
    parameters."""
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(axis_type,), devices=jax.devices()[:4])
    shapes = {**{f"w{i}": (8, 4) for i in range(5)}, "up": (4, 6), "down": (6, 4), "bias": (8,)}
    lies = NamedSharding(mesh, jax.P(), memory_kind="pinned_host")
    numbers = {
        name: np.arange(np.prod(s), dtype=np.float32).reshape(s) for name, s in shapes.items()
    }
    params = jax.device_put(numbers, lies)
    inner = optax.contrib.schedule_free(optax.trace(0.9), 0.1)

    def zero(replicas):
        return gw.zero1(inner, axis_name=AXIS, replicas=replicas, shard=shard)

    begun = zero(4).init(params)
    like = {
        2: jax.eval_shape(zero(2).init, params),
        4: jax.eval_shape(zero(4).init, params),
        1: inner.init(params),
    }
    placed = gw.distribute(begun, mesh, AXIS)
    whole, fewer = gw.reshard(placed, like[1]), gw.reshard(placed, like[2])
    found = {
        "init": begun,
        "placed": placed,
        "shapes": gw.abstract_state(placed, 4, mesh, AXIS).pieces,
        "like parameters": gw.abstract_state(like[4], 4, mesh, AXIS, params=params).pieces,
        "whole": whole,
        "fewer": fewer,
        "more": gw.reshard(fewer, like[4]),
        "again": gw.distribute(gw.reshard(whole, like[4]), mesh, AXIS),
    }
    for name, tree in found.items():
        assert kinds(tree, name) == {(name, "pinned_host")}
    for name, x in whole.z.items():
        assert np.array_equal(x, params[name])
    # One that lies on the devices stays there, and draws none along but its stack.
    mixed = params | {"w0": jax.device_put(params["w0"], lies.with_memory_kind("device"))}
    z = gw.reshard(zero(4).init(mixed), inner.init(mixed)).z
    assert isinstance(z["w0"], np.ndarray)
    assert kinds(z["bias"], "mixed") == {("mixed", "pinned_host")}


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        return linen.tanh(linen.Dense(32, kernel_init=init)(x)), None


class Stack(linen.Module):
    @linen.compact
    def __call__(self, x):
        layers = linen.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        return layers()(x, None)[0]


@pytest.mark.parametrize(
    "tx", [optax.chain(TX, optax.adam(1e-2)), LOCAL], ids=["gradients", "local"]
)
def test_a_state_is_laid_out_by_the_names_of_axes(tx):
    """The three lines by which MaxText makes its states. A box names the axes of its parameter, and
    stands round nothing that has other axes."""
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"))
    rules = (("embed", "fsdp"), ("mlp", None), ("layers", None))

    def make():
        params = Stack().init(jax.random.key(0), jnp.zeros((1, 32)))["params"]
        return params, tx.init(params)

    specs = linen.get_partition_spec(jax.eval_shape(make))
    shardings = linen.logical_to_mesh_sharding(specs, mesh, rules)
    with jax.set_mesh(mesh):
        params, state = jax.jit(make, out_shardings=shardings)()
    flat = jax.tree_util.tree_flatten_with_path((params, state))[0]
    sharded = {jax.tree_util.keystr(path) for path, x in flat if not x.sharding.is_fully_replicated}
    assert all("kernel" in path for path in sharded)
    # of the kernel: itself, and what is remembered in its shape
    assert len(sharded) == (5 if tx is LOCAL else 3)
    placed = gw.distribute((params, state), mesh, AXIS) if tx is not LOCAL else None
    if placed is not None:
        error = jax.tree.leaves(placed[1][0].local.per_replica)[0]
        assert error.sharding.spec[0] == AXIS
        shapes = gw.abstract_state((params, state), 2, mesh, AXIS, params=params)
        assert jax.tree.leaves(shapes[1][0].local.per_replica)[0].sharding.spec == jax.P(
            AXIS, None, "fsdp", None
        )


def test_a_mixture_whose_parts_do_not_all_average_is_spoken_of():
    """But what is frozen, and what is averaged before."""
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(4)}
    average = gw.average_gradients(PowerSGD(2), axis_name=AXIS)

    def mixture(rest, before=()):
        parts = {"w": optax.chain(average, optax.sgd(0.1)), "b": rest}
        return optax.chain(*before, optax.multi_transform(parts, {"w": "w", "b": "b"}))

    def sharded(averaged):
        return gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=2, averaged=averaged)

    quiet = [
        mixture(optax.set_to_zero()),
        mixture(sharded(False)),
        mixture(sharded(True), [gw.all_reduce_mean(axis_name=AXIS)]),
        mixture(optax.chain(gw.all_reduce_mean(axis_name=AXIS), optax.sgd(0.1))),
        mixture(optax.sgd(0.1), [gw.all_reduce_mean(axis_name=AXIS)]),
    ]
    with warnings.catch_warnings(action="error", category=UserWarning):
        for tx in quiet:
            gw.partition_specs(tx.init(params), AXIS)
    for rest in (optax.sgd(0.1), optax.adam(0.1), sharded(True)):
        with pytest.warns(UserWarning, match="averages gradients of 'w' and not of 'b'"):
            gw.partition_specs(mixture(rest).init(params), AXIS)


def test_moments_before_a_sharded_optimizer_are_spoken_of():
    """But not those before one that is given averages."""

    def specs(averaged, *before):
        zero = gw.zero1(optax.sgd(0.1), axis_name=AXIS, replicas=2, averaged=averaged)
        tx = optax.chain(*before, optax.scale_by_adam(), zero)
        return gw.partition_specs(tx.init(PARAMS), AXIS)

    with pytest.warns(UserWarning, match="ScaleByAdamState precedes .* inside it, zero1"):
        specs(False)
    with warnings.catch_warnings(action="error", category=UserWarning):
        specs(True, gw.all_reduce_mean(axis_name=AXIS))


BOTH = ("data", "model")


def zero(axis):
    return gw.zero1(optax.adam(0.1), axis_name=axis, replicas=4 if axis == BOTH else 2)


def nodes(axis):
    return gw.average_gradients(TwoLevel(PowerSGD(2), within=axis[-1]), axis_name=axis)


#: What is made along an axis, and where it is put.
ELSEWHERE = {
    "pieces": (zero("data"), "model"),
    "pieces of both axes": (zero("data"), BOTH),
    "pieces in another order": (zero(BOTH), BOTH[::-1]),
    "nodes in another order": (nodes(BOTH), BOTH[::-1]),
    "local SGD": (gw.local_sgd(optax.sgd(0.1), LocalSGD(4), axis_name="data"), "model"),
    "DiLoCo": (gw.diloco(optax.sgd(0.1), 4, axis_name="data"), "model"),
}


@pytest.mark.parametrize(("tx", "axis"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_state_of_another_axis_is_refused(tx, axis):
    mesh, state = jax.make_mesh((2, 2), BOTH), tx.init(PARAMS)
    state = gw.stack_replicas(state) if isinstance(tx, gw.LocalOptimizer) else state
    for place in (
        lambda: gw.distribute(state, mesh, axis),
        lambda: gw.partition_specs(state, axis),
    ):
        with pytest.raises(ValueError, match=r"axis_name=.* Give axis_name=.* here, or make"):
            place()


def test_replicas_of_no_nodes_may_have_any_order():
    tx = gw.average_gradients(power(), axis_name=BOTH)
    gw.distribute(tx.init(PARAMS), jax.make_mesh((2, 2), BOTH), BOTH[::-1])


def test_what_was_portable_lies_as_its_parameter_does():
    mesh = jax.make_mesh((2, 2), (AXIS, "fsdp"))
    params = {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, jax.P(None, "fsdp")))}
    state = gw.distribute(TX.init(params), mesh, AXIS)
    moved = gw.to_portable(state, power())
    back = gw.from_portable(moved, power(), TX.init(params), replicas=2)
    for x, y in zip(*map(jax.tree.leaves, (gw.distribute(back, mesh, AXIS), state)), strict=True):
        assert np.array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert state.local.per_replica["error"]["w"].sharding.spec == jax.P(AXIS, None, "fsdp")


def test_another_start_of_local_sgd_is_restored(tmp_path):
    saved, later = (
        gw.stack_replicas(gw.diloco(optax.sgd(0.1), 4, axis_name=AXIS, start_step=n).init(PARAMS))
        for n in (0, 10)
    )
    back = through_orbax(
        gw.distribute(saved, mesh_of(2), AXIS), tmp_path, gw.abstract_state(later, 2)
    )
    assert jax.tree.structure(back) == jax.tree.structure(later)


def test_missed_averages_are_found_under_any_key():
    params = {"w": jnp.ones((4, 4))}
    tx = gw.local_sgd(optax.sgd(0.1), LocalSGD(2), axis_name=AXIS)
    state = gw.stack_replicas((params, tx.init(params)))
    own, local = state.per_replica
    missed = gw.PerReplica((own, local._replace(updates=local.updates + 3)))
    for given in (missed, {"updates": missed}):
        with pytest.raises(ValueError, match="was called 3 times and average_params 0"):
            gw.distribute(given, mesh_of(2), AXIS)
    assert next(tx.turns({"updates": state})) == tx.turn(0)
