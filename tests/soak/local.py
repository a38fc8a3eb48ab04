"""Random local SGD: replicas that wander off and meet, in random groups, at random steps, with and without compressing how far they came."""

import random
from typing import Any

import numpy as np

from gradwire import LocalSGD, LocalSimulator, OuterSGD
from gradwire.core.simulate import PoisonOps
from tests.soak import draw
from tests.soak.checks import Flat

NDArray = np.ndarray[Any, Any]
STEPS = 20


def run(seed):
    """One history. Returns the number of steps; raises AssertionError or ReplicaMismatch if something does not hold.

    Averaging moves nothing on average. With a compressor, what it has not sent yet is in the errors, which are of differences from the outer parameters:

        mean of the parameters - mean of the errors    is what the optimizers alone have made of it

    Nor does an average that is taken later, if what was learned meanwhile is kept. Between any two steps the run may end, and another go on from its memory.
    """
    rng = random.Random(seed)
    shapes = draw.shapes(rng)
    stream = draw.Gradients(shapes, seed)
    local, replicas = drawn(rng, len(shapes))
    start = stream.of(1, list(shapes))[0]
    simulator = LocalSimulator(local, start, replicas, ops=PoisonOps() if rng.random() < 0.2 else None)
    flat = Flat(shapes)
    expected = flat.of([start])[0]
    largest = np.maximum(flat.largest(flat.of([start])), 1.0)
    used = []

    def update(replica, parameters, gradients):
        used.append(gradients)
        return {name: x - 0.1 * gradients[name] for name, x in parameters.items()}

    for _ in range(STEPS):
        if rng.random() < 0.1:
            simulator = resumed(simulator, local, replicas)
        used.clear()
        simulator.step(stream.of(replicas, list(shapes)), update)  # raises if those that met do not agree
        gradients = flat.of(used)
        expected -= 0.1 * np.add.reduce(gradients) / replicas
        largest += flat.largest(gradients)
        memories = (state.tensors.items() for state in simulator.states)
        errors = flat.of({n: m["error"] for n, m in memory if "error" in m} for memory in memories)
        now = np.add.reduce(flat.of(simulator.parameters) - errors) / replicas
        flat.require(
            now - expected, 1e-11 * largest, "averaging has moved {name} by {wrong}, and {allowed} is rounding"
        )
    return STEPS


def resumed(before, local, replicas):
    """Another, from copies of parameters and memory alone: what is on its way is in these."""
    after = LocalSimulator(local, before.parameters[0], replicas, ops=before.ops)
    after.parameters = [{n: x.copy() for n, x in p.items()} for p in before.parameters]
    after.states = [s.map(np.array) for s in before.states]
    after.steps = before.steps
    return after


def drawn(rng, parameters):
    replicas = rng.choice([1, 2, 2, 3, 4, 6])
    period = rng.randint(1, 6)
    sizes = [n for n in (2, 3) if replicas % n == 0 and n < replicas]
    compressor = draw.compressor(rng) if rng.random() < 0.5 else None
    # Smaller groups average parameters as they are, and with outer parameters some of what they came to is compressed later: still nothing is lost.
    hierarchy = (
        {rng.choice(sizes): period, "all": period * rng.randint(2, 3)} if sizes and rng.random() < 0.4 else period
    )
    longest = max(hierarchy.values()) if isinstance(hierarchy, dict) else hierarchy
    late = {"outer": OuterSGD(), "overlap": rng.randint(1, longest - 1), "merge": "progress"} if longest > 1 else {}
    local = LocalSGD(
        hierarchy,
        start_step=rng.choice([0, 0, 1, 5]),
        subgroup=rng.choice([None, *sizes]),
        fragments=rng.randint(1, min(period, parameters)),
        compressor=compressor,
        **(late if rng.random() < 0.5 else {}),
    )
    return local, replicas
