"""The sharded step in the simulator: what it computes, what it sends, and that it uses nothing after giving it away."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import AllReduce, PowerSGD, Simulator, Spec, State, plan
from gradwire.core.simulate import NumpyOps, PoisonOps, lock_step
from gradwire.core.zero.sharded_step import Zero, clip_by_norm
from gradwire.core.zero.sharding import MixedShards, shard_by_bucket, shard_by_element, shard_by_parameter
from gradwire.core.zero.stacks import StackShards
from tests.parity import zero_cases
from tests.parity.zero_cases import ZERO_CASES

#: Of three shapes there are several.
SHAPES = (
    {"w": (5, 7), "b": (3,), "s": (), "empty": (0, 4), "v": (16, 4)} | {f"{n}2": (5, 7) for n in "abcd"} | {"b2": (3,)}
)
SPECS = {name: Spec(shape, "float64") for name, shape in SHAPES.items()}
BUCKETS = [["w", "b", "a2", "b2", "c2"], ["s", "empty", "v", "d2"]]
MAKERS = {
    "element": shard_by_element,
    "parameter": shard_by_parameter,
    "bucket": lambda specs, world: shard_by_bucket(specs, world, BUCKETS),
    "mixed": lambda specs, world: mixed(specs, world),
    "stacks": StackShards,
    "spread": lambda specs, world: shard_by_bucket(specs, world, BUCKETS, spread=True),
}


def mixed(specs, world):
    cut, whole = ({n: s for n, s in specs.items() if (len(s.shape) == 2) == matrix} for matrix in (False, True))
    return MixedShards(specs, world, (shard_by_element(cut, world), shard_by_parameter(whole, world)))


EVERY_KIND = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
#: The last is more than there are parameters, and more than most have elements.
WORLDS = (1, 2, 3, 17)


def given_gradients(world, seed=0):
    rng = np.random.default_rng(seed)
    return [{name: rng.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(world)]


def mean(gradients):
    return {name: np.mean([g[name] for g in gradients], axis=0) for name in SHAPES}


def norm(gradients):
    return np.sqrt(sum((g**2).sum() for g in gradients.values()))


def twice(replica, pieces):
    return {name: 2 * x for name, x in pieces.items()}


def assert_equal(result, expected, rtol=1e-12):
    assert result.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(result[name], expected[name], rtol=rtol, atol=1e-15)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("case", [c for c in ZERO_CASES if not isinstance(ZERO_CASES[c].algorithm, PowerSGD)])
def test_the_oracle_of_the_parity_table_is_the_optimizer_that_is_not_sharded(case, replicas):
    sharded, plain = zero_cases.oracle(case, replicas).params, zero_cases.plain(case, replicas)
    for mine, theirs in zip(sharded, plain, strict=True):
        assert_equal(mine, theirs, rtol=1e-11)
    changed = [n for n in zero_cases.SHAPES if not np.array_equal(sharded[-1][n], zero_cases.initial(n))]
    assert changed == [n for n in zero_cases.SHAPES if n != "empty"]


@EVERY_KIND
@pytest.mark.parametrize("algorithm", [PowerSGD(2, min_compression_rate=0.5), None], ids=repr)
def test_after_another_algorithm_each_replica_takes_its_part(make, algorithm):
    world = 3
    sim = Simulator(Zero(make(SPECS, world), algorithm), SHAPES, world, ops=PoisonOps(), optimizer=twice)
    alone = Simulator(algorithm or AllReduce(), SHAPES, world)
    for step in range(3):
        local = given_gradients(world, step)
        averages = alone.step(local)
        result = sim.step(local if algorithm else [averages] * world)
        assert_equal(result, {name: 2 * x for name, x in averages.items()})
    if algorithm:
        assert sim.states[0].tensors.keys() == alone.states[0].tensors.keys() >= {"w", "v"}


@EVERY_KIND
def test_the_norm_is_that_of_every_gradient_once(make):
    for world in (2, 3):
        local = given_gradients(world)
        average = mean(local)
        found = Simulator(Zero(make(SPECS, world), max_norm=1.0), SHAPES, world, optimizer=twice).step(local)
        assert norm(average) > 1
        assert_equal(found, {name: 2 * x / norm(average) for name, x in average.items()}, rtol=1e-9)


@EVERY_KIND
@pytest.mark.parametrize(
    ("algorithm", "max_norm"),
    [(AllReduce(), None), (AllReduce(bucket_bytes=64), 1.0), (PowerSGD(2, min_compression_rate=0.5), 1.0), (None, 1.0)],
    ids=repr,
)
def test_a_plan_is_what_is_sent(make, algorithm, max_norm):
    if make is StackShards and algorithm == AllReduce(bucket_bytes=64):
        with pytest.raises(ValueError, match="bucket_bytes=64"):
            Zero(make(SPECS, 2), algorithm)
        return
    for world in WORLDS[1:]:
        zero = Zero(make(SPECS, world), algorithm, max_norm)
        sim = Simulator(zero, SHAPES, world, optimizer=twice)
        local = given_gradients(world)
        sim.step(local if algorithm else [local[0]] * world)
        predicted = plan(SHAPES, zero, itemsize=8)
        assert (predicted.collectives, predicted.wire_bytes) == (sim.traffic.collectives, sim.traffic.nbytes)


@settings(deadline=None)
@given(world=st.integers(1, 9), sizes=st.lists(st.integers(0, 50), min_size=1, max_size=8), clipped=st.booleans())
def test_bytes_by_hand(world, sizes, clipped):
    """Half of the message there and half of it back: an all-reduce of the padded parameters. The norm is one number more."""
    shapes = {f"p{i}": (n,) for i, n in enumerate(sizes)}
    shards = shard_by_element({name: Spec(shape) for name, shape in shapes.items()}, world)
    padded = sum(world * -(-n // world) for n in sizes)
    step = plan(shapes, Zero(shards, max_norm=1.0 if clipped else None)).steps[0]
    assert step.nbytes == 2 * -(-4 * padded // 2) + 4 * clipped
    assert step.collectives == (2 if padded else 0) + clipped


def test_a_model_sends_at_most_two_percent_more_than_one_all_reduce():
    width = 256
    block = {"qkv": (3 * width, width), "out": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    block |= {f"{name}.bias": shape[:1] for name, shape in block.items()}
    shapes = {f"{i}.{name}": shape for i in range(4) for name, shape in block.items()} | {"scale": (), "odd": (1001, 7)}
    dense = plan(shapes, AllReduce())
    specs = {name: Spec(shape) for name, shape in shapes.items()}
    for world in (2, 3, 8, 64):
        for make in (shard_by_element, shard_by_parameter):
            step = plan(shapes, Zero(make(specs, world), AllReduce(bucket_bytes=1 << 20), max_norm=1.0))
            assert dense.wire_bytes <= step.wire_bytes <= 1.02 * dense.wire_bytes


def test_clipping_of_half_precision_does_not_overflow_and_keeps_the_dtype():
    pieces = [{"x": np.full(4, 60000.0, np.float16)}, {"x": np.full(3, 60000.0, np.float16)}]
    results = lock_step([clip_by_norm(NumpyOps(), p, 1.0) for p in pieces])
    for (clipped, norm_squared), own in zip(results, pieces, strict=True):
        assert clipped["x"].dtype == np.float16
        assert norm_squared.dtype == np.float32
        np.testing.assert_allclose(clipped["x"], np.full(own["x"].shape, 7**-0.5), rtol=1e-3)


def test_a_norm_that_is_not_finite_spoils_every_update():
    local = given_gradients(2)
    local[1]["s"][...] = np.inf
    result = Simulator(Zero(shard_by_element(SPECS, 2), max_norm=1.0), SHAPES, 2, optimizer=twice).step(local)
    assert not any(np.isfinite(x).any() and x.size for name, x in result.items() if name == "s")
    # Every factor is max_norm / inf = 0: optimizers are given zeros, as torch's clipping gives them.
    assert all((x == 0).all() for name, x in result.items() if name != "s")
    local[1]["s"][...] = np.nan
    result = Simulator(Zero(shard_by_element(SPECS, 2), max_norm=1.0), SHAPES, 2, optimizer=twice).step(local)
    assert all(np.isnan(x).all() for x in result.values())


def test_gradients_are_unscaled_before_anything_looks_at_them():
    scale = [4.0]
    zero = Zero(shard_by_element(SPECS, 2), max_norm=1e3, unscale=lambda: 1 / scale[0])
    sim = Simulator(zero, SHAPES, 2, optimizer=twice)
    for scale[0] in (4.0, 256.0):
        local = given_gradients(2)
        scaled = [{name: scale[0] * x for name, x in g.items()} for g in local]
        assert_equal(sim.step(scaled), {name: 2 * x for name, x in mean(local).items()})


def test_some_of_the_parameters_take_part():
    sim = Simulator(Zero(shard_by_element(SPECS, 3)), SHAPES, 3, optimizer=twice)
    local = given_gradients(3)
    expected = {name: 2 * x for name, x in mean(local).items()}
    for names in (["b", "w"], ["v"], ["s", "empty"]):
        result = sim.step([{name: g[name] for name in names} for g in local])
        assert_equal(result, {name: expected[name] for name in names})


@EVERY_KIND
@pytest.mark.parametrize("ops", [NumpyOps, PoisonOps])
def test_results_are_written_where_they_may_be(make, ops):
    old = [{name: np.full(shape, 7.0) for name, shape in SHAPES.items()} for _ in range(3)]
    given, zero, kernels = (
        given_gradients(3),
        Zero(make(SPECS, 3), AllReduce(None if make is StackShards else 64)),
        ops(),
    )
    expected = {name: 2 * x for name, x in mean(given).items()}
    programs = [zero.step(kernels, dict(g), State(), 0, out=o) for g, o in zip(given, old, strict=True)]
    for (result, _), mine in zip(lock_step(programs, kernels, optimizer=twice), old, strict=True):
        assert_equal(result, expected)
        if ops is NumpyOps and make is not StackShards:
            assert all(result[name] is mine[name] for name in SHAPES)
            assert_equal(mine, expected)


def test_dtypes_do_not_share_a_message():
    specs = {"a": Spec((3,), "float32"), "b": Spec((4,), "float64"), "c": Spec((5,), "float32")}
    assert Zero(shard_by_element(specs, 2)).buckets(specs) == [["a", "c"], ["b"]]
    assert Zero(shard_by_element(specs, 2), AllReduce(bucket_bytes=1)).buckets(specs) == [["c"], ["b"], ["a"]]
