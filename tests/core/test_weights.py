"""Replicas that count by a weight, against NumPy's weighted average and runs without the absent
one; two levels, against averages of nodes."""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from hypothesis import example, settings
from hypothesis import given as drawn
from hypothesis import strategies as st

import gradwire as gw
import gradwire.core.protocol as rq
from gradwire import (
    AllReduce,
    LocalSGD,
    LocalSimulator,
    PowerSGD,
    Quantize,
    Simulator,
    TopK,
    TwoLevel,
    WireDtype,
    plan,
)
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.codecs.coder import LITTLE
from gradwire.core.codecs.shares import Extent, deal, shares_of
from gradwire.core.kernels.numpy import dtype_named
from gradwire.core.protocol import gather, together
from gradwire.core.protocol.halves import AllGather
from gradwire.core.protocol.programs import UnknownRequest
from gradwire.core.protocol.reductions import Reduce
from gradwire.core.protocol.weights import LARGEST, SMALLEST, require_weight
from gradwire.core.simulate import PoisonOps
from tests.methods import METHODS

SHAPES = {"w": (24, 16), "b": (7,), "x": (130,), "none": (0, 2), "s": ()}
#: What a method remembers of a step is what it has not sent, so the average is known without
#: looking at its messages.
REMEMBERING = {
    "power_sgd": PowerSGD(2),
    "half_step": PowerSGD(2, half_step=True, start_step=1),
    "top_k": TopK(4, per=32),
    "top_k_bits": TopK(8, per=64, bits=4),
    "sign": gw.Sign(),
    "one_bit": gw.Sign(per="column", magnitudes=2),
    "int8": Quantize("int8", block=8),
}
#: And those that forget.
EVERY = REMEMBERING | {
    "dense": AllReduce(),
    "senders": TopK(4, per=32, mean="senders"),
    "wire_int8": WireDtype(AllReduce(), "int8", block=8),
    "wire_factors": WireDtype(PowerSGD(2), "bfloat16"),
}
weight = st.one_of(st.just(0.0), st.just(1.0), st.floats(2**-10, 2**20, width=32))


@st.composite
def some_weights(draw, smallest=1):
    """Of up to 5 replicas, of which one or more count."""
    found = draw(st.lists(weight, min_size=smallest, max_size=5))
    found[draw(st.integers(0, len(found) - 1))] = draw(st.floats(2**-10, 2**20, width=32))
    return found


def gradients(replicas, step, shapes=SHAPES):
    rng = {(r, n): np.random.default_rng([r, step, *n.encode()]) for r in replicas for n in shapes}
    return [{n: rng[r, n].normal(size=s) for n, s in shapes.items()} for r in replicas]


def broken(given):
    return {n: np.full(np.shape(x), np.nan) for n, x in given.items()}


def rounded_by(algorithm, name, replicas):
    """The replica that rounds the mean of each element."""
    codec, sizes = algorithm._codec, {n: math.prod(s) for n, s in SHAPES.items()}
    first = deal([Extent(n, size, "float64") for n, size in sizes.items()], codec, replicas).first
    rows, width = codec.layout(sizes[name])
    owners = shares_of(replicas, ((rows, first.get(name, 0)),), (0,)).owners()
    return np.repeat(owners, width)[: sizes[name]]


def same_bits(a, b):
    """A step that overflows in half precision is NaN with the absent replica, and without it."""
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n], equal_nan=True) for n in a)


def assert_same_states(states, others):
    for mine, theirs in zip(states, others, strict=True):
        np.testing.assert_equal([mine.shared, mine.tensors], [theirs.shared, theirs.tensors])


@pytest.mark.parametrize("method", REMEMBERING)
@settings(max_examples=4)
@example(weights=[1.0, 0.0, 1.0])
@drawn(weights=some_weights())
def test_the_average_is_the_weighted_mean_of_what_was_sent(method, weights):
    """x - error is what a replica has sent, or nothing, if it is absent: then its error stays,
    whatever its gradient is."""
    algorithm, float32 = REMEMBERING[method], np.asarray(weights, np.float32).astype(float)
    simulator = Simulator(algorithm, SHAPES, len(weights))
    for step in range(3):
        given = gradients(range(len(weights)), step)
        before = [s.map(np.array).tensors for s in simulator.states]
        sent = [broken(g) if w == 0 else g for g, w in zip(given, weights, strict=True)]
        averages = simulator.step(sent, weights=weights)
        for name, shape in SHAPES.items():
            parts, told = [], np.full(shape, True)
            for r, state in enumerate(simulator.states):
                error = before[r].get(name, {}).get("error", 0.0)
                after = state.tensors.get(name, {}).get("error", np.zeros(shape))
                if weights[r] == 0:
                    assert np.array_equal(after, error * np.ones(shape))
                # nothing is remembered, and the error is as it was
                early = step < algorithm.start_step
                parts.append(given[r][name] if early else given[r][name] + error - after)
            if isinstance(algorithm, Quantize) and len(weights) != 2:  # two replicas round once
                # The second rounding of the mean is in somebody's memory, but in those blocks that
                # an absent replica rounds, or one that counts little.
                notes = float32 * LITTLE * len(weights) >= float32.sum() * (1 + 1e-6)
                told = notes[rounded_by(algorithm, name, len(weights))].reshape(shape)
            present = float32 > 0
            expected = np.average(np.array(parts)[present], axis=0, weights=float32[present])
            np.testing.assert_allclose(averages[name][told], expected[told], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", EVERY)
@settings(max_examples=4)
@drawn(
    weights=some_weights(),
    place=st.integers(0, 5),
    dtype=st.sampled_from(["float64", "float32", "float16"]),
)
def test_weight_0_is_a_run_without_that_replica(method, weights, place, dtype):
    algorithm, place = EVERY[method], min(place, len(weights))
    if isinstance(algorithm, (Quantize, WireDtype)):
        # Parts of an average are owned by replicas: who owns a part remembers how it was rounded,
        # and two replicas round once less.
        quantized = isinstance(algorithm, Quantize) and algorithm.error_feedback
        blocks = sum(-(-math.prod(shape) // 128) for shape in SHAPES.values())
        # Of no more blocks than replicas the same replica owns each, with one more that is the
        # last.
        least = max(3, blocks) if quantized else 3
        weights = [w or 1.0 for w in (weights * least)[: max(least, len(weights))]]
        place = len(weights)
        if quantized:
            algorithm = Quantize("int8")
    with_it = Simulator(algorithm, SHAPES, len(weights) + 1, dtype=dtype, ops=PoisonOps())
    without, unweighted = (
        Simulator(algorithm, SHAPES, len(weights), dtype=dtype) for _ in range(2)
    )
    for step in range(3):
        given = gradients(range(len(weights)), step)
        more = [*given[:place], broken(given[0]), *given[place:]]
        averages = without.step(given, weights=weights)
        assert same_bits(
            averages, with_it.step(more, weights=[*weights[:place], 0, *weights[place:]])
        )
        assert_same_states(without.states, [*with_it.states[:place], *with_it.states[place + 1 :]])
        # whose sums would be too long to be divided afterwards
        if set(weights) == {1.0} and dtype != "float16":
            assert same_bits(averages, unweighted.step(given))


HALVES = ("bfloat16", "float16")


def rounded_once(arrays, weights, dtype):
    """The weighted mean in float32 of those that count, in their dtype."""
    power = np.exp2(-np.floor(np.log2(max(weights))))  # by which no bit changes
    counting = [
        (np.float32(w * power), np.asarray(x, np.float32))
        for x, w in zip(arrays, weights, strict=True)
        if w
    ]
    return np.asarray(sum(w * x for w, x in counting) / sum(w for w, _ in counting), dtype)


@pytest.mark.parametrize("dtype", [dtype_named(name) for name in HALVES], ids=HALVES)
@pytest.mark.parametrize(
    "weights",
    [
        (1, 2),
        (1, 5),
        (7,),
        (0, 3, 1),
        (1e18, 3e17, 0, 7),
        (1e-18, 3e-18, 5e-18),
        (1e18, 1e-18, 1),
        (1, 2, 3, 4, 0),
    ],
    ids=str,
)
def test_16_bits_are_summed_in_32_and_rounded_once(weights, dtype):
    """To the bit. What is behind a weight of 0 is NaN."""
    given = [{n: x.astype(dtype) for n, x in g.items()} for g in gradients(range(len(weights)), 0)]
    given = [
        {n: x * np.nan for n, x in g.items()} if w == 0 else g
        for g, w in zip(given, weights, strict=True)
    ]
    found = Simulator(
        AllReduce(), SHAPES, len(weights), dtype=str(np.dtype(dtype)), ops=PoisonOps()
    ).step(given, weights=list(weights))
    for name in SHAPES:
        expected = rounded_once([g[name] for g in given], weights, dtype)
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 1, 2), (3,))], ids=str)
def test_16_bits_in_groups_of_any_sizes(groups):
    start, dtype, weights = (
        {"w": np.zeros((9, 5), dtype_named("bfloat16"))},
        dtype_named("bfloat16"),
        [1, 2, 0, 5],
    )
    local = LocalSGD({groups: 1, "all": 2}, weighted=True)
    simulator = LocalSimulator(local, start, 4, dtype="bfloat16")
    given = [
        {n: x.astype(dtype) for n, x in g.items()} for g in gradients(range(4), 3, {"w": (9, 5)})
    ]
    simulator.step(
        given, lambda r, p, g: {n: np.asarray(g[n], p[n].dtype) for n in p}, weights=weights
    )
    for members in groups:
        of_group = [given[m]["w"] for m in members], [weights[m] for m in members]
        for m in members:
            np.testing.assert_array_equal(
                simulator.parameters[m]["w"], rounded_once(*of_group, dtype)
            )


@pytest.mark.parametrize("weights", [(1, 2), (1, 5, 3)], ids=str)
def test_parameters_of_16_bits_neither_grow_nor_shrink_when_they_are_averaged_a_thousand_times(
    weights,
):
    """They only jitter, by half a percent, in each of a thousand averages."""
    dtype = dtype_named("bfloat16")
    x = np.random.default_rng(0).normal(size=(32, 32)).astype(dtype)
    simulator, growth = (
        LocalSimulator(LocalSGD(1, weighted=True), {"w": x}, len(weights), dtype="bfloat16"),
        0.0,
    )
    for step in range(1000):
        noise = [
            1 + 0.005 * np.random.default_rng([step, r]).normal(size=x.shape)
            for r in range(len(weights))
        ]
        moved = [
            np.asarray(simulator.parameters[r]["w"].astype(np.float32) * noise[r], dtype)
            for r in range(len(weights))
        ]
        expected = np.linalg.norm(rounded_once(moved, weights, dtype).astype(float))
        simulator.step([{"w": m} for m in moved], lambda r, p, g: g, weights=list(weights))
        growth += np.log(np.linalg.norm(simulator.parameters[0]["w"].astype(float)) / expected)
    assert abs(growth) < 1e-4


@pytest.mark.parametrize("dtype", HALVES)
def test_no_wire_is_wider_for_weights(dtype):
    for world_size in (2, 4):
        plain, weighted = (
            plan(SHAPES, a, world_size=world_size, dtype=dtype).wire_bytes
            for a in (AllReduce(), gw.Weighted(AllReduce()))
        )
        assert weighted <= plain + 8 * world_size


def test_weights_that_sums_of_float32_would_lose_are_refused():
    for wrong in (1e39, 1e19, 1e-19, 1e-44, 10**400, -1, np.nan):
        with pytest.raises(ValueError, match="weight"):
            require_weight(wrong)
    assert [require_weight(w) for w in (0, 1e-18, 1e18, np.float32(2), 2**53)] == [
        0,
        1e-18,
        1e18,
        2,
        2**53,
    ]


@pytest.mark.parametrize("weight", [SMALLEST, LARGEST])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e16])
def test_values_of_any_size_come_out_of_sums_by_the_smallest_and_the_largest_weights(weight, size):
    """As all who may give a weight, each of the largest, or one of them beside others: no inf, no
    zero, and no digit less."""
    for weights in ([weight] * 8, [weight, 1, 2, 0, 1, 1, 1, 1]):
        given = [{n: np.float32(size) * x for n, x in g.items()} for g in gradients(range(8), 0)]
        found = Simulator(AllReduce(), SHAPES, 8).step(given, weights=weights)
        for name in SHAPES:
            expected = np.average([g[name].astype(float) for g in given], axis=0, weights=weights)
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5 * size)


def test_half_precision_does_not_overflow():
    replicas = Simulator(AllReduce(), {"w": (2,)}, 2, dtype="float16")
    assert replicas.step([{"w": [4e4, 1.0]}, {"w": [0.0, 3.0]}], weights=[3e5, 1e5])[
        "w"
    ].tolist() == [3e4, 1.5]


@pytest.mark.parametrize(
    "algorithm", [AllReduce(), PowerSGD(2), TopK(4, per=32), gw.Sign(), Quantize("int8")], ids=repr
)
def test_levels_weigh_nodes_by_their_replicas(algorithm):
    near = ((0, 1), (2, 3), (4, 5))
    two, one = Simulator(gw.TwoLevel(algorithm, near), SHAPES, 6), Simulator(algorithm, SHAPES, 3)
    for step in range(3):
        given = gradients(range(6), step)
        nodes = [
            {n: (given[0][n] + 3 * given[1][n]) / 4 for n in SHAPES},
            broken(given[2]),
            given[4],
        ]
        given[3], given[5] = broken(given[3]), broken(given[5])
        averages, expected = (
            two.step(given, weights=[1, 3, 0, 0, 2, 0]),
            one.step(nodes, weights=[4, 0, 2]),
        )
        for name in SHAPES:
            np.testing.assert_allclose(averages[name], expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "method", ["dense", "power_sgd", "half_step", "top_k", "sign", "wire_int8", "int8"]
)
@pytest.mark.parametrize(
    "levels", [lambda algorithm: algorithm, lambda algorithm: gw.TwoLevel(algorithm, 2)], ids="12"
)
def test_nobody_counts(method, levels):
    """The memory is as it was, and the next step goes on from it."""
    two, never = (Simulator(levels(EVERY[method]), SHAPES, 4) for _ in range(2))
    for step in range(3):
        given = gradients(range(4), step)
        for simulator in (two, never):
            simulator.step(given, weights=[1, 2, 3, 4])
        before = [s.map(np.array) for s in two.states]
        with pytest.raises(gw.NobodyCounts):
            two.step(given, weights=[0] * 4)
        assert two.steps == step + 1
        assert_same_states(two.states, before)
    assert same_bits(two.step(given, weights=[1, 0, 0, 0]), never.step(given, weights=[1, 0, 0, 0]))


@pytest.mark.parametrize(
    "method", [n for n in EVERY if n != "wire_factors"]
)  # between codes of 16 bits it travels by itself
def test_a_weight_is_4_bytes_of_a_message(method):
    weighted, plain = (
        plan(SHAPES, a, world_size=4).steps for a in (gw.Weighted(EVERY[method]), EVERY[method])
    )
    for mine, theirs in zip(weighted, plain, strict=True):
        assert mine.collectives == theirs.collectives
        # a gather of 4 counts for 8, and there may be both
        assert 4 <= mine.nbytes - theirs.nbytes <= 12


@dataclass(frozen=True, kw_only=True, repr=False)
class Careless(gw.Compressor):
    """Averages what it has gathered, all alike."""

    def memory(self, ops, name, spec):
        return {}

    async def compress(self, ops, name, x, memory, context):
        (every,) = await gather(x)
        return x, ops.multiply(every[0], 1.0), memory


SHARDED = gw.Zero(gw.shard_by_element({"w": gw.Spec((8, 8))}, 2))


@pytest.mark.parametrize("algorithm", [Careless(), METHODS["int8"].algorithm, SHARDED])
def test_what_cannot_be_weighed_is_refused_by_name(algorithm):
    with pytest.raises(UnknownRequest, match=type(algorithm).__name__):
        plan({"w": (8, 8)}, gw.Weighted(algorithm), world_size=2)


# ---- local SGD
START = {
    name: np.random.default_rng(1).normal(size=shape)
    for name, shape in {"w": (12, 8), "v": (8, 6), "b": (5,)}.items()
}
LOCAL = {
    "plain": partial(LocalSGD, 4),
    "warm": partial(LocalSGD, 4, start_step=2),
    "fragments": partial(gw.diloco, 4, fragments=2, compressor=PowerSGD(2)),
    "overlap": partial(gw.diloco, 4, overlap=2, start_step=1),
    "progress": partial(
        gw.diloco, 4, overlap=1, merge="progress", fragments=3, compressor=TopK(4, per=16)
    ),
    "eager": partial(gw.diloco, 4, eager=True, compressor=PowerSGD(1)),
    "radial": partial(gw.diloco, 4, radial=True),
    "radial_overlap": partial(gw.diloco, 4, radial=("w",), overlap=2, compressor=gw.Sign()),
}


def updated(replica, parameters, given):
    return {n: parameters[n] - 0.1 * given[n] for n in parameters}


def at(step, replicas):
    return gradients(replicas, step, {n: x.shape for n, x in START.items()})


@pytest.mark.parametrize("case", LOCAL)
@settings(max_examples=3)
@drawn(weights=some_weights(), place=st.integers(0, 5))
def test_local_sgd_without_an_absent_replica(case, weights, place):
    """To the bit, weights changing with the steps; and equal weights are none."""
    local, place = LOCAL[case](weighted=True), min(place, len(weights))
    with_it, without = (LocalSimulator(local, START, n) for n in (len(weights) + 1, len(weights)))
    plain = LocalSimulator(LOCAL[case](), START, len(weights))
    for step in range(11):
        mine = [w * (1 + step % 3) for w in weights]
        given = at(step, range(len(weights)))
        warm = step < local.start_step
        absent = (
            given[0]
            if warm
            else {n: np.full(x.shape, np.nan if step == 6 else 3.0) for n, x in START.items()}
        )
        without.step(given, updated, weights=mine)
        with_it.step(
            [*given[:place], absent, *given[place:]],
            updated,
            weights=[*mine[:place], 0, *mine[place:]],
        )
        rest = [*with_it.parameters[:place], *with_it.parameters[place + 1 :]]
        assert all(map(same_bits, without.parameters, rest))
        if set(weights) == {1.0}:
            plain.step(given, updated)
            for a, b in zip(plain.parameters, without.parameters, strict=True):
                for name in START:
                    np.testing.assert_allclose(a[name], b[name], rtol=1e-9, atol=1e-9)
    # What was broken has taken part again since, in nothing that others have received.
    assert all(np.isfinite(x).all() for x in without.parameters[0].values())


@pytest.mark.parametrize("start", ["plain", "fragments", "eager"])
def test_no_replica_counts_in_a_round(start):
    simulator = LocalSimulator(LOCAL[start](weighted=True), START, 2)
    for step in range(3):
        simulator.step(at(step, range(2)), updated)
    before = [s.map(np.array) for s in simulator.states]
    parameters = [{n: x.copy() for n, x in p.items()} for p in simulator.parameters]
    with pytest.raises(gw.NobodyCounts):
        simulator.step(at(3, range(2)), updated, weights=[0, 0])
    assert simulator.steps == 3
    assert all(map(same_bits, simulator.parameters, parameters))
    assert_same_states(simulator.states, before)


def test_a_group_of_absent_replicas_goes_on_by_itself():
    simulator = LocalSimulator(LocalSGD({2: 1, "all": 2}, weighted=True), {"w": [0.0]}, 4)
    simulator.step([{"w": [-10.0 * (r + 1)]} for r in range(4)], updated, weights=[0, 0, 1, 3])
    assert [float(p["w"][0]) for p in simulator.parameters] == [1.0, 2.0, 3.75, 3.75]
    simulator.step([{"w": [0.0]}] * 4, updated, weights=[0, 0, 1, 0])
    assert [float(p["w"][0]) for p in simulator.parameters] == [3.75] * 4


@settings(max_examples=10)
@drawn(
    weights=some_weights(),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.0, 1e-40, 1e-6, 1.0, 1e12]),
)
def test_directions_and_lengths_are_averaged_apart(weights, seed, scale):
    """The formula of the paper, in NumPy; with lr 1 and no momentum the outer step is the average
    itself."""
    shapes, rng = {"m": (4, 3), "v": (5,)}, np.random.default_rng(seed)
    local = LocalSGD(1, compressor=AllReduce(), weighted=True, radial=True)
    moves = [
        {n: rng.normal(size=s) * scale * 10.0 ** rng.integers(-3, 4) for n, s in shapes.items()}
        for _ in weights
    ]
    simulator = LocalSimulator(local, {n: np.zeros(s) for n, s in shapes.items()}, len(weights))
    simulator.step(moves, lambda r, p, g: {n: p[n] - g[n] for n in p}, weights=weights)
    w = np.asarray(weights, np.float32).astype(float)
    lengths = np.array([np.linalg.norm(d["m"]) for d in moves])
    unit = [d["m"] / x if x > 1e-30 else d["m"] for d, x in zip(moves, lengths, strict=True)]
    direction = np.average(unit, axis=0, weights=w)
    length = np.linalg.norm(direction)
    expected = np.average(lengths, weights=w) * direction / (length if length > 1e-12 else 1.0)
    vector = np.average([d["v"] for d in moves], axis=0, weights=w)
    for p in simulator.parameters:
        np.testing.assert_allclose(p["m"], -expected, rtol=1e-5, atol=1e-30)
        np.testing.assert_allclose(p["v"], -vector, rtol=1e-5, atol=1e-30)


def test_a_radial_average_costs_a_number_for_each_tensor_and_a_weight_one():
    sent = [
        plan({"m": (64, 32), "n": (8, 8), "v": (5,)}, gw.diloco(1, **o)).wire_bytes
        for o in ({}, {"radial": True}, {"weighted": True})
    ]
    assert (sent[1] - sent[0], sent[2] - sent[0]) == (2 * 4, 4)


OF_NODES = {
    "a": (24, 16),
    "b": (24,),
    "c": (12, 4, 3, 3),
    "d": (3, 8, 10),
    "e": (),
    "f": (30, 20),
    "none": (0, 4),
}


def gradients_of(replicas, step=0, shapes=OF_NODES):
    return gradients(range(replicas), step, shapes)


def of_nodes(given, near):
    return [
        {n: np.mean([given[r][n] for r in members], axis=0) for n in given[0]} for members in near
    ]


def close(mine, theirs, tolerance=1e-9):
    assert mine.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_allclose(mine[name], x, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "algorithm",
    [
        PowerSGD(2),
        PowerSGD(2, half_step=True, start_step=1),
        PowerSGD(2, warm_start=False, max_norm=20.0),
        TopK(8, per=64, mean="senders"),
        gw.Quantize("int8", block=8),
        WireDtype(PowerSGD(2), "bfloat16"),
        WireDtype(AllReduce(), "int8"),
    ],
    ids=repr,
)
def test_is_the_algorithm_on_the_averages_of_the_nodes(algorithm):
    """And so is the memory, whole on each replica of a node; and local SGD whose gradients are
    averaged in the node, its differences between nodes."""
    near, local = (
        ((0, 2), (3, 1)),
        gw.diloco(2, subgroup=((0, 2), (3, 1)), compressor=TwoLevel(algorithm, ((0, 2), (3, 1)))),
    )
    two, one = Simulator(TwoLevel(algorithm, near), OF_NODES, 4), Simulator(algorithm, OF_NODES, 2)
    start = {n: np.ones(s) for n, s in OF_NODES.items()}
    two_locals, one_local = (
        LocalSimulator(local, start, 4),
        LocalSimulator(gw.diloco(2, compressor=algorithm), start, 2),
    )
    for step in range(4):
        given = gradients_of(4, step)
        nodes = of_nodes(given, near)
        close(two.step(given), one.step(nodes))
        for simulator, own in ((two_locals, given), (one_local, nodes)):
            simulator.step(own, lambda _, p, g: {n: p[n] - 0.1 * g[n] for n in p})
    for node, members in enumerate(near):
        for member in members:
            close(two_locals.parameters[member], one_local.parameters[node], 1e-8)
            for name, memory in one.states[node].tensors.items():
                close(two.states[member].tensors[name], memory)


class Everything(Wrapper):
    """Asks for all that a message can be, and returns what is equal on all replicas."""

    async def step(self, ops, gradients_of, state, step):
        replicas, index = await rq.world_size(), await rq.replica_index()
        alone = tuple((i,) for i in range(replicas))

        async def asked(name, x):
            before = await rq.mean(x)  # of which something is still wanted
            rows = ops.stack([x * (i + 1.0) for i in range(replicas)])
            (received,) = await rq.all_to_all(rows)
            of_all, whole = await rq.gather(x, ops.iota(7), watched=False)
            mine = ops.asarray(np.full(x.shape, index + 1), "int32")
            sums = await rq.reduce_sum(mine, out=mine)
            largest = await rq.reduce_max(x)
            (same,) = await rq.all_to_all(x.reshape((1, *x.shape)), groups=alone)
            own = await rq.mean(received.reshape((-1,)), groups=alone, watched=False)
            summed = await rq.reduce_sum(own.reshape(rows.shape), watched=False)
            total = await rq.mean(same.reshape(x.shape), watched=False)
            total = total + before + largest + ops.cast(sums, "float64") + (await rq.mean(x, out=x))
            for i in range(replicas):
                total = (
                    total
                    + of_all[i] * (i + 2.0)
                    + summed[i]
                    + ops.cast(whole[i], "float64")[:1].reshape(()) * 0.5
                )
            return total

        found = await together([asked(n, x) for n, x in gradients_of.items()])
        scale = await rq.sum_scalar(ops.asarray(2.0, "float64"))
        assert await rq.step_is_finite()
        return {n: x * scale for n, x in zip(gradients_of, found, strict=True)}, state


SIZES = st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4)


@example(2, 2, [[4]])  # of a single array, what is cut may be the array itself
@example(2, 2, [[96, 24], [12, 10], [12]])  # one tensor is most of the model
@drawn(st.integers(1, 3), st.integers(1, 5), SIZES)
def test_a_message_of_any_size_is_cut_in_any_number_of_parts(nodes, within, sizes):
    """As many elements as there are parts, fewer, and one more."""
    shapes = {f"{i}": tuple(shape) for i, shape in enumerate(sizes)}
    given = gradients_of(nodes * within, 0, shapes)
    near = [range(first, first + within) for first in range(0, nodes * within, within)]
    two = Simulator(
        TwoLevel(Everything(AllReduce()), within), shapes, nodes * within, ops=PoisonOps()
    )
    one = Simulator(AllReduce() if nodes == 1 < within else Everything(AllReduce()), shapes, nodes)
    close(two.step(given), one.step(of_nodes(given, near)))


class StoresEarly(Wrapper):
    """Sends something after it has stored its memory."""

    async def step(self, ops, gradients_of, state, step):
        averages, after = await self.algorithm.step(ops, gradients_of, state, step)
        return await rq.mean_each(averages), after


@pytest.mark.parametrize(("name", "bad"), [("a", np.inf), ("c", np.nan), ("f", np.inf)])
@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_is_not_finite_leaves_no_trace_on_any_replica(name, bad, early):
    algorithm = PowerSGD(2, half_step=True)
    sim = Simulator(TwoLevel(StoresEarly(algorithm) if early else algorithm, 2), OF_NODES, 4)
    sim.step(gradients_of(4))
    before = [state.map(np.array) for state in sim.states]
    given = gradients_of(4, 1)
    given[3][name].flat[0] = bad
    assert not np.isfinite(sim.step(given)[name]).all()
    for mine, theirs in zip(sim.states, before, strict=True):
        np.testing.assert_equal(mine.shared, theirs.shared)
        np.testing.assert_equal(mine.tensors, theirs.tensors)


def test_each_message_goes_once_between_nodes_and_once_inside():
    sim, one = Simulator(TwoLevel(PowerSGD(2), 2), OF_NODES, 4), Simulator(PowerSGD(2), OF_NODES, 2)
    sim.step(gradients_of(4))
    one.step(gradients_of(2))
    near, between = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    sent = [(type(r), r.groups) for r in sim.requests if r.payloads(sim.ops, 4)]
    assert sent == [(Reduce, near), *[(Reduce, between), (AllGather, near)] * 2]
    parts = [r for r in sim.requests if r.groups == between and isinstance(r, Reduce)]
    for part, message in zip(
        parts, [r for r in one.requests if isinstance(r, Reduce)], strict=True
    ):
        (elements,) = (x.shape[-1] for x in part.arrays)
        assert 0 <= 2 * elements - sum(x.size for x in message.arrays) < 2


def test_nodes_of_one_replica_are_one_level_and_a_single_node_takes_the_plain_average():
    one, alone = (Simulator(TwoLevel(PowerSGD(2), within), OF_NODES, 3) for within in (1, 3))
    given = gradients_of(3)
    one.step(given)
    close(alone.step(given), Simulator(AllReduce(), OF_NODES, 3).step(given))
    assert not any(x["error"].any() for state in alone.states for x in state.tensors.values())
    assert {r.groups for r in one.requests} == {None}
    inside = [r for r in alone.requests if r.payloads(alone.ops, 3) and r.groups == ((0, 1, 2),)]
    assert [type(r) for r in inside] == [Reduce]
    assert {r.groups for r in alone.requests if r.groups} == {((0, 1, 2),)}


def test_plan_shows_both_levels_and_what_two_links_take():
    p = plan(OF_NODES, TwoLevel(PowerSGD(2), 2), world_size=6, dtype="float32")
    flat = plan(OF_NODES, PowerSGD(2), dtype="float32")
    near, far = p.levels
    assert (near.groups, near.replicas, far.groups, far.replicas) == (3, 2, 2, 3)
    assert far.node_bytes == pytest.approx(flat.wire_bytes, abs=16)  # filled up to two parts
    assert far.collectives == 2
    # Gradients are averaged, and messages put together: half an all-reduce of those.
    assert near.nbytes == pytest.approx(p.dense_bytes + flat.wire_bytes / 2, abs=16)
    assert p.memory_bytes == flat.memory_bytes
    assert p.compression_ratio == pytest.approx(flat.compression_ratio, rel=1e-2)
    slow = p.seconds(6, 0.0, 1e6)
    assert slow == pytest.approx(4 / 3 * far.node_bytes / 1e6)
    assert p.seconds(6, 0.0, 1e6, within=(0.0, 1e9)) == pytest.approx(slow + near.nbytes / 1e9)
    assert "between 3 nodes" in str(p)
    with pytest.raises(ValueError, match="made for 3 nodes of 2"):
        p.seconds(4, 0.0, 1e6)
    with pytest.raises(ValueError, match="has one level"):
        flat.seconds(6, 0.0, 1e6, within=(0.0, 1e9))
    # On one node nothing is between, and a step is an uncompressed average.
    alone, dense = (
        plan(OF_NODES, TwoLevel(PowerSGD(2), 6), world_size=6),
        plan(OF_NODES, AllReduce(), world_size=6),
    )
    assert [t.wire_bytes for t in alone.tensors] == [t.wire_bytes for t in dense.tensors]
    assert not any(t.compressed for t in alone.tensors)
    assert (alone.levels, alone.wire_bytes, alone.collectives) == ((), dense.wire_bytes, 1)
    assert alone.compression_ratio == 1
    assert alone.seconds(6, 1e-5, 1e6) == dense.seconds(6, 1e-5, 1e6)
    assert f"per step: {dense.wire_bytes:,} bytes of" in str(alone)
    with pytest.raises(ValueError, match="one node of 6 replicas"):
        alone.seconds(6, 0.0, 1e6, within=(0.0, 1e9))


def test_plan_of_local_sgd_shows_both_levels():
    p = plan(
        OF_NODES,
        gw.diloco(5, subgroup=2, compressor=TwoLevel(PowerSGD(2), 2)),
        world_size=6,
        dtype="float32",
    )
    flat = plan(OF_NODES, PowerSGD(2), dtype="float32")
    assert p.levels[1].node_bytes == pytest.approx(flat.wire_bytes / 5, abs=4)
    # Gradients in each step; in each fifth differences, and messages between nodes.
    assert p.levels[0].nbytes == pytest.approx(1.2 * p.dense_bytes + 0.1 * flat.wire_bytes, abs=16)
    one = plan(OF_NODES, gw.diloco(5, compressor=PowerSGD(2)), world_size=6, dtype="float32")
    assert p.memory_bytes == one.memory_bytes
    assert "between 3 nodes" in str(p)
    # A partition says how many replicas there are.
    two = TwoLevel(TopK(8), ((0, 2), (1, 3)))
    for algorithm in (two, gw.diloco(2, compressor=two)):
        assert plan(OF_NODES, algorithm) == plan(OF_NODES, algorithm, world_size=4)
        with pytest.raises(ValueError, match="no partition"):
            plan(OF_NODES, algorithm, world_size=8)


def test_node_is_replaced_by_those_who_know():
    groups = ((0, 2), (1, 3))
    assert TwoLevel(AllReduce()).on_nodes_of(4) == TwoLevel(AllReduce(), 4)
    local = gw.diloco(4, compressor=TwoLevel(AllReduce(), "node"))
    assert local.mentions_nodes
    assert local.on_nodes_of(2).compressor.within == 2
    for around in (gw.Weighted, lambda two: WireDtype(two, "bfloat16")):
        assert around(TwoLevel(AllReduce())).on_nodes_of(groups) == around(
            TwoLevel(AllReduce(), groups)
        )
        assert (
            around(TwoLevel(AllReduce())).mentions_nodes
            > around(TwoLevel(AllReduce(), 2)).mentions_nodes
        )
    assert LocalSGD(4, subgroup="node").on_nodes_of(groups).subgroups(4) == groups
    assert LocalSGD({"node": 2, "all": 8}, subgroup="node").on_nodes_of(2) == LocalSGD(
        {2: 2, "all": 8}, subgroup=2
    )
    assert LocalSGD(8).on_nodes_of(2) == LocalSGD(8)
    assert LocalSGD(4, subgroup=1).subgroups(4) is None


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_is_rounded_beside_a_replica_of_little_weight_does_not_come_back(dtype):
    """In the step after it, in which all count alike."""
    off = {}
    for few in (1.0, 1 / 16, 1e-5):
        rng, sim = np.random.default_rng(0), Simulator(Quantize(dtype), {"w": (4096,)}, 4)
        for weights in ([few, 1, 1, 1], [1, 1, 1, 1]):
            given = [{"w": rng.standard_normal(4096)} for _ in range(4)]
            found = sim.step(given, weights=weights)["w"]
        off[few] = np.sqrt(np.square(found - sum(g["w"] for g in given) / 4).mean())
    assert max(off.values()) < 2 * off[1.0]


@pytest.mark.parametrize("inner", [TopK(4, per=37), TopK(8, per=64, bits=2)])
def test_a_node_that_is_absent_sends_nothing_whatever_its_replicas_have(inner):
    """Their positions come from gradients of several replicas."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        given = [{"b": rng.standard_normal(370)} for _ in range(6)]
        weights, found = [0, 0, 0, 1, 1, 1], []
        for gradients in (given, [{"b": np.zeros(370)}] * 3 + given[3:]):
            sim = Simulator(TwoLevel(inner, 3), {"b": (370,)}, 6)
            found.append(sim.step(gradients, weights=weights)["b"])
        np.testing.assert_array_equal(*found)
        assert np.abs(found[0]).max() > 0
