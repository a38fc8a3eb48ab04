"""The lock-step driver: what it says when replicas disagree, and that it leaves its input alone."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire.core.protocol as rq
from gradwire.core.algorithm import State
from gradwire.core.algorithms.all_reduce import AllReduce
from gradwire.core.algorithms.power_sgd import PowerSGD
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.protocol.control_requests import OptimizerStep
from gradwire.core.protocol.programs import ask
from gradwire.core.simulate import NumpyOps, ReplicaMismatch, Simulator, lock_step

OPS = NumpyOps()


def branched(x, truth=True):
    return rq.branch(np.array(truth), rq.mean, rq.mean, x)


async def averages(array, times=1):
    for _ in range(times):
        await rq.mean(array)


def local_sgd_after(step):
    local, w = LocalSGD(4), {"w": np.ones(2)}
    return local.average(OPS, w, local.init(OPS, w, 2), step, 2)


def parts(*counts):
    return rq.reduce_scatter([np.ones(5)], [counts])


X, SIX, BUT = np.zeros(3), np.zeros((2, 3)), "but replica {odd} asks for "
ENDED = "replicas [{odd}] have ended while replicas {others} ask for"
MEAN = "replica 0 asks for the mean of float64[2, 3], "
#: What most replicas ask for, what one does, and the words.
DISAGREEING = {
    "shape": (lambda: rq.mean(SIX), lambda: rq.mean(SIX.T), f"{MEAN}{BUT}the mean of float64[3, 2]"),
    "dtype": (lambda: rq.mean(SIX), lambda: rq.mean(SIX.astype("float32")), f"{MEAN}{BUT}the mean of float32[2, 3]"),
    "request": (
        lambda: rq.mean(SIX),
        lambda: rq.orthonormalize(OPS, SIX),
        f"{MEAN}{BUT}Orthonormalize of float64[2, 3]",
    ),
    "finite": (lambda: rq.mean(SIX), rq.step_is_finite, f"{MEAN}{BUT}StepIsFinite"),
    "operation": (lambda: rq.reduce_sum(X), lambda: rq.reduce_max(X), f"the sum of float64[3], {BUT}the max"),
    "gathers": (lambda: rq.gather(X), lambda: rq.gather(X[:1]), f"Gather of float64[3], {BUT}Gather of float64[1]"),
    "exchanges": (lambda: rq.gather(X), lambda: rq.all_to_all(X), f"Gather of float64[3], {BUT}AllToAll"),
    "parts": (lambda: parts(2, 3), lambda: parts(4, 1), BUT + "ReduceScatter of float64[5] in parts of [(4, 1)]"),
    "an early end": (lambda: averages(X, 2), lambda: averages(X, 1), ENDED + " the mean of float64[3]"),
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
        (lambda: [branched(X, n < 2) for n in range(3)], r"branch differently: \{0: True, 1: True, 2: False\}"),
        (lambda: [parts(2, 2)], r"5 elements in parts of \[2, 2\] for 1 replicas"),
        (lambda: [rq.mean(X, groups=g) for g in (PAIRS, PAIRS, OTHERS, PAIRS)], r"\(0, 1\), .*replica 2 .*\(\(0, 2\)"),
        (lambda: [ask(OptimizerStep({}, np.array(ok))) for ok in (True, False)], "disagree whether the step"),
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
        return State({"count": np.zeros(())}, {n: {"own": np.zeros(2), "common": np.zeros(2)} for n in specs})

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
    with pytest.raises(ReplicaMismatch, match=rf"{message} differs: replicas \[2, 3\] disagree with replica 0"):
        simulator.step([{"w": [1, 2]}, {"w": [1, 2]}, {"w": [3, 2]}, {"w": [3, 3]}])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_equal_nans_are_no_disagreement_and_parameters_are_matched_by_name(dtype):
    simulator = Simulator(AllReduce(), {"a": (2,), "b": (2,)}, replicas=2, dtype=dtype)
    averages = simulator.step([{"a": [1, np.nan], "b": [5, 5]}, {"b": [7, 7], "a": [3, 3]}])
    np.testing.assert_array_equal([averages[name].astype(float) for name in "ab"], [[2, np.nan], [6, 6]])


def test_gradients_for_other_parameters_are_a_disagreement():
    simulator = Simulator(AllReduce(), {"a": (2,), "b": (2,)}, replicas=3)
    both = {"a": [1, 1], "b": [1, 1]}
    with pytest.raises(ReplicaMismatch, match=r"replica 0 has gradients for \['a', 'b'\], but replica 2 for \['b'\]"):
        simulator.step([both, both, {"b": [1, 1]}])


def test_a_failed_step_leaves_the_state_as_it_was():
    simulator = Simulator(PowerSGD(rank=1), {"w": (8, 6)}, replicas=2)
    simulator.step([{"w": np.ones((8, 6))}] * 2)
    before = [state.map(np.array) for state in simulator.states]

    class Breaks(NumpyOps):
        def matmul(self, x, y, *, out=None):
            if out is not None:  # the average, the last kernel of a step: the memory has been committed by now
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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
