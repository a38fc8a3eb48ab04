"""The columns of JAX: two devices under `pmap`, and one program for each method."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradwire.jax_backend as gw
from gradwire import Simulator
from gradwire.core import checkpoint
from gradwire.core.kernels.numpy import NumpyOps
from tests.composition.scenario import (
    BAD,
    FEATURES,
    REPLICAS,
    STEPS,
    Moved,
    Played,
    algorithm_of,
    given,
    local_of,
    shapes_of,
)
from tests.composition.table import QUICK, outcome
from tests.methods import METHODS
from tests.torch.compare import said

AXIS = "data"
DEVICES = jax.devices()[:REPLICAS]
OPS = NumpyOps()


def on_host(tree: Any) -> Any:
    """Copies: the next step may be given what lies on the devices."""
    return jax.tree.map(lambda x: np.array(x), tree)


class Averaging:
    """`average_gradients`, on all replicas at once: what is given and received has a row for each."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.algorithm = algorithm_of(case)
        self.tx = gw.average_gradients(self.algorithm, axis_name=AXIS)
        self.like = self.tx.init({name: jnp.zeros(shape) for name, shape in shapes_of(case).items()})
        self.step_of = jax.pmap(self.tx.update, AXIS, devices=DEVICES)

    def begin(self, state: Any = None) -> None:
        whole = self.like if state is None else gw.from_portable(state, self.algorithm, self.like, replicas=REPLICAS)
        self.state = gw.replicate(whole, DEVICES, axis_name=AXIS)

    def step(self, gradients: dict[str, Any]) -> dict[str, Any]:
        averages, self.state = self.step_of(gradients, self.state)
        return on_host(averages)

    def weights(self) -> dict[str, Any]:
        return {}

    def saved(self) -> Any:
        return gw.to_portable(gw.unreplicate(self.state), self.algorithm, errors="all")

    def memory(self) -> dict[str, Any]:
        state = self.saved()
        return {key: state[key] for key in ("shared", "tensors", "local")}


class Local:
    """`local_sgd` on plain gradient descent of rate 1."""

    def __init__(self, case: str) -> None:
        self.tx = gw.local_sgd(optax.sgd(1.0), local_of(case), axis_name=AXIS)
        params = {name: jnp.zeros(shape) for name, shape in shapes_of(case).items()}
        self.like = gw.stack_replicas({"params": params, "opt_state": self.tx.init(params)})

        def step(state: Any, gradients: Any) -> Any:
            mine = gw.this_replica(state)
            updates, opt_state = self.tx.update(gradients, mine["opt_state"], mine["params"])
            params, opt_state = self.tx.average_params(optax.apply_updates(mine["params"], updates), opt_state)
            return gw.stack_replicas({"params": params, "opt_state": opt_state})

        self.step_of = jax.pmap(step, AXIS, devices=DEVICES)

    def begin(self, state: Any = None) -> None:
        self.state = gw.replicate(self.like if state is None else state, DEVICES, axis_name=AXIS)

    def step(self, gradients: dict[str, Any]) -> dict[str, Any]:
        before = self.weights()
        self.state = self.step_of(self.state, gradients)
        return {name: before[name] - x for name, x in self.weights().items()}

    def saved(self) -> Any:
        return on_host(gw.unreplicate(self.state))

    def weights(self) -> dict[str, Any]:
        params: dict[str, Any] = self.saved().per_replica["params"]
        return params

    def memory(self) -> dict[str, Any]:
        averages = self.saved().per_replica["opt_state"].averages
        return {key: on_host(getattr(averages, key)) for key in ("shared", "memory")}


RUNS = {"jax": Averaging, "jax_local_sgd": Local}


def row(x: Any, replica: int) -> Any:
    """Of one replica, where there is a row for each."""
    return jax.tree.map(lambda x: x[replica] if np.ndim(x) else x, x)


@cache
def played(door: str, case: str) -> list[Played]:
    run = RUNS[door](case)

    def stacked(step: int) -> Any:
        both = [given(case, step, replica) for replica in range(REPLICAS)]
        return {name: np.stack([g[name] for g in both]) for name in both[0]}

    both, rest, again = Played(), Played(), Played()
    run.begin()
    both.play(run, range(BAD + 1), stacked)
    state = run.saved()
    rest.play(run, range(BAD + 1, STEPS), stacked)
    run.begin(state)
    again.play(run, range(BAD + 1, STEPS), stacked)
    refused = said(gw.set_replicas, gw.unreplicate(run.state), REPLICAS + 1)
    received, weights = both.received + rest.received, both.weights + rest.weights
    memory = both.memory + rest.memory[1:]
    replicas = [
        Played(
            [row(x, r) for x in received],
            [row(x, r) for x in weights],
            memory,
            Played([row(x, r) for x in again.received], [row(x, r) for x in again.weights], again.memory),
            refused=refused,
        )
        for r in range(REPLICAS)
    ]
    if outcome(case, door, "other world size") == "works":
        run.begin(state := of_three(case))
        memory_of = [checkpoint.of_replica(OPS, run.saved(), r, REPLICAS)["tensors"] for r in range(REPLICAS)]
        averages = run.step(stacked(BAD + 1))
        for r, replica in enumerate(replicas):
            replica.moved = Moved(state, {}, row(averages, r), memory_of[r])
    return replicas


def of_three(case: str) -> dict[str, Any]:
    """The portable state of three replicas, in the simulator, after as many steps."""
    algorithm = algorithm_of(case)
    sim = Simulator(algorithm, shapes_of(case), 3, dtype="float32")
    for step in range(BAD + 1):
        sim.step([given(case, step, replica) for replica in range(3)])
    head = checkpoint.head("compressor", repr(algorithm), sim.steps)
    states = [{**head, "shared": state.shared, "tensors": state.tensors} for state in sim.states]
    return checkpoint.gather(OPS, states, algorithm.per_replica)


CELLS = [
    pytest.param(door, case, feature, marks=() if case in QUICK[door] else pytest.mark.slow)
    for door in RUNS
    for case in METHODS
    for feature in FEATURES
    if outcome(case, door, feature) == "works"
]


@pytest.mark.parametrize(("door", "case", "feature"), CELLS)
def test_cell(door: str, case: str, feature: str) -> None:
    FEATURES[feature](case, door, played(door, case))


@pytest.mark.parametrize("case", QUICK["jax_local_sgd"])
def test_replicas_that_train_by_themselves_are_as_many_as_before(case: str) -> None:
    assert "average the weights of local SGD first" in played("jax_local_sgd", case)[0].refused
