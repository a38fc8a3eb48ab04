"""Compressor state in portable form: resized, loaded into another model, and sent through files."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
import torch

import gradwire.jax_backend as gw
from gradwire import PowerSGD, WireDtype
from tests.jax.replicas import AXIS, Replicas, equal, gradients, mesh_of

SHAPES = {"in": (24, 32), "out": (32, 16), "bias": (16,)}
HALF = PowerSGD(2, half_step=True, start_step=3)


def init(algorithm=HALF, shapes=SHAPES):
    return gw.average_gradients(algorithm, axis_name=AXIS).init({n: jnp.zeros(s) for n, s in shapes.items()})


@functools.cache
def trained():
    """After six steps. (That a run goes on to the bit is in tests/composition.)"""
    replicas = Replicas(gw.average_gradients(HALF, axis_name=AXIS), {n: jnp.zeros(s) for n, s in SHAPES.items()})
    for step in range(6):
        replicas.update(gradients(SHAPES, step))
    return jax.tree.map(jnp.asarray, replicas.global_state())


def test_a_distributed_state_is_taken_as_it_lies():
    mine, mesh = trained(), mesh_of(4)
    placed = gw.distribute(mine, mesh, AXIS)
    assert jax.tree.structure(gw.partition_specs(placed, AXIS)) == jax.tree.structure(mine)
    portable = (gw.to_portable(state, HALF, errors="all") for state in (placed, mine))
    jax.tree.map(np.testing.assert_array_equal, *portable)
    assert equal(jax.device_get(gw.set_replicas(placed, 2)), jax.device_get(gw.set_replicas(mine, 2)))


def test_a_state_that_does_not_fit_is_refused_or_gives_what_fits(caplog):
    mine = trained()
    saved = gw.to_portable(mine, HALF)
    assert saved["local"]["in"]["error"].shape == (1, *SHAPES["in"])
    assert saved["replicas"] == 4
    assert type(saved["step"]) is int
    like = init(shapes={"in": (24, 32), "new": (32, 16)})
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


def test_units_of_a_loss_scale_are_left_behind_and_orbax_brings_back_the_rest(tmp_path):
    saved = gw.to_portable(trained(), HALF, errors="all")
    expected = gw.from_portable(saved, HALF, init(), replicas=4)
    scaled = saved | {"scale": 8.0, "local": jax.tree.map(lambda x: 8 * x, saved["local"])}
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", saved)
        restored = checkpointer.restore(tmp_path / "orbax")
    assert restored["algorithm"] == repr(HALF)
    for state in (scaled, restored):
        assert equal(gw.from_portable(state, HALF, init(), replicas=4), expected)


@pytest.mark.parametrize(
    "algorithm",
    [PowerSGD(2, warm_start=False, error_feedback=False), WireDtype(PowerSGD(2, state_dtype="bfloat16"), "bfloat16")],
    ids=["no memory", "bfloat16"],
)
def test_every_kind_of_memory_comes_back(algorithm):
    made = init(algorithm)
    changed = jax.tree.map(lambda x: x + jnp.ones((), x.dtype) if x.ndim else x, made)
    made = changed._replace(account=made.account)  # which is no memory
    saved = gw.to_portable(made, algorithm)
    assert set(saved["tensors"]) == {"in", "out"}
    like = init(algorithm)
    assert equal(gw.from_portable(saved, algorithm, like, replicas=1), made)
    tensors = jax.tree.map(
        lambda x: torch.from_numpy(np.asarray(x, np.float32)).bfloat16() if np.ndim(x) > 1 else x, saved
    )
    if saved["local"]:  # as torch would hand it over
        assert equal(gw.from_portable(tensors, algorithm, like, replicas=1), made)
