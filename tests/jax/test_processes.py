"""Two real JAX processes come to what two devices of one process come to, and both of them to the
same bits."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradwire.jax_backend import power_sgd, reshard, zero1
from tests.jax import mesh_of_some, two_processes
from tests.jax.replicas import AXIS, Replicas, gradients
from tests.launch import jax_processes

pytestmark = pytest.mark.slow


def test_two_processes_are_two_devices(tmp_path):
    jax_processes(Path(two_processes.__file__), 2, str(tmp_path), os.environ["XLA_FLAGS"])
    shapes = two_processes.SHAPES
    run = Replicas(
        power_sgd(2, axis_name=AXIS, half_step=True),
        {k: jnp.zeros(s) for k, s in shapes.items()},
        2,
        "pmap",
    )
    for step in range(two_processes.STEPS):
        expected = run.update(gradients(shapes, step, 2))
    expected["error"] = run.global_state().local.per_replica["error"]["w"]
    adam = two_processes.ADAM
    sharded = Replicas(
        zero1(adam, axis_name=AXIS, replicas=2),
        {k: jnp.zeros(s) for k, s in shapes.items()},
        2,
        "pmap",
    )
    after = {f"zero/{k}": x for k, x in sharded.update(gradients(shapes, 0, 2)).items()}
    plain = jax.eval_shape(adam.init, {k: jnp.zeros(s) for k, s in shapes.items()})
    after["zero/moment"] = reshard(sharded.global_state(), plain)[0].mu["w"]
    first, second = (np.load(tmp_path / f"{process}.npz") for process in range(2))
    assert len(first) == len(second) == 10
    for name, x in first.items():
        assert np.array_equal(x, second[name]), name
        if name == "mean":
            reference = expected["error"].mean(0, keepdims=True)
        else:
            reference = after[name] if name in after else expected[name.split("/")[1]]
        assert x.shape == reference.shape
        # Compiled apart from each other, for one device and for two: each may contract and order
        # its sums in its own way.
        assert np.allclose(x, reference, rtol=0, atol=1e-4 * np.abs(reference).max()), name


def test_a_mesh_of_some_processes_names_who_of_them_is_missing():
    jax_processes(Path(mesh_of_some.__file__), 3)
