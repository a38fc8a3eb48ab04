"""The transformation against the float64 simulator: updates and error memory over 50 steps, under every kind of map."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import gradwire
from gradwire import AllReduce, PowerSGD, RandomProjection
from gradwire.jax_backend import average_gradients
from tests.jax.replicas import Replicas, gradients

#: Few distinct shapes: XLA compiles every kernel once for each.
SHAPES = {"kernel": (32, 24), "bias": (24,), "scale": (), "again": (32, 4, 6)}


def power(**options: Any) -> PowerSGD:
    return PowerSGD(**{"rank": 2, "min_compression_rate": 1.0} | options)


CASES = {
    "default": power(),
    "rank 6, a compiled loop": power(rank=6),
    "half step": power(half_step=True),
    "dense start": power(start_step=5),
    "half step, dense start": power(half_step=True, start_step=5),
    "cold start": power(warm_start=False),
    "no error feedback": power(error_feedback=False),
    "cold start, no error feedback": power(warm_start=False, error_feedback=False),
    "ranks by name": power(rank={"kern*": 0, "a*": 2, "*": 1}),
    "all reduce": AllReduce(),
    "random projection": RandomProjection(2),
    "random projection, no error feedback": RandomProjection(2, error_feedback=False),
}


def compare(algorithm: Any, mode: str, steps: int, replicas: int = 4) -> None:
    rank = getattr(algorithm, "rank", 2)
    oracle = gradwire.Simulator(algorithm, SHAPES, replicas)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    run = Replicas(average_gradients(algorithm, axis_name="data"), params, replicas, mode)
    compressed = False
    for step in range(steps):
        given = gradients(SHAPES, step, replicas, rank if isinstance(rank, int) else 2)
        expected, got = oracle.step(given), run.update(given)
        memory = run.global_state().local.per_replica.get("error", {})
        for name in SHAPES:
            close(got[name], expected[name])
            exact = np.mean([g[name] for g in given], axis=0)
            compressed |= bool(np.linalg.norm(expected[name] - exact) > 1e-3 * np.linalg.norm(exact))
        for replica, state in enumerate(oracle.states):
            for name, kept in state.tensors.items():
                if "error" in kept:
                    close(memory[name][replica], kept["error"])
    assert compressed == (not isinstance(algorithm, AllReduce))


def close(got: Any, expected: Any) -> None:
    assert np.linalg.norm(got - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_follow_the_oracle(case: str) -> None:
    compare(CASES[case], "vmap", 50)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("default", "pmap"),
        ("default", "shard_map"),
        ("default", "shard_map_vma"),
        ("half step, dense start", "shard_map_vma"),
        ("rank 6, a compiled loop", "shard_map_vma"),
    ],
)
def test_every_map_follows_the_oracle(case: str, mode: str) -> None:
    compare(CASES[case], mode, 10)


@pytest.mark.parametrize("replicas", [1, 3])
def test_other_numbers_of_replicas(replicas: int) -> None:
    compare(CASES["default"], "vmap", 5, replicas)
