"""One process of a training in JAX that chooses its method under torchrun, see `attempt.py`.

    torchrun … chooser_jax.py FOLDER PACE [DECISIONS]

With DECISIONS the methods are those in that file.
"""

import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gradwire import Auto
from gradwire.jax_backend import AutoStep, mark_varying, partition_specs
from tests.chaos.attempt import Attempt
from tests.chaos.sorting import WIDTH, batch, digest

AXIS = "data"


def new_params() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    return {
        "in": jnp.asarray(draw.normal(0, 0.2, (WIDTH, 64)), jnp.float32),
        "bias": jnp.zeros(64),
        "out": jnp.asarray(draw.normal(0, 0.1, (64, WIDTH)), jnp.float32),
    }


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return jnp.square(jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"] - y).mean()


def build_on(mesh: jax.sharding.Mesh) -> Any:
    def build(average: Any) -> tuple[Any, Any]:
        tx = optax.chain(average, optax.adamw(3e-3))
        params = new_params()
        state = params, tx.init(params)
        specs = partition_specs(state, AXIS)

        def train_step(state: Any, x: Any, y: Any) -> Any:
            params, opt_state = state
            gradients = jax.grad(loss_of)(mark_varying(params, AXIS), x, y)
            updates, opt_state = tx.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        maps = {"mesh": mesh, "in_specs": (specs, P(AXIS), P(AXIS)), "out_specs": specs}
        return state, jax.jit(jax.shard_map(train_step, **maps), donate_argnums=0)

    return build


def own(state: Any) -> list[np.ndarray]:
    """What this process has of each array."""
    return [np.asarray(x.addressable_shards[0].data) for x in jax.tree.leaves(state)]


def restored(fresh: Any, saved: list[np.ndarray]) -> Any:
    def placed(x: jax.Array, data: np.ndarray) -> jax.Array:
        (device,) = x.sharding.addressable_devices
        shards = [jax.device_put(data, device)]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    leaves, structure = jax.tree.flatten(fresh)
    return jax.tree.unflatten(structure, map(placed, leaves, saved))


def main(folder: Path, pace: float, decisions: str | None = None) -> None:
    attempt = Attempt(folder)
    jax.distributed.initialize(
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        num_processes=attempt.ranks,
        process_id=attempt.rank,
    )
    mesh = jax.make_mesh((attempt.ranks,), (AXIS,))
    rows = NamedSharding(mesh, P(AXIS))
    auto = AutoStep(Auto(loss="5%", decisions=decisions), build_on(mesh), axis_name=AXIS, mesh=mesh)
    found = multihost_utils.broadcast_one_to_all(np.asarray(attempt.newest(), np.int32))
    newest = int(found[0]), int(found[1])
    if newest[1]:
        saved = pickle.loads(attempt.file(newest).read_bytes())
        state = restored(auto.init(saved["method"]), saved["state"])
    else:
        state = auto.init()
    for step in attempt.steps(newest[1]):
        data = (x.numpy() for x in batch(0, attempt.rank, step))
        state = auto.step(state, *(jax.make_array_from_process_local_data(rows, x) for x in data))
        attempt.say(
            step, repr(auto._methods[auto._number]), digest(map(torch.from_numpy, own(state[0])))
        )
        if part := attempt.new_file(step):
            part.write_bytes(pickle.dumps({"method": auto.method, "state": own(state)}))
            attempt.keep(part)
        time.sleep(pace)
    jax.distributed.shutdown()


if __name__ == "__main__":
    place, pause, *given = sys.argv[1:]
    main(Path(place), float(pause), *given)
