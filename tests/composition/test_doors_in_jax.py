"""The columns of JAX: two devices under `pmap`, and one program for each method."""

from __future__ import annotations

from functools import cache, partial
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
from tests.composition.table import outcome, quick
from tests.methods import METHODS

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

    def __init__(self, case: str, replicas: int = REPLICAS) -> None:
        self.tx = gw.local_sgd(optax.sgd(1.0), local_of(case), axis_name=AXIS)
        params = {name: jnp.zeros(shape) for name, shape in shapes_of(case).items()}
        self.like = gw.stack_replicas({"params": params, "opt_state": self.tx.init(params)})

        def step(state: Any, gradients: Any) -> Any:
            mine = gw.this_replica(state)
            updates, opt_state = self.tx.update(gradients, mine["opt_state"], mine["params"])
            params, opt_state = self.tx.average_params(optax.apply_updates(mine["params"], updates), opt_state)
            return gw.stack_replicas({"params": params, "opt_state": opt_state})

        self.devices = jax.devices()[:replicas]
        self.step_of = jax.pmap(step, AXIS, devices=self.devices)

    def begin(self, state: Any = None) -> None:
        self.state = gw.replicate(self.like if state is None else state, self.devices, axis_name=AXIS)

    def step(self, gradients: dict[str, Any]) -> dict[str, Any]:
        before = self.weights()
        self.state = self.step_of(self.state, gradients)
        return {name: before[name] - x for name, x in self.weights().items()}

    def saved(self) -> Any:
        return on_host(gw.unreplicate(self.state))

    def weights(self) -> dict[str, Any]:
        params: dict[str, Any] = self.saved().per_replica["params"]
        return params

    def averages(self) -> Any:
        return self.saved().per_replica["opt_state"].averages

    def memory(self) -> dict[str, Any]:
        averages = self.averages()
        return {"shared": averages.shared, "memory": averages.memory}

    def of_replica(self, replica: int) -> dict[str, Any]:
        """Parameter → memory → array."""
        tensors: dict[str, Any] = {}
        for key, tree in self.averages().memory.items():
            for name, x in tree.items():
                if isinstance(x, np.ndarray):
                    tensors.setdefault(name, {})[key] = x[replica]
        return tensors


RUNS = {"jax": Averaging, "jax_local_sgd": Local}


def row(x: Any, replica: int) -> Any:
    """Of one replica, where there is a row for each."""
    return jax.tree.map(lambda x: x[replica] if np.ndim(x) else x, x)


def stacked(case: str, step: int, replicas: int = REPLICAS) -> Any:
    own = [given(case, step, replica) for replica in range(replicas)]
    return {name: np.stack([g[name] for g in own]) for name in own[0]}


@cache
def run_of(door: str, case: str) -> Any:
    """One for each cell of a row, since compiling is what takes the time."""
    return RUNS[door](case)


@cache
def played(door: str, case: str) -> list[Played]:
    run, gradients = run_of(door, case), partial(stacked, case)
    both, rest, again = Played(), Played(), Played()
    run.begin()
    both.play(run, range(BAD + 1), gradients)
    state = run.saved()
    rest.play(run, range(BAD + 1, STEPS), gradients)
    run.begin(state)
    again.play(run, range(BAD + 1, STEPS), gradients)
    received, weights = both.received + rest.received, both.weights + rest.weights
    memory = both.memory + rest.memory[1:]
    replicas = [
        Played(
            [row(x, r) for x in received],
            [row(x, r) for x in weights],
            memory,
            Played([row(x, r) for x in again.received], [row(x, r) for x in again.weights], again.memory),
        )
        for r in range(REPLICAS)
    ]
    if door == "jax":
        run.begin(state := of_three(case))
        memory_of = [checkpoint.of_replica(OPS, run.saved(), r, REPLICAS)["tensors"] for r in range(REPLICAS)]
        averages = run.step(gradients(BAD + 1))
        for r, replica in enumerate(replicas):
            replica.moved = Moved(state, {}, row(averages, r), memory_of[r])
    return replicas


def moved_by_hand(case: str) -> list[Played]:
    """Local SGD that goes on with three replicas, from the mean of two, as `set_replicas` says when it is given the two."""
    run, three = run_of("jax_local_sgd", case), Local(case, 3)
    run.begin()
    for step in range(BAD + 1):
        run.step(stacked(case, step))
    state = run.saved()
    with pytest.raises(ValueError, match="where every replica has its own, take the mean of all"):
        gw.set_replicas(state, 3)
    three.begin(jax.tree.map(lambda x: np.repeat(x.mean(0, keepdims=True), 3, 0).astype(x.dtype), state))
    local = local_of(case)
    portable = checkpoint.gather(
        OPS,
        [
            {
                **checkpoint.head("local_sgd", repr(local), BAD + 1),
                "shared": row(run.averages().shared, r),
                "tensors": run.of_replica(r),
            }
            for r in range(REPLICAS)
        ],
        local.per_replica,
    )
    weights, memory = row(three.weights(), 0), [three.of_replica(r) for r in range(3)]
    received = three.step(stacked(case, BAD + 1, 3))
    return [Played(moved=Moved(portable, weights, row(received, r), memory[r])) for r in range(3)]


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
    pytest.param(door, case, feature, marks=() if quick(case, door, feature) else pytest.mark.slow)
    for door in RUNS
    for case in METHODS
    for feature in FEATURES
    if outcome(case, door, feature) == "works"
]


@pytest.mark.parametrize(("door", "case", "feature"), CELLS)
def test_cell(door: str, case: str, feature: str) -> None:
    by_hand = (door, feature) == ("jax_local_sgd", "other world size")
    FEATURES[feature](case, door, moved_by_hand(case) if by_hand else played(door, case))
