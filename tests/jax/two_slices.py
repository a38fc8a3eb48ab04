"""Run as `two_slices.py PORT PROCESS COUNT`, with four devices: docs/two-levels.md on slices, each of them a process that Slurm has started."""

import functools
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils

from tests.pages import public_names, run_blocks


def main(port, process, count):
    nodes = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost,localhost", "JAX_COORDINATOR_PORT": port}
    os.environ |= nodes | {"SLURM_NTASKS": count, "SLURM_PROCID": process, "SLURM_LOCALID": "0"}
    # A CPU tells no slices: all are number 0.
    by_slice = mesh_utils.create_hybrid_device_mesh
    mesh_utils.create_hybrid_device_mesh = functools.partial(by_slice, process_is_granule=True)
    names = {"jax": jax}
    run_blocks("two-levels", [3], names)
    mesh = names["mesh"]
    assert jax.device_count() == 8
    assert [[d.process_index for d in row] for row in mesh.devices] == [[0] * 4, [1] * 4]

    # The block before, on this mesh, and a step in which each replica has a part of one matrix of rank 1.
    import gradwire.jax_backend as gw

    params = {"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}
    names |= public_names(gw) | {"params": params}
    run_blocks(
        "two-levels", [2], names, {'mesh = jax.make_mesh((2, 4), ("dcn", "ici"))\n': "", "adamw(3e-4)": "sgd(1.0)"}
    )
    tx, specs, axes = names["tx"], names["specs"], ("dcn", "ici")
    whole = {"w": np.outer(np.arange(64.0), np.arange(32.0)), "b": np.arange(32.0)}

    def step(state):
        share = 1.0 + jax.lax.axis_index(axes)
        return tx.update(jax.tree.map(lambda x: share * jnp.asarray(x, jnp.float32), whole), state)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=(jax.P(), specs), check_vma=False)
    updates, _ = jax.jit(mapped)(names["state"])
    for name, x in updates.items():  # the mean of 1 to 8
        assert np.allclose(x.addressable_data(0), -4.5 * whole[name], rtol=1e-4, atol=1e-2), name


if __name__ == "__main__":
    main(*sys.argv[1:])
