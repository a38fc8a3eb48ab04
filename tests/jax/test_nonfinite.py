"""A step in which one replica's gradient holds an inf or NaN: every replica skips it, and no memory
changes by a bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradwire import AllReduce, LocalSGD, PowerSGD, TwoLevel, WireDtype
from gradwire.core.algorithm import nested
from gradwire.jax_backend import (
    average_gradients,
    diloco,
    local_sgd,
    power_sgd,
    replicate,
    stats,
    to_portable,
    unreplicate,
)
from gradwire.jax_backend.state.skipped_steps import _run_of
from tests.jax.replicas import AXIS, Replicas, gradients, power

SHAPES = {"w": (32, 24), "b": (24,)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def poisoned(step, name, value):
    given = gradients(SHAPES, step)
    given[2][name].reshape(-1)[5] = value
    return given


def bits(state):
    """All of the state but what is counted."""
    return [
        np.asarray(x).tobytes() for x in jax.tree.leaves(state._replace(step=None, account=None))
    ]


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        (power(half_step=True), "shard_map_vma"),
        (power(start_step=9), "vmap"),
        # What remembers nothing has its codes looked at, or what is cast.
        (WireDtype(AllReduce(), "int8"), "shard_map_vma"),
        (WireDtype(AllReduce(), "bfloat16"), "pmap"),
        pytest.param(WireDtype(AllReduce(), "e3m0"), "shard_map", marks=pytest.mark.slow),
        pytest.param(
            WireDtype(PowerSGD(2, start_step=9), "float16"), "vmap", marks=pytest.mark.slow
        ),
        pytest.param(
            TwoLevel(WireDtype(AllReduce(), "int8"), 2), "shard_map", marks=pytest.mark.slow
        ),
        (WireDtype(TwoLevel(AllReduce(), 2), "int8"), "shard_map"),
        (WireDtype(TwoLevel(PowerSGD(2, start_step=9), 2), "int8"), "shard_map"),
        pytest.param(
            TwoLevel(WireDtype(PowerSGD(2, start_step=9), "int8"), 2),
            "pmap",
            marks=pytest.mark.slow,
        ),
    ],
    ids=repr,
)
def test_memory_stays_as_it_was_and_training_goes_on(algorithm, mode):
    """More of it is in tests/composition."""
    run = Replicas(average_gradients(algorithm, axis_name=AXIS), PARAMS, mode=mode)
    run.update(gradients(SHAPES, 0))
    for name, value in (("w", np.nan), ("b", -np.inf)):
        before = bits(run.global_state())
        updates = run.update(poisoned(2, name, value))
        # A vector's inf reaches the other tensors' memory too: the step is skipped as a whole.
        assert bits(run.global_state()) == before
        assert np.isnan(updates["w"]).all() or algorithm.start_step or not run.state.memory
        assert not np.isfinite(updates[name]).all()
    after = run.update(gradients(SHAPES, 3))
    # Uncompressed averages of steps before the start are not looked at, but where they are coded.
    plain = algorithm.start_step and not any(
        isinstance(each, WireDtype) for each in nested(algorithm)
    )
    assert int(stats(run.global_state()).skipped_steps) == (0 if plain else 2)
    assert all(np.isfinite(x).all() for x in after.values())


SEEN_BY = {
    "stats": stats,
    "unreplicate": lambda state: unreplicate(replicate(state, jax.devices()[:1], axis_name=AXIS)),
    "to_portable": lambda state: to_portable(state, PowerSGD(2)),
    "stats, traced": jax.jit(stats),
}


ONE_RUN = [(12, 0), (22, 10), (32, 20)]


@pytest.mark.parametrize(
    ("by", "looks", "lines"),
    [
        *((by, ONE_RUN, int(by != "stats, traced")) for by in SEEN_BY),
        ("stats", [(12, 0), (21, 9)], 0),
        ("stats", [(30, 30)], 1),
        ("stats", [(10, 10), (11, 10), (30, 29)], 2),
    ],
)
def test_ten_skipped_steps_in_a_row_are_said_where_the_host_sees_a_state(by, looks, lines, caplog):
    """By its counts of steps, and of those that were skipped, at some of them."""
    _run_of.cache_clear()
    state = power_sgd(2, axis_name=AXIS).init(PARAMS)
    for steps, skipped in looks:
        account = state.account._replace(skipped=jnp.int32(skipped))
        SEEN_BY[by](state._replace(step=jnp.int32(steps), account=account))
    said = [
        record.getMessage()
        for record in caplog.records
        if "10 steps in a row" in record.getMessage()
    ]
    assert len(said) == lines
    assert all(line.startswith("PowerSGD(rank=2)") for line in said)


def test_averages_in_a_row_that_replicas_refused_are_said_as_well(caplog):
    """Replicas that begin eagerly refuse theirs alone: the largest count of this process is looked
    at."""
    _run_of.cache_clear()
    state = diloco(optax.sgd(0.1), 4, axis_name=AXIS).init(PARAMS)
    for arrived, refused in [(5, 0), (7, 2), (8, 3), (21, 16)]:
        rows = jax.tree.map(lambda x: jnp.stack([x] * 3), state)._replace(
            arrived=jnp.full(3, arrived)
        )
        account = rows.averages.account._replace(skipped=jnp.array([0, refused, 0]))
        found = stats(rows._replace(averages=rows.averages._replace(account=account)))
        assert (found.skipped_averages, found.skipped_steps) == (refused, 0)
    said = [
        record.getMessage()
        for record in caplog.records
        if "3 averages in a row" in record.getMessage()
    ]
    assert len(said) == 1
    assert said[0].startswith("LocalSGD(")


@pytest.mark.parametrize(
    ("algorithm", "mode"),
    [
        (power(half_step=True), "shard_map_vma"),  # the matrices are computed with as one stack
        (PowerSGD(2, square=True, half_step=True), "vmap"),  # and here they are not
    ],
    ids=repr,
)
def test_finite_outliers_do_not_stall_training(algorithm, mode):
    """The error that they leave may overflow in a later step, which leaves it as it is."""
    shapes = {"v": (32, 32), "w": (32, 32)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    run = Replicas(average_gradients(algorithm, axis_name=AXIS), params, mode=mode)
    finite = []
    for step in range(14):
        given = gradients(shapes, step)
        for own in given if step in (6, 9) else ():
            own["w"][3, 4] = own["v"][5, 6] = 1e38 if step == 6 else 3.3e38
        finite.append(all(np.isfinite(x).all() for x in run.update(given).values()))
    assert all(finite[:6])
    assert all(finite[-2:])
    assert not all(finite)


@pytest.mark.parametrize("algorithm", [PowerSGD(2), TwoLevel(PowerSGD(2), within=2)], ids=repr)
def test_an_error_that_overflows_does_not_stay(algorithm):
    """Of a large matrix, and where each replica of a node has a part."""
    params = {"w": jnp.zeros((512, 256))}
    run = Replicas(average_gradients(algorithm, axis_name=AXIS), params, mode="pmap")
    run.state = run.state._replace(
        local=jax.tree.map(lambda x: jnp.full_like(x, 3e38), run.state.local)
    )
    finite = [
        np.isfinite(run.update(gradients({"w": (512, 256)}, step))["w"]).all() for step in range(3)
    ]
    assert finite == [False, True, True]


def test_averages_without_a_broken_replica_are_right_in_each_dtype():
    """Of Adam's moments, one in bfloat16 and one in float32: 1, where two of three have 1."""
    inner = optax.adam(0.0, mu_dtype=jnp.bfloat16)
    tx = local_sgd(inner, LocalSGD(1), axis_name=AXIS, moments="average")

    def step(params, broken):
        state = tx.init(params)
        ones = jax.tree.map(
            lambda x: jnp.where(broken, jnp.nan, x + 1).astype(x.dtype), state.inner[0]
        )
        ones = ones._replace(count=state.inner[0].count)
        _, after = tx.average_params(params, state._replace(inner=(ones, *state.inner[1:])))
        return after.inner[0].nu["w"], after.inner[0].mu["w"]

    found = jax.vmap(step, axis_name=AXIS)({"w": jnp.zeros((3, 4))}, jnp.arange(3) == 2)
    assert [x.dtype for x in found] == [jnp.float32, jnp.bfloat16]
    for x in found:
        np.testing.assert_allclose(np.float32(x), 1.0, rtol=1e-6)
