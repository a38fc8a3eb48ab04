"""Requests, `together` and `branch`, driven by the simulator with one replica: an average is then the array itself."""

import gc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire.core.protocol as rq
from gradwire.core.kernels.low_rank import LowRank, Residual
from gradwire.core.protocol import together
from gradwire.core.protocol.collective_requests import Reduce
from gradwire.core.protocol.control_requests import Branch, StepIsFinite
from gradwire.core.protocol.local_requests import Orthonormalize
from gradwire.core.protocol.programs import ask
from gradwire.core.simulate import NumpyOps, lock_step


def run(program):
    """The program's result, and what it asked for."""
    requests = []
    (result,) = lock_step([program], requests=requests)
    return result, requests


async def means(values):
    """Average numbers one after the other; return them."""
    return [float((await rq.mean(np.array([v], float)))[0]) for v in values]


def payload(request):
    return [float(a[0]) for a in request.arrays]


@given(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=6))
def test_nth_requests_of_all_programs_are_one_message(programs):
    result, requests = run(together(means(p) for p in programs))
    assert result == programs
    rounds = max((len(p) for p in programs), default=0)
    assert [payload(r) for r in requests] == [[p[n] for p in programs if len(p) > n] for n in range(rounds)]


nested = st.recursive(st.lists(st.integers(0, 99), max_size=3), lambda inner: st.tuples(inner, inner), max_leaves=6)


@given(nested)
def test_nested_togethers_send_what_one_would(tree):
    def leaves(t):
        return [leaf for part in t for leaf in leaves(part)] if isinstance(t, tuple) else [t]

    async def of(t):
        return tuple(await together([of(part) for part in t])) if isinstance(t, tuple) else await means(t)

    result, requests = run(of(tree))
    _, flat = run(together(means(p) for p in leaves(tree)))
    assert result == tree
    assert [payload(r) for r in requests] == [payload(r) for r in flat]


def test_a_request_about_nothing_takes_nobodys_answer():
    async def ask_for(*values):
        return await ask(Reduce(tuple(np.full(1, v) for v in values), (False,) * len(values)))

    results, _ = run(together([ask_for(1.0, 2.0), ask_for()]))
    assert [[float(x[0]) for x in answers] for answers in results] == [[1.0, 2.0], []]


def test_donation_is_per_array_and_survives_fusion():
    async def kept():
        return await rq.mean(np.zeros(1))

    async def given_away():
        x = np.zeros(2)
        return await rq.mean(x, out=x)

    async def elsewhere():  # `out` another array than `x`: x itself is not donated
        return await rq.mean(np.zeros(3), out=np.zeros(3))

    _, (request,) = run(together([kept(), given_away(), elsewhere()]))
    assert request.donated == (False, True, False)


@pytest.mark.parametrize(("watched", "expected"), [((False, False), False), ((False, True), True)])
def test_a_fused_mean_is_watched_if_one_of_them_is(watched, expected):
    _, (request,) = run(together(rq.mean(np.zeros(1), watched=w) for w in watched))
    assert request.watched is expected


def test_residuals_survive_fusion_and_the_simulator_computes_each_once():
    ops, one = NumpyOps(), np.ones((1, 2))
    residuals = [Residual(ops, np.full((2, 2), float(i)), LowRank(one, one)) for i in range(3)]
    _, (request,) = run(together(rq.mean(np.zeros(1), overlap=r) for r in (residuals[0], None, *residuals[1:])))
    assert request.overlap == tuple(residuals)
    for i, residual in enumerate(residuals):
        assert residual.computed
        np.testing.assert_array_equal(residual.x, np.full((2, 2), i - 1.0))


def test_local_requests_come_first_so_that_messages_meet():
    ops = NumpyOps()

    async def prepares():
        return await rq.mean(await rq.orthonormalize(ops, np.ones((1, 4))))

    async def sends_at_once():
        return await rq.mean(np.zeros(2))

    for programs in ([prepares(), sends_at_once()], [sends_at_once(), prepares()]):
        _, requests = run(together(programs))
        assert [type(r) for r in requests] == [Orthonormalize, Reduce]
        assert len(requests[1]) == 2


def test_equal_shapes_are_orthonormalized_by_one_kernel():
    calls = []

    class Counting(NumpyOps):
        def loop(self, n, body, start, **options):
            calls.append(start.shape)
            return super().loop(n, body, start, **options)

    ops = Counting()
    shapes = [(2, 5), (3, 5), (2, 5), (2, 5)]
    arrays = [np.random.default_rng(i).normal(size=s) for i, s in enumerate(shapes)]
    _, requests = run(together(rq.orthonormalize(ops, a) for a in arrays))
    assert len(requests) == 1
    assert sorted(calls) == [(1, 3, 5), (3, 2, 5)]


def test_different_ways_to_orthonormalize_are_not_mixed():
    ops, x = NumpyOps(), np.array([[3.0, 4.0], [0.0, 0.0]])
    fresh = np.array([[1.0, 0.0], [0.0, 1.0]])
    options = ({}, {"fresh": fresh}, {"epsilon": 0.25})
    programs = [rq.orthonormalize(ops, x, **each) for each in options]
    (plain, refreshed, softened), requests = run(together(programs))
    assert len(requests) == 3
    np.testing.assert_allclose(plain, [[0.6, 0.8], [0, 0]], atol=1e-15)
    np.testing.assert_allclose(refreshed, [[0.6, 0.8], [-0.8, 0.6]], atol=1e-15)
    # The row is scaled to [0.75, 1], of norm 1.25, before epsilon is added to that norm.
    np.testing.assert_allclose(softened, [[0.5, 2 / 3], [0, 0]], atol=1e-15)


def test_finite_is_asked_once_when_nobody_has_more_to_send():
    async def program(values):
        for v in values:
            await rq.mean(np.array([v]))
        return bool(await rq.step_is_finite())

    # The first program is ready to ask long before the second one averages a NaN, and must hear of it.
    result, requests = run(together([program([1.0]), program([1.0, np.nan]), program([1.0])]))
    assert result == [False, False, False]
    assert [type(r) for r in requests] == [Reduce, Reduce, StepIsFinite]
    assert run(together([program([1.0]), program([2.0])]))[0] == [True, True]


def test_unwatched_averages_do_not_count_as_not_finite():
    async def program():
        await rq.mean(np.array([np.inf]), watched=False)
        return bool(await rq.step_is_finite())

    assert run(program())[0] is True


@pytest.mark.parametrize("truth", [True, False])
def test_branch_runs_one_side_and_returns_its_result(truth):
    async def then(x, y):
        return "then", await rq.mean(x + y)

    async def otherwise(x, y):
        return "otherwise", await rq.mean(x - y)

    operands = np.array([5.0]), np.array([3.0])
    (side, value), requests = run(rq.branch(np.array(truth), then, otherwise, *operands))
    assert (side, float(value[0])) == (("then", 8.0) if truth else ("otherwise", 2.0))
    assert [type(r) for r in requests] == [Branch, Reduce]

    # A bool is known to the program: no need for the driver to look.
    (side, _), requests = run(rq.branch(truth, then, otherwise, *operands))
    assert side == ("then" if truth else "otherwise")
    assert [type(r) for r in requests] == [Reduce]


def test_branch_within_together_waits_for_the_messages_before_it():
    async def side(x):
        return await rq.mean(x)

    async def branches(truth):
        return await rq.branch(np.array(truth), side, side, np.ones(1))

    result, requests = run(together([branches(True), means([1, 2]), branches(False)]))
    assert [type(r) for r in requests] == [Reduce, Reduce, Branch, Reduce, Branch, Reduce]
    assert result[1] == [1, 2]


def test_a_forgotten_await_warns():
    async def forgets():
        rq.mean(np.zeros(1))
        gc.collect(1)
        return "done"

    with pytest.warns(RuntimeWarning, match=r"'mean' was never awaited"):
        assert run(forgets()) == ("done", [])


class Failure(Exception):
    pass


async def fails(after):
    await means(range(after))
    raise Failure


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_exception_closes_the_other_programs(after, recwarn):
    log = []

    async def tidy(name):
        log.append(f"{name} begins")
        try:
            await means(range(9))
        finally:
            log.append(f"{name} ends")

    with pytest.raises(Failure):
        run(together([tidy("a"), fails(after), together(tidy(name) for name in "bc"), tidy("d")]))
    gc.collect(1)  # what is young: all objects of all tests before it take a second
    begun = "a" if after == 0 else "abcd"  # at once: the programs after it never begin, and nothing complains
    assert sorted(log) == sorted(f"{name} {what}" for name in begun for what in ("begins", "ends"))
    assert not recwarn.list


def test_a_driver_that_gives_up_closes_all_programs():
    closed = []

    async def tidy(name):
        try:
            await rq.mean(np.zeros(1))
        finally:
            closed.append(name)

    program = together([tidy("a"), together([tidy("b"), tidy("c")])])
    program.send(None)
    program.close()
    assert sorted(closed) == ["a", "b", "c"]


def test_a_driver_that_answers_too_few_arrays_is_told():
    program = together([rq.mean(np.zeros(1)), rq.mean(np.zeros(1))])
    program.send(None)
    with pytest.raises(RuntimeError, match="answered Reduce with 1 arrays for 2"):
        program.send((np.zeros(1),))
