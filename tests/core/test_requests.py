"""What a request says of itself, against what it is: its bytes, its abstract answers, and the answers of replicas in lock step."""

import math

import numpy as np
import pytest
from hypothesis import given
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


def _arrays(replicas, shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=shape) * 40).astype(dtype) for _ in range(replicas)]


@given(_worlds(), SHAPES, st.sampled_from(["float64", "float32", "int8", "int32", "uint8"]))
def test_a_gather_stacks_what_the_members_have(world, shape, dtype):
    replicas, groups, members = world
    own = _arrays(replicas, shape, dtype)
    results, _ = _run(replicas, lambda r: rq.gather(own[r], groups=groups))
    for r, (everything,) in enumerate(results):
        np.testing.assert_array_equal(everything, np.stack([own[m] for m in members[r]]))
        assert everything.dtype == dtype


@given(_worlds(), SHAPES)
def test_an_all_to_all_transposes_replicas_and_rows(world, shape):
    replicas, groups, members = world
    rows = _arrays(replicas, (len(members[0]), *shape), "float64")
    results, _ = _run(replicas, lambda r: rq.all_to_all(rows[r], groups=groups))
    for r, (received,) in enumerate(results):
        place = list(members[r]).index(r)
        np.testing.assert_array_equal(received, np.stack([rows[m][place] for m in members[r]]))


@given(_worlds(), SHAPES)
def test_sums_and_maxima_are_those_of_the_members(world, shape):
    replicas, groups, members = world
    own = _arrays(replicas, shape, "float64")
    sums, _ = _run(replicas, lambda r: rq.reduce_sum(own[r], groups=groups))
    largest, _ = _run(replicas, lambda r: rq.reduce_max(own[r], groups=groups))
    for r in range(replicas):
        np.testing.assert_allclose(sums[r], np.sum([own[m] for m in members[r]], axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(largest[r], np.max([own[m] for m in members[r]], axis=0))


def test_integers_are_summed_in_their_own_dtype():
    (total, *_), _ = _run(3, lambda r: rq.reduce_sum(np.array([100, -1], np.int8)))
    assert total.dtype == np.int8
    assert total.tolist() == [300 - 256, -3]


@given(_worlds())
def test_parts_of_a_group_average_and_join_again(world):
    replicas, groups, members = world
    size = len(members[0])
    own = _arrays(replicas, (2 * size,), "float64")

    async def program(r):
        (part,) = await rq.reduce_scatter([own[r].copy()], [(2,) * size], groups=groups)
        return await rq.all_gather([part], [(2,) * size], groups=groups)

    results, _ = _run(replicas, program)
    for r, (whole,) in enumerate(results):
        np.testing.assert_allclose(whole, np.mean([own[m] for m in members[r]], axis=0), rtol=1e-12, atol=1e-12)


@given(_worlds())
def test_sizes_and_places_are_those_of_the_group(world):
    replicas, groups, members = world

    async def program(r):
        return await rq.world_size(groups), await rq.replica_index(groups)

    results, _ = _run(replicas, program)
    for r, (size, place) in enumerate(results):
        assert (size, members[r][place]) == (len(members[r]), r)


PROGRAMS = {
    "mean": lambda x, groups: rq.mean(x, groups=groups),
    "sum": lambda x, groups: rq.reduce_sum(x, groups=groups),
    "max": lambda x, groups: rq.reduce_max(x, groups=groups),
    "gather": lambda x, groups: rq.gather(x, groups=groups),
    "all-to-all": lambda x, groups: rq.all_to_all(x, groups=groups),
}


@given(_worlds(), SHAPES, st.sampled_from(sorted(PROGRAMS)), st.sampled_from(["float32", "float16", "float64"]))
def test_a_plan_foresees_shapes_and_bytes(world, shape, kind, dtype):
    replicas, groups, members = world
    size = len(members[0])
    shape = (size, *shape) if kind == "all-to-all" else shape
    own = _arrays(replicas, shape, dtype)
    results, requests = _run(replicas, lambda r: PROGRAMS[kind](own[r], groups))
    planned = PROGRAMS[kind](AbstractArray(shape, dtype), groups)
    assert rehearsed(planned, world_size=replicas).traffic == counted(OPS, requests, replicas)
    # A ring all-reduce of n bytes among G replicas has each send 2(G-1)/G · n; what a request sends is counted as the n of equal bytes.
    each = math.prod(shape) * WIRE_ITEMSIZE[dtype]
    wire = {"gather": (size - 1) * each, "all-to-all": (size - 1) * each / size}.get(kind, 2 * (size - 1) / size * each)
    assert 2 * (size - 1) / size * counted(OPS, requests, replicas).nbytes == pytest.approx(wire, abs=1)
    answer = results[0][0] if kind in ("gather", "all-to-all") else results[0]
    (request,) = rehearsed(PROGRAMS[kind](AbstractArray(shape, dtype), groups), world_size=replicas).requests
    replica = type("Replica", (), {"replicas": lambda self, groups, assumed: size})()
    assert request.abstract(replica)[0].shape == answer.shape


def test_a_gathered_nan_is_seen_by_the_whole_step():
    async def program(r, groups):
        await rq.gather(np.array([math.nan if r == 1 else 1.0]), np.array([1], np.int8), groups=groups)
        return bool(await rq.step_is_finite())

    assert _run(2, lambda r: program(r, None))[0] == [False, False]
    assert _run(2, lambda r: program(r, ((0,), (1,))))[0] == [True, True]
