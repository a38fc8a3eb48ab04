"""Memory of a compiled step, by XLA's own analysis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradwire.jax_backend import distribute, partition_specs, power_sgd, replicate
from tests.jax.replicas import AXIS, mesh_of

SHAPES = {"a": (256, 256), "b": (512, 128), "c": (256,)}
GRADIENT = 4 * sum(int(np.prod(s)) for s in SHAPES.values())


@pytest.mark.parametrize("half_step", [False, True], ids=["full", "half-step"])
@pytest.mark.parametrize("mode", ["pmap", "shard_map"])
def test_a_step_takes_one_more_gradient_and_reuses_what_is_donated(mode, half_step):
    tx = power_sgd(2, axis_name=AXIS, half_step=half_step)
    gradients = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    state = tx.init(gradients)
    given = sum(x.nbytes for x in jax.tree.leaves((gradients, state))) + 1  # with the mark of the place, a bool
    if mode == "pmap":
        devices = jax.local_devices()[:2]
        step = jax.pmap(tx.update, AXIS, devices=devices, donate_argnums=(0, 1))
        arguments = replicate((gradients, state), devices, axis_name=AXIS)
    else:
        specs = jax.P(), partition_specs(state, AXIS)
        mapped = jax.shard_map(tx.update, mesh=mesh_of(2), in_specs=specs, out_specs=specs, check_vma=False)
        step, arguments = jax.jit(mapped, donate_argnums=(0, 1)), (gradients, distribute(state, mesh_of(2), AXIS))
    memory = step.lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == given
    assert memory.temp_size_in_bytes < 1.1 * GRADIENT
