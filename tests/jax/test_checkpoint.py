"""Compressor state that is stopped, resized, renamed, loaded into another model and sent through files."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import torch

import gradwire.jax_backend as gw
from gradwire import PowerSGD, WireDtype
from tests.jax.replicas import AXIS, mesh_of

#: 12 examples make a step: 4, 2 and 3 replicas share them equally.
EXAMPLES, WIDTH = 12, 24
SHAPES = {"in": (WIDTH, 32), "out": (32, 16), "bias": (16,)}
HALF = PowerSGD(2, half_step=True, start_step=3)


def params():
    rng = np.random.default_rng(3)
    return {n: jnp.asarray(rng.standard_normal(s) / len(s) / 4, jnp.float32) for n, s in SHAPES.items()}


def loss(p, x):
    y = jnp.tanh(x @ p["in"]) @ p["out"] + p["bias"]
    return jnp.square(y - jnp.sin(x[:, :16]).cumsum(1)).mean()


def batch(step, replicas):
    x = np.random.default_rng(step).standard_normal((EXAMPLES, WIDTH)).astype(np.float32)
    return x.reshape(replicas, EXAMPLES // replicas, WIDTH)


@functools.cache
def transformation():
    return optax.chain(gw.average_gradients(HALF, axis_name=AXIS), optax.sgd(0.05, momentum=0.9))


@functools.cache
def train_step(replicas):
    def step(state, x):
        params, opt_state = state
        updates, opt_state = transformation().update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.pmap(step, AXIS, devices=jax.devices()[:replicas])


def run(state, replicas, steps):
    """From a state in global form to one."""
    state = gw.replicate(state, jax.devices()[:replicas], axis_name=AXIS)
    for t in steps:
        state = train_step(replicas)(state, batch(t, replicas))
    return gw.unreplicate(state)


def start():
    return params(), transformation().init(params())


@functools.cache
def whole():
    """The state after 0, 1, 2, … steps of four replicas without interruption."""
    state = gw.replicate(start(), jax.devices()[:4], axis_name=AXIS)
    states = [gw.unreplicate(state)]
    for t in range(12):
        state = train_step(4)(state, batch(t, 4))
        states.append(gw.unreplicate(state))
    return states


def same_bits(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


# In the dense phase, right before the first compressed step, and in both phases of the half step.
@pytest.mark.parametrize("taken_after", [1, 3, 4, 5])
def test_a_run_resumes_bit_for_bit_from_any_step(taken_after):
    state = whole()[taken_after]
    assert int(state[1][0].shared["phase"]) == max(0, taken_after - 3) % 2
    assert np.any(state[1][0].local.per_replica["error"]["in"]) == (taken_after > 3)
    assert same_bits(run(gw.set_replicas(state, 4), 4, range(taken_after, 8)), whole()[8])
    # And so does the compressor's part alone, through the portable form.
    weights, (mine, rest) = state
    portable = gw.to_portable(mine, HALF, errors="all")
    again = gw.from_portable(portable, HALF, transformation().init(params())[0], replicas=4)
    assert same_bits(run((weights, (again, rest)), 4, range(taken_after, 8)), whole()[8])


def test_a_distributed_state_is_taken_as_it_lies():
    _, (mine, _) = whole()[6]
    mesh = mesh_of(4)
    placed = gw.distribute(mine, mesh, AXIS)
    assert jax.tree.structure(gw.partition_specs(placed, AXIS)) == jax.tree.structure(mine)
    assert same_bits(gw.to_portable(placed, HALF, errors="all"), gw.to_portable(mine, HALF, errors="all"))
    assert same_bits(gw.set_replicas(placed, 2), gw.set_replicas(mine, 2))


def test_a_state_that_does_not_fit_is_refused_or_gives_what_fits(caplog):
    _, (mine, _) = whole()[6]
    saved = gw.to_portable(mine, HALF)
    assert saved["local"]["in"]["error"].shape == (1, *SHAPES["in"])
    assert saved["replicas"] == 4
    assert type(saved["step"]) is int
    like = gw.average_gradients(HALF, axis_name=AXIS).init({"in": jnp.zeros((WIDTH, 32)), "new": jnp.zeros((32, 16))})
    with pytest.raises(ValueError, match=r"'out' only there, 'new' only here.*strict=False"):
        gw.from_portable(saved, HALF, like, replicas=2)
    with pytest.raises(ValueError, match=r"is of PowerSGD\(rank=2.*not of PowerSGD\(rank=3"):
        gw.from_portable(saved, PowerSGD(3), like, replicas=2)
    with pytest.raises(ValueError, match="lacks"):
        gw.from_portable({k: v for k, v in saved.items() if k != "local"}, HALF, like, replicas=2)
    with caplog.at_level(logging.WARNING):
        got = gw.from_portable(saved, HALF, like, replicas=2, strict=False)
    assert "'out'" in caplog.text
    assert "error and p and q of 1 parameters was taken over" in caplog.text
    assert int(got.step) == 6
    assert int(got.shared["phase"]) == 1
    for tree, old in ((got.memory["q"], mine.memory["q"]), (got.memory["p"], mine.memory["p"])):
        assert np.array_equal(tree["in"], old["in"])
    assert np.array_equal(got.memory["q"]["new"], like.memory["q"]["new"])
    np.testing.assert_allclose(
        got.local.per_replica["error"]["in"][0], mine.local.per_replica["error"]["in"].mean(0), rtol=0, atol=1e-6
    )


def test_units_of_a_loss_scale_are_left_behind():
    _, (mine, _) = whole()[6]
    saved = gw.to_portable(mine, HALF, errors="all")
    scaled = saved | {"scale": 8.0, "local": jax.tree.map(lambda x: 8 * x, saved["local"])}
    assert same_bits(gw.from_portable(scaled, HALF, mine, replicas=4), gw.from_portable(saved, HALF, mine, replicas=4))


@pytest.mark.parametrize(
    "algorithm",
    [PowerSGD(2, warm_start=False, error_feedback=False), WireDtype(PowerSGD(2, state_dtype="bfloat16"), "bfloat16")],
    ids=["no memory", "bfloat16"],
)
def test_every_kind_of_memory_comes_back(algorithm):
    made = gw.average_gradients(algorithm, axis_name=AXIS).init(params())
    changed = jax.tree.map(lambda x: x + jnp.ones((), x.dtype) if x.ndim else x, made)
    made = changed._replace(account=made.account)  # which is no memory
    saved = gw.to_portable(made, algorithm)
    assert set(saved["tensors"]) == {"in", "out"}
    like = gw.average_gradients(algorithm, axis_name=AXIS).init(params())
    assert same_bits(gw.from_portable(saved, algorithm, like, replicas=1), made)
    tensors = jax.tree.map(
        lambda x: torch.from_numpy(np.asarray(x, np.float32)).bfloat16() if np.ndim(x) > 1 else x, saved
    )
    if saved["local"]:  # as torch would hand it over
        assert same_bits(gw.from_portable(tensors, algorithm, like, replicas=1), made)


def test_orbax_brings_back_what_is_portable(tmp_path):
    _, (mine, _) = whole()[6]
    saved = gw.to_portable(mine, HALF, errors="all")
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", saved)
        restored = checkpointer.restore(tmp_path / "orbax")
    assert restored["algorithm"] == repr(HALF)
    like = transformation().init(params())[0]
    found, right = (gw.from_portable(state, HALF, like, replicas=4) for state in (restored, saved))
    assert same_bits(found, right)
