"""Every method at every front door, through the same seven steps: each cell of the first table of
docs/works-together.md is a check of what came of them.

Steps 0 and 1 are dense, where a method can begin so. Steps 2 and 3 compress. In step 4 the second
replica's gradient holds an inf. After it a checkpoint is taken, and steps 5 and 6 follow: in the
run itself, in a fresh one that has loaded the checkpoint, and (step 5) on another number of
replicas. With two levels four replicas are two nodes, and two of them go on as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gradwire import LocalSGD, LocalSimulator, Simulator, TwoLevel, WireDtype
from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.compressor import Compressor
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.local_sgd.algorithm import OUTER
from gradwire.core.state.checkpoint import fit, of_replica
from tests.bounds import noting
from tests.methods import EVERY, TWO_LEVELS
from tests.parity import cases

#: The first compressed step, the one with an inf, and how many there are.
DENSE, BAD, STEPS = 2, 4, 7
REPLICAS = 2
#: Local SGD averages differences from its outer parameters: an average with an inf is none, and
#: everyone returns to the outer parameters.
LOCAL = ("local_sgd", "jax_local_sgd")

NDArray = np.ndarray[Any, Any]
Arrays = dict[str, NDArray]


@dataclass
class Moved:
    """A step on another number of replicas, of one of them: the `state` of all replicas before,
    with a row for each, the `weights` and `memory` that this one began with, and what it
    `received`."""

    state: dict[str, Any]
    weights: Arrays
    received: Arrays
    memory: dict[str, Any]


@dataclass
class Played:
    """What one replica has seen.

    Attributes:
        received: of each step, the average: the gradient that the optimizer was given, or by how
            much parameters were moved.
        weights: after each step.
        memory: before each step, and after the last.
        again: of the run that was resumed, from step `BAD` + 1 on.
        moved: on another number of replicas.
        refused: what was said instead of all that.
    """

    received: list[Arrays] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    again: Played | None = None
    moved: Moved | None = None
    refused: str = ""

    def play(self, run: Any, steps: range, given: Any) -> None:
        """These steps of a run: an object with `step(given)`, `weights()` and `memory()`."""
        self.memory = [run.memory()]
        for step in steps:
            self.received.append(run.step(given(step)))
            self.weights.append(run.weights())
            self.memory.append(run.memory())


def delayed(algorithm: Algorithm) -> Algorithm:
    """With a dense start, where it can have one."""
    if isinstance(algorithm, Compressor):
        return replace(algorithm, start_step=DENSE)
    if isinstance(algorithm, WireDtype | TwoLevel):
        return replace(algorithm, algorithm=delayed(algorithm.algorithm))
    return algorithm


def replicas_of(case: str) -> tuple[int, int]:
    """How many train, and how many go on with a checkpoint of theirs."""
    return (4, 2) if case in TWO_LEVELS else (REPLICAS, 3)


def rows_of(case: str, replicas: int) -> int:
    """How many rows of errors the state of so many replicas has: one for each, or for each node of
    two."""
    return replicas // 2 if case in TWO_LEVELS else replicas


def algorithm_of(case: str) -> Algorithm:
    return delayed(EVERY[case].algorithm)


def begins_dense(case: str) -> bool:
    return algorithm_of(case).start_step == DENSE


def local_of(case: str) -> LocalSGD:
    """Averages after every step, so that differences are gradients."""
    return LocalSGD(1, compressor=algorithm_of(case))


def shapes_of(case: str) -> dict[str, tuple[int, ...]]:
    """A matrix, a vector, and what the method's options name."""
    options = repr(EVERY[case].algorithm)
    return {
        name: shape
        for name, shape in cases.SHAPES.items()
        if name in ("w", "b") or f"'{name}'" in options
    }


def given(case: str, step: int, replica: int) -> Arrays:
    """A replica's gradients, by parameter."""
    gradients = {
        name: cases.gradients(case, step, replica)[name].copy() for name in shapes_of(case)
    }
    if (step, replica) == (BAD, 1):
        gradients["w"][3, 5] = np.inf
    return gradients


def check_resumed(case: str, door: str, played: list[Played]) -> None:
    for own in played:
        assert own.again is not None
        rest = Played(own.received[BAD + 1 :], own.weights[BAD + 1 :], own.memory[BAD + 1 :])
        assert bits(vars(own.again)) == bits(vars(rest))


def check_moved(case: str, door: str, played: list[Played]) -> None:
    """The mean of the errors is what it was, all replicas receive the same, and it is what the
    simulator makes of the state."""
    moved = [own.moved for own in played if own.moved is not None]
    state, replicas = moved[0].state, len(moved)
    # nodes are counted where there is a memory of them
    if case not in TWO_LEVELS or state["local"]:
        assert state["replicas"] != rows_of(case, replicas)
    for name, memory in state["local"].items():
        for key, rows in memory.items():
            mean = np.mean([own.memory[name][key] for own in moved], axis=0, dtype=np.float64)
            np.testing.assert_allclose(
                mean, rows.mean(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-5
            )
    assert len({str(bits(own.received)) for own in moved}) == 1
    expected = _continued(case, door, moved)
    for name, x in expected.items():
        scale = max(
            np.linalg.norm(cases.gradients(case, BAD + 1, r)[name]) for r in range(replicas)
        )
        cases.assert_close(f"{name} on {replicas} replicas", moved[0].received[name], x, scale)


def check_dense(case: str, door: str, played: list[Played]) -> None:
    """Uncompressed averages, and a memory that stays as it was; and no longer."""
    coded = isinstance(algorithm_of(case), WireDtype)
    for step in range(DENSE + 1):
        for name in shapes_of(case):
            mean = _mean(case, step)[name]
            for own in played:
                distance = float(
                    np.linalg.norm(own.received[step][name] - mean) / np.linalg.norm(mean)
                )
                if step < DENSE:
                    assert noting(distance) <= (0.02 if coded else 1e-5), (step, name)
                elif name == "w" and EVERY[case].noise:
                    assert distance > (0.02 if coded else 1e-3)
        if step < DENSE:
            assert all(
                bits(_compressors(own.memory[step + 1])) == bits(_compressors(own.memory[0]))
                for own in played
            )


def check_nonfinite(case: str, door: str, played: list[Played]) -> None:
    """All replicas receive something that is not finite, or return to the outer parameters; no
    memory changes by a bit, and the next step is as usual."""
    for own in played:
        w = own.received[BAD]["w"]
        if door in LOCAL:
            assert all(not x.any() for x in own.received[BAD].values())
            assert bits(own.weights[BAD]) == bits(own.weights[BAD - 1])
        else:
            assert not np.isfinite(w).all()
            assert np.array_equal(np.isfinite(w), np.isfinite(played[0].received[BAD]["w"]))
        assert bits(own.memory[BAD + 1]) == bits(own.memory[BAD])
        assert all(np.isfinite(x).all() for x in own.received[BAD + 1].values())
        assert any(x.any() for x in own.received[BAD + 1].values())


#: What is asked of every method at every door → the check.
FEATURES = {
    "checkpoint": check_resumed,
    "other world size": check_moved,
    "dense start": check_dense,
    "non-finite step": check_nonfinite,
}


def bits(x: Any) -> Any:
    """To be compared: arrays by every bit."""
    if isinstance(x, Mapping):
        return {key: bits(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [bits(each) for each in x]
    return (x.dtype.str, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x


def _mean(case: str, step: int) -> Arrays:
    each = [given(case, step, replica) for replica in range(replicas_of(case)[0])]
    return {name: np.mean([g[name] for g in each], axis=0, dtype=np.float64) for name in each[0]}


def _compressors(memory: Mapping[str, Any]) -> dict[str, Any]:
    """Without local SGD's own."""
    return {
        name: {key: x for key, x in own.items() if key != OUTER} for name, own in memory.items()
    }


def _continued(case: str, door: str, moved: list[Moved]) -> Arrays:
    """What the simulator receives in the next step, in float64 where nothing hangs on the last
    bit."""
    state, weights, replicas = moved[0].state, moved[0].weights, len(moved)
    dtype = "float64" if EVERY[case].continuous else "float32"
    local = door in LOCAL
    if local:
        options: Any = local_of(case)
        sim: Any = LocalSimulator(options, weights, replicas, dtype=dtype)
    else:
        options = algorithm_of(case)
        sim = Simulator(options, shapes_of(case), replicas, dtype=dtype)
    kind = "local_sgd" if local else "compressor"
    for replica in range(replicas):
        loaded, difference = fit(
            of_replica(NumpyOps(), state, rows_of(case, replica), rows_of(case, replicas)),
            repr(without_levels(options)),
            sim.states[replica],
            kind,
        )
        assert not difference, difference
        sim.states[replica] = loaded.map(
            lambda x: np.array(x, dtype if x.dtype.kind == "f" else x.dtype)
        )
    sim.steps = state["step"]
    gradients = [given(case, BAD + 1, replica) for replica in range(replicas)]
    if not local:
        averages: Arrays = sim.step(gradients)
        return averages
    before = {name: x.copy() for name, x in sim.parameters[0].items()}
    sim.step(gradients, lambda replica, p, g: {name: p[name] - g[name] for name in p})
    return {name: before[name] - x for name, x in sim.parameters[0].items()}
