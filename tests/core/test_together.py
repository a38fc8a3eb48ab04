"""Any mix of requests, side by side: each program gets what it gets alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire.core.protocol as rq
from gradwire.core.protocol import together
from gradwire.core.protocol.collective_requests import Reduce
from gradwire.core.protocol.control_requests import StepIsFinite
from gradwire.core.protocol.programs import Request, ask
from gradwire.core.simulate import NumpyOps, lock_step

OPS = NumpyOps()
REPLICAS = 3
PARTS = [(2, 2, 2), (3, 0, 1)]
GROUPS = ((0, 2), (1,))
EACH = ((2,), (0,), (1,))


async def _joined(x):
    own = await rq.replica_index()
    return await rq.all_gather([x[: counts[own]].copy() for counts in PARTS], PARTS, out=[None, np.zeros(4)])


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


async def _program(kinds, number, own):
    rng = np.random.default_rng([number, own])
    return [await ASKED[kind](rng.normal(size=6)) for kind in kinds]


def _optimizer(own, pieces):
    return {name: piece + own for name, piece in pieces.items()}


def _run(program):
    """On each replica, what `program(replica)` returns; and what replica 0 asked for."""
    requests = []
    return lock_step([program(own) for own in range(REPLICAS)], OPS, requests, _optimizer), requests


@given(st.lists(st.lists(st.sampled_from(sorted(ASKED)), max_size=4), max_size=4))
def test_programs_get_side_by_side_what_each_gets_alone(programs):
    def side_by_side(own):
        return together([_program(kinds, number, own) for number, kinds in enumerate(programs)])

    results, _ = _run(side_by_side)
    for number, kinds in enumerate(programs):
        alone, _ = _run(lambda own, kinds=kinds, number=number: _program(kinds, number, own))
        for own in range(REPLICAS):
            for kind, got, wanted in zip(kinds, results[own][number], alone[own], strict=True):
                assert type(got) is type(wanted), kind
                got, wanted = (
                    x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x] for x in (got, wanted)
                )
                for a, b in zip(got, wanted, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=kind)


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
    assert isinstance(requests[0], Reduce)
    assert isinstance(requests[-1], StepIsFinite)


def test_a_request_that_a_driver_does_not_know_reaches_it_by_name():
    class Wish(Request):
        pass

    with pytest.raises(TypeError, match="the simulator cannot answer Wish"):
        _run(lambda own: together([ask(Wish()), rq.mean(np.zeros(1))]))
