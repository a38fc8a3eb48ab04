"""Run as `mesh_of_some.py PORT PROCESS COUNT`: a mesh on the devices of all processes but the last,
of which one does not come at first."""

import sys

import jax
import jax.numpy as jnp
import numpy as np


def main(port, process, count):
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=process)
    from gradwire.jax_backend import distribute, power_sgd
    from gradwire.jax_backend.engine import barrier
    from gradwire.jax_backend.jax_internals import coordination_client
    from tests.jax.replicas import AXIS, refused

    service = coordination_client()
    mesh = jax.sharding.Mesh(
        np.array([d for d in jax.devices() if d.process_index < count - 1]), (AXIS,)
    )
    state = power_sgd(2, axis_name=AXIS).init({"w": jnp.ones((32, 24))})
    if process == 0:
        barrier.PATIENCE, barrier.LONGEST = 0.1, 0.2
        with refused(
            "distribute: process 0 has waited in vain for processes [1]", error=RuntimeError
        ):
            distribute(state, mesh, AXIS)
        barrier.LONGEST = 100
        service.key_value_set("given up", "-")
    service.blocking_key_value_get("given up", 100_000)
    if process < count - 1:
        assert distribute(state, mesh, AXIS).local.per_replica["error"]["w"].shape == (
            count - 1,
            32,
            24,
        )
        service.key_value_set(f"placed/{process}", "-")
    for each in range(count - 1):  # whoever ends first takes the service along
        service.blocking_key_value_get(f"placed/{each}", 100_000)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
