"""The table: one row per case, run by every driver on the same gradients for the same number of steps.

Imported by the tests as `tests.parity.cases` and by the worker scripts beside it as `cases`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gradwire import AllReduce, PowerSGD, Simulator, plan
from gradwire.core.algorithm import Algorithm

STEPS = 50
TOLERANCE = 1e-5
SHAPES: dict[str, tuple[int, ...]] = {
    "w": (32, 16),
    "v": (32, 16),
    "conv": (16, 4, 3, 3),
    "tall": (50, 7),
    "stack": (3, 20, 12),
    "heads": (6, 5, 18),
    "b": (32,),
    "s": (),
}


@dataclass(frozen=True)
class Case:
    """`signal` is the rank of what the replicas' gradients share, `noise` the size of what they do not.

    The signal has the rank that the algorithm keeps. Where that is not so, directions of nearly equal weight compete in the error
    memory, and which one is sent next is decided by rounding: runs that differ in one last bit, in float64 too, then part by a factor
    of about 1.3 per step. That is PowerSGD with error feedback, not a difference between backends.
    """

    algorithm: Algorithm
    signal: int
    noise: float = 0.1
    sometimes_zero: bool = False


CASES: dict[str, Case] = {
    "all_reduce": Case(AllReduce(), 2),
    "all_reduce_buckets": Case(AllReduce(bucket_bytes=2048, first_bucket_bytes=1024), 2),
    "rank_1": Case(PowerSGD(1), 1),
    "rank_2": Case(PowerSGD(2), 2),
    "rank_4": Case(PowerSGD(4, min_compression_rate=1.0), 4),
    "rank_deficient": Case(PowerSGD(4, min_compression_rate=1.0), 1, noise=0.0),
    "half_step": Case(PowerSGD(2, half_step=True), 2),
    "cold_start": Case(PowerSGD(2, warm_start=False), 2),
    "no_error_feedback": Case(PowerSGD(2, error_feedback=False), 2),
    # The norm of replica 0 stays below, that of replica 1 lies about it, those of the others above.
    "max_norm": Case(PowerSGD(2, max_norm=32.0), 2),
    "start_step": Case(PowerSGD(2, start_step=10), 2),
    "square": Case(PowerSGD(2, square=True), 2),
    "rank_by_name": Case(PowerSGD({"conv": 2, "tall": 0, "*": 2}), 2),
    "views": Case(PowerSGD(2, stacked={"stack": 1}, rows={"heads": 1}, transpose=("conv", "stack")), 2),
    "views_half_step": Case(PowerSGD(2, stacked={"stack": 1}, transpose=("stack",), half_step=True), 2),
    "views_cold_start": Case(PowerSGD(2, stacked={"stack": 1}, warm_start=False), 2),
    "sometimes_zero": Case(PowerSGD(2, error_feedback=False), 2, sometimes_zero=True),
}

#: In torch it is the wrapper that makes buckets: "all_reduce" with `many_groups` and `data_parallel_buckets` is the bucketed dense case.
TORCH_CASES = [case for case in CASES if case != "all_reduce_buckets"]
#: On four ranks of torch, where a launch of all of them takes long on few cores: every kind of message and of memory.
FOUR_RANKS_CASES = ["all_reduce", "rank_2", "half_step", "start_step", "square", "rank_by_name", "views"]


def torch_cases(ranks: int) -> list[str]:
    return FOUR_RANKS_CASES if ranks == 4 else TORCH_CASES


def gradient(case: Case, name: str, step: int, replica: int) -> np.ndarray[Any, Any]:
    """A float32 gradient: a signal that turns slowly, larger on later replicas, with noise of the replica's own."""
    shape = SHAPES[name]
    size = int(np.prod(shape))
    if case.sometimes_zero and name == "v" and step % 5 in (0, 1):
        return np.zeros(shape, np.float32)
    seed = list(name.encode())
    own = np.random.default_rng([replica + 1, step + 1, *seed]).standard_normal
    # The matrices that the case compresses; of algorithms that compress none, those that others do.
    algorithm = case.algorithm if isinstance(case.algorithm, PowerSGD) else PowerSGD(1)
    view = algorithm.view_of(name, shape)
    if view is None:
        return own(shape).astype(np.float32)
    if view.stack:
        matrices = [_matrix(case, view.n, view.m, step, replica, [i, *seed]) for i in range(*view.stack)]
        return np.stack(matrices).astype(np.float32).reshape(shape)
    return _matrix(case, view.n, view.m, step, replica, seed).reshape(-1)[:size].astype(np.float32).reshape(shape)


def _matrix(case: Case, n: int, m: int, step: int, replica: int, seed: list[int]) -> np.ndarray[Any, Any]:
    own = np.random.default_rng([replica + 1, step + 1, *seed]).standard_normal
    fixed = np.random.default_rng(seed)
    # Orthonormal directions of clearly different, never crossing weights.
    a, b = (np.linalg.qr(fixed.standard_normal((k, min(n, m, 2 * case.signal))))[0] for k in (n, m))
    k = min(case.signal, a.shape[1])
    weights = 10.0 * 0.6 ** np.arange(k) * (1 + 0.1 * replica)
    turn = 0.02 * step
    a, b = (x[:, :k] * np.cos(turn) + np.roll(x, k, axis=1)[:, :k] * np.sin(turn) for x in (a, b))
    matrix: np.ndarray[Any, Any] = (a * weights) @ b.T + case.noise * own((n, m)) / math.sqrt(m)
    return matrix


@cache
def gradients(case: str, step: int, replica: int) -> dict[str, np.ndarray[Any, Any]]:
    """One replica's gradients in one step, by parameter name."""
    return {name: gradient(CASES[case], name, step, replica) for name in SHAPES}


@dataclass
class Trace:
    """What a driver did: per step, the averaged gradients and each replica's error memory."""

    updates: list[dict[str, Any]]
    errors: list[list[dict[str, Any]]]  # [step][replica][name]
    nbytes: list[int]
    collectives: list[int]


@cache
def oracle(case: str, replicas: int) -> Trace:
    """The simulator, in float64, on the same float32 gradients."""
    row = CASES[case]
    sim = Simulator(row.algorithm, SHAPES, replicas)
    trace = Trace([], [], [], [])
    for step in range(STEPS):
        trace.updates.append(sim.step([gradients(case, step, r) for r in range(replicas)]))
        trace.errors.append([{n: m["error"].copy() for n, m in s.tensors.items() if "error" in m} for s in sim.states])
        trace.nbytes.append(sim.traffic.nbytes // 2)  # as float32
        trace.collectives.append(sim.traffic.collectives)
    return trace


def assert_same(case: str, replicas: int, updates: Sequence[Mapping[str, Any]], errors: Sequence[Any]) -> None:
    """Compare a driver's trace with the oracle, step by step: updates (the reconstructions), and every replica's error memory."""
    expected = oracle(case, replicas)
    scale = {n: max(np.linalg.norm(gradients(case, s, 0)[n]) for s in range(STEPS)) for n in SHAPES}
    assert len(updates) == len(errors) == STEPS
    for step in range(STEPS):
        for name in SHAPES:
            _assert_close(f"update of {name}", step, updates[step][name], expected.updates[step][name], scale[name])
        for replica in range(replicas):
            mine, theirs = errors[step][replica], expected.errors[step][replica]
            assert mine.keys() == theirs.keys()
            for name in theirs:
                what = f"error of {name} on replica {replica}"
                _assert_close(what, step, mine[name], theirs[name], scale[name])


def _assert_close(what: str, step: int, mine: Any, expected: Any, scale: float) -> None:
    mine = np.asarray(mine, np.float64)
    assert mine.shape == expected.shape, f"{what}: shape {mine.shape}, not {expected.shape}"
    difference = np.linalg.norm(mine - expected)
    # Relative to the parameter's gradients: where an update or an error ought to be zero, it is their rounding noise.
    allowed = TOLERANCE * max(np.linalg.norm(expected), scale)
    assert difference <= allowed, f"step {step}, {what}: {difference:.3e} apart, {allowed:.3e} allowed"


def assert_compressed(case: str, replicas: int) -> None:
    """The case did what it is there for: fewer bytes than dense in its last step, and something left out."""
    trace = oracle(case, replicas)
    dense = sum(int(np.prod(s)) * 4 for s in SHAPES.values())
    if CASES[case].algorithm.__class__ is AllReduce:
        assert trace.nbytes[-1] == dense
        return
    assert trace.nbytes[-1] < 0.7 * dense
    step = STEPS - 1
    compressed = [t.name for t in plan(SHAPES, CASES[case].algorithm).tensors if t.compressed]
    assert compressed
    for name in compressed if CASES[case].noise else ():
        mean = np.mean([gradients(case, step, r)[name] for r in range(replicas)], axis=0)
        assert np.linalg.norm(trace.updates[-1][name] - mean) > 1e-3 * np.linalg.norm(mean)
