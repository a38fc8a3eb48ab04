"""What a run logs of its compression is what the plan says, and what is in the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import gradwire
import gradwire.jax_backend as gw
from gradwire import (
    AllReduce,
    LocalSGD,
    LocalSimulator,
    PowerSGD,
    Quantize,
    TwoLevel,
    WireDtype,
    diloco,
)
from gradwire.torch_backend import Stats
from tests.jax.replicas import AXIS, Replicas, gradients, mesh_of

SHAPES = {"w": (32, 24), "b": (24,), "v": (16, 4, 8)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def test_bytes_are_those_of_the_plan():
    """Of several transformations together, and in a state of nnx, too."""
    low, dense = gw.power_sgd(2, axis_name=AXIS), gw.average_gradients(AllReduce(), axis_name=AXIS)
    tx = optax.partition({"low": low, "dense": dense}, {"w": "low", "b": "dense", "v": "low"})
    coded = WireDtype(PowerSGD(1, half_step=True), "bfloat16")
    for made, algorithm in (
        (tx, PowerSGD(2)),
        (gw.average_gradients(coded, axis_name=AXIS), coded),
    ):
        found = gw.stats({"opt": (made.init(PARAMS), optax.EmptyState())})
        assert found.wire_bytes == gradwire.plan(SHAPES, algorithm).wire_bytes
        assert (found.steps, found.local_error_norm, found.skipped_steps, found.bytes_sent) == (
            0,
            0,
            0,
            0,
        )
        assert found.compression_ratio == 1
    optimizer = nnx.Optimizer(
        nnx.Linear(32, 24, rngs=nnx.Rngs(0)), optax.chain(low, optax.adam(1e-3)), wrt=nnx.Param
    )
    plan = gradwire.plan({"kernel": (32, 24), "bias": (24,)}, PowerSGD(2))
    assert gw.stats(optimizer.opt_state).wire_bytes == plan.wire_bytes


def test_before_the_start_everything_is_sent():
    run = Replicas(gw.power_sgd(2, axis_name=AXIS, start_step=2), PARAMS)
    sent, total = [], []
    for step in range(4):
        found = gw.stats(run.state)
        sent.append(float(found.wire_bytes))
        total.append((float(found.bytes_sent), float(found.dense_bytes)))
        run.update(gradients(SHAPES, step))
    plan = gradwire.plan(SHAPES, PowerSGD(2))
    assert sent == [plan.dense_bytes, plan.dense_bytes, plan.wire_bytes, plan.wire_bytes]
    whole, wire = plan.dense_bytes, plan.wire_bytes
    assert total == [(0, 0), (whole, whole), (2 * whole, 2 * whole), (2 * whole + wire, 3 * whole)]
    assert np.isclose(found.compression_ratio, 3 * whole / (2 * whole + wire))


def of_levels(sent, near=((0, 1), (2, 3))):
    """Bytes in all, inside nodes, and of both replicas of a node to the other node."""
    total, within = (
        sum(x) for x in zip(*((t.nbytes, t.in_groups(near)[1]) for t in sent), strict=True)
    )
    return total, within, 2 * (total - within)


LOCAL = {
    "two levels": (diloco(2, fragments=2, subgroup=2, compressor=TwoLevel(PowerSGD(2), 2)), 4),
    "groups": (LocalSGD({2: 1, "all": 2}, subgroup=2), 4),
    "compressor's warm-up": (
        diloco(2, start_step=1, compressor=PowerSGD(2, start_step=1, half_step=True)),
        7,
    ),
}
ROWS = [
    pytest.param(*case, id=name, marks=pytest.mark.slow if name != "groups" else ())
    for name, case in LOCAL.items()
]


@pytest.mark.parametrize(("local", "steps"), ROWS)
def test_local_sgd_is_counted_as_its_replicas_send(local, steps):
    """Along an axis that JAX keeps track of, where a row of an array cannot be cut out."""
    tx = gw.local_sgd(optax.sgd(0.1), local, axis_name=AXIS)
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    state = gw.stack_replicas((PARAMS, tx.init(PARAMS)))
    assert (gw.stats(state).bytes_sent, gw.stats(state).compression_ratio) == (0, 1)
    state, specs = gw.distribute(state, mesh, AXIS), gw.partition_specs(state, AXIS)

    def step(g, state):
        state = tx.step(jax.tree.map(lambda x: x[0], g), gw.this_replica(state))
        return gw.stack_replicas(state), jax.tree.map(lambda x: x[None], gw.stats(state))

    shards = {
        "in_specs": (jax.P(AXIS), specs),
        "out_specs": (specs, jax.P(AXIS)),
        "check_vma": False,
    }
    mapped, sim, sent = (
        jax.jit(jax.shard_map(step, mesh=mesh, **shards)),
        LocalSimulator(local, PARAMS, 4, dtype="float32"),
        [],
    )
    for t in range(steps):
        given = gradients(SHAPES, t)
        rows = jax.device_put(
            jax.tree.map(lambda *x: jnp.stack(x), *given), jax.NamedSharding(mesh, jax.P(AXIS))
        )
        state, inside = mapped(rows, state)
        sim.step(given, lambda _, p, g: {n: p[n] - 0.1 * g[n] for n in p})
        sent.append(sim.traffic)
    inside = jax.tree.map(np.asarray, inside)
    found, errors = gw.stats(state), state.per_replica[1].averages.memory.get("error", {})
    total, within, between = of_levels(sent)
    two = (
        (within, between)
        if local.compressor and hasattr(local.compressor, "within")
        else (0, total)
    )
    assert (found.steps, found.bytes_sent) == (steps, total)
    assert (found.within_bytes, found.between_bytes) == two
    assert np.isclose(found.compression_ratio, found.dense_bytes / two[1])
    assert not two[0] or np.isclose(found.within_ratio, found.dense_bytes / within)
    assert found.dense_bytes == steps * gradwire.plan(SHAPES, AllReduce()).dense_bytes
    assert all(np.ptp(x) == 0 for x in inside[:6])
    assert found[:6] == tuple(x[0] for x in inside[:6])
    squares = sum((np.asarray(x, np.float64) ** 2).sum() / 4 for x in jax.tree.leaves(errors))
    assert np.isclose(found.local_error_norm, np.sqrt(squares), rtol=1e-5)
    assert (found.local_error_norm > 0) == (local.compressor is not None)


def test_a_start_later_than_any_count_of_steps():
    tx = gw.diloco(
        optax.sgd(0.1), 3_000_000, compressor=PowerSGD(2, start_step=1_000), axis_name=AXIS
    )
    assert gw.stats(tx.init(PARAMS)).steps == 0


def test_what_torch_has_too_is_called_the_same():
    found = gw.stats(gw.power_sgd(2, axis_name=AXIS).init(PARAMS))
    theirs = Stats(1, 0, 2, 100, 200, local_error_norms=((100, 1.0),))
    assert found.scalars().keys() == theirs.scalars().keys()
    assert {"wire_bytes", "local_error_norm"} == {
        name for name in found._fields if not hasattr(theirs, name)
    }


def test_bytes_are_those_of_the_algorithm_that_goes_on():
    """A state may come from another wire dtype, or another number of replicas."""
    coded, plain = (
        gw.average_gradients(each, axis_name=AXIS)
        for each in (WireDtype(PowerSGD(2), "int8"), PowerSGD(2))
    )
    run = Replicas(coded, PARAMS, 2)
    run.update(gradients(SHAPES, 0, 2))
    sent = [gradwire.plan(SHAPES, PowerSGD(2)).wire_bytes]
    after = jax.vmap(plain.update, (None, 0), axis_name=AXIS, axis_size=2)
    state = jax.tree.map(lambda x: jnp.stack([x] * 2), coded.init(PARAMS))
    found = gw.stats(jax.tree.map(lambda x: x[0], after(PARAMS, state)[1]))
    assert [found.wire_bytes] == sent == [found.bytes_sent]
    tx = gw.average_gradients(Quantize("int8"), axis_name=AXIS)
    of_four = jax.vmap(tx.init, None, axis_name=AXIS, axis_size=4)(PARAMS)
    two = jax.tree.map(lambda x: x[:2], of_four)
    found = gw.stats(
        jax.tree.map(lambda x: x[0], jax.vmap(tx.update, (None, 0), axis_name=AXIS)(PARAMS, two)[1])
    )
    by_replicas = [gradwire.plan(SHAPES, Quantize("int8"), world_size=n).wire_bytes for n in (2, 4)]
    assert by_replicas[0] != by_replicas[1]
    assert found.wire_bytes == by_replicas[0]


@pytest.mark.parametrize("given", [True, False], ids=["params", "no params"])
def test_bytes_are_those_of_gradients_narrower_than_their_parameters(given):
    """But not those of a step in which a parameter has none."""
    tx = gw.all_reduce_mean(axis_name=AXIS)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    step = jax.jit(
        jax.vmap(
            lambda g, s: tx.update(g, s, PARAMS if given else None)[1],
            (None, None),
            None,
            axis_name=AXIS,
            axis_size=2,
        )
    )
    dense = gradwire.plan(SHAPES, AllReduce()).dense_bytes
    before = tx.init(PARAMS)
    for updates, nbytes in ((PARAMS, dense), (half | {"w": None}, dense), (half, dense / 2)):
        after = step(updates, before)
        assert jax.tree.structure(after) == jax.tree.structure(before)
        found = gw.stats(after)
        assert (found.wire_bytes, found.bytes_sent, found.dense_bytes) == (nbytes,) * 3


def test_averages_by_weight_are_compared_with_weighted_means():
    """Also where an absent replica holds NaN."""
    weights = jnp.array([3.0, 0.0, 1e-3, 1.0])
    tx = gw.average_gradients(PowerSGD(2), axis_name=AXIS)
    rng = np.random.default_rng(0)
    given = {
        "w": rng.standard_normal((4, 32, 24)).astype(np.float32),
        "b": rng.standard_normal((4, 24)).astype(np.float32),
    }
    errors = 0.1 * rng.standard_normal((4, 1, 32, 24)).astype(np.float32)
    given["w"][1] = given["b"][1] = np.nan
    state = tx.init(jax.tree.map(lambda x: x[0], given))

    def error_of(g, weight, error):
        own = state._replace(local=gw.PerReplica({"error": {"w": error, "b": optax.MaskedNode()}}))
        averages, _ = tx.update(g, own, weight=weight)
        return averages, gw.relative_error(g, averages, own, axis_name=AXIS, weight=weight)

    averages, found = jax.jit(jax.vmap(error_of, axis_name=AXIS))(given, weights, errors)
    share = np.asarray(weights, np.float64) / weights.sum()
    mean = np.tensordot(share, np.nan_to_num(given["w"]) + errors[:, 0], 1)
    off = np.linalg.norm(averages["w"][0] - mean) / np.linalg.norm(mean)
    assert np.allclose(found.by_parameter["w"], off, rtol=1e-4)
    assert (found.by_parameter["b"] < 1e-6).all()
    assert 0.1 < off < 1


@pytest.mark.parametrize("algorithm", [PowerSGD(2), PowerSGD(2, error_feedback=False)], ids=repr)
def test_averages_are_compared_with_those_of_what_went_in(algorithm):
    tx = gw.average_gradients(algorithm, axis_name=AXIS)

    def update(g, state):
        averages, after = tx.update(g, state)
        return (averages, gw.relative_error(g, averages, state, axis_name=AXIS)), after

    run = Replicas(optax.GradientTransformation(tx.init, update), PARAMS)
    for step in range(2):
        given, errors = (
            gradients(SHAPES, step),
            run.global_state().local.per_replica.get("error", {}),
        )
        averages, found = run.update(given)
    off, norms = {}, {}
    for name in SHAPES:
        left_out = errors.get(name)
        mean = np.mean([g[name] for g in given], 0, dtype=np.float64)
        mean += np.mean(left_out, 0, dtype=np.float64) if isinstance(left_out, np.ndarray) else 0
        off[name], norms[name] = np.linalg.norm(averages[name] - mean), np.linalg.norm(mean)
        assert np.isclose(found.by_parameter[name], off[name] / norms[name], rtol=1e-4, atol=1e-6)
    whole = np.linalg.norm(list(off.values())) / np.linalg.norm(list(norms.values()))
    assert np.isclose(found.whole, whole, rtol=1e-4)
    assert found.by_parameter["b"] < 1e-6 < 0.01 < found.whole < 1


def test_of_the_state_as_a_whole_and_inside_the_training_step():
    """There each replica sees the norm of its own error."""
    tx, mesh = gw.power_sgd(2, axis_name=AXIS), mesh_of(4)
    state = gw.distribute(tx.init(PARAMS), mesh, AXIS)
    specs = gw.partition_specs(state, AXIS)

    def step(g, state):
        _, state = tx.update(jax.tree.map(lambda x: x[0], g), state)
        return state, jax.tree.map(lambda x: gw.mark_varying(x, AXIS)[None], gw.stats(state))

    mapped = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(jax.P(AXIS), specs), out_specs=(specs, jax.P(AXIS))
        )
    )
    for t in range(3):
        given = gradients(SHAPES, t)
        if t == 1:
            given[2]["b"][3] = np.nan
        state, inside = mapped(jax.tree.map(lambda *x: np.stack(x), *given), state)
    whole = jax.jit(gw.stats)(state)
    rows = jax.tree.leaves(jax.tree.map(np.asarray, state.local))
    norms = np.sqrt(sum((x.astype(np.float64) ** 2).reshape(4, -1).sum(1) for x in rows))
    assert norms.min() > 0
    assert np.allclose(inside.local_error_norm, norms, rtol=1e-4)
    assert np.isclose(whole.local_error_norm, np.sqrt((norms**2).mean()), rtol=1e-5)
    assert (whole.steps, whole.skipped_steps) == (3, 1)
    assert inside.skipped_steps.tolist() == [1] * 4


def test_what_pmap_holds_is_refused_with_the_way_to_read_it():
    local = gw.local_sgd(optax.sgd(0.1), LocalSGD(2), axis_name=AXIS)
    averages = gw.power_sgd(2, axis_name=AXIS).init(PARAMS)
    for state in (averages, gw.stack_replicas((PARAMS, local.init(PARAMS)))):
        replicated = gw.replicate(state, axis_name=AXIS)
        with pytest.raises(
            ValueError, match=r"stats: .* the state is in pmap form.* Give it unreplicate\(state\)"
        ):
            gw.stats(replicated)
        assert gw.stats(gw.unreplicate(replicated)).steps.max() == 0
