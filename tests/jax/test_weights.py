"""Weights in JAX, under every kind of map: against the simulator, with NaN where a replica is
absent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gradwire.jax_backend as gw
from gradwire import AllReduce, LocalSGD, PowerSGD, Simulator, TopK, TwoLevel, WireDtype
from tests.jax.replicas import AXIS, Replicas, equal, gradients, mesh_of, refused

SHAPES = {"w": (24, 16), "x": (130,), "b": (7,)}
WEIGHTS = np.array([512, 0, 100, 7.5], np.float32)
ALGORITHMS = {
    "power_sgd": PowerSGD(2, half_step=True, start_step=1),
    "top_k": TopK(4, per=32),
    "codes": WireDtype(AllReduce(), "int8"),
    "levels": TwoLevel(PowerSGD(2), 2),
}
ROWS = [
    ("power_sgd", "shard_map_vma"),
    pytest.param("top_k", "vmap", marks=pytest.mark.slow),
    pytest.param("codes", "shard_map_vma", marks=pytest.mark.slow),
    pytest.param("levels", "pmap", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "mode"), ROWS)
def test_an_absent_replica_changes_nothing(name, mode):
    tx = optax.chain(gw.average_gradients(ALGORITHMS[name], axis_name=AXIS), optax.scale(1.0))

    def update(given, state):
        return tx.update(given["gradients"], state, weight=given["weight"])

    run = Replicas(
        optax.GradientTransformation(tx.init, update),
        {n: jnp.zeros(s) for n, s in SHAPES.items()},
        4,
        mode,
    )
    simulator = Simulator(ALGORITHMS[name], SHAPES, 4, dtype="float32")
    for step in range(3):
        mine = gradients(SHAPES, step)
        mine[1] = {n: x * np.nan for n, x in mine[1].items()}
        averages = run.update(
            [{"gradients": g, "weight": w} for g, w in zip(mine, WEIGHTS, strict=True)]
        )
        expected = simulator.step(mine, weights=WEIGHTS.tolist())
        for n, x in averages.items():
            np.testing.assert_allclose(x, expected[n], rtol=5e-4, atol=5e-4)
    # Nobody counts: the program cannot raise, so it says so in the averages, and the memory keeps
    # its bits.
    before = run.global_state()[0]
    averages = run.update([{"gradients": g, "weight": np.float32(0)} for g in mine])
    after = run.global_state()[0]
    assert all(np.isnan(x).all() for x in averages.values())
    assert equal((before.memory, before.local), (after.memory, after.local))


@pytest.mark.parametrize("weights", [(0, 0), (3e38, 3e38), (1, -1), (1, -2), (np.nan, 1)])
@pytest.mark.parametrize(
    ("algorithm", "dtype", "replicas"),
    [
        (AllReduce(), "float32", 2),
        (PowerSGD(2), "float32", 2),
        # More than two send each other parts, and with these the weights.
        (AllReduce(), "bfloat16", 4),
        (WireDtype(AllReduce(), "int8"), "float32", 4),
        pytest.param(WireDtype(AllReduce(), "bfloat16"), "float32", 4, marks=pytest.mark.slow),
        pytest.param(WireDtype(AllReduce(), "int4"), "bfloat16", 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_that_sum_to_no_number_above_0_are_counted(algorithm, dtype, replicas, weights):
    """Also of an uncompressed average, all of which is NaN."""
    tx, given = (
        gw.average_gradients(algorithm, axis_name=AXIS),
        {"w": jnp.ones((replicas, 24, 16), dtype)},
    )
    states = jax.vmap(lambda g: tx.init(g), axis_name=AXIS)(given)
    step = jax.jit(jax.vmap(lambda g, s, weight: tx.update(g, s, weight=weight), axis_name=AXIS))
    for n, each in enumerate(((1, 1), weights, (0, 2))):
        averages, states = step(
            given, states, jnp.tile(jnp.asarray(each, jnp.float32), replicas // 2)
        )
        assert jnp.isnan(averages["w"]).all() == (n == 1)
        assert states.account.skipped.tolist() == [n > 0] * replicas


def test_refusals():
    tx = gw.average_gradients(AllReduce(), axis_name=AXIS)
    ones = {"w": jnp.ones((4, 2))}

    def update(weight):
        return jax.vmap(lambda g: tx.update(g, tx.init(g), weight=weight)[0], axis_name=AXIS)(ones)

    for wrong in (-1, float("nan"), "2", True, jnp.ones(3)):
        with pytest.raises((TypeError, ValueError), match="weight"):
            update(wrong)
    assert update(2)["w"].tolist() == np.ones((4, 2)).tolist()
    # What a program alone sees makes averages that are not finite: a sum that is might be wrong.
    for wrong in (-1.0, np.nan, np.inf, 3e38):
        weighed = jax.vmap(lambda g, w: tx.update(g, tx.init(g), weight=w)[0], axis_name=AXIS)
        assert np.isnan(jax.jit(weighed)(ones, jnp.array([1.0, 1.0, wrong, 1.0]))["w"]).all()

    # Parameters stay as they were where nobody counts.
    local_tx = gw.local_sgd(optax.sgd(1.0), LocalSGD(1, weighted=True), axis_name=AXIS)

    def alone(params, weight):
        return local_tx.average_params(params, local_tx.init(params), weight=weight)[0]

    mine = jnp.arange(4.0)
    assert jax.vmap(alone, axis_name=AXIS)(mine, jnp.zeros(4)).tolist() == mine.tolist()
    assert jax.vmap(alone, axis_name=AXIS)(mine, jnp.array([0.0, 0, 1, 3])).tolist() == [2.75] * 4

    for local, words in (
        (LocalSGD(2), "weighted=True"),
        (LocalSGD(2, start_step=2, weighted=True), "TrainState"),
    ):
        local_tx = gw.local_sgd(optax.sgd(0.1), local, axis_name=AXIS)

        def step(params, tx=local_tx):
            state = TrainState.create(apply_fn=None, params=params, tx=tx)
            return tx.step(params, state, weight=1).params

        with refused(words):
            jax.vmap(step, axis_name=AXIS)(ones)


@pytest.mark.parametrize("weights", [(1, 2), (1, 5, 0, 3)], ids=str)
@pytest.mark.parametrize("told", [False, True], ids=["counted", "turn"])
@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
def test_parameters_of_16_bits_are_summed_in_32_and_rounded_once(weights, told, mode):
    """Whether what is due is decided in the program or while it is compiled. Behind a weight of 0
    is NaN; where nobody counts, parameters stay."""
    tx = gw.local_sgd(optax.sgd(1.0), LocalSGD(1, weighted=True), axis_name=AXIS)
    rng, counted = np.random.default_rng(0), np.float32(weights)
    given = rng.normal(size=(len(weights), 7, 9)).astype(jnp.bfloat16)
    given[counted == 0] = np.nan
    options = {"turn": tx.turn(0)} if told else {}

    def alone(params, weight):
        return tx.average_params(params, tx.init(params), weight=weight, **options)[0]

    def of_row(params, weight):
        return alone(params[0], weight[0])[None]

    run = jax.vmap(alone, axis_name=AXIS)
    if mode == "shard_map":
        of_axis = jax.sharding.PartitionSpec(AXIS)
        run = jax.shard_map(
            of_row, mesh=mesh_of(len(weights)), in_specs=of_axis, out_specs=of_axis, check_vma=False
        )
    run = jax.jit(run)
    total = sum(w * x.astype(np.float32) for w, x in zip(counted, given, strict=True) if w)
    expected = (total / counted.sum()).astype(jnp.bfloat16).astype(np.float32)
    for found in np.asarray(run(given, counted)).astype(np.float32):
        np.testing.assert_allclose(
            found, expected, rtol=2**-7
        )  # halfway between two numbers the last bit of a sum decides
        assert np.mean(found == expected) >= 0.9
    present = given[counted > 0].repeat(len(weights), 0)[: len(weights)]
    assert np.array_equal(run(present, 0 * counted), present)
