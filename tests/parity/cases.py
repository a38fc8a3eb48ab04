"""The table: every method, run by every driver on the same gradients, one step at a time from the
oracle's own state.

Before each step a driver is given the state in which the oracle begins it, and afterwards its
averages and all its memory are compared. So a difference is found in the step that makes it, and
none grows: with error feedback, directions of nearly equal weight compete, and rounding decides
which is sent first. Runs that go on by themselves are compared in `test_moving` and the soak.

Imported by the tests as `tests.parity.cases` and by the worker scripts beside it as `cases`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gradwire import AllReduce, PowerSGD, Simulator, State, WireDtype, plan
from gradwire.core.state.checkpoint import head
from tests.bounds import noting
from tests.methods import EVERY, METHODS

STEPS = 10
#: 50 times what one unit in the last place of the gradients does to a step where two directions are
#: nearly equal.
TOLERANCE = 2e-4
SHAPES = {
    "w": (32, 16),
    "v": (32, 16),
    "conv": (16, 4, 3, 3),
    "tall": (50, 7),
    "stack": (3, 20, 12),
    "heads": (6, 5, 18),
    "b": (32,),
    "s": (),
}

#: In torch it is the wrapper that makes buckets: "all_reduce" with `many_groups` and
#: `data_parallel_buckets` is the bucketed dense case.
TORCH_METHODS = [name for name in METHODS if name != "all_reduce_buckets"]
#: Every kind of message and of memory.
DIFFERENT = [
    "all_reduce",
    "rank_2",
    "half_step",
    "start_step",
    "square",
    "rank_by_name",
    "views",
    "int8",
    "top_k",
    "sign",
]


def gradient(case, name, step, replica):
    """A float32 gradient: a signal that turns slowly, larger on later replicas, with noise of the
    replica's own."""
    shape = SHAPES[name]
    size = int(np.prod(shape))
    if case.sometimes_zero and name == "v" and step % 5 in (0, 1):
        return np.zeros(shape, np.float32)
    seed = tuple(name.encode())
    kind = case.signal, case.noise
    own = np.random.default_rng([replica + 1, step + 1, *seed]).standard_normal
    # The matrices that the case compresses; of algorithms that compress none, those that others do.
    algorithm = case.algorithm if isinstance(case.algorithm, PowerSGD) else PowerSGD(1)
    view = algorithm.view_of(name, shape)
    if view is None:
        return own(shape).astype(np.float32)
    if view.stack:
        matrices = [
            _matrix(*kind, view.n, view.m, step, replica, (i, *seed)) for i in range(*view.stack)
        ]
        return np.stack(matrices).astype(np.float32).reshape(shape)
    return (
        _matrix(*kind, view.n, view.m, step, replica, seed)
        .reshape(-1)[:size]
        .astype(np.float32)
        .reshape(shape)
    )


@cache
def _matrix(signal, noise, n, m, step, replica, seed):
    """The same for many methods."""
    own = np.random.default_rng([replica + 1, step + 1, *seed]).standard_normal
    a, b = _directions(signal, n, m, seed)
    k = min(signal, a.shape[1])
    weights = 10.0 * 0.6 ** np.arange(k) * (1 + 0.1 * replica)
    turn = 0.02 * step
    a, b = (x[:, :k] * np.cos(turn) + np.roll(x, k, axis=1)[:, :k] * np.sin(turn) for x in (a, b))
    matrix = (a * weights) @ b.T + noise * own((n, m)) / math.sqrt(m)
    return matrix


@cache
def _directions(signal, n, m, seed):
    """Orthonormal, of clearly different, never crossing weights."""
    fixed = np.random.default_rng(seed)
    return [np.linalg.qr(fixed.standard_normal((k, min(n, m, 2 * signal))))[0] for k in (n, m)]


@cache
def gradients(case, step, replica):
    """One replica's gradients in one step, by parameter name."""
    return {name: gradient(EVERY[case], name, step, replica) for name in SHAPES}


@dataclass
class Trace:
    """What happened in each step.

    Attributes:
        before, after: [step][replica], the states.
        updates: [step], the averaged gradients.
        nbytes, collectives: [step], in the drivers' dtype.
    """

    before: list[list[State[Any]]]
    after: list[list[State[Any]]]
    updates: list[dict[str, Any]]
    nbytes: list[int]
    collectives: list[int]


@cache
def oracle(case, replicas, names=tuple(SHAPES)):
    """The simulator on the same float32 gradients: in float64, or in float32 for a method that is
    not continuous."""
    method, shapes = METHODS[case], {name: SHAPES[name] for name in names}
    sim = Simulator(
        method.algorithm, shapes, replicas, dtype="float64" if method.continuous else "float32"
    )
    planned = plan(shapes, method.algorithm, world_size=replicas).steps
    dense = sum(math.prod(s) * 4 for s in shapes.values())
    trace = Trace([], [], [], [], [])
    for step in range(STEPS):
        trace.before.append([s.map(np.array) for s in sim.states])
        given = [gradients(case, step, r) for r in range(replicas)]
        trace.updates.append(sim.step([{name: g[name] for name in names} for g in given]))
        trace.after.append([s.map(np.array) for s in sim.states])
        late = step - method.algorithm.start_step
        trace.nbytes.append(planned[late % len(planned)].nbytes if late >= 0 else dense)
        trace.collectives.append(sim.traffic.collectives)
    return trace


def saved(case, replicas, step, replica, names=tuple(SHAPES)):
    """The state in which the oracle begins a step, as one replica saves it."""
    state, algorithm = (
        oracle(case, replicas, names).before[step][replica],
        repr(METHODS[case].algorithm),
    )
    return {**head("compressor", algorithm, step), "shared": state.shared, "tensors": state.tensors}


def assert_same(case, step, update, memory, names=tuple(SHAPES), tolerance=None):
    """Compare a step of a driver with the oracle's: the averages, and the memory of each tensor on
    each replica."""
    tolerance = tolerance or TOLERANCE
    replicas, kind = len(memory), {"continuous": EVERY[case].continuous}
    expected = oracle(case, replicas, names)
    for name in names:
        # Relative to the parameter's gradients: where an average or an error ought to be zero, it
        # is their rounding noise.
        scale = max(
            np.linalg.norm(gradients(case, s, r)[name])
            for s in range(STEPS)
            for r in range(replicas)
        )
        assert_close(
            f"step {step}, average of {name}",
            update[name],
            expected.updates[step][name],
            scale,
            tolerance,
            **kind,
        )
        for replica in range(replicas):
            mine = memory[replica].get(name, {})
            theirs = expected.after[step][replica].tensors.get(name, {})
            assert mine.keys() == theirs.keys()
            for key, x in theirs.items():
                assert_close(
                    f"step {step}, {key} of {name} on replica {replica}",
                    mine[key],
                    x,
                    scale,
                    tolerance,
                    **kind,
                )


def assert_close(what, mine, expected, scale, tolerance=TOLERANCE, *, continuous=True):
    """Relative to its norm, or to `scale` if that is larger. Where a method is not continuous,
    rounding makes a code another one, or nothing."""
    mine = np.asarray(mine, np.float64)
    assert mine.shape == expected.shape, f"{what}: shape {mine.shape}, not {expected.shape}"
    difference, unit = (
        float(np.linalg.norm(mine - expected)),
        float(max(np.linalg.norm(expected), scale)),
    )
    apart = difference / (unit or 1.0)
    apart = noting(apart) if continuous else apart
    assert apart <= tolerance, f"{what}: {difference:.3e} apart, {tolerance * unit:.3e} allowed"


def assert_compressed(case, replicas, names=tuple(SHAPES)):
    """The method did what it is there for: fewer bytes than dense in its last step, and something
    left out."""
    trace, method = oracle(case, replicas, names), METHODS[case]
    shapes = {name: SHAPES[name] for name in names}
    dense = sum(math.prod(s) * 4 for s in shapes.values())
    if isinstance(method.algorithm, AllReduce):
        assert trace.nbytes[-1] == dense
        return
    assert trace.nbytes[-1] < 0.7 * dense
    planned = plan(shapes, method.algorithm, world_size=replicas)
    compressed = [t.name for t in planned.tensors if t.compressed]
    if isinstance(method.algorithm, WireDtype):  # which remembers nothing
        compressed = compressed or [t.name for t in planned.tensors if t.wire_bytes]
    # What codes would not shorten arrives as it is: a single element, and of `Quantize` a vector
    # that is less than a block for each replica.
    compressed = [name for name in compressed if math.prod(SHAPES[name]) > 32]
    assert compressed
    for name in compressed if method.noise else ():
        mean = np.mean([gradients(case, STEPS - 1, r)[name] for r in range(replicas)], axis=0)
        assert np.linalg.norm(trace.updates[-1][name] - mean) > 1e-3 * np.linalg.norm(mean)
