"""Any mix of requests, side by side: each program gets what it gets alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire.core.requests as rq
from gradwire.core.programs import Request, ask, together
from gradwire.core.simulate import NumpyOps, lock_step

OPS = NumpyOps()
REPLICAS = 3
PARTS = [(2, 2, 2), (3, 0, 1)]
GROUPS = ((0, 2), (1,))
EACH = ((2,), (0,), (1,))


async def _request(kind, x):
    """One request about a vector of 6 elements, and all of its answer."""
    if kind == "mean":
        return await rq.mean(x)
    if kind == "mean in groups":
        return await rq.mean(x, groups=GROUPS)
    if kind == "sum":
        return await rq.reduce_sum(np.round(x).astype(np.int8))
    if kind == "max":
        return await rq.reduce_max(x)
    if kind == "max in groups":
        return await rq.reduce_max(x, groups=GROUPS)
    if kind == "gather":
        return await rq.gather(x, x[:2])
    if kind == "gather in groups":
        return await rq.gather(x, groups=EACH)
    if kind == "all_to_all":
        return await rq.all_to_all(x.reshape((3, 2)), x[:3])
    if kind == "all_to_all in groups":
        return await rq.all_to_all(x[:1], groups=EACH)
    if kind == "world_size":
        return [await rq.world_size(), await rq.world_size(EACH)]
    if kind == "reduce_scatter in groups":
        return await rq.reduce_scatter([x.copy()], [(6,)], groups=EACH)
    if kind == "all_gather in groups":
        return await rq.all_gather([x.copy()], [(6,)], groups=EACH)
    if kind == "reduce_scatter":
        return await rq.reduce_scatter([x.copy(), x[:4] * 2.0], PARTS)
    if kind == "all_gather":
        own = await rq.replica_index()
        return await rq.all_gather([x[: counts[own]].copy() for counts in PARTS], PARTS, out=[None, np.zeros(4)])
    if kind == "replica":
        return [await rq.replica_index(), await rq.replica_index(GROUPS)]
    if kind == "total":
        return await rq.sum_scalar(x[0].copy())
    if kind == "own_norm":
        return await rq.local_norm(OPS, {"x": x})
    if kind == "orthonormalize":
        return await rq.orthonormalize(OPS, x.reshape((2, 3)))
    if kind == "all_finite":
        return await rq.step_is_finite()
    if kind == "update":
        return (await rq.optimizer_step({"x": x}))["x"]
    assert kind == "branch"
    return await rq.branch(await rq.mean(x[:1].copy()) > 0.0, _more, _less, x.copy())


async def _more(x):
    return await rq.mean(x + 1.0)


async def _less(x):
    await rq.mean(x)
    return await rq.mean(x - 1.0)


KINDS = (
    "mean|mean in groups|sum|max|max in groups|gather|gather in groups|all_to_all|all_to_all in groups|reduce_scatter|all_gather|"
    "reduce_scatter in groups|all_gather in groups|world_size|replica|total|own_norm|orthonormalize|all_finite|update|branch"
)


async def _program(kinds, number, own):
    rng = np.random.default_rng([number, own])
    return [await _request(kind, rng.normal(size=6)) for kind in kinds]


def _optimizer(own, pieces):
    return {name: piece + own for name, piece in pieces.items()}


def _run(program):
    """On each replica, what `program(replica)` returns; and what replica 0 asked for."""
    requests = []
    return lock_step([program(own) for own in range(REPLICAS)], OPS, requests, _optimizer), requests


@given(st.lists(st.lists(st.sampled_from(KINDS.split("|")), max_size=4), max_size=4))
def test_programs_get_side_by_side_what_each_gets_alone(programs):
    def side_by_side(own):
        return together([_program(kinds, number, own) for number, kinds in enumerate(programs)])

    results, _ = _run(side_by_side)
    for number, kinds in enumerate(programs):
        alone, _ = _run(lambda own, kinds=kinds, number=number: _program(kinds, number, own))
        for own in range(REPLICAS):
            for kind, got, wanted in zip(kinds, results[own][number], alone[own], strict=True):
                assert len(got) == len(wanted) if isinstance(wanted, tuple) else type(got) is type(wanted), kind
                for a, b in zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]:
                    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=kind)


def test_reduce_scatters_and_all_gathers_are_one_request_each():
    async def program(values):
        own = await rq.replica_index()
        (part,) = await rq.reduce_scatter([np.array(values)], [(1, 1, 1)])
        (whole,) = await rq.all_gather([part], [(1, 1, 1)])
        return own, whole

    given_ = [[3.0, 6.0, 9.0], [1.0, 2.0, 3.0]]
    results, requests = _run(lambda own: together([program(values) for values in given_]))
    assert [type(r) for r in requests] == [rq.ReplicaIndex, rq.ReduceScatter, rq.AllGather]
    assert [len(r) for r in requests[1:]] == [2, 2]
    for own, result in enumerate(results):
        assert [answer[0] for answer in result] == [own, own]
        np.testing.assert_array_equal([answer[1] for answer in result], given_)


def test_what_does_not_fuse_waits_for_messages_and_finite_for_all():
    async def sums():
        return float(await rq.sum_scalar(np.array(1.0)))

    async def averages():
        await rq.mean(np.zeros(2))
        return await rq.sum_scalar(np.array(2.0))

    async def asks():
        return bool(await rq.step_is_finite())

    results, requests = _run(lambda own: together([asks(), sums(), averages()]))
    assert [type(r).__name__ for r in requests] == ["Reduce", "SumScalar", "SumScalar", "StepIsFinite"]
    assert results == [[True, 3.0, 6.0]] * REPLICAS
    assert isinstance(requests[0], rq.Reduce)
    assert isinstance(requests[-1], rq.StepIsFinite)


def test_a_request_that_a_driver_does_not_know_reaches_it_by_name():
    class Wish(Request):
        pass

    with pytest.raises(TypeError, match="the simulator cannot answer Wish"):
        _run(lambda own: together([ask(Wish()), rq.mean(np.zeros(1))]))
