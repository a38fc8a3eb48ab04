"""Two levels of replicas: under `pmap` in groups of one axis, under `shard_map` along the second of
two, against the simulator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradwire import PowerSGD, Quantize, Simulator, TopK, TwoLevel, WireDtype, plan
from gradwire.jax_backend import (
    average_gradients,
    collective_traffic,
    distribute,
    from_portable,
    partition_specs,
    power_sgd,
    replicate,
    set_replicas,
    stats,
    to_portable,
    unreplicate,
)
from tests.bounds import relative
from tests.jax.replicas import equal, refused

#: Those that are alike are computed with as one stack.
SHAPES = {"large": (192, 16), "small": (12, 10), "bias": (12,)} | {
    f"alike.{i}": (12, 10) for i in range(5)
}
AXES = ("dcn", "ici")


def gradients(replicas, step):
    return [
        {
            n: np.random.default_rng([r, step, *n.encode()]).normal(size=s).astype(np.float32)
            for n, s in SHAPES.items()
        }
        for r in range(replicas)
    ]


def updates_of(tx, driver, steps, replicas=4, within=2, bad=None):
    """What replicas are given in each step, the state after it, and where it lies."""
    params = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
    devices = jax.devices()[:replicas]
    if driver == "pmap":
        state = replicate(tx.init(params), devices, axis_name="data")
        one = jax.pmap(tx.update, axis_name="data", devices=devices)
    else:
        mesh = Mesh(np.array(devices).reshape(-1, within), AXES)
        with jax.set_mesh(mesh):
            state = tx.init(params)
        specs = partition_specs(state, AXES)
        state = distribute(state, mesh, AXES)

        def body(given, state):
            return tx.update(jax.tree.map(lambda x: x[0], given), state)

        vma = driver == "shard_map_vma"
        one = jax.jit(
            jax.shard_map(
                body, mesh=mesh, in_specs=(P(AXES), specs), out_specs=(P(), specs), check_vma=vma
            )
        )
    found = []
    for step in range(steps):
        given = gradients(replicas, step)
        if step == bad:
            given[-1]["small"][0, 0] = np.nan
        update, state = one({n: np.stack([g[n] for g in given]) for n in SHAPES}, state)
        found.append(
            (
                {
                    n: np.asarray(x)[0] if driver == "pmap" else np.asarray(x)
                    for n, x in update.items()
                },
                state,
            )
        )
    return found


@pytest.mark.parametrize(
    ("driver", "algorithm", "within"),
    [
        ("pmap", PowerSGD(2, half_step=True, max_norm=9.0), 2),
        ("shard_map_vma", PowerSGD(2, half_step=True), "ici"),
        ("pmap", PowerSGD(2), 1),
        pytest.param(
            "pmap", TopK(8, per=48, mean="senders"), ((0, 2), (1, 3)), marks=pytest.mark.slow
        ),
    ],
)
def test_equals_the_simulator(driver, algorithm, within):
    sim = Simulator(TwoLevel(algorithm, 2 if within == "ici" else within), SHAPES, 4)
    tx = average_gradients(
        TwoLevel(algorithm, within), axis_name="data" if driver == "pmap" else "dcn"
    )
    for step, (update, _) in enumerate(updates_of(tx, driver, 3)):
        expected = sim.step(gradients(4, step))
        for name, x in expected.items():
            assert relative(update[name], x) < 3e-4


@pytest.mark.parametrize(("driver", "within"), [("pmap", 2), ("pmap", 1), ("shard_map_vma", "ici")])
def test_what_is_dealt_among_nodes_is_counted_where_init_was_outside_of_the_map(driver, within):
    algorithm = TwoLevel(Quantize("int4"), within)
    tx = average_gradients(algorithm, axis_name="data" if driver == "pmap" else "dcn")
    ((update, state),) = updates_of(tx, driver, 1)
    for name, x in update.items():
        plain = np.mean([g[name] for g in gradients(4, 0)], axis=0)
        assert relative(x, plain) < 0.3
    counted = plan(SHAPES, TwoLevel(Quantize("int4"), 1 if within == 1 else 2), world_size=4)
    assert (
        stats(unreplicate(state) if driver == "pmap" else state).scalars()["bytes_sent"]
        == counted.wire_bytes
    )


@pytest.mark.parametrize("within", [4, 1])
def test_a_mesh_axis_of_one_replica(within):
    """A single slice is one node, whose averages are those of `lax.pmean`; and slices of one chip
    have nothing to average inside."""
    tx = average_gradients(TwoLevel(PowerSGD(2), "ici"), axis_name="dcn")
    sim = Simulator(TwoLevel(PowerSGD(2), within), SHAPES, 4)
    for step, (update, _) in enumerate(updates_of(tx, "shard_map_vma", 2, within=within)):
        for name, x in sim.step(gradients(4, step)).items():
            assert relative(update[name], x) < 3e-4


CODED = WireDtype(PowerSGD(2, start_step=1), "bfloat16")


@pytest.mark.parametrize(
    ("driver", "coded"),
    [
        ("pmap", lambda within: TwoLevel(CODED, within)),
        ("shard_map_vma", lambda within: WireDtype(TwoLevel(CODED.algorithm, within), "bfloat16")),
    ],
    ids=["between nodes", "everywhere"],
)
def test_averages_travel_in_codes_before_the_compression_begins_and_memory_as_it_is(driver, coded):
    pmap = driver == "pmap"
    tx = average_gradients(coded(2 if pmap else "ici"), axis_name="data" if pmap else "dcn")
    sim = Simulator(coded(2), SHAPES, 4, dtype="float32")
    ((update, state),) = updates_of(tx, driver, 1)
    given = gradients(4, 0)
    for name, x in sim.step(given).items():
        plain = np.mean([g[name] for g in given], axis=0)
        assert relative(update[name], x) < 1e-5
        assert np.linalg.norm(update[name] - plain) > 1e-3 * np.linalg.norm(plain)
    # As it began. In bfloat16 it would not be.
    q = np.asarray(state.memory["q"]["small"])
    np.testing.assert_allclose(q[0] if pmap else q, sim.states[0].tensors["small"]["q"], rtol=1e-4)


def test_each_message_goes_once_between_nodes_and_once_inside():
    params = {n: jnp.ones(s) for n, s in SHAPES.items()}
    tx = power_sgd(2, axis_name="data", within=2)
    sent = collective_traffic(tx.update, params, tx.init(params), axis_env=[("data", 4)])
    dense = 4 * sum(np.prod(s) for s in SHAPES.values())
    p, q = 4 * (2 * (192 + 6 * 12) + 12), 4 * 2 * (16 + 6 * 10)
    assert [each.kind for each in sent] == [
        "all_reduce",
        "all_reduce",
        "all_gather",
        "all_reduce",
        "all_gather",
    ]
    assert [each.nbytes for each in sent] == [dense, p / 2, p, q / 2, q]


def test_stacks_are_joined_with_two_levels_as_with_one():
    """The stacks of one level, of which each message travels as one array: no operation more for
    each matrix."""
    shapes = {f"{i}": (12, 10) for i in range(24)}
    params = {n: jnp.ones(s) for n, s in shapes.items()}

    def products(within):
        tx = power_sgd(2, axis_name="data", **({} if within is None else {"within": within}))
        jaxpr = jax.make_jaxpr(tx.update, axis_env=[("data", 4)])(params, tx.init(params))
        return str(jaxpr).count("dot_general")

    assert products(2) == products(None)


def test_replicas_of_a_node_have_the_same_error_and_keep_it_in_a_step_that_is_not_finite():
    tx = power_sgd(2, axis_name="dcn", within="ici")
    (_, first), (update, second) = updates_of(tx, "shard_map", 2, bad=1)
    assert np.isnan(update["small"]).any()
    for own in jax.tree.leaves(first.local.per_replica):
        assert own.sharding.spec == P(AXES)
        rows = np.asarray(own)
        np.testing.assert_array_equal(rows[::2], rows[1::2])
        assert not np.array_equal(rows[0], rows[2])
    assert equal((first.memory, first.local), (second.memory, second.local))


@functools.cache
def ran_in_nodes_of_two():
    return unreplicate(updates_of(power_sgd(2, axis_name="data", within=2), "pmap", 2)[-1][1])


@pytest.mark.parametrize("errors", ["mean", "all"])
def test_a_checkpoint_goes_on_with_one_level_with_other_nodes_and_comes_back(errors):
    algorithm = PowerSGD(2)
    params = {n: jnp.ones(s) for n, s in SHAPES.items()}

    def loaded(within, replicas):
        """And the algorithm that goes with it."""
        other = algorithm if within == 1 else TwoLevel(algorithm, within)
        like = power_sgd(2, axis_name="data", within=within).init(params)
        return from_portable(saved, other, like, replicas=replicas), other

    ran = ran_in_nodes_of_two()
    saved = to_portable(ran, TwoLevel(algorithm, 2), errors=errors)
    assert (saved["replicas"], saved["algorithm"]) == (2, repr(algorithm))
    assert {len(memory["error"]) for memory in saved["local"].values()} == {
        2 if errors == "all" else 1
    }
    for within, replicas in ((2, 4), (4, 4), (3, 6), (1, 4), (((0, 2), (1, 3)), 4)):
        back = to_portable(*loaded(within, replicas))
        for name, x in mean_errors(saved).items():
            np.testing.assert_allclose(mean_errors(back)[name], x, rtol=1e-4, atol=1e-5)
    if errors == "all":  # nothing is lost
        again = loaded(2, 4)[0]
        assert equal(
            jax.device_get((ran.memory, ran.local)), jax.device_get((again.memory, again.local))
        )
        rows = loaded(((0, 2), (1, 3)), 4)[0].local.per_replica["error"]["small"]
        np.testing.assert_array_equal(rows, saved["local"]["small"]["error"][[0, 1, 0, 1]])
    fewer = set_replicas(ran, 2).local.per_replica["error"]
    for name, x in mean_errors(saved).items():
        np.testing.assert_allclose(fewer[name][0], x, rtol=1e-4, atol=1e-5)
    saved["local"]["small"]["error"][:] = np.nan
    for within in (2, 1):
        with refused("'error'", "'small'"):
            loaded(within, 4)


def mean_errors(saved):
    return {name: memory["error"].mean(0) for name, memory in saved["local"].items()}


@pytest.mark.parametrize("other", [PowerSGD(2), WireDtype(PowerSGD(2), "bfloat16")], ids=repr)
def test_a_state_of_another_wire_dtype_goes_on(other):
    """Inside two levels as without them."""
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    coded, tx = (
        average_gradients(TwoLevel(each, within="ici"), axis_name="dcn")
        for each in (WireDtype(PowerSGD(2), "int8"), other)
    )
    assert jax.tree.structure(coded.init(params)) == jax.tree.structure(tx.init(params))
    mesh = jax.make_mesh((2, 2), AXES)
    state = distribute(coded.init(params), mesh, AXES)
    specs = partition_specs(state, AXES)
    step = jax.shard_map(
        tx.update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False
    )
    jax.eval_shape(step, params, state)
