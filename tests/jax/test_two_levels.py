"""Two levels of replicas: under `pmap` in groups of one axis, under `shard_map` along the second of two, against the simulator."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from gradwire import AllReduce, LocalSGD, PowerSGD, Simulator, TopK, TwoLevel, WireDtype
from gradwire.jax_backend import (
    average_gradients,
    collective_traffic,
    distribute,
    from_portable,
    local_sgd,
    partition_specs,
    power_sgd,
    replicate,
    set_replicas,
    stack_replicas,
    to_portable,
    unreplicate,
)

#: The first is more than a fair share, and is cut. Of those that are alike some have one owner, and are computed with as one stack.
SHAPES = {"large": (192, 16), "small": (12, 10), "bias": (12,)} | {f"alike.{i}": (12, 10) for i in range(5)}
AXES = ("dcn", "ici")


def gradients(replicas, step):
    return [
        {n: np.random.default_rng([r, step, *n.encode()]).normal(size=s).astype(np.float32) for n, s in SHAPES.items()}
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
        one = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P(AXES), specs), out_specs=(P(), specs), check_vma=vma))
    found = []
    for step in range(steps):
        given = gradients(replicas, step)
        if step == bad:
            given[-1]["small"][0, 0] = np.nan
        update, state = one({n: np.stack([g[n] for g in given]) for n in SHAPES}, state)
        found.append(({n: np.asarray(x)[0] if driver == "pmap" else np.asarray(x) for n, x in update.items()}, state))
    return found


@pytest.mark.parametrize(
    ("driver", "algorithm", "within"),
    [
        ("pmap", PowerSGD(2, half_step=True, max_norm=9.0), 2),
        ("shard_map_vma", PowerSGD(2, half_step=True), "ici"),
        pytest.param("pmap", TopK(8, per=48, mean="senders"), ((0, 2), (1, 3)), marks=pytest.mark.slow),
        pytest.param("pmap", AllReduce(), 2, marks=pytest.mark.slow),
        pytest.param("shard_map", PowerSGD(2, start_step=1), "ici", marks=pytest.mark.slow),
        pytest.param("shard_map_vma", AllReduce(), "ici", marks=pytest.mark.slow),
    ],
)
def test_equals_the_simulator(driver, algorithm, within):
    sim = Simulator(TwoLevel(algorithm, 2 if within == "ici" else within), SHAPES, 4)
    tx = average_gradients(TwoLevel(algorithm, within), axis_name="data" if driver == "pmap" else "dcn")
    for step, (update, _) in enumerate(updates_of(tx, driver, 3)):
        expected = sim.step(gradients(4, step))
        for name, x in expected.items():
            assert np.linalg.norm(update[name] - x) < 1e-4 * np.linalg.norm(x)


def test_averages_that_are_known_as_factors_travel_as_factors_inside_a_node():
    params = {n: jnp.ones(s) for n, s in SHAPES.items()}

    def gathered(start_step, taken):
        tx = power_sgd(2, start_step=start_step, axis_name="data", within=2)
        sent = collective_traffic(tx.update, params, tx.init(params), axis_env=[("data", 4)])
        inside = [
            each for each in sent if each.kind == "all_gather" and (taken is None or each.branches == ((0, taken),))
        ]
        return sum(each.nbytes for each in inside) / 4

    dense = sum(np.prod(s) for s in SHAPES.values())
    # The new factors are memory of all replicas as well. The large matrix is two blocks.
    p, q = 2 * (96 + 96 + 6 * 12), 2 * (16 + 16 + 6 * 10)
    assert p + 2 * q + 12 <= gathered(0, None) < 1.1 * (p + 2 * q + 12)
    assert gathered(3, 1) == gathered(0, None)
    assert dense + q <= gathered(3, 0) < 1.1 * (dense + q)


def test_codes_between_nodes_begin_before_the_compression():
    def coded(within):
        return TwoLevel(WireDtype(PowerSGD(2, start_step=1), "bfloat16"), within)

    sim = Simulator(coded(2), SHAPES, 4, dtype="float32")
    given = gradients(4, 0)
    ((update, _),) = updates_of(average_gradients(coded(2), axis_name="data"), "pmap", 1)
    for name, x in sim.step(given).items():
        plain = np.mean([g[name] for g in given], axis=0)
        assert np.linalg.norm(update[name] - x) < 1e-6 * np.linalg.norm(x)
        assert np.linalg.norm(update[name] - plain) > 1e-3 * np.linalg.norm(plain)


def test_in_a_wire_dtype_averages_travel_in_codes_and_memory_as_it_is():
    def coded(within):
        return WireDtype(TwoLevel(PowerSGD(2, start_step=1), within), "bfloat16")

    tx, sim = average_gradients(coded("ici"), axis_name="dcn"), Simulator(coded(2), SHAPES, 4, dtype="float32")
    ((update, state),) = updates_of(tx, "shard_map_vma", 1)
    given = gradients(4, 0)
    for name, x in sim.step(given).items():
        plain = np.mean([g[name] for g in given], axis=0)
        assert np.linalg.norm(update[name] - x) < 1e-6 * np.linalg.norm(x)
        assert np.linalg.norm(update[name] - plain) > 1e-3 * np.linalg.norm(plain)
    # As it began. In bfloat16 it would not be.
    owner = next(own for own in sim.states if "small" in own.tensors)
    np.testing.assert_allclose(state.memory["q"]["small"], owner.tensors["small"]["q"], rtol=1e-5)


def test_each_replica_has_its_part_of_the_error_and_keeps_it_in_a_step_that_is_not_finite():
    tx = power_sgd(2, axis_name="dcn", within="ici")
    (_, first), (update, second) = updates_of(tx, "shard_map", 2, bad=1)
    assert np.isnan(update["small"]).any()
    own = first.local.per_replica["own"]["float32"]
    assert own.sharding.spec == P(AXES)
    flat = sum(np.prod(s) for n, s in SHAPES.items() if n != "bias")
    assert own.shape[0] == 4
    assert flat / 2 <= own.shape[1] < 0.6 * flat
    for a, b in zip(
        jax.tree.leaves((first.memory, first.local)), jax.tree.leaves((second.memory, second.local)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_says_what_does_not_fit():
    params = {n: jnp.ones(s) for n, s in SHAPES.items()}
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        power_sgd(2, axis_name="dcn", within="ici").init(params)
    with pytest.raises(ValueError, match="are one axis"):
        power_sgd(2, axis_name="ici", within="ici")
    local = LocalSGD(2, compressor=TwoLevel(PowerSGD(2), "ici"))
    with pytest.raises(ValueError, match=r"jax\.set_mesh"):
        local_sgd(optax.sgd(0.1), local, axis_name="dcn").init(params)
    # Rows that only replicas of one place may average.
    state = local_sgd(optax.sgd(0.1), replace(local, compressor=TwoLevel(PowerSGD(2), 2)), axis_name="data").init(
        params
    )
    of_four = unreplicate(replicate(stack_replicas(state), jax.devices()[:4], axis_name="data"))
    with pytest.raises(ValueError, match="Of nodes of 2") as said:
        set_replicas(of_four, 2)
    line = str(said.value).partition("replicas: ")[2]
    moved = eval(line, {"jax": jax, "numpy": np, "state": of_four})
    assert set_replicas(moved, 2).per_replica.averages.memory["anchor"]["small"].shape == (2, 12, 10)
    tx = power_sgd(2, axis_name="data", within=3)
    state = replicate(tx.init(params), jax.devices()[:4], axis_name="data")
    with pytest.raises(ValueError, match="within=3, but 4 replicas"):
        jax.pmap(tx.update, axis_name="data", devices=jax.devices()[:4])(
            {n: np.ones((4, *s), np.float32) for n, s in SHAPES.items()}, state
        )


@functools.cache
def ran_in_nodes_of_two():
    return unreplicate(updates_of(power_sgd(2, axis_name="data", within=2), "pmap", 2)[-1][1])


@pytest.mark.parametrize("errors", ["mean", "all"])
def test_a_checkpoint_goes_on_with_one_level_with_other_nodes_and_comes_back(errors):
    algorithm = PowerSGD(2)
    params = {n: jnp.ones(s) for n, s in SHAPES.items()}

    def like(within):
        tx = power_sgd(2, axis_name="data") if within == 1 else power_sgd(2, axis_name="data", within=within)
        return tx.init(params)

    ran = ran_in_nodes_of_two()
    saved = to_portable(ran, TwoLevel(algorithm, 2), errors=errors)
    assert (saved["replicas"], saved["algorithm"]) == (2, repr(algorithm))
    assert {"large[0:96]", "large[96:192]", "small", "alike.0"} <= set(saved["local"])
    for within, replicas in ((2, 4), (4, 4), (3, 6), (1, 4)):
        other = algorithm if within == 1 else TwoLevel(algorithm, within)
        moved = from_portable(saved, other, like(within), replicas=replicas)
        back = to_portable(moved, other)
        for name, x in mean_errors(saved).items():
            np.testing.assert_allclose(mean_errors(back)[name], x, rtol=1e-5, atol=1e-6)
    again = from_portable(saved, TwoLevel(algorithm, 2), like(2), replicas=4)
    if errors == "all":  # nothing is lost
        for a, b in zip(
            jax.tree.leaves((ran.memory, ran.local)), jax.tree.leaves((again.memory, again.local)), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    with pytest.raises(ValueError, match="from_portable"):
        set_replicas(ran, 2)
    with pytest.raises(ValueError, match="not of PowerSGD"):
        from_portable(saved, TwoLevel(PowerSGD(1), 2), like(2), replicas=4)


def mean_errors(saved):
    blocks = {}
    for name, memory in saved["local"].items():
        parameter, _, rows = name.partition("[")
        blocks.setdefault(parameter, []).append((int(rows.partition(":")[0] or 0), memory["error"].mean(0)))
    return {n: np.concatenate([x for _, x in sorted(own, key=lambda b: b[0])]) for n, own in blocks.items()}
