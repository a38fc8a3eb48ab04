"""What a method costs on this device: its own program, compiled and at work on gradients of a
model's shapes, with messages to itself.

cost = method_cost(PowerSGD(4), specs, replicas=16)
print(cost.compute)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.core.advise.cost import Cost, cost_of
from gradwire.core.advise.timing import seconds_in_cycle
from gradwire.core.algorithm import Algorithm, State
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.ops import Spec
from gradwire.jax_backend.advise.step_time import ready, seconds_of
from gradwire.jax_backend.axes.outside_meshes import outside_meshes
from gradwire.jax_backend.engine.driver import drive
from gradwire.jax_backend.ops.kernels import JaxOps
from gradwire.jax_backend.state.placement import replicate
from gradwire.jax_backend.transforms import average_gradients

AXIS = "replicas"


@outside_meshes
def method_cost(
    algorithm: Algorithm | LocalSGD, specs: Mapping[str, Spec], replicas: int, device: Any = None
) -> Cost:
    """Compile a method and run it on this device, on all gradients at once. One replica alone
    exchanges with itself, so decoding what many have sent is not in it; nothing is predicted to
    travel while backward goes on.

    Args:
        algorithm: after its `start_step`.
        specs: of the parameters.
        replicas: of how many this one is one.
        device: of `jax.local_devices()`; None: the first.

    Raises:
        ValueError: what the algorithm refuses, by name.
    """
    device = device or jax.local_devices()[0]
    if isinstance(algorithm, LocalSGD):
        return cost_of(
            algorithm, specs, replicas, partial(_local_seconds, algorithm, replicas, device)
        )
    return cost_of(algorithm, specs, replicas, partial(_seconds, algorithm, device))


def _seconds(algorithm: Algorithm, device: Any, specs: Mapping[str, Spec]) -> list[float]:
    """The seconds of each step in a cycle. Where in a step messages are sent is XLA's affair; that
    they wait for each other is not."""
    tx = average_gradients(without_levels(algorithm), axis_name=AXIS)  # which one replica has not
    given = jax.device_put(_drawn(specs), device)
    state = tx.init(given)
    state = state._replace(step=jnp.asarray(algorithm.start_step, state.step.dtype))
    state = replicate(state, [device], axis_name=AXIS)
    stacked = jax.tree.map(lambda x: x[None], given)
    step = jax.pmap(tx.update, AXIS, devices=[device], donate_argnums=(0, 1))

    def once() -> float:
        gradients = ready(jax.tree.map(jnp.copy, stacked))

        def run() -> Any:
            nonlocal state
            averages, state = step(gradients, state)
            return averages, state

        return seconds_of(run)

    return seconds_in_cycle(once, algorithm.cycle)


def _local_seconds(
    local: LocalSGD, replicas: int, device: Any, specs: Mapping[str, Spec]
) -> Iterator[float]:
    """The seconds of each average in a cycle, decoding and the outer step included, which come
    later where it overlaps; 0.0 where a schedule names replicas, of which one alone has no
    averages."""
    ops, alone = JaxOps(), without_levels(local.at_once())
    params = jax.device_put(_drawn(specs), device)
    for step in local.acting_steps(replicas):
        if local.names_replicas:
            yield 0.0
            continue
        state = alone.init(ops, params, 1)

        def average(params: Any, shared: Any, tensors: Any, step: int = step) -> Any:
            after, new, _ = drive(alone.average(ops, params, State(shared, tensors), step, 1), AXIS)
            return after, new.shared, new.tensors

        arguments = jax.tree.map(lambda x: x[None], (params, state.shared, state.tensors))
        run = partial(jax.pmap(average, AXIS, devices=[device]), *arguments)
        yield min(seconds_of(run) for _ in range(3))  # the first is compiled


def _drawn(specs: Mapping[str, Spec]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(specs))
    return {
        name: jax.random.normal(key, tuple(spec.shape), jnp.float32).astype(spec.dtype)
        for key, (name, spec) in zip(keys, specs.items(), strict=True)
    }
