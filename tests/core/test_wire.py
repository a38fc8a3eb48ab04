"""What steps send: plans against the simulator and against figures worked out by hand, payloads in
another dtype, and the one dry run that answers all of it."""

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import (
    AllReduce,
    Compressor,
    PowerSGD,
    Simulator,
    Spec,
    TopK,
    Traffic,
    WireDtype,
    Zero,
    plan,
)
from gradwire.core.algorithms.shared.views import StackedShape
from gradwire.core.algorithms.wrapper import Wrapper
from gradwire.core.kernels import random
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.plan.dry_run import ATTRIBUTE, REMEMBERED, DryRun, dry_run, rehearsed, summary
from gradwire.core.plan.links import Links, consecutive
from gradwire.core.protocol import all_gather, branch, branch_on_phase, mean, optimizer_step
from gradwire.core.protocol.exchanges import AllToAll, Gather
from gradwire.core.protocol.groups import UnknownWorldSize
from gradwire.core.protocol.reductions import Reduce
from gradwire.core.simulate import PoisonOps
from tests.executed import executed

shapes = st.dictionaries(
    st.sampled_from(["a.weight", "b.weight", "c.weight", "d.bias", "e"]),
    st.lists(st.integers(0, 24), max_size=3).map(tuple),
    max_size=5,
)
algorithms = st.one_of(
    st.just(AllReduce()),
    st.builds(
        PowerSGD,
        st.integers(1, 4),
        start_step=st.sampled_from([0, 2]),
        min_compression_rate=st.sampled_from([0.5, 2.0]),
        square=st.booleans(),
        error_feedback=st.booleans(),
        state_dtype=st.sampled_from([None, "float32", "bfloat16"]),
    ),
    st.builds(PowerSGD, st.integers(1, 4), warm_start=st.just(False)),
    st.builds(
        PowerSGD, st.integers(1, 4), half_step=st.just(True), start_step=st.sampled_from([0, 2])
    ),
)
wired = st.one_of(
    algorithms,
    st.builds(WireDtype, algorithms, st.sampled_from(["float16", "bfloat16", "float32"])),
)


@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
@given(shapes, wired, st.sampled_from(["float64", "float32", "float16", "bfloat16"]))
def test_a_plan_is_what_the_simulator_sends(shapes, algorithm, dtype):
    p = plan(shapes, algorithm, dtype=dtype, world_size=2)
    simulator = Simulator(algorithm, shapes, replicas=2, dtype=dtype)
    sent = []
    for _ in range(2 + 2 * algorithm.cycle):
        simulator.step([{name: np.ones(shape) for name, shape in shapes.items()}] * 2)
        # Counted here once more, from the arrays themselves: an all-to-all is half an all-reduce,
        # and so is a gather of halves.
        messages = [
            int(sum(a.nbytes for a in r.arrays if a.dtype == d) * share)
            for r in simulator.requests
            for kind, share in ((Reduce, 1), (Gather, 1), (AllToAll, 0.5))
            if isinstance(r, kind)
            for d in {a.dtype for a in r.arrays}
        ]
        assert (simulator.traffic.collectives, simulator.traffic.nbytes) == (
            sum(m > 0 for m in messages),
            sum(messages),
        )
        sent.append(simulator.traffic)
    steps = sent[2:] if algorithm.start_step == 2 else sent
    assert steps == list(p.steps) * (len(steps) // algorithm.cycle)
    assert p.wire_bytes == np.mean([t.nbytes for t in p.steps])
    assert p.collectives == np.mean([t.collectives for t in p.steps])
    assert p.peak_bytes == max(t.nbytes for t in p.steps)
    itemsize = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}[dtype]
    assert p.dense_bytes == sum(int(np.prod(s)) for s in shapes.values()) * itemsize
    assert sum(t.dense_bytes for t in p.tensors) == p.dense_bytes
    # Bytes add up, but for rows of codes that a tensor by itself would have to fill up; messages do
    # not, they are shared.
    spare = sum(t.wire_bytes for t in p.tensors) - p.wire_bytes
    assert (
        0 <= spare <= 2 * 2 * len(shapes) * itemsize
        if isinstance(algorithm, WireDtype)
        else abs(spare) < 1e-6
    )
    assert {t.name for t in p.tensors if t.compressed} == set(simulator.states[0].tensors)
    assert p.memory_bytes == sum(
        x.nbytes for m in simulator.states[0].tensors.values() for x in m.values()
    )


def test_a_small_model_by_hand():
    model = {
        "conv": (64, 3, 7, 7),
        "norm": (64,),
        "fc": (1000, 512),
        "fc.bias": (1000,),
        "count": (),
    }
    # conv is 64 x 147 and fc 1000 x 512; at rank 4, (64 + 147) * 4 * 2 < 64 * 147.
    factors, rest = (64 + 147 + 1000 + 512) * 4, 64 + 1000 + 1
    p = plan(model, PowerSGD(rank=4))
    assert p.steps == (Traffic(2, (factors + rest) * 4),)
    assert [(t.compressed, t.rank, t.wire_bytes) for t in p.tensors] == [
        *(
            (True, 4, (64 + 147) * 16),
            (False, None, 256),
            (True, 4, 1512 * 16),
            (False, None, 4000),
            (False, None, 4),
        )
    ]
    assert plan(model, PowerSGD(rank=4), itemsize=8).wire_bytes == (factors + rest) * 8
    assert plan(model, AllReduce()).steps == (Traffic(1, (64 * 147 + 512_000 + rest) * 4),)
    assert plan(model, PowerSGD(rank={"fc": 2})).steps == (
        Traffic(2, (1512 * 2 + 64 * 147 + rest) * 4),
    )
    # float32 factors beside float16 tensors are two messages in the first round.
    mixed = plan(model, PowerSGD(rank=4, state_dtype="float32"), dtype="float16")
    assert mixed.steps == (Traffic(3, factors * 4 + rest * 2),)
    half = plan({"w": (100, 40), "b": (10,)}, PowerSGD(rank=2, half_step=True))
    assert half.steps == (Traffic(1, (100 * 2 + 10) * 4), Traffic(1, (40 * 2 + 10) * 4))
    assert (half.wire_bytes, half.peak_bytes, half.tensors[0].wire_bytes) == (
        (70 * 2 + 10) * 4,
        840,
        70 * 2 * 4,
    )
    assert "Clip gradients" in str(
        plan({"w": (64, 64)}, WireDtype(PowerSGD(1, half_step=True), "bfloat16"))
    )
    assert plan({"w": (64, 64)}, PowerSGD(1)).notes == ()
    for nothing in ({}, {"empty": (0, 5)}):
        p = plan(nothing, PowerSGD(rank=4))
        assert (p.wire_bytes, p.collectives, p.compression_ratio) == (0, 0, 1)
        assert "in 0 collectives" in str(p)


def test_seconds_by_hand():
    # Ring all-reduce on 4: 6 hops of 1 us each; 6/4 of the payload over a link of 1 GB/s.
    assert Links(4).seconds(Traffic(2, 40960), 1e-6, 1e9) == pytest.approx(
        2 * 6e-6 + 1.5 * 40.96e-6
    )
    # A hop of 10 us is more than what the last quarter of a message takes: two up and two down a
    # tree. Gloo has none.
    assert Links(4).seconds(Traffic(2, 40960), 10e-6, 1e9) == pytest.approx(
        2 * 40e-6 + 2 * 40.96e-6
    )
    assert Links(4, library="gloo").seconds(Traffic(2, 40960), 10e-6, 1e9) == pytest.approx(
        2 * 60e-6 + 1.5 * 40.96e-6
    )
    assert plan({"w": (2048, 512)}, PowerSGD(rank=4)).seconds(4, 10e-6, 1e9) == pytest.approx(
        161.92e-6
    )
    assert Links(4096).hops(Traffic(2, 40960), 50e-6, 1e9) == {"tree": 2 * 2 * 12}
    assert Links(4096).hops(Traffic(1, 1 << 40), 50e-6, 1e9) == {"ring": 2 * 4095}
    # A ring of 4 nodes of 2 leaves each of them once.
    assert Links(8, consecutive(8, 4), "gloo").hops(Traffic(1, 8), 1.0, 1e9) == {"ring": 8}
    assert Links(8, consecutive(8, 4)).hops(Traffic(1, 8), 1.0, 1e9) == {"tree": 4}
    # Half-steps of 800 and 320 bytes on 2: a hop out and a hop back, the payload once.
    half = plan({"w": (100, 40)}, PowerSGD(rank=2, half_step=True))
    assert half.seconds(2, 0.0, 1.0) == pytest.approx((800 + 320) / 2)
    assert half.seconds(2, 1.0, 1e30) == pytest.approx(2)
    assert half.seconds(1, 1.0, 1.0) == 0
    # Codes go out to those who average their parts, and come back: three hops each.
    assert plan({"w": (64, 64)}, WireDtype(AllReduce(), "int8"), world_size=4).seconds(
        4, 1.0, 1e30
    ) == pytest.approx(6)


def gradients(rng, shapes, world=2):
    return [{k: rng.normal(size=s) for k, s in shapes.items()} for _ in range(world)]


MODEL = {"w": (20, 15), "b": (15,)}


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "inner", [AllReduce(), PowerSGD(2, half_step=True), PowerSGD(2, start_step=1)], ids=repr
)
def test_only_the_payload_is_in_the_wire_dtype(inner, wire):
    rng = np.random.default_rng(0)
    simulator, exact = (
        Simulator(a, MODEL, replicas=3, dtype="float32") for a in (WireDtype(inner, wire), inner)
    )
    for _ in range(4):
        step = gradients(rng, MODEL, 3)
        averages, expected = simulator.step(step), exact.step(step)
        sent = [r for r in simulator.requests if isinstance(r, (Reduce, Gather, AllToAll))]
        assert {a.dtype.name for r in sent for a in r.arrays} == {wire}
        assert {
            v.dtype.name for s in simulator.states for m in s.tensors.values() for v in m.values()
        } <= {"float32"}
        # There and back, each half of an all-reduce; three replicas fill up what they cannot
        # divide.
        assert simulator.traffic.collectives == 2 * exact.traffic.collectives
        assert (
            0
            <= simulator.traffic.nbytes - exact.traffic.nbytes // 2
            <= 4 * 2 * exact.traffic.collectives
        )
        assert {average.dtype.name for average in averages.values()} == {"float32"}
        # Everything that was sent once was rounded once, and nothing else was.
        b = np.mean(
            [g["b"].astype(np.float32).astype(wire) for g in step], axis=0, dtype=np.float32
        ).astype(wire)
        np.testing.assert_allclose(averages["b"], b.astype(np.float32), rtol=2**-7)
        assert not np.array_equal(averages["b"], expected["b"])


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_two_replicas_send_each_other_everything_at_once(wire):
    algorithm, shapes = WireDtype(AllReduce(), wire), {"w": (3, 50), "v": (7,)}
    two, three = (Simulator(algorithm, shapes, replicas, dtype="float32") for replicas in (2, 3))
    step = gradients(np.random.default_rng(0), shapes)
    averages = two.step(step)
    assert [type(r) for r in two.requests if isinstance(r, (Reduce, Gather, AllToAll))] == [Gather]
    # With another replica, whose gradients are zero, the same codes are summed, and the mean is
    # rounded a second time.
    rounded = three.step([*step, {n: np.zeros_like(g) for n, g in step[0].items()}])
    for name in shapes:
        error = np.abs(averages[name] - np.mean([g[name] for g in step], axis=0))
        assert (
            0
            < error.max()
            <= max(np.abs(g[name]).max() for g in step) / (2 * 127 if wire == "int8" else 2**8)
        )
        assert not np.array_equal(1.5 * rounded[name], averages[name])


@pytest.mark.parametrize(
    ("dtype", "wire"), [("float16", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")]
)
def test_payloads_that_are_no_wider_travel_as_they_are(dtype, wire):
    step = gradients(np.random.default_rng(0), MODEL)
    wrapped, plain = (
        Simulator(a, MODEL, 2, dtype=dtype) for a in (WireDtype(PowerSGD(2), wire), PowerSGD(2))
    )
    np.testing.assert_equal(wrapped.step(step), plain.step(step))
    assert {x.dtype.name for r in wrapped.requests if isinstance(r, Reduce) for x in r.arrays} == {
        dtype
    }


def test_the_answer_lies_where_the_gradient_did_only_if_that_was_given_away():
    class Keeps(AllReduce):
        async def step(self, ops, gradients, state, step):
            return {k: await mean(g) + 0 * g for k, g in gradients.items()}, state

    step = gradients(np.random.default_rng(0), {"w": (256, 128)})
    kept, given = (
        Simulator(
            WireDtype(a, "int8"), {"w": (256, 128)}, replicas=2, dtype="float32", ops=PoisonOps()
        ).step(step)
        for a in (Keeps(), AllReduce())
    )
    np.testing.assert_array_equal(kept["w"], given["w"])


# 40,000, 400, 80,000 and 40 bytes
LAYERS = {"a": (100, 100), "b": (100,), "c": (200, 100), "d": (10,)}
BUCKETS = AllReduce(bucket_bytes=80_000, first_bucket_bytes=40)
IN_MIB = {"bucket_cap_mb": 80_000 / 2**20, "first_bucket_mb": 40 / 2**20}


@pytest.mark.parametrize(
    "arguments",
    [
        {"algorithm": BUCKETS},
        {"algorithm": WireDtype(BUCKETS, "bfloat16")},
        {"algorithm": AllReduce(), **IN_MIB},
        {"algorithm": PowerSGD(2), **IN_MIB},
    ],
    ids=repr,
)
def test_a_plan_prints_the_buckets_and_each_of_the_algorithms_is_a_message(arguments):
    p = plan(LAYERS, **arguments)
    assert [(b.names, b.nbytes) for b in p.buckets] == [
        (("d",), 40),
        (("c",), 80_000),
        (("b", "a"), 40_400),
    ]
    lines = [
        "bucket 0: 40 bytes: d",
        "bucket 1: 80,000 bytes: c",
        "bucket 2: 40,400 bytes: b … a, 2 tensors",
    ]
    assert str(p).splitlines()[2 + len(LAYERS) : -1][: len(lines)] == lines
    if arguments == {"algorithm": BUCKETS}:
        simulator = Simulator(BUCKETS, LAYERS, replicas=2, dtype="float32")
        averages = simulator.step(
            [{n: np.full(s, k, np.float32) for n, s in LAYERS.items()} for k in (1, 2)]
        )
        assert [sum(a.nbytes for a in r.arrays) for r in simulator.requests] == [40, 80_000, 40_400]
        np.testing.assert_equal(averages, {n: np.full(s, 1.5) for n, s in LAYERS.items()})
        assert plan(LAYERS, BUCKETS).steps == (simulator.traffic,) == (Traffic(3, 120_440),)
        assert plan(LAYERS, WireDtype(BUCKETS, "float16")).steps == (Traffic(6, 60_220),)


def test_the_buckets_of_a_plan_hold_one_dtype_as_those_of_ddp_do():
    specs = {
        f"{i}.{n}": Spec((256, 256), d)
        for i in (0, 1)
        for n, d in (("n", "float32"), ("w", "bfloat16"))
    }
    p = plan(specs, AllReduce(), bucket_cap_mb=1, first_bucket_mb=1)
    assert [b.names for b in p.buckets] == [("1.w", "0.w"), ("1.n", "0.n")]


SHARDED = {"w": (6, 4), "b": (5,)}


@pytest.mark.parametrize(
    "options", [{}, {"max_norm": 1.0}, {"algorithm": AllReduce(bucket_bytes=40)}], ids=str
)
def test_gradients_of_a_sharded_optimizer_are_cast_and_parameters_are_not(options):
    new = np.float32(1 + 2**-12)  # which no bfloat16 holds

    def optimizer(replica, pieces):
        return {name: np.full_like(piece, new) for name, piece in pieces.items()}

    shards = gw.shard_by_element(
        {name: Spec(shape, "float32") for name, shape in SHARDED.items()}, world_size=3
    )
    algorithm = WireDtype(Zero(shards, **options), "bfloat16")
    simulator = Simulator(algorithm, SHARDED, replicas=3, dtype="float32", optimizer=optimizer)
    parameters = simulator.step([{name: np.ones(shape) for name, shape in SHARDED.items()}] * 3)
    assert all((p == new).all() for p in parameters.values())
    sent = {
        type(r).__name__: {x.dtype.name for x in r.arrays}
        for r in simulator.requests
        if hasattr(r, "arrays")
    }
    assert sent == {"AllToAll": {"bfloat16"}, "AllGather": {"float32"}}
    # Both halves of 24 and 6 (5, padded) elements: 2 bytes down, 4 bytes up; and a scalar for the
    # norm.
    assert simulator.traffic.nbytes == 30 * 2 // 2 + 30 * 4 // 2 + 4 * ("max_norm" in options)
    assert plan(SHARDED, algorithm).steps == (simulator.traffic,)


def test_an_update_inside_a_branch_cannot_be_told_apart():
    class Branches(AllReduce):
        async def step(self, ops, gradients, state, step):
            async def side():
                return await optimizer_step(dict(gradients))

            return await branch(np.array(True), side, side), state

    simulator = Simulator(
        WireDtype(Branches(), "bfloat16"), SHARDED, 1, optimizer=lambda replica, pieces: pieces
    )
    with pytest.raises(ValueError, match="update is in a branch"):
        simulator.step([{name: np.ones(shape) for name, shape in SHARDED.items()}])


def test_a_gather_is_cast_and_integers_are_not():
    class Gathers(AllReduce):
        async def step(self, ops, gradients, state, step):
            x, i = gradients["b"], np.arange(5, dtype=np.int32)
            (whole, places) = await all_gather(
                [x, i], [(5, 5), (5, 5)], out=[np.zeros(10, x.dtype), None]
            )
            assert (whole.dtype, places.dtype) == (x.dtype, i.dtype)
            return {"b": whole[:5] + whole[5:]}, state

    simulator = Simulator(
        WireDtype(Gathers(), "bfloat16"), {"b": (5,)}, replicas=2, dtype="float32"
    )
    result = simulator.step([{"b": np.full(5, 1 + 2**-12)}, {"b": np.full(5, 2.0)}])
    np.testing.assert_array_equal(result["b"], np.full(5, 3.0))
    (request,) = simulator.requests
    assert [x.dtype.name for x in request.arrays] == ["bfloat16", "int32"]


class Decides(Compressor):
    """Sends a tensor whole if it is large on average, else a scalar."""

    def memory(self, ops, name, spec):
        return {} if len(spec.shape) == 2 else None

    async def compress(self, ops, name, x, memory, at):
        async def whole(x):
            return x, await mean(x)

        async def nothing(x):
            return x * 0.0, x * 0.0

        size = await mean(ops.max_abs(x.reshape((1, -1))).reshape(()))
        mine, average = await branch(size > 1.0, whole, nothing, x)
        return mine, average, memory


def test_a_plan_counts_the_larger_side_of_a_branch_on_data_and_says_so():
    shapes = {"w": (64, 64), "b": (3,)}
    p = plan(shapes, Decides())
    assert p.steps == (Traffic(2, 16 + 16_384, optional_bytes=16_384),)
    assert (p.wire_bytes, p.optional_bytes) == (16_400, 16_384)
    assert "a branch depends on data, and a step sends between 16 and 16,400 bytes" in str(p)
    assert "branch" not in str(plan(shapes, PowerSGD(2, half_step=True)))
    for size, sent in ((0.5, 16), (2.0, 16_400)):
        simulator = Simulator(Decides(), shapes, replicas=2, dtype="float32")
        simulator.step([{name: np.full(shape, size) for name, shape in shapes.items()}] * 2)
        assert simulator.traffic.nbytes == sent


async def sends(n, *operands):
    return await mean(AbstractArray((n,), "float32"))


def test_branches_within_branches_are_counted_from_the_least_to_the_most():
    x, data = AbstractArray((10,), "float32"), AbstractArray((), "bool")

    async def inner(y):
        await branch(data, partial(sends, 8), partial(sends, 6))
        return y

    async def program():
        await branch(data, partial(sends, 2), inner, x)
        await branch(np.array(False), inner, partial(sends, 2), x)  # known, and no question
        return await branch(data, inner, inner, x)

    assert rehearsed(program()).traffic == Traffic(3, (8 + 2 + 8) * 4, optional_bytes=(6 + 2) * 4)
    assert len(rehearsed(program()).requests) == 14


def test_phases_are_told_by_their_value():
    async def program():
        counter = AbstractArray((), "int32")
        a = await branch_on_phase(counter, 2, partial(sends, 100), partial(sends, 10))
        return a, await branch_on_phase(counter, 0, partial(sends, 1000), partial(sends, 1))

    assert [rehearsed(program(), phase).traffic.nbytes // 4 for phase in range(3)] == [
        1010,
        11,
        101,
    ]


TRIED = {"w": Spec((64, 32)), "v": Spec((32, 48)), "b": Spec((64,))}


@dataclass(frozen=True)
class Counted(Wrapper):
    """Notes of which gradients it takes steps."""

    taken: list = field(default_factory=list, compare=False)

    def step(self, ops, gradients, state, step):
        self.taken.append(tuple(gradients))
        return self.algorithm.step(ops, gradients, state, step)


def test_a_step_of_each_kind_is_run_once_whatever_is_asked():
    algorithm = Counted(PowerSGD(2, half_step=True, start_step=3))
    dry = dry_run(algorithm, TRIED, 4)
    assert not algorithm.taken  # before anybody asks
    for _ in range(2):
        dry = dry_run(algorithm, dict(TRIED), 4)
        assert dry.requests
        assert dry.groups == []
        assert dry.stages[-1].total == summary(algorithm, TRIED, 4).wire_bytes
    assert len(algorithm.taken) == 3  # the dense one, and each half
    for _ in range(2):
        plan(
            {name: spec.shape for name, spec in TRIED.items()},
            algorithm,
            dtype="float32",
            world_size=4,
        )
        before, algorithm.taken[:] = len(algorithm.taken), []
    assert before == 0
    assert dry_run(algorithm, TRIED, 8).requests
    assert len(algorithm.taken) == 3


def test_stacks_and_patterns_in_another_order_are_other_runs():
    algorithm = PowerSGD(2)
    flat, stack = (
        dry_run(algorithm, {"w": Spec(shape)})
        for shape in ((4, 64, 32), StackedShape((4, 64, 32), 1))
    )
    assert flat.memory.tensors["w"]["q"].shape != stack.memory.tensors["w"]["q"].shape
    first, last = PowerSGD(rank={"*": 1, "w": 4}), PowerSGD(rank={"w": 4, "*": 1})
    assert first != last
    assert [dry_run(each, TRIED).memory.tensors["w"]["q"].shape[0] for each in (first, last)] == [
        1,
        4,
    ]


def test_some_of_the_gradients_are_those_of_the_whole_model():
    algorithm = PowerSGD(rank={"w": 2, "v": 3})
    dry = dry_run(algorithm, TRIED)
    alone = [dry.only([name]).stages[-1].total for name in TRIED]
    assert alone == [4 * 2 * (64 + 32), 4 * 3 * (32 + 48), 4 * 64]
    assert dry.only(TRIED) is dry
    assert dry.only(["v", "w"]) is dry.only(["w", "v"])
    assert list(dry.only(["v", "w"]).specs) == [name for name in TRIED if name in ("v", "w")]


def experts(n):
    return {
        f"experts.{i}.{part}": shape
        for i in range(n)
        for part, shape in (("up", (64, 32)), ("bias", (32,)))
    }


@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(),
        PowerSGD(warm_start=False, error_feedback=False, rank={"experts.1.*": 1, "*": 4}),
        PowerSGD({"experts.1.*": 0, "*": 4}),
        pytest.param(WireDtype(AllReduce(), "int8"), marks=pytest.mark.slow),
        pytest.param(TopK(4, per=64), marks=pytest.mark.slow),
        pytest.param(gw.TwoLevel(PowerSGD(2), within=2), marks=pytest.mark.slow),
        gw.LocalSGD(4, compressor=PowerSGD({"experts.1.*": 1, "*": 4}), outer=gw.OuterSGD()),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
def test_a_plan_runs_once_for_each_kind_of_tensor_and_says_of_each_what_it_sends(
    algorithm, monkeypatch
):
    runs = []
    own = DryRun._step
    monkeypatch.setattr(
        DryRun, "_step", lambda self, *kind: runs.append(len(self.specs)) or own(self, *kind)
    )
    by_kind = plan(experts(40), algorithm, world_size=4)
    few, runs[:] = runs.count(1), []
    assert plan(experts(80), copy.copy(algorithm), world_size=4).tensors[:80] == by_kind.tensors
    assert 0 < runs.count(1) == few <= 8
    monkeypatch.setattr(DryRun, "alone", lambda self, name: self.only([name]))
    assert plan(experts(40), copy.copy(algorithm), world_size=4) == by_kind


@pytest.mark.parametrize(
    "method", [AllReduce, partial(PowerSGD, 2), partial(WireDtype, AllReduce(), "int8")]
)
@pytest.mark.filterwarnings("ignore::gradwire.CompressionWarning")
def test_a_plan_takes_no_more_of_each_tensor_where_there_are_more(method):
    plan(experts(2), method(), world_size=8)
    few, many = (executed(lambda n=n: plan(experts(n), method(), world_size=8)) for n in (16, 128))
    assert many < 8.5 * few


class Frozen(Wrapper):
    """Sends nothing of one tensor, and shows that nowhere but in what it does."""

    async def step(self, ops, gradients, state, step):
        own = {name: g for name, g in gradients.items() if name != "experts.1.up"}
        averages, state = await self.algorithm.step(ops, own, state, step)
        return {**gradients, **averages}, state


def test_what_an_algorithm_that_nobody_knows_sends_of_a_tensor_is_found_out_for_each():
    sent = [tensor.wire_bytes for tensor in plan(experts(3), Frozen(AllReduce())).tensors]
    assert sent == [8192, 128, 0, 128, 8192, 128]


class Fails(PowerSGD):
    """Written for the tensors of one framework."""

    def compress(self, ops, name, x, memory, context):
        return x.sign()


def test_what_cannot_be_tried_still_has_its_memory():
    dry = dry_run(Fails(2), TRIED)
    assert set(dry.memory.tensors) == {"w", "v"}
    for _ in range(2):
        with pytest.raises(AttributeError, match="sign"):
            dry.steps  # noqa: B018
    with pytest.raises(UnknownWorldSize):
        dry_run(TopK(4, per=64), TRIED).steps  # noqa: B018


def test_runs_live_as_long_as_the_algorithm_and_are_few():
    algorithm = WireDtype(PowerSGD(2), "bfloat16")
    for world in range(2, 2 * REMEMBERED):
        dry_run(algorithm, TRIED, world)
    assert len(vars(algorithm)[ATTRIBUTE]) == REMEMBERED
    for other in (
        copy.copy(algorithm),
        copy.deepcopy(algorithm),
        pickle.loads(pickle.dumps(algorithm)),
    ):
        assert other == algorithm
        assert dry_run(other, TRIED, 2).algorithm is other
        assert dry_run(algorithm, TRIED, 2).algorithm is algorithm
    gone = weakref.ref(algorithm)
    del algorithm
    gc.collect(1)  # what is young
    assert gone() is None


@pytest.mark.parametrize("warm_start", [True, False])
def test_random_numbers_without_data_are_not_drawn(monkeypatch, warm_start):
    def mixed(x):
        raise AssertionError("a number was hashed")

    monkeypatch.setattr(random, "_mix", mixed)
    dry = dry_run(PowerSGD(2, warm_start=warm_start), TRIED)
    assert dry.cycle[0].by_number is not warm_start
