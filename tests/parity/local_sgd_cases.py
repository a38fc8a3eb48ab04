"""The table of local SGD: one row per case, run by every driver on the same loss, on four replicas,
for the same number of steps.

Imported by the tests as `tests.parity.local_sgd_cases` and by the worker scripts beside it as
`local_sgd_cases`. Replica r minimizes

    loss = ½ · curvature[r] · ‖parameter - target[r]‖² + (noise[r, step] · parameter).sum()        summed over the parameters

by plain SGD with learning rate `RATE`. Curvatures differ, so that H local steps are not one large
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gradwire import LocalSGD, LocalSimulator, OuterSGD, PowerSGD, TopK, TwoLevel, diloco
from gradwire.core.protocol.weights import LARGEST, SMALLEST
from tests.parity import cases

REPLICAS = 4
STEPS = 24
RATE = 0.1
TOLERANCE = 5e-5
SHAPES = {"w": (24, 16), "conv": (8, 3, 3, 3), "b": (24,), "s": ()}
CURVATURE = [1.0, 0.6, 1.4, 0.8]

CASES = {
    "every_step": LocalSGD(1),
    "period": LocalSGD(4),
    "post_local": LocalSGD(4, start_step=6),
    "subgroups": LocalSGD(4, start_step=6, subgroup=2),
    "hierarchical": LocalSGD({2: 2, 4: 4}),
    "one_node": LocalSGD({4: 2, "all": 6}),
    "partition": LocalSGD({((0, 2), (1, 3)): 3, "all": 6}, start_step=2, subgroup=((0, 3), (1, 2))),
    "outer_sgd": LocalSGD(4, outer=OuterSGD(0.5)),
    "diloco": diloco(4, lr=0.4, momentum=0.6),
    "diloco_hierarchical": diloco(
        {2: 2, "all": 6}, lr=0.4, momentum=0.6, nesterov=False, start_step=5
    ),
    "fragments": diloco(6, lr=0.4, momentum=0.6, fragments=3, start_step=3),
    "power_sgd": LocalSGD(4, compressor=PowerSGD(2)),
    "sparse_loco": diloco(
        4,
        lr=1.0,
        momentum=0,
        compressor=TopK(4, per=(4, 4), bits=2, mean="senders", error_feedback=0.95),
    ),
    "everything": diloco(
        4,
        lr=0.4,
        momentum=0.6,
        start_step=2,
        subgroup=2,
        fragments=2,
        compressor=PowerSGD(2, half_step=True, start_step=1),
    ),
    "overlap": diloco(6, lr=0.4, momentum=0.6, fragments=3, overlap=3, start_step=2),
    "overlap_progress": diloco(
        5, lr=0.4, momentum=0.6, overlap=1, merge="progress", compressor=PowerSGD(2)
    ),
    "overlap_hierarchical": diloco({2: 2, "all": 6}, lr=0.4, momentum=0.6, overlap=3, merge=0.0),
    "eager": diloco(4, lr=0.4, momentum=0.6, fragments=2, eager=True, compressor=PowerSGD(2)),
    "two_levels": diloco(
        4,
        lr=0.4,
        momentum=0.6,
        start_step=2,
        subgroup=2,
        fragments=2,
        compressor=TwoLevel(PowerSGD(2), 2),
    ),
    "weighted": LocalSGD({2: 2, 4: 4}, start_step=2, subgroup=2, weighted=True),
    "weighted_overlap": diloco(
        6, lr=0.4, momentum=0.6, overlap=2, weighted=True, radial=True, compressor=PowerSGD(2)
    ),
    "weighted_eager": diloco(4, lr=0.4, momentum=0.6, eager=True, weighted=True),
}


def initial():
    """float32 parameters, where all replicas begin."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def weight(replica, step):
    """What a replica counts for: others in each round, replica 1 is absent in every other one, and
    in two of three all are as large or as small as weights may be."""
    here = step // 4
    usual = [3.0, 500.0 * (here % 2), 2.0 + step, 40.0]
    both = [LARGEST, SMALLEST * (here % 2), 1.0, LARGEST / 3]
    smallest = [SMALLEST, 5 * SMALLEST * (here % 2), 2 * SMALLEST, 3 * SMALLEST]
    return (usual, both, smallest)[here % 3][replica]


@cache
def target(replica):
    """Where a replica wants to go: from the start in directions of rank 2, clearly apart in weight,
    somewhat further on later replicas.

    What is compressed has the rank that is kept. Where it has not, directions of nearly equal
    weight compete in the error memory, and rounding decides which is sent next (see
    `tests.methods.Method`).
    """
    made = {}
    for name, start in initial().items():
        rng = np.random.default_rng([7, *name.encode()])
        way = rng.standard_normal(start.shape)
        if start.ndim > 1:
            n = start.shape[0]
            a, b = (np.linalg.qr(rng.standard_normal((k, 2)))[0] for k in (n, start.size // n))
            way = ((a * [8.0, 3.0]) @ b.T).reshape(start.shape)
        made[name] = (start + (1 + 0.1 * replica) * way).astype(np.float32)
    return made


@cache
def noise(replica, step):
    """What a replica's data add to its gradient in a step."""
    rng = np.random.default_rng([replica + 1, step + 1])
    return {
        name: (0.02 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


@dataclass
class Trace:
    """What a driver did.

    Attributes:
        parameters: [step][replica][name], after each step.
        memory: [replica][name][memory], in the end.
        nbytes, collectives: of each step, as replica 0 sent them.
    """

    parameters: list[list[dict[str, Any]]]
    memory: list[dict[str, dict[str, Any]]]
    nbytes: list[int]
    collectives: list[int]


@cache
def oracle(case):
    """The simulator, in float64."""
    sim = LocalSimulator(CASES[case], initial(), REPLICAS)
    sizes, nothing = (
        LocalSimulator(CASES[case], initial(), REPLICAS, dtype="float32"),
        [initial()] * REPLICAS,
    )
    trace = Trace([], [], [], [])
    for step in range(STEPS):
        gradients = [
            {n: CURVATURE[r] * (p[n] - target(r)[n]) + noise(r, step)[n] for n in SHAPES}
            for r, p in enumerate(sim.parameters)
        ]
        weights = [weight(r, step) for r in range(REPLICAS)] if CASES[case].weighted else None
        sim.step(gradients, lambda _, p, g: {n: p[n] - RATE * g[n] for n in p}, weights=weights)
        trace.parameters.append([{n: x.copy() for n, x in p.items()} for p in sim.parameters])
        sizes.step(nothing, lambda _, p, g: p)
        trace.nbytes.append(sizes.traffic.nbytes)
        trace.collectives.append(sim.traffic.collectives)
    trace.memory = [{n: dict(m) for n, m in s.tensors.items()} for s in sim.states]
    return trace


def assert_same(case, parameters, memory):
    """Compare a driver's trace with the oracle: every replica's parameters after every step, and
    its memory in the end.

    A factor of PowerSGD is left out: it is defined up to a rotation only.
    """
    expected = oracle(case)

    def close(what, mine, theirs, name):
        # Relative to the parameter: where a velocity or an error ought to be small, it holds the
        # rounding noise of one.
        cases.assert_close(what, mine, theirs, np.linalg.norm(target(0)[name]), TOLERANCE)

    assert len(parameters) == STEPS
    assert len(memory) == REPLICAS
    for step in range(STEPS):
        for r in range(REPLICAS):
            for name in SHAPES:
                what = f"step {step}, {name} on replica {r}"
                close(what, parameters[step][r][name], expected.parameters[step][r][name], name)
    for r in range(REPLICAS):
        assert memory[r].keys() == expected.memory[r].keys()
        for name, theirs in expected.memory[r].items():
            assert memory[r][name].keys() == theirs.keys()
            for key in theirs.keys() - {"p", "q"}:
                close(f"{key} of {name} on replica {r}", memory[r][name][key], theirs[key], name)
