"""The functions of JAX that take options. What they make is traced once, for two replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import gradwire.jax_backend as gw
from gradwire import LocalSGD, PowerSGD
from tests.fuzz.engine import Target

AXIS = "data"
PARAMS = {"w": jnp.ones((16, 12)), "b": jnp.ones(16)}
AVERAGED = gw.power_sgd(1, axis_name=AXIS)
STATE = AVERAGED.init(PARAMS)


def traced(made: Any) -> None:
    """A step, without running it."""

    def step(gradients: Any) -> Any:
        return made.update(gradients, made.init(PARAMS), PARAMS)[0]

    jax.make_jaxpr(step, axis_env=[(AXIS, 2)])(PARAMS)


def clipped(made: Any) -> None:
    traced(gw.zero1(optax.chain(made, optax.sgd(0.1)), axis_name=AXIS, replicas=2))


NAMED = {"axis_name": AXIS}
#: An axis that no map binds is found where the transformation is used.
UNBOUND = (NameError,)
TARGETS = {
    "power_sgd": Target(gw.power_sgd, {"rank": 1, **NAMED}, traced, raises=UNBOUND),
    "all_reduce_mean": Target(gw.all_reduce_mean, NAMED, traced, raises=UNBOUND),
    "average_gradients": Target(gw.average_gradients, {"algorithm": PowerSGD(1), **NAMED}, traced, raises=UNBOUND),
    "zero1": Target(gw.zero1, {"inner": optax.sgd(0.1), "replicas": 2, **NAMED}, traced, raises=UNBOUND),
    "clip_by_global_norm": Target(
        gw.clip_by_global_norm, {"max_norm": 1.0, **NAMED}, clipped, raises=UNBOUND, left_out=["axis_name"]
    ),
    "local_sgd": Target(gw.local_sgd, {"inner": optax.sgd(0.1), "local": LocalSGD(2), **NAMED}, traced, raises=UNBOUND),
    "diloco": Target(gw.diloco, {"inner": optax.sgd(0.1), "period": 2, **NAMED}, traced, raises=UNBOUND),
    "set_replicas": Target(gw.set_replicas, {"state": STATE, "replicas": 2}, left_out=["state"]),
    "abstract_state": Target(gw.abstract_state, {"state": STATE, "replicas": 2}, left_out=["state", "params"]),
    "replicate": Target(gw.replicate, {"state": STATE}, left_out=["state"]),
    "distribute": Target(
        gw.distribute, {"state": STATE, "mesh": jax.make_mesh((1,), (AXIS,)), **NAMED}, left_out=["state"]
    ),
    "partition_specs": Target(gw.partition_specs, {"state": STATE, **NAMED}, left_out=["state"]),
    "mark_varying": Target(gw.mark_varying, {"params": PARAMS, **NAMED}, left_out=["params"], raises=UNBOUND),
    "to_portable": Target(gw.to_portable, {"state": STATE, "algorithm": PowerSGD(1)}),
    "from_portable": Target(
        gw.from_portable,
        {"state": gw.to_portable(STATE, PowerSGD(1)), "algorithm": PowerSGD(1), "like": STATE, "replicas": 2},
    ),
}
