"""docs/two-levels.md on slices, each of them a process that Slurm has started: this says what Slurm
and the slices would, once it is imported."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils

import gradwire.jax_backend as gw

NODES = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost,localhost", "SLURM_LOCALID": "0"}
OWN = {"SLURM_NTASKS": "WORLD_SIZE", "SLURM_PROCID": "RANK", "JAX_COORDINATOR_PORT": "PORT"}
os.environ |= NODES | {name: os.environ[ours] for name, ours in OWN.items()}
# A CPU tells no slices: all are number 0.
mesh_utils.create_hybrid_device_mesh = functools.partial(
    mesh_utils.create_hybrid_device_mesh, process_is_granule=True
)


def train(mesh):
    """A step on this mesh, in which each replica has a part of one matrix of rank 1."""
    assert jax.device_count() == 8
    assert [[d.process_index for d in row] for row in mesh.devices] == [[0] * 4, [1] * 4]
    axes = ("dcn", "ici")
    tx = optax.chain(gw.power_sgd(4, axis_name="dcn", within="ici"), optax.sgd(1.0))
    with jax.set_mesh(mesh):
        state = tx.init({"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)})
    specs, state = gw.partition_specs(state, axes), gw.distribute(state, mesh, axes)
    whole = {"w": np.outer(np.arange(64.0), np.arange(32.0)), "b": np.arange(32.0)}

    def step(state):
        share = 1.0 + jax.lax.axis_index(axes)
        return tx.update(jax.tree.map(lambda x: share * jnp.asarray(x, jnp.float32), whole), state)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs,), out_specs=(jax.P(), specs), check_vma=False
    )
    updates, _ = jax.jit(mapped)(state)
    for name, x in updates.items():  # the mean of 1 to 8
        assert np.allclose(x.addressable_data(0), -4.5 * whole[name], rtol=1e-4, atol=1e-2), name
