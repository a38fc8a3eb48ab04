"""Random compressors on random replicas: they agree, they conserve what they leave out, a bad step leaves no trace, and replicas may come and go."""

import random
from typing import Any

import numpy as np

from gradwire import Compressor, Simulator, State
from gradwire.core.simulate import PoisonOps
from gradwire.core.state import checkpoint
from tests.soak import draw
from tests.soak.checks import Flat, same_bits

NDArray = np.ndarray[Any, Any]
STEPS = 20


def run(seed):
    """One history. Returns the number of steps; raises AssertionError or ReplicaMismatch if something does not hold."""
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    algorithm = draw.algorithm(rng)
    gradients = draw.Gradients(shapes, seed)
    simulator = Simulator(algorithm, shapes, draw.replicas(rng), ops=PoisonOps() if rng.random() < 0.2 else None)
    history = History(simulator, shapes)
    for _ in range(STEPS):
        if rng.random() < 0.1:
            simulator = resized(simulator, draw.replicas(rng), shapes)
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

    def __init__(self, simulator, shapes):
        self.simulator = simulator
        self.flat = Flat(shapes)
        self.put_in, self.came_out, self.largest = self.flat.zeros(), self.flat.zeros(), self.flat.zeros()
        # What its memory does not hold, a plain average hands on as it is.
        self.compresses = isinstance(simulator.algorithm, Compressor)

    def moved_to(self, simulator):
        self.simulator = simulator
        self._check()

    def step(self, local, bad):
        before = [state.map(np.array) for state in self.simulator.states] if bad else []
        step = self.simulator.steps
        given = self.simulator.step(local)  # raises if the replicas disagree about anything
        if bad:
            self._check_skipped(before, given, local, step)
            return
        (averages,) = self.flat.of([given])
        assert np.logical_and.reduce(np.isfinite(averages)), f"not finite, and all gradients were: {given}"
        gradients = self.flat.of(local)
        self.put_in += np.add.reduce(gradients) / len(local)
        self.came_out += averages
        self.largest += self.flat.largest(gradients)
        self._check()

    def _check(self):
        memories = (state.tensors.items() for state in self.simulator.states)
        errors = self.flat.of({n: m["error"] for n, m in memory if "error" in m} for memory in memories)
        wrong = self.put_in - self.came_out - np.add.reduce(errors) / len(errors)
        self.flat.require(wrong, 1e-11 * self.largest, "{name} has lost or gained {wrong}, and {allowed} is rounding")

    def _check_skipped(self, before, given, local, step):
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


def resized(simulator, replicas, shapes):
    """The same training with another number of replicas, through a checkpoint: everyone starts from the mean error, all else was equal anyway."""
    algorithm = simulator.algorithm
    other = Simulator(algorithm, shapes, replicas, ops=simulator.ops)
    head = checkpoint.head("compressor", repr(algorithm), simulator.steps)
    states = [head | {"shared": s.shared, "tensors": s.tensors} for s in simulator.states]
    portable = checkpoint.gather(simulator.ops, states, algorithm.per_replica)
    for replica in range(replicas):
        own = checkpoint.of_replica(simulator.ops, portable, replica, replicas)
        other.states[replica] = State(own["shared"], own["tensors"]).map(np.array)
    other.steps = simulator.steps
    return other
