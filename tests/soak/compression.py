"""Random compressors on random replicas: they agree, they conserve what they leave out, a bad step leaves no trace, and replicas may come and go."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from gradwire import Compressor, Simulator, State
from gradwire.core import checkpoint
from gradwire.core.simulate import PoisonOps
from tests.soak import draw

__all__ = ["run"]

NDArray = np.ndarray[Any, Any]
STEPS = 20


def run(seed: int) -> int:
    """One history. Returns the number of steps; raises AssertionError or ReplicaMismatch if something does not hold."""
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    algorithm = draw.algorithm(rng)
    gradients = draw.Gradients(shapes, seed)
    simulator = Simulator(algorithm, shapes, rng.randint(1, 4), ops=PoisonOps() if rng.random() < 0.2 else None)
    history = History(simulator, shapes)
    for _ in range(STEPS):
        if rng.random() < 0.1:
            simulator = resized(simulator, rng.randint(1, 4), shapes)
            history.moved_to(simulator)
        # Now and then a layer is frozen.
        names = [name for name in shapes if rng.random() < 0.9]
        local = gradients.of(len(simulator.states), names)
        bad = rng.random() < 0.15 and gradients.spoil(rng, local)
        history.step(local, bad)
    return STEPS


class History:
    """Everything that went in and came out, and what must be true of it (float64).

        mean of the gradients so far  =  averages so far + mean of the errors

    Steps that were not finite are in neither.
    """

    def __init__(self, simulator: Simulator, shapes: dict[str, tuple[int, ...]]) -> None:
        self.simulator = simulator
        self.put_in = {name: np.zeros(shape) for name, shape in shapes.items()}
        self.came_out = {name: np.zeros(shape) for name, shape in shapes.items()}
        self.largest = dict.fromkeys(shapes, 0.0)
        # What its memory does not hold, a plain average hands on as it is.
        self.compresses = isinstance(simulator.algorithm, Compressor)

    def moved_to(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self._check()

    def step(self, local: list[dict[str, NDArray]], bad: bool) -> None:
        before = [copied(state) for state in self.simulator.states]
        step = self.simulator.steps
        given = self.simulator.step(local)  # raises if the replicas disagree about anything
        if bad:
            self._check_skipped(before, given, local, step)
            return
        for name, average in given.items():
            assert np.isfinite(average).all(), f"{name} is not finite, and all gradients were"
            self.put_in[name] += sum(g[name] / len(local) for g in local)
            self.came_out[name] += average
            self.largest[name] += max((float(np.abs(g[name]).max(initial=0.0)) for g in local), default=0.0)
        self._check()

    def _check(self) -> None:
        for name, put_in in self.put_in.items():
            errors = [s.tensors[name]["error"] for s in self.simulator.states if "error" in s.tensors.get(name, {})]
            held = sum(errors) / len(errors) if errors else np.zeros(())
            wrong = np.abs(put_in - self.came_out[name] - held).max(initial=0.0)
            assert wrong <= 1e-11 * self.largest[name], f"{name} has lost or gained {wrong} of {self.largest[name]}"

    def _check_skipped(
        self, before: list[State[NDArray]], given: dict[str, NDArray], local: list[dict[str, NDArray]], step: int
    ) -> None:
        compressed = self.compresses and step >= self.simulator.algorithm.start_step
        for name, average in given.items():
            hit = any(not np.isfinite(g[name]).all() for g in local)
            remembered = compressed and name in self.simulator.states[0].tensors and average.size
            if hit or remembered:
                assert not np.isfinite(average).all(), f"{name} came out finite from a step that was not"
            if remembered:
                assert np.isnan(average).all(), f"{name} came out in part from a step that was not finite"
        for old, new in zip(before, self.simulator.states, strict=True):
            assert same_bits(old, new), "a step that was not finite has changed a memory"


def resized(simulator: Simulator, replicas: int, shapes: dict[str, tuple[int, ...]]) -> Simulator:
    """The same training with another number of replicas, through a checkpoint: everyone starts from the mean error, all else was equal anyway."""
    algorithm = simulator.algorithm
    other = Simulator(algorithm, shapes, replicas, ops=simulator.ops)
    head = {"format": checkpoint.FORMAT, "algorithm": repr(algorithm), "step": simulator.steps}
    states = [head | {"shared": s.shared, "tensors": s.tensors} for s in simulator.states]
    neutral = checkpoint.gather(simulator.ops, states, algorithm.per_replica)
    for replica in range(replicas):
        own = checkpoint.of_replica(simulator.ops, neutral, replica, replicas)
        other.states[replica] = copied(State(own["shared"], own["tensors"]))
    other.steps = simulator.steps
    return other


def copied(state: State[NDArray]) -> State[NDArray]:
    return State(
        {key: np.array(x) for key, x in state.shared.items()},
        {name: {key: np.array(x) for key, x in memory.items()} for name, memory in state.tensors.items()},
    )


def same_bits(a: State[NDArray], b: State[NDArray]) -> bool:
    def bits(state: State[NDArray]) -> list[Any]:
        shared = [(key, x.tobytes()) for key, x in state.shared.items()]
        return shared + [(n, k, x.tobytes()) for n, m in state.tensors.items() for k, x in m.items()]

    return sorted(bits(a)) == sorted(bits(b))
