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
from gradwire.core.algorithms.two_level import without_levels
from gradwire.core.kernels.numpy import NumpyOps
from gradwire.core.state import checkpoint
from tests.composition.scenario import (
    BAD,
    FEATURES,
    STEPS,
    Moved,
    Played,
    algorithm_of,
    given,
    local_of,
    replicas_of,
    rows_of,
    shapes_of,
)
from tests.composition.table import cells, quick
from tests.methods import EVERY, TWO_LEVELS, VARIANTS

AXIS = "data"
OPS = NumpyOps()


def on_host(tree: Any) -> Any:
    """Copies: the next step may be given what lies on the devices."""
    return jax.tree.map(lambda x: np.array(x), tree)


class Averaging:
    """`average_gradients`, on all replicas at once: what is given and received has a row for
    each."""

    def __init__(self, case: str, replicas: int = 0) -> None:
        self.case = case
        self.devices = jax.devices()[: replicas or replicas_of(case)[0]]
        self.algorithm = algorithm_of(case)
        self.tx = gw.average_gradients(self.algorithm, axis_name=AXIS)
        self.like = self.tx.init(
            {name: jnp.zeros(shape) for name, shape in shapes_of(case).items()}
        )
        self.step_of = jax.pmap(self.tx.update, AXIS, devices=self.devices)

    def begin(self, state: Any = None) -> None:
        replicas = len(self.devices)
        whole = (
            self.like
            if state is None
            else gw.from_portable(state, self.algorithm, self.like, replicas=replicas)
        )
        self.state = gw.replicate(whole, self.devices, axis_name=AXIS)

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

    def __init__(self, case: str, replicas: int = 0) -> None:
        self.tx = gw.local_sgd(optax.sgd(1.0), local_of(case), axis_name=AXIS)
        params = {name: jnp.zeros(shape) for name, shape in shapes_of(case).items()}
        self.like = gw.stack_replicas({"params": params, "opt_state": self.tx.init(params)})

        def step(state: Any, gradients: Any) -> Any:
            mine = gw.this_replica(state)
            updates, opt_state = self.tx.update(gradients, mine["opt_state"], mine["params"])
            params, opt_state = self.tx.average_params(
                optax.apply_updates(mine["params"], updates), opt_state
            )
            return gw.stack_replicas({"params": params, "opt_state": opt_state})

        self.devices = jax.devices()[: replicas or replicas_of(case)[0]]
        self.step_of = jax.pmap(step, AXIS, devices=self.devices)

    def begin(self, state: Any = None) -> None:
        self.state = gw.replicate(
            self.like if state is None else state, self.devices, axis_name=AXIS
        )

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
        return {
            "shared": averages.shared,
            "memory": averages.memory,
            "own": averages.local.per_replica,
        }

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


def stacked(case: str, step: int, replicas: int = 0) -> Any:
    own = [given(case, step, replica) for replica in range(replicas or replicas_of(case)[0])]
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
            Played(
                [row(x, r) for x in again.received],
                [row(x, r) for x in again.weights],
                again.memory,
            ),
        )
        for r in range(replicas_of(case)[0])
    ]
    if door == "jax" and case in TWO_LEVELS:
        other = Averaging(case, replicas_of(case)[1])
        other.begin(state)
        saved, n = other.saved(), len(other.devices)
        memory_of = [
            checkpoint.of_replica(OPS, saved, rows_of(case, r), rows_of(case, n))["tensors"]
            for r in range(n)
        ]
        averages = other.step(stacked(case, BAD + 1, n))
        for r in range(n):
            replicas[r].moved = Moved(state, {}, row(averages, r), memory_of[r])
    elif door == "jax":
        run.begin(state := of_three(case))
        n = len(replicas)
        memory_of = [checkpoint.of_replica(OPS, run.saved(), r, n)["tensors"] for r in range(n)]
        averages = run.step(gradients(BAD + 1))
        for r, replica in enumerate(replicas):
            replica.moved = Moved(state, {}, row(averages, r), memory_of[r])
    return replicas


def moved_to_others(case: str) -> list[Played]:
    """Local SGD that goes on with other replicas, from the mean of those before."""
    training, moving = replicas_of(case)
    run, others = run_of("jax_local_sgd", case), Local(case, moving)
    run.begin()
    for step in range(BAD + 1):
        run.step(stacked(case, step))
    others.begin(gw.set_replicas(run.saved(), moving))
    local = local_of(case)
    portable = checkpoint.gather(
        OPS,
        [
            {
                **checkpoint.head("local_sgd", repr(without_levels(local)), BAD + 1),
                "shared": row(run.averages().shared, r),
                "tensors": run.of_replica(r),
            }
            for r in range(0, training, training // rows_of(case, training))
        ],
        local.per_replica,
    )
    weights, memory = row(others.weights(), 0), [others.of_replica(r) for r in range(moving)]
    received = others.step(stacked(case, BAD + 1, moving))
    return [
        Played(moved=Moved(portable, weights, row(received, r), memory[r])) for r in range(moving)
    ]


def of_three(case: str) -> dict[str, Any]:
    """The portable state of three replicas, in the simulator, after as many steps."""
    algorithm = algorithm_of(case)
    sim = Simulator(algorithm, shapes_of(case), 3, dtype="float32")
    for step in range(BAD + 1):
        sim.step([given(case, step, replica) for replica in range(3)])
    head = checkpoint.head("compressor", repr(algorithm), sim.steps)
    states = [{**head, "shared": state.shared, "tensors": state.tensors} for state in sim.states]
    return checkpoint.gather(OPS, states, algorithm.per_replica)


#: Without variants, each of which is the program of another method but for numbers: tests/parity
#: has them.
CELLS = cells([(door, case) for door in RUNS for case in EVERY if case not in VARIANTS], quick)


@pytest.mark.parametrize(("door", "case", "feature"), CELLS)
def test_cell(door: str, case: str, feature: str) -> None:
    others = (door, feature) == ("jax_local_sgd", "other world size")
    FEATURES[feature](case, door, moved_to_others(case) if others else played(door, case))
