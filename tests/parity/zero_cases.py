"""The table for sharded optimizers: one row per case, run by every driver on the same gradients for
the same number of steps.

The oracle is the simulator in float64, with optimizers written down here in NumPy that update each
replica's pieces. Imported by the tests as `tests.parity.zero_cases` and by worker scripts beside it
as `zero_cases`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gradwire import AllReduce, PowerSGD, Simulator
from gradwire.core.algorithm import Algorithm
from gradwire.core.ops import Spec
from gradwire.core.zero.sharded_step import Zero
from gradwire.core.zero.sharding import shard_by_element
from tests.methods import Method
from tests.parity import cases

STEPS = 12
#: Of a parameter, relative to its norm, after any number of steps. In float32 a step alone rounds
#: by 6e-8.
TOLERANCE = 1e-5
#: Sizes that no number of replicas divides, a scalar, and nothing at all.
SHAPES = {n: cases.SHAPES[n] for n in ("w", "conv", "tall", "b", "s")} | {"empty": (0, 4)}

NDArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ZeroCase:
    """What every driver builds: gradients averaged by `algorithm`, clipped to the global norm
    `max_norm`, and given to `optimizer`.

    "sgd" has `MOMENTUM` and no weight decay; "adamw" has `BETAS`, `EPSILON`, and the decoupled
    `WEIGHT_DECAY` on parameters of two dimensions or more, so two parameter groups in torch and a
    mask in Optax. The learning rate is `rate(step)`, from step 0 on.
    """

    algorithm: Algorithm
    optimizer: str
    peak: float
    max_norm: float | None = None

    def rate(self, step):
        """Linear warm-up, then half a cosine."""
        return self.peak * min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / STEPS))


MOMENTUM = 0.9
#: Near the usual 0.9 and 0.999, and float32 numbers: of 0.999 in float32, Optax's 1 - β is wrong by
#: 1e-5, sharded or not.
BETAS = (0.875, 1 - 2**-10)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1

#: The matrices of torch's powerSGD_hook, under whose name torch's forms run it.
AS_TORCH = PowerSGD(2, rows={"*": 1})
ZERO_CASES = {
    "sgd": ZeroCase(AllReduce(), "sgd", 0.01),
    "adamw": ZeroCase(AllReduce(), "adamw", 0.02),
    "adamw_buckets": ZeroCase(AllReduce(bucket_bytes=2048), "adamw", 0.02),
    "adamw_clipped": ZeroCase(AllReduce(), "adamw", 0.02, max_norm=1.0),
    "sgd_clipped": ZeroCase(AllReduce(), "sgd", 0.05, max_norm=8.0),
    "power_sgd_adamw": ZeroCase(AS_TORCH, "adamw", 0.02),
}


def dense(case):
    """Whether gradients are averaged as they are."""
    return isinstance(case.algorithm, AllReduce)


def torch_forms(case):
    """The forms of torch's optimizer that can serve the case: gradients that arrive one by one have
    no norm, and PowerSGD needs DDP."""
    forms = ["plain", "averaging", "overlapped", "interleaved"]
    unfit = set() if dense(case) else {"averaging"}
    if case.max_norm is not None:
        unfit.add("interleaved")
    return [form for form in forms if form not in unfit]


_SIGNAL = Method(AS_TORCH)


@cache
def gradients(step, replica):
    """One replica's float32 gradients in one step, by parameter name. They do not depend on the
    parameters."""
    given = {
        name: cases.gradient(_SIGNAL, name, step, replica)
        for name in SHAPES
        if name in cases.SHAPES
    }
    return given | {"empty": np.zeros(SHAPES["empty"], np.float32)}


def initial(name):
    """The float32 parameter at the start."""
    return (
        np.random.default_rng(list(name.encode())).standard_normal(SHAPES[name]).astype(np.float32)
    )


class Optimizers:
    """One optimizer per replica, each with its pieces: `Simulator(optimizer=…)`."""

    def __init__(self, case, pieces):
        self.case = case
        self.pieces = pieces
        self.steps = 0
        self.memory = [{} for _ in pieces]

    def __call__(self, replica, gradients):
        for name, g in gradients.items():
            change = (
                self.sgd(replica, name, g)
                if self.case.optimizer == "sgd"
                else self.adamw(replica, name, g)
            )
            self.pieces[replica][name] = (
                self.pieces[replica][name] - self.case.rate(self.steps) * change
            )
        self.steps += replica == len(self.pieces) - 1
        return {name: x.copy() for name, x in self.pieces[replica].items()}

    def moment(self, replica, name, new, beta, weight):
        """β·moment + weight·new."""
        memory = self.memory[replica]
        memory[name] = beta * memory.get(name, np.zeros_like(new)) + weight * new
        return memory[name]

    def sgd(self, replica, name, g):
        return self.moment(replica, name, g, MOMENTUM, 1.0)

    def adamw(self, replica, name, g):
        first, second = (
            self.moment(replica, f"{name}/{power}", g**power, beta, 1 - beta)
            / (1 - beta ** (self.steps + 1))
            for power, beta in zip((1, 2), BETAS, strict=True)
        )
        decay = WEIGHT_DECAY if len(SHAPES[name]) > 1 else 0.0
        return first / (np.sqrt(second) + EPSILON) + decay * self.pieces[replica][name]


@dataclass
class ZeroTrace:
    """What a driver did: the parameters after each step, and what each step sent."""

    params: list[dict[str, NDArray]]
    nbytes: list[int]
    collectives: list[int]


@cache
def oracle(case, replicas):
    """The simulator in float64, on the same float32 gradients and parameters. Bytes are counted as
    for float32."""
    row = ZERO_CASES[case]
    shards = shard_by_element(
        {name: Spec(shape, "float64") for name, shape in SHAPES.items()}, replicas
    )
    algorithm = Zero(shards, row.algorithm, row.max_norm)
    start = {name: initial(name).astype(np.float64) for name in SHAPES}
    unused = Simulator(algorithm, SHAPES, replicas)
    optimizers = Optimizers(
        row, [shards.own(unused.ops, start, replica) for replica in range(replicas)]
    )
    sim = Simulator(algorithm, SHAPES, replicas, optimizer=optimizers)
    trace = ZeroTrace([], [], [])
    for step in range(STEPS):
        trace.params.append(sim.step([gradients(step, replica) for replica in range(replicas)]))
        trace.nbytes.append(sim.traffic.nbytes // 2)
        trace.collectives.append(sim.traffic.collectives)
    return trace


def assert_same(case, replicas, params):
    """Compare a driver's float32 parameters with the oracle's, after every step."""
    expected = oracle(case, replicas).params
    assert len(params) == STEPS
    for step in range(STEPS):
        for name in SHAPES:
            cases.assert_close(
                f"step {step}, {name}", params[step][name], expected[step][name], 0, TOLERANCE
            )


def plain(case, replicas):
    """The same optimizer, not sharded, on the average of all gradients: what the oracle itself is
    held against. No PowerSGD here."""
    row = ZERO_CASES[case]
    optimizer = Optimizers(row, [{name: initial(name).astype(np.float64) for name in SHAPES}])
    params = []
    for step in range(STEPS):
        given = [gradients(step, replica) for replica in range(replicas)]
        mean = {
            name: np.mean([g[name].astype(np.float64) for g in given], axis=0) for name in SHAPES
        }
        norm = math.sqrt(sum(float((g**2).sum()) for g in mean.values()))
        factor = min(1.0, row.max_norm / norm) if row.max_norm else 1.0
        params.append(optimizer(0, {name: g * factor for name, g in mean.items()}))
    return params
