"""What a request says of itself, against what it is: its bytes, its abstract answers, and the answers of replicas in lock step."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire.core.protocol as rq
from gradwire.core.kernels.abstract import AbstractArray
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.ops import WIRE_ITEMSIZE
from gradwire.core.plan.dry_run import rehearsed
from gradwire.core.plan.traffic import traffic_of as counted
from gradwire.core.simulate import lock_step

OPS = NumpyOps()
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def _partitions(replicas, size):
    order = st.permutations(range(replicas))
    return order.map(lambda o: tuple(tuple(o[i : i + size]) for i in range(0, replicas, size)))


@st.composite
def _worlds(draw):
    """Replicas, groups of one size or None, and the members with whom each replica speaks."""
    size, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    replicas = size * groups
    partition = draw(_partitions(replicas, size)) if draw(st.booleans()) else None
    members = {r: next((m for m in partition if r in m), ()) if partition else range(replicas) for r in range(replicas)}
    return replicas, partition, members


def _run(replicas, program):
    requests = []
    return lock_step([program(own) for own in range(replicas)], OPS, requests), requests


REQUESTS = {
    "mean": (rq.mean, lambda own, place: own.mean(0)),
    "sum": (rq.reduce_sum, lambda own, place: own.sum(0)),
    "max": (rq.reduce_max, lambda own, place: own.max(0)),
    "gather": (rq.gather, lambda own, place: own),
    "all-to-all": (rq.all_to_all, lambda own, place: own[:, place]),
}


@settings(max_examples=80)
@given(_worlds(), SHAPES, st.sampled_from(sorted(REQUESTS)), st.sampled_from(["float64", "float32", "float16"]))
def test_answers_are_those_of_the_members_and_a_plan_foresees_them(world, shape, kind, dtype):
    (replicas, groups, members), (request, expected) = world, REQUESTS[kind]
    size, several = len(members[0]), kind in ("gather", "all-to-all")
    shape = (size, *shape) if kind == "all-to-all" else shape
    # Sums and means of multiples of six are exact, whatever the order.
    own = 6 * np.random.default_rng(0).integers(-8, 9, (replicas, *shape)).astype(dtype)
    results, requests = _run(replicas, lambda r: request(own[r], groups=groups))
    for r, result in enumerate(results):
        answer = result[0] if several else result
        np.testing.assert_array_equal(answer, expected(own[[*members[r]]], list(members[r]).index(r)))
        assert answer.dtype == dtype
    planned = rehearsed(request(AbstractArray(shape, dtype), groups=groups), world_size=replicas)
    assert planned.traffic == counted(OPS, requests, replicas)
    # A ring all-reduce of n bytes among G replicas has each send 2(G-1)/G · n; what a request sends is counted as the n of equal bytes.
    each = math.prod(shape) * WIRE_ITEMSIZE[dtype]
    wire = {"gather": (size - 1) * each, "all-to-all": (size - 1) * each / size}.get(kind, 2 * (size - 1) / size * each)
    assert 2 * (size - 1) / size * counted(OPS, requests, replicas).nbytes == pytest.approx(wire, abs=1)
    replica = type("Replica", (), {"replicas": lambda self, groups, assumed: size})()
    assert planned.requests[0].abstract(replica)[0].shape == answer.shape


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8"])
def test_integers_are_gathered_in_their_own_dtype(dtype):
    ((everything,), _), _ = _run(2, lambda r: rq.gather(np.array([r, 100], dtype)))
    assert everything.dtype == dtype
    assert everything.tolist() == [[0, 100], [1, 100]]


def test_integers_are_summed_in_their_own_dtype():
    (total, *_), _ = _run(3, lambda r: rq.reduce_sum(np.array([100, -1], np.int8)))
    assert total.dtype == np.int8
    assert total.tolist() == [300 - 256, -3]


@given(_worlds())
def test_parts_of_a_group_average_and_join_again(world):
    replicas, groups, members = world
    size = len(members[0])
    own = np.random.default_rng(0).normal(size=(replicas, 2 * size))

    async def program(r):
        (part,) = await rq.reduce_scatter([own[r].copy()], [(2,) * size], groups=groups)
        (whole,) = await rq.all_gather([part], [(2,) * size], groups=groups)
        return whole, await rq.world_size(groups), await rq.replica_index(groups)

    results, _ = _run(replicas, program)
    for r, (whole, told, place) in enumerate(results):
        np.testing.assert_allclose(whole, own[[*members[r]]].mean(0), rtol=1e-12, atol=1e-12)
        assert (told, members[r][place]) == (size, r)


def test_a_gathered_nan_is_seen_by_the_whole_step():
    async def program(r, groups):
        await rq.gather(np.array([math.nan if r == 1 else 1.0]), np.array([1], np.int8), groups=groups)
        return bool(await rq.step_is_finite())

    assert _run(2, lambda r: program(r, None))[0] == [False, False]
    assert _run(2, lambda r: program(r, ((0,), (1,))))[0] == [True, True]
