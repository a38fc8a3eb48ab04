"""The constructors and functions of the core, and what is done with what they make."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradwire as g
from gradwire.core.advise.cost import Cost
from gradwire.core.advise.probe import Level
from gradwire.core.advise.timeline import Compute, Group
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.local_sgd.schedule import Schedule
from gradwire.testing import check
from tests.fuzz.engine import Target

SHAPES = {"layers.0.w": (16, 12), "layers.1.w": (16, 12), "b": (16,), "s": (), "z": (0, 4)}
SPECS = {name: g.Spec(shape) for name, shape in SHAPES.items()}
SAMPLES = ((256, 1e-4), (1 << 20, 1e-2))
PROBE = g.Probe("torch", "cpu", 2, 1, (Level("all", 2, SAMPLES, SAMPLES, 0.5),))


def steps(made: Any, replicas: int = 4) -> None:
    """Some steps and a plan of an algorithm; hashes and writes it."""
    rng = np.random.default_rng(0)
    simulator = g.Simulator(made, SHAPES, replicas, dtype="float32")
    for _ in range(2):
        drawn = [{n: rng.standard_normal(s).astype("float32") for n, s in SHAPES.items()} for _ in range(replicas)]
        assert all(np.isfinite(x).all() for x in simulator.step(drawn).values())
    assert hash(made) == hash(made)
    assert type(made).__name__ in repr(made)
    str(g.plan(SHAPES, made, world_size=replicas))


def local_steps(made: Any) -> None:
    made = made.without_factory()  # any callable may make an outer optimizer, in a backend
    simulator = g.LocalSimulator(made, {n: np.ones(s) for n, s in SHAPES.items()}, 4)
    for _ in range(3):
        gradients = [{n: np.ones(s) for n, s in SHAPES.items()}] * 4
        simulator.step(gradients, lambda _, p, d: {n: p[n] - 0.1 * d[n] for n in p})
    str(g.plan(SHAPES, made, world_size=4))


def sharded(made: Any) -> None:
    g.plan(SHAPES, made)


def of_spec(made: Any) -> None:
    g.AllReduce().init(NumpyOps(), {"w": made})
    assert made.nbytes >= made.size >= 0


def shards_used(made: Any) -> None:
    made.counts(list(made.specs))


SHARDS = g.shard_by_element(SPECS, 2)
ALGORITHMS = {"algorithm": g.PowerSGD(1)}
STEP = {"model": SHAPES, "algorithm": g.PowerSGD(1), "step": 0.1, "replicas": 4}
TARGETS = {
    "AllReduce": Target(g.AllReduce, {"bucket_bytes": 512}, steps),
    "PowerSGD": Target(g.PowerSGD, {"rank": 2}, steps),
    "Quantize": Target(g.Quantize, {"dtype": "int8"}, steps),
    "Sign": Target(g.Sign, {}, steps),
    "TopK": Target(g.TopK, {"keep": 4, "per": 16}, steps),
    "TwoLevel": Target(g.TwoLevel, {"algorithm": g.PowerSGD(1), "within": 2}, steps),
    "WireDtype": Target(g.WireDtype, {"algorithm": g.AllReduce(), "dtype": "int8"}, steps),
    "Schedule": Target(Schedule, {"period": 4}, lambda made: made.levels(4)),
    "LocalSGD": Target(g.LocalSGD, {"period": 4, "outer": g.OuterSGD()}, local_steps),
    "OuterSGD": Target(g.OuterSGD, {"momentum": 0.5}, lambda made: local_steps(g.LocalSGD(2, outer=made))),
    "diloco": Target(g.diloco, {"period": 4}, local_steps),
    "Spec": Target(g.Spec, {"shape": (2, 3)}, of_spec),
    "Zero": Target(g.Zero, {"shards": SHARDS}, sharded),
    "Simulator": Target(g.Simulator, {"algorithm": g.PowerSGD(1), "shapes": SHAPES, "replicas": 2}),
    "LocalSimulator": Target(
        g.LocalSimulator, {"local": g.LocalSGD(2), "parameters": {"w": np.zeros((8, 8))}, "replicas": 2}
    ),
    "plan": Target(g.plan, {"shapes": SHAPES, **ALGORITHMS}, str),
    "plan.seconds": Target(g.plan(SHAPES, g.PowerSGD(1)).seconds, {"world_size": 4, "latency": 1e-5, "bandwidth": 1e9}),
    "utilization": Target(g.utilization, {**STEP, "link": "1Gbit"}),
    "link_for": Target(g.link_for, STEP),
    "advise": Target(
        g.advise,
        lambda: {
            **{"model": SHAPES, "probe": PROBE, "step": 0.1},
            "costs": [(g.AllReduce(), Cost(((Group(4096, 0.0),),)))],
        },
        str,
        left_out=("algorithms", "costs"),
        raises=(OSError,),
    ),
    "Level": Target(Level, {"name": "all", "replicas": 2, "all_reduce": SAMPLES, "exchange": SAMPLES, "overlap": 0.5}),
    "Probe": Target(
        g.Probe, {"framework": "torch", "device": "cpu", "replicas": 2, "nodes": 1, "levels": PROBE.levels}, str
    ),
    "Compute": Target(Compute, {"seconds": 0.1}, lambda made: made.ready(1, 2)),
    "assign_buckets": Target(g.assign_buckets, {"sizes": [1, 2, 3], "limits": [2]}),
    "shard_by_element": Target(g.shard_by_element, {"specs": SPECS, "world_size": 2}, shards_used),
    "shard_by_parameter": Target(g.shard_by_parameter, {"specs": SPECS, "world_size": 2}, shards_used),
    "shard_by_bucket": Target(
        g.shard_by_bucket, {"specs": SPECS, "world_size": 2, "buckets": [[n] for n in SPECS]}, shards_used
    ),
    "check": Target(check, {"algorithm": g.Sign(), "shapes": {"w": (12, 12)}, "world_sizes": (1, 2)}),
}
