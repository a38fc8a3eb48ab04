"""An inf or NaN in one replica's gradient: everybody skips, nothing is remembered, training goes on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradwire.jax_backend import power_sgd
from tests.jax.replicas import AXIS, Replicas, gradients

SHAPES = {"w": (32, 24), "bias": (24,)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def with_bad(given: list[Any], name: str, value: float) -> list[Any]:
    bad = [{k: v.copy() for k, v in g.items()} for g in given]
    bad[1][name].flat[5] = value
    return bad


def memory(replicas: Replicas) -> list[np.ndarray]:
    state = replicas.global_state()
    state = state if hasattr(state, "local") else state[0]
    return jax.tree.leaves((state.shared, state.memory, state.local))


@pytest.mark.parametrize("mode", ["pmap", "shard_map", "shard_map_vma"])
def test_state_is_left_as_it_was(mode: str) -> None:
    replicas = Replicas(power_sgd(2, axis_name=AXIS), PARAMS, mode=mode)
    replicas.update(gradients(SHAPES, 0))
    before = memory(replicas)
    updates = replicas.update(with_bad(gradients(SHAPES, 1), "w", np.inf))
    assert np.isnan(updates["w"]).all()
    for a, b in zip(before, memory(replicas), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("half_step", [False, True])
@pytest.mark.parametrize(("name", "value"), [("w", np.inf), ("w", np.nan), ("bias", -np.inf)])
def test_the_next_steps_are_those_of_a_run_without_it(name: str, value: float, half_step: bool) -> None:
    tx = power_sgd(2, axis_name=AXIS, half_step=half_step)
    hurt, healthy = Replicas(tx, PARAMS), Replicas(tx, PARAMS)
    for step in range(4):
        given = gradients(SHAPES, step)
        if step == 2:
            updates = hurt.update(with_bad(given, name, value))
            assert np.isnan(updates["w"]).all()  # whatever it was that was not finite
        a, b = hurt.update(given), healthy.update(given)
        for key in SHAPES:
            np.testing.assert_array_equal(a[key], b[key])


def test_apply_if_finite_after_it_skips_on_all_replicas() -> None:
    tx = optax.chain(power_sgd(2, axis_name=AXIS), optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3))
    hurt = Replicas(tx, PARAMS, mode="pmap")
    hurt.update(gradients(SHAPES, 0))
    updates = hurt.update(with_bad(gradients(SHAPES, 1), "w", np.nan))
    assert all((u == 0).all() for u in updates.values())
    again = hurt.update(gradients(SHAPES, 1))
    assert all(np.isfinite(u).all() and (u != 0).any() for u in again.values())
