"""Requests against what they say of themselves, side by side in `together`, and in a `branch`; and
the simulator, which says who disagrees and leaves its input alone."""

import gc
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire.core.protocol as rq
from gradwire import AllReduce, LocalSGD, LowRank, PowerSGD, ReplicaMismatch, Simulator, State
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.kernels.payloads import Residual
from gradwire.core.ops import WIRE_ITEMSIZE
from gradwire.core.plan.dry_run import rehearsed
from gradwire.core.plan.traffic import traffic_of as counted
from gradwire.core.protocol import together
from gradwire.core.protocol.control_requests import Branch, OptimizerStep, StepIsFinite
from gradwire.core.protocol.exchanges import Gather
from gradwire.core.protocol.local_requests import Orthonormalize
from gradwire.core.protocol.programs import AT_REST, STATED, Collective, Fusable, Request, ask
from gradwire.core.protocol.reductions import Reduce, SumScalar
from gradwire.core.simulate import NumpyOps, lock_step
from tests.launch import LIMIT

OPS = NumpyOps()


def optimizer(own, pieces):
    return {name: piece + own for name, piece in pieces.items()}


def on(replicas, program):
    """On each replica, what `program(replica)` returns; and what replica 0 asked for."""
    requests = []
    return lock_step([program(own) for own in range(replicas)], OPS, requests, optimizer), requests


def run(program):
    (result,), requests = on(1, lambda own: program)
    return result, requests


async def means(values):
    """Average numbers one after the other; return them."""
    return [float((await rq.mean(np.array([v], float)))[0]) for v in values]


nested = st.recursive(
    st.lists(st.integers(0, 99), max_size=4),
    lambda inner: st.lists(inner, max_size=6).map(tuple),
    max_leaves=8,
)


@given(nested)
def test_nth_requests_of_all_programs_are_one_message(tree):
    """Of those in a `together` within a `together` too."""

    def leaves(t):
        return [leaf for part in t for leaf in leaves(part)] if isinstance(t, tuple) else [t]

    async def of(t):
        return (
            tuple(await together([of(part) for part in t]))
            if isinstance(t, tuple)
            else await means(t)
        )

    result, requests = run(of(tree))
    assert result == tree
    rounds = max(map(len, leaves(tree)), default=0)
    sent = [[float(a[0]) for a in request.arrays] for request in requests]
    assert sent == [[p[n] for p in leaves(tree) if len(p) > n] for n in range(rounds)]


def test_a_request_about_nothing_takes_nobodys_answer():
    async def ask_for(*values):
        return await ask(Reduce(tuple(np.full(1, v) for v in values), (False,) * len(values)))

    results, _ = run(together([ask_for(1.0, 2.0), ask_for()]))
    assert [[float(x[0]) for x in answers] for answers in results] == [[1.0, 2.0], []]


def test_what_is_said_of_each_array_survives_fusion():
    """What is donated, `out` that is another array being none; what is computed meanwhile, each
    once; and that somebody asks whether it is finite."""
    given_away, one = np.zeros(2), np.ones((1, 2))
    residuals = [Residual(OPS, np.full((2, 2), float(i)), LowRank(one, one)) for i in range(3)]
    first = [
        rq.mean(np.zeros(1), overlap=residuals[0], watched=False),
        rq.mean(given_away, out=given_away, watched=False),
        rq.mean(np.zeros(3), out=np.zeros(3), overlap=residuals[1], watched=False),
    ]
    _, (unwatched,) = run(together(first))
    assert (unwatched.donated, unwatched.watched) == ((False, True, False), False)
    assert unwatched.overlap == tuple(residuals[:2])
    _, (watched,) = run(
        together([rq.mean(np.zeros(1), watched=False), rq.mean(np.zeros(1), overlap=residuals[2])])
    )
    assert watched.watched
    for i, residual in enumerate(residuals):
        assert residual.computed
        np.testing.assert_array_equal(residual.x, np.full((2, 2), i - 1.0))


@pytest.mark.parametrize("order", [1, -1])
def test_local_requests_come_first_so_that_messages_meet(order):
    async def prepares():
        return await rq.mean(await rq.orthonormalize(OPS, np.ones((1, 4))))

    _, requests = run(together([prepares(), rq.mean(np.zeros(2))][::order]))
    assert [type(r) for r in requests] == [Orthonormalize, Reduce]
    assert len(requests[1]) == 2


def test_equal_shapes_are_orthonormalized_by_one_kernel():
    calls = []

    class Counting(NumpyOps):
        def loop(self, n, body, start, **options):
            calls.append(start.shape)
            return super().loop(n, body, start, **options)

    ops = Counting()
    arrays = [
        np.random.default_rng(i).normal(size=s)
        for i, s in enumerate([(2, 5), (3, 5), (2, 5), (2, 5)])
    ]
    _, requests = run(together(rq.orthonormalize(ops, a) for a in arrays))
    assert (len(requests), sorted(calls)) == (1, [(1, 3, 5), (3, 2, 5)])


def test_different_ways_to_orthonormalize_are_not_mixed():
    x, fresh = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    programs = [
        rq.orthonormalize(OPS, x, **each) for each in ({}, {"fresh": fresh}, {"epsilon": 0.25})
    ]
    found, requests = run(together(programs))
    assert len(requests) == 3
    # The row is scaled to [0.75, 1], of norm 1.25, before epsilon is added to that norm.
    expected = [[0.6, 0.8], [0, 0]], [[0.6, 0.8], [-0.8, 0.6]], [[0.5, 2 / 3], [0, 0]]
    np.testing.assert_allclose(found, expected, atol=1e-15)


def test_finite_is_asked_once_when_nobody_has_more_to_send():
    async def program(*values, watched=True):
        for v in values:
            await rq.mean(np.array([v]), watched=watched)
        return bool(await rq.step_is_finite())

    # The first program is ready to ask long before the second one averages a NaN, and must hear of
    # it.
    result, requests = run(together([program(1.0), program(1.0, np.nan), program(1.0)]))
    assert result == [False, False, False]
    assert [type(r) for r in requests] == [Reduce, Reduce, StepIsFinite]
    assert run(together([program(1.0), program(2.0)]))[0] == [True, True]
    assert run(program(np.inf, watched=False))[0] is True


@pytest.mark.parametrize("truth", [True, False])
def test_branch_runs_one_side_and_returns_its_result(truth):
    async def then(x, y):
        return "then", float((await rq.mean(x + y))[0])

    async def otherwise(x, y):
        return "otherwise", float((await rq.mean(x - y))[0])

    # A bool is known to the program: no need for the driver to look.
    for told, asked in ((np.array(truth), [Branch, Reduce]), (truth, [Reduce])):
        found, requests = run(rq.branch(told, then, otherwise, np.array([5.0]), np.array([3.0])))
        assert found == (("then", 8.0) if truth else ("otherwise", 2.0))
        assert [type(r) for r in requests] == asked


def test_what_does_not_fuse_waits_for_messages_and_finite_for_all():
    def branches(truth):
        return rq.branch(np.array(truth), rq.mean, rq.mean, np.ones(1))

    async def sums():
        await rq.mean(np.zeros(2))
        return await rq.sum_scalar(np.array(2.0))

    result, requests = run(together([branches(True), means([1, 2]), branches(False)]))
    assert [type(r) for r in requests] == [Reduce, Reduce, Branch, Reduce, Branch, Reduce]
    assert result[1] == [1, 2]
    results, requests = on(
        3, lambda own: together([rq.step_is_finite(), rq.sum_scalar(np.array(1.0)), sums()])
    )
    assert [type(r) for r in requests] == [Reduce, SumScalar, SumScalar, StepIsFinite]
    assert results == [[True, 3.0, 6.0]] * 3


def test_a_forgotten_await_warns():
    async def forgets():
        rq.mean(np.zeros(1))
        gc.collect(1)
        return "done"

    with pytest.warns(RuntimeWarning, match=r"'mean' was never awaited"):
        assert run(forgets()) == ("done", [])


class Failure(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 2, None])
def test_an_exception_closes_the_other_programs(after, recwarn):
    """And so does a driver that gives up."""
    log = []

    async def tidy(name):
        log.append(f"{name} begins")
        try:
            await means(range(9))
        finally:
            log.append(f"{name} ends")

    async def fails():
        await means(range(9 if after is None else after))
        raise Failure

    program = together([tidy("a"), fails(), together(tidy(name) for name in "bc"), tidy("d")])
    if after is None:
        program.send(None)
        program.close()
    else:
        with pytest.raises(Failure):
            run(program)
    gc.collect(1)  # what is young: all objects of all tests before it take a second
    # at once: the programs after it never begin, and nothing complains
    begun = "a" if after == 0 else "abcd"
    assert sorted(log) == sorted(f"{name} {what}" for name in begun for what in ("begins", "ends"))
    assert not recwarn.list


def test_a_driver_that_answers_too_few_arrays_is_told():
    program = together([rq.mean(np.zeros(1)), rq.mean(np.zeros(1))])
    program.send(None)
    with pytest.raises(RuntimeError, match="answered Reduce with 1 arrays for 2"):
        program.send((np.zeros(1),))


ANY_SHAPE = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def partitions(replicas, size):
    order = st.permutations(range(replicas))
    return order.map(lambda o: tuple(tuple(o[i : i + size]) for i in range(0, replicas, size)))


@st.composite
def worlds(draw):
    """Replicas, groups of one size or None, and the members with whom each replica speaks."""
    size, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    replicas = size * groups
    partition = draw(partitions(replicas, size)) if draw(st.booleans()) else None
    members = {
        r: next((m for m in partition if r in m), ()) if partition else range(replicas)
        for r in range(replicas)
    }
    return replicas, partition, members


REQUESTS = {
    "mean": (rq.mean, lambda own, place: own.mean(0)),
    "sum": (rq.reduce_sum, lambda own, place: own.sum(0)),
    "max": (rq.reduce_max, lambda own, place: own.max(0)),
    "gather": (rq.gather, lambda own, place: own),
    "all-to-all": (rq.all_to_all, lambda own, place: own[:, place]),
}


@settings(max_examples=80)
@given(
    worlds(),
    ANY_SHAPE,
    st.sampled_from(sorted(REQUESTS)),
    st.sampled_from(["float64", "float32", "float16"]),
)
def test_answers_are_those_of_the_members_and_a_plan_foresees_them(world, shape, kind, dtype):
    (replicas, groups, members), (request, expected) = world, REQUESTS[kind]
    size, several = len(members[0]), kind in ("gather", "all-to-all")
    shape = (size, *shape) if kind == "all-to-all" else shape
    # Sums of multiples of 36, and means over 1, 2, 3, 4, 6 and 9 replicas, are exact, whatever the
    # order.
    own = 36 * np.random.default_rng(0).integers(-8, 9, (replicas, *shape)).astype(dtype)
    results, requests = on(replicas, lambda r: request(own[r], groups=groups))
    for r, result in enumerate(results):
        answer = result[0] if several else result
        np.testing.assert_array_equal(
            answer, expected(own[[*members[r]]], list(members[r]).index(r))
        )
        assert answer.dtype == dtype
    planned = rehearsed(request(AbstractArray(shape, dtype), groups=groups), world_size=replicas)
    assert planned.traffic == counted(OPS, requests, replicas)
    # A ring all-reduce of n bytes among G replicas has each send 2(G-1)/G · n; what a request sends
    # is counted as the n of equal bytes.
    each = math.prod(shape) * WIRE_ITEMSIZE[dtype]
    wire = {"gather": (size - 1) * each, "all-to-all": (size - 1) * each / size}.get(
        kind, 2 * (size - 1) / size * each
    )
    assert 2 * (size - 1) / size * counted(OPS, requests, replicas).nbytes == pytest.approx(
        wire, abs=1
    )
    replica = type("Replica", (), {"replicas": lambda self, groups, assumed: size})()
    assert planned.requests[0].abstract(replica)[0].shape == answer.shape


@pytest.mark.parametrize(
    ("dtype", "total"), [("int8", [44, -3]), ("int32", [300, -3]), ("uint8", [44, 253])]
)
def test_integers_are_gathered_and_summed_in_their_own_dtype(dtype, total):
    ((everything,), _), _ = on(2, lambda r: rq.gather(np.array([r, 100], dtype)))
    assert everything.dtype == dtype
    assert everything.tolist() == [[0, 100], [1, 100]]
    (sums, *_), _ = on(3, lambda r: rq.reduce_sum(np.array([100, -1]).astype(dtype)))
    assert sums.dtype == dtype
    assert sums.tolist() == total


def test_a_gathered_nan_is_seen_by_the_whole_step():
    async def program(r, groups):
        await rq.gather(
            np.array([math.nan if r == 1 else 1.0]), np.array([1], np.int8), groups=groups
        )
        return bool(await rq.step_is_finite())

    assert on(2, lambda r: program(r, None))[0] == [False, False]
    assert on(2, lambda r: program(r, ((0,), (1,))))[0] == [True, True]


@given(worlds())
def test_parts_of_a_group_average_and_join_again(world):
    replicas, groups, members = world
    size = len(members[0])
    own = np.random.default_rng(0).normal(size=(replicas, 2 * size))

    async def program(r):
        (part,) = await rq.reduce_scatter([own[r].copy()], [(2,) * size], groups=groups)
        (whole,) = await rq.all_gather([part], [(2,) * size], groups=groups)
        return whole, await rq.world_size(groups), await rq.replica_index(groups)

    results, _ = on(replicas, program)
    for r, (whole, told, place) in enumerate(results):
        np.testing.assert_allclose(whole, own[[*members[r]]].mean(0), rtol=1e-12, atol=1e-12)
        assert (told, members[r][place]) == (size, r)


PARTS = [(2, 2, 2), (3, 0, 1)]
GROUPS = ((0, 2), (1,))
EACH = ((2,), (0,), (1,))


async def _joined(x):
    own = await rq.replica_index()
    return await rq.all_gather(
        [x[: counts[own]].copy() for counts in PARTS], PARTS, out=[None, np.zeros(4)]
    )


async def _more(x):
    return await rq.mean(x + 1.0)


async def _less(x):
    await rq.mean(x)
    return await rq.mean(x - 1.0)


async def _branch(x):
    return await rq.branch(await rq.mean(x[:1].copy()) > 0.0, _more, _less, x.copy())


#: One request about a vector of 6 elements.
ASKED = {
    "mean": lambda x: rq.mean(x),
    "mean in groups": lambda x: rq.mean(x, groups=GROUPS),
    "sum": lambda x: rq.reduce_sum(np.round(x).astype(np.int8)),
    "max": lambda x: rq.reduce_max(x),
    "max in groups": lambda x: rq.reduce_max(x, groups=GROUPS),
    "gather": lambda x: rq.gather(x, x[:2]),
    "gather in groups": lambda x: rq.gather(x, groups=EACH),
    "all-to-all": lambda x: rq.all_to_all(x.reshape((3, 2)), x[:3]),
    "all-to-all in groups": lambda x: rq.all_to_all(x[:1], groups=EACH),
    "size": lambda x: rq.world_size(),
    "size in groups": lambda x: rq.world_size(EACH),
    "reduce-scatter": lambda x: rq.reduce_scatter([x.copy(), x[:4] * 2.0], PARTS),
    "reduce-scatter in groups": lambda x: rq.reduce_scatter([x.copy()], [(6,)], groups=EACH),
    "all-gather": _joined,
    "all-gather in groups": lambda x: rq.all_gather([x.copy()], [(6,)], groups=EACH),
    "replica": lambda x: rq.replica_index(),
    "replica in groups": lambda x: rq.replica_index(GROUPS),
    "total": lambda x: rq.sum_scalar(x[0].copy()),
    "own norm": lambda x: rq.local_norm(OPS, {"x": x}),
    "orthonormal": lambda x: rq.orthonormalize(OPS, x.reshape((2, 3))),
    "finite": lambda x: rq.step_is_finite(),
    "update": lambda x: rq.optimizer_step({"x": x}),
    "branch": _branch,
}


async def program_of(kinds, number, own):
    rng = np.random.default_rng([number, own])
    return [await ASKED[kind](rng.normal(size=6)) for kind in kinds]


@given(st.lists(st.lists(st.sampled_from(sorted(ASKED)), max_size=4), max_size=4))
def test_programs_get_side_by_side_what_each_gets_alone(programs):
    results, _ = on(
        3, lambda own: together([program_of(kinds, n, own) for n, kinds in enumerate(programs)])
    )
    for number, kinds in enumerate(programs):
        alone, _ = on(3, lambda own, kinds=kinds, number=number: program_of(kinds, number, own))
        for own in range(3):
            for kind, got, wanted in zip(kinds, results[own][number], alone[own], strict=True):
                assert type(got) is type(wanted), kind
                got, wanted = (
                    x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x]
                    for x in (got, wanted)
                )
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=kind)


def test_a_request_that_a_driver_does_not_know_reaches_it_by_name():
    class Wish(Request):
        pass

    with pytest.raises(TypeError, match="the simulator cannot answer Wish"):
        run(together([ask(Wish()), rq.mean(np.zeros(1))]))


@pytest.mark.parametrize("bases", [(Fusable, Collective), (Collective,)])
@pytest.mark.parametrize("missing", STATED)
def test_a_collective_request_that_does_not_say_how_it_is_sent_cannot_be_made(bases, missing):
    stated = {name: getattr(Gather, name) for name in STATED}
    assert issubclass(type("Whole", bases, stated), Collective)
    del stated[missing]
    with pytest.raises(TypeError, match=f"Broadcast lacks {missing}: "):
        type("Broadcast", bases, stated)


def test_what_sends_is_a_collective_request_and_one_of_all_replicas_is_asked_in_no_group():
    with pytest.raises(TypeError, match=r"Broadcast .* a subclass of Collective"):
        type("Broadcast", (Fusable,), {"payloads": Gather.payloads})
    with pytest.raises(TypeError, match="sum_scalar is of all replicas"):
        SumScalar(X).among(((0, 1), (2, 3)))
    with pytest.raises(TypeError, match="Wish has no field groups"):
        type("Wish", (Request,), {})().among(((0, 1),))


def branched(x, truth=True):
    return rq.branch(np.array(truth), rq.mean, rq.mean, x)


async def asked_times(array, times=1):
    for _ in range(times):
        await rq.mean(array)


def local_sgd_after(step):
    local, w = LocalSGD(4), {"w": np.ones(2)}
    return local.average(OPS, w, local.init(OPS, w, 2), step, 2)


def scattered(*counts):
    return rq.reduce_scatter([np.ones(5)], [counts])


X, SIX, BUT = np.zeros(3), np.zeros((2, 3)), "but replica {odd} asks for "
ENDED = "replicas [{odd}] have ended while replicas {others} ask for"
MEAN = "replica 0 asks for the mean of float64[2, 3], "
#: What most replicas ask for, what one does, and the words.
DISAGREEING = {
    "shape": (
        lambda: rq.mean(SIX),
        lambda: rq.mean(SIX.T),
        f"{MEAN}{BUT}the mean of float64[3, 2]",
    ),
    "dtype": (
        lambda: rq.mean(SIX),
        lambda: rq.mean(SIX.astype("float32")),
        f"{MEAN}{BUT}the mean of float32[2, 3]",
    ),
    "request": (
        lambda: rq.mean(SIX),
        lambda: rq.orthonormalize(OPS, SIX),
        f"{MEAN}{BUT}Orthonormalize of float64[2, 3]",
    ),
    "finite": (lambda: rq.mean(SIX), rq.step_is_finite, f"{MEAN}{BUT}StepIsFinite"),
    "operation": (
        lambda: rq.reduce_sum(X),
        lambda: rq.reduce_max(X),
        f"the sum of float64[3], {BUT}the max",
    ),
    "gathers": (
        lambda: rq.gather(X),
        lambda: rq.gather(X[:1]),
        f"Gather of float64[3], {BUT}Gather of float64[1]",
    ),
    "exchanges": (
        lambda: rq.gather(X),
        lambda: rq.all_to_all(X),
        f"Gather of float64[3], {BUT}AllToAll",
    ),
    "parts": (
        lambda: scattered(2, 3),
        lambda: scattered(4, 1),
        BUT + "ReduceScatter of float64[5] in parts of [(4, 1)]",
    ),
    "an early end": (
        lambda: asked_times(X, 2),
        lambda: asked_times(X, 1),
        ENDED + " the mean of float64[3]",
    ),
    "a step number": (lambda: local_sgd_after(3), lambda: local_sgd_after(4), ENDED + " the mean"),
    "in a branch": (lambda: branched(X), lambda: branched(X[:2]), BUT + "the mean of float64[2]"),
}


@pytest.mark.parametrize("name", DISAGREEING)
@given(world=st.integers(2, 5), odd=st.integers(1, 4))
def test_who_disagrees_is_named_with_both_requests(name, world, odd):
    (usual, unusual, words), odd = DISAGREEING[name], min(odd, world - 1)
    others = [replica for replica in range(world) if replica != odd]
    with pytest.raises(ReplicaMismatch) as error:
        lock_step([(unusual if replica == odd else usual)() for replica in range(world)])
    assert words.format(odd=odd, others=others) in str(error.value)
    assert str(error.value).count("replica ") in (0, 2)


PAIRS, OTHERS = ((0, 1), (2, 3)), ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        (
            lambda: [branched(X, n < 2) for n in range(3)],
            r"branch differently: \{0: True, 1: True, 2: False\}",
        ),
        (lambda: [scattered(2, 2)], r"5 elements in parts of \[2, 2\] for 1 replicas"),
        (
            lambda: [rq.mean(X, groups=g) for g in (PAIRS, PAIRS, OTHERS, PAIRS)],
            r"\(0, 1\), .*replica 2 .*\(\(0, 2\)",
        ),
        (
            lambda: [ask(OptimizerStep({}, np.array(ok))) for ok in (True, False)],
            "disagree whether the step",
        ),
    ],
)
def test_what_else_replicas_cannot_do(programs, words):
    with pytest.raises(ReplicaMismatch, match=words):
        lock_step(programs(), optimizer=lambda *_: {})


class Divergent:
    """Returns something else on some replicas: the gradient, the shared state, a memory."""

    per_replica = frozenset({"own"})
    start_step = 0
    cycle = 1

    def __init__(self, where):
        self.where = where

    def init(self, ops, specs):
        return State(
            {"count": np.zeros(())}, {n: {"own": np.zeros(2), "common": np.zeros(2)} for n in specs}
        )

    async def step(self, ops, gradients, state, step):
        local = gradients["w"]
        average = await rq.mean(local)
        if self.where == "average":
            return {"w": local}, state
        if self.where == "shared":
            state.shared["count"] = local.sum()
        else:
            state.tensors["w"][self.where] = local
        return {"w": average}, state


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("average", "the averaged gradient of 'w'"),
        ("shared", "the shared state 'count'"),
        ("common", "memory 'common' of 'w'"),
    ],
)
def test_results_that_must_be_equal_and_are_not(where, message):
    simulator = Simulator(Divergent(where), {"w": (2,)}, replicas=4)
    with pytest.raises(
        ReplicaMismatch, match=rf"{message} differs: replicas \[2, 3\] disagree with replica 0"
    ):
        simulator.step([{"w": [1, 2]}, {"w": [1, 2]}, {"w": [3, 2]}, {"w": [3, 3]}])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_equal_nans_are_no_disagreement_and_parameters_are_matched_by_name(dtype):
    simulator = Simulator(AllReduce(), {"a": (2,), "b": (2,)}, replicas=2, dtype=dtype)
    averages = simulator.step([{"a": [1, np.nan], "b": [5, 5]}, {"b": [7, 7], "a": [3, 3]}])
    np.testing.assert_array_equal(
        [averages[name].astype(float) for name in "ab"], [[2, np.nan], [6, 6]]
    )


def test_gradients_for_other_parameters_are_a_disagreement():
    simulator = Simulator(AllReduce(), {"a": (2,), "b": (2,)}, replicas=3)
    both = {"a": [1, 1], "b": [1, 1]}
    with pytest.raises(
        ReplicaMismatch,
        match=r"replica 0 has gradients for \['a', 'b'\], but replica 2 for \['b'\]",
    ):
        simulator.step([both, both, {"b": [1, 1]}])


def test_a_failed_step_leaves_the_state_as_it_was():
    simulator = Simulator(PowerSGD(rank=1), {"w": (8, 6)}, replicas=2)
    simulator.step([{"w": np.ones((8, 6))}] * 2)
    before = [state.map(np.array) for state in simulator.states]

    class Breaks(NumpyOps):
        def matmul(self, x, y, *, out=None):
            # the average, the last kernel of a step: the memory has been committed by now
            if out is not None:
                raise ZeroDivisionError
            return super().matmul(x, y)

    simulator.ops = Breaks()
    with pytest.raises(ZeroDivisionError):
        simulator.step([{"w": np.eye(8, 6)}] * 2)
    for mine, old in zip(simulator.states, before, strict=True):
        np.testing.assert_equal(mine.tensors, old.tensors)
    assert simulator.steps == 1


def test_a_step_may_bring_a_part_of_the_model():
    shapes, rng = {"u": (8, 6), "w": (8, 6), "b": (6,)}, np.random.default_rng(0)
    simulator = Simulator(PowerSGD(rank=1), shapes, replicas=2)
    simulator.step([{k: rng.normal(size=s) for k, s in shapes.items()} for _ in range(2)])
    frozen = [s.tensors["u"]["error"].copy() for s in simulator.states]
    averages = simulator.step([{"b": np.ones(6), "w": rng.normal(size=(8, 6))} for _ in range(2)])
    assert list(averages) == ["w", "b"]
    np.testing.assert_equal([s.tensors["u"]["error"] for s in simulator.states], frozen)


def test_short_floats_need_no_import_but_ml_dtypes_installed():
    """In a process where nobody has imported it, at first as if it were not installed."""
    program = """
import sys
import numpy as np
from gradwire import AllReduce, LocalSGD, LocalSimulator, Quantize, Simulator, WireDtype

assert "ml_dtypes" not in sys.modules
ways = [
    *(lambda a=a: Simulator(a, {"w": (64, 64)}, 2, dtype="float32").step([{"w": np.ones((64, 64))}] * 2)["w"]
      for d in ("bfloat16", "float8_e4m3fn") for a in (WireDtype(AllReduce(), d), Quantize(d))),
    lambda: Simulator(AllReduce(), {"w": (2,)}, 2, dtype="bfloat16").step([{"w": [1.0, 1.0]}] * 2)["w"],
    lambda: LocalSimulator(LocalSGD(2), {"w": np.ones(2)}, 2, dtype="bfloat16").parameters[0]["w"],
]
for way in ways:
    sys.modules["ml_dtypes"] = None
    try:
        way()
    except ImportError as error:
        assert "ml_dtypes" in str(error) and "pip install" in str(error), error
    else:
        raise AssertionError("nothing was refused")
    del sys.modules["ml_dtypes"]
for way in ways:
    assert np.allclose(np.asarray(way(), np.float32), 1, rtol=1e-3)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT)


# ---- the collector of cycles, while programs run


@pytest.fixture
def collects():
    """As it was, whatever a test has made of it."""
    was = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was else gc.disable)()


def test_the_collector_rests_as_long_as_anyone_is_within(collects):
    with AT_REST:
        with AT_REST:
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with AT_REST:
        pass
    assert not gc.isenabled()


def test_the_collector_is_back_after_an_error_and_when_another_thread_has_left(collects):
    entered, leave = threading.Event(), threading.Event()

    def within():
        with AT_REST:
            entered.set()
            assert leave.wait(60)

    thread = threading.Thread(target=within)
    thread.start()
    assert entered.wait(60)
    with pytest.raises(KeyError), AT_REST:
        raise KeyError
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


FORKING = """
import gc, os
from gradwire.core.protocol.programs import AT_REST
with AT_REST:
    child = os.fork()
    if not child:
        os._exit(0 if gc.isenabled() else 1)
    assert not gc.isenabled()
assert os.waitpid(child, 0)[1] == 0 and gc.isenabled()
"""


def test_the_child_of_a_fork_collects():
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=LIMIT)
