"""What a method costs on this device: its own program, compiled and at work on gradients of a model's shapes, with messages to itself.

cost = method_cost(PowerSGD(4), specs, replicas=16)
print(cost.compute)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from gradwire.core.advise.cost import Cost, Group, Round
from gradwire.core.algorithm import Algorithm
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.local_sgd.algorithm import LocalSGD
from gradwire.core.local_sgd.plan import average_of, local_memory
from gradwire.core.ops import Spec
from gradwire.core.plan.dry_run import dry_run
from gradwire.core.plan.memory import memory_bytes
from gradwire.jax_backend.driver import drive
from gradwire.jax_backend.ops import JaxOps
from gradwire.jax_backend.placement import replicate
from gradwire.jax_backend.timing import ready
from gradwire.jax_backend.transforms import average_gradients

AXIS = "replicas"
#: Steps under the clock, at least and at most as many as take so many seconds.
LEAST, MOST, LONG = 2, 9, 0.3


def method_cost(algorithm: Algorithm | LocalSGD, specs: Mapping[str, Spec], replicas: int, device: Any = None) -> Cost:
    """Compile a method and run it on this device, on all gradients at once. One replica alone exchanges with itself, so decoding what many have sent is
    not in it; nothing is predicted to travel while backward goes on.

    Args:
        algorithm: after its `start_step`.
        specs: of the parameters.
        replicas: of how many this one is one.
        device: of `jax.local_devices()`; None: the first.

    Raises:
        ValueError: what the algorithm refuses, by name.
    """
    device = device or jax.local_devices()[0]
    kept = memory_bytes(algorithm, specs, replicas)
    total = sum(spec.nbytes for spec in specs.values())
    if isinstance(algorithm, LocalSGD):
        return _local_cost(algorithm, specs, replicas, device, kept, total)
    cycle = [step.messages for step in dry_run(algorithm, specs, replicas).cycle]
    tx = average_gradients(algorithm, axis_name=AXIS)
    params = {
        name: jax.ShapeDtypeStruct(tuple(spec.shape), spec.dtype)  # type: ignore[no-untyped-call]
        for name, spec in specs.items()
    }
    state = tx.init(params)
    state = state._replace(step=jnp.asarray(algorithm.start_step, state.step.dtype))
    state = replicate(state, [device], axis_name=AXIS)
    given = jax.device_put(_drawn(specs), device)
    stacked = jax.tree.map(lambda x: x[None], given)
    step = jax.pmap(tx.update, AXIS, devices=[device], donate_argnums=(0, 1))
    seconds = []
    began = time.perf_counter()
    for number in range(1 + MOST * algorithm.cycle):
        if number > LEAST * algorithm.cycle and time.perf_counter() - began > LONG:
            break
        gradients = ready(jax.tree.map(jnp.copy, stacked))
        start = time.perf_counter()
        averages, state = ready(step(gradients, state))
        if number:
            seconds.append(time.perf_counter() - start)
        else:
            began = time.perf_counter()  # it was compiled
        del averages
    each = median(seconds)
    # Where in a step messages are sent is XLA's affair; that they wait for each other is not.
    steps = tuple(
        (Group(total, (Round(each), *(Round(0.0, (message,)) for message in sent), Round(0.0))),) for sent in cycle
    )
    return Cost(steps, overlaps=False, memory_bytes=kept)


def _local_cost(local: LocalSGD, specs: Mapping[str, Spec], replicas: int, device: Any, kept: int, total: int) -> Cost:
    ops, alone = JaxOps(), without_levels(local)
    memory = local_memory(local, specs, replicas)
    params = jax.device_put(_drawn(specs), device)
    state = alone.init(ops, params, 1) if not local.names_replicas else None
    rounds: list[Round] = []
    for step in local.acting_steps(replicas):
        each = 0.0
        if state is not None:

            def average(params: Any, shared: Any, tensors: Any, step: int = step) -> Any:
                from_state = type(state)(shared, tensors)
                after, new, _ = drive(alone.average(ops, params, from_state, step, 1), AXIS)
                return after, new.shared, new.tensors

            run = jax.pmap(average, AXIS, devices=[device])
            arguments = jax.tree.map(lambda x: x[None], (params, state.shared, state.tensors))
            each = min(_timed(partial(run, *arguments)) for _ in range(1 + LEAST))
        sent = average_of(local, specs, memory, step, replicas, 0, replicas).messages
        rounds += [Round(each), *(Round(0.0, (message,)) for message in sent)]
    return Cost(((Group(total, (*rounds, Round(0.0))),),), local.cycle, overlaps=False, memory_bytes=kept)


def _drawn(specs: Mapping[str, Spec]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(specs))
    return {
        name: jax.random.normal(key, tuple(spec.shape), jnp.float32).astype(spec.dtype)
        for key, (name, spec) in zip(keys, specs.items(), strict=True)
    }


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    ready(run())
    return time.perf_counter() - began
